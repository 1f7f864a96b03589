"""Owns the proof of the draft-extend buffer fill: it equals the plain loop, whatever the buffers held before."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels.dispatch import load
from spec_kernels.native.draft_extend import OUTPUTS, SOURCES

GARBAGE = 7777
BACKENDS = [status.backend for status in sk.backends("fill_draft_extend_buffers", "cpu") if status.eligible]


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on every backend that serves host memory."""
    fill = partial(sk.fill_draft_extend_buffers, backend=request.param)
    monkeypatch.setattr(sk, "fill_draft_extend_buffers", fill)
    return str(request.param)


def make_buffers(rows: int, tokens: int, hidden: int = 3, index: torch.dtype = torch.int64) -> sk.DraftExtendBuffers:
    """Buffers full of garbage, as an earlier batch would leave them."""

    def numbers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((count,), GARBAGE, dtype=dtype)

    return sk.DraftExtendBuffers(
        input_ids=numbers(tokens, index),
        positions=numbers(tokens, index),
        out_cache_loc=numbers(tokens, index),
        seq_lens=numbers(rows),
        req_pool_indices=numbers(rows, index),
        num_correct_drafts=numbers(rows),
        num_accept_tokens=numbers(rows),
        select_index=numbers(rows, index),
        temperatures=torch.full((rows, 1), float("nan")),
        hidden_states=torch.full((tokens, hidden), float("nan")),
        global_num_tokens=numbers(2),
        global_num_tokens_for_logprob=numbers(2),
    )


def make_batch(raw_bs: int, width: int, front: int = 0, hidden: int = 3, seed: int = 0) -> sk.DraftExtendBatch:
    random = torch.Generator().manual_seed(seed)

    def numbers(count: int, high: int = 500) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=random)

    tokens = raw_bs * width
    return sk.DraftExtendBatch(
        input_ids=numbers(tokens),
        positions=numbers(tokens),
        out_cache_loc=numbers(tokens),
        seq_lens=numbers(raw_bs),
        req_pool_indices=numbers(raw_bs),
        num_correct_drafts=numbers(raw_bs, width - front).int(),
        num_accept_tokens=numbers(raw_bs, width + 1).int(),
        temperatures=torch.rand(raw_bs, 1, generator=random),
        hidden_states=torch.randn(tokens, hidden, generator=random),
    )


def fill_loop(
    buffers: sk.DraftExtendBuffers, batch: sk.DraftExtendBatch, *, bs: int, width: int, front: int, fill: int
) -> dict[str, list[Any]]:
    """The contract, said once more: row by row, as lists."""
    raw_bs = batch.seq_lens.shape[0] if batch.raw_bs is None else batch.raw_bs
    tokens, rows = raw_bs * width, buffers.seq_lens.shape[0]
    out: dict[str, list[Any]] = {item.name: [] for item in fields(buffers)}
    for token in range(buffers.input_ids.shape[0]):
        for name in ("input_ids", "positions", "out_cache_loc"):
            out[name].append(int(getattr(batch, name)[token]) if token < tokens else 0)
        if buffers.hidden_states is not None:
            hidden = batch.hidden_states if token < tokens else None
            zeros = [0.0] * buffers.hidden_states.shape[1]
            out["hidden_states"].append(zeros if hidden is None else hidden[token].tolist())
    fills = {"seq_lens": fill, "req_pool_indices": 0, "num_correct_drafts": 0, "num_accept_tokens": -1}
    for row in range(rows):
        for name, value in fills.items():
            out[name].append(int(getattr(batch, name)[row]) if row < raw_bs else value)
        drafts = int(batch.num_correct_drafts[row]) if row < raw_bs else 0
        out["select_index"].append(row * width + front + drafts)
        heat = batch.temperatures.flatten() if batch.temperatures is not None and row < raw_bs else None
        out["temperatures"].append(1.0 if heat is None else float(heat[row]))
    for name in ("global_num_tokens", "global_num_tokens_for_logprob"):
        if getattr(buffers, name) is not None:
            out[name] = [bs * width] * getattr(buffers, name).shape[0]
    return out


def assert_filled(buffers: sk.DraftExtendBuffers, expected: dict[str, list[Any]]) -> None:
    for item in fields(buffers):
        tensor = getattr(buffers, item.name)
        if tensor is not None:
            found = tensor.flatten().tolist() if item.name == "temperatures" else tensor.tolist()
            assert found == expected[item.name], item.name


def fill_and_check(
    buffers: sk.DraftExtendBuffers, batch: sk.DraftExtendBatch, *, bs: int, width: int, front: int = 0, fill: int = 0
) -> None:
    expected = fill_loop(buffers, batch, bs=bs, width=width, front=front, fill=fill)
    sk.fill_draft_extend_buffers(buffers, batch, bs=bs, width=width, num_front_tokens=front, seq_len_fill=fill)
    assert_filled(buffers, expected)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_equals_the_loop_whatever_was_there_before(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    front = data.draw(st.integers(0, width - 1))
    index = data.draw(st.sampled_from([torch.int64, torch.int32]))
    buffers = make_buffers(rows, rows * width + data.draw(st.integers(0, 3)), index=index)
    for seed in range(data.draw(st.integers(1, 3))):
        bs = data.draw(st.integers(0, rows))
        raw_bs = data.draw(st.integers(0, bs))
        batch = make_batch(raw_bs, width, front, seed=seed)
        if index == torch.int32:
            names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices")
            batch = replace(batch, **{name: getattr(batch, name).int() for name in names})
        before = {
            item.name: value.clone() for item in fields(batch) if (value := getattr(batch, item.name)) is not None
        }
        fill_and_check(buffers, batch, bs=bs, width=width, front=front, fill=data.draw(st.sampled_from([0, 1])))
        for name, value in before.items():
            assert torch.equal(getattr(batch, name), value)


def test_four_then_two_then_none_in_one_bucket() -> None:
    buffers = make_buffers(4, 16)
    for raw_bs in (4, 2, 0):
        fill_and_check(buffers, make_batch(raw_bs, 4, seed=raw_bs), bs=4, width=4, fill=1)
        assert buffers.req_pool_indices[raw_bs:].tolist() == [0] * (4 - raw_bs)
        assert buffers.select_index[raw_bs:].tolist() == [row * 4 for row in range(raw_bs, 4)]
        assert not buffers.out_cache_loc[raw_bs * 4 :].any()


def test_sources_may_be_the_buffers_themselves() -> None:
    buffers = make_buffers(4, 16)
    sk.fill_draft_extend_buffers(buffers, make_batch(3, 4), bs=4, width=4, seq_len_fill=0)
    assert buffers.hidden_states is not None and buffers.temperatures is not None
    batch = sk.DraftExtendBatch(
        buffers.input_ids[:8],
        buffers.positions[4:12],
        buffers.positions[:8],
        buffers.seq_lens[1:3],
        buffers.req_pool_indices[:2],
        buffers.num_correct_drafts[:2],
        buffers.num_correct_drafts[1:3],
        buffers.temperatures[1:3],
        buffers.hidden_states[2:10],
    )
    copy = replace(batch, **{i.name: v.clone() for i in fields(batch) if (v := getattr(batch, i.name)) is not None})
    expected = fill_loop(buffers, copy, bs=2, width=4, front=0, fill=0)
    sk.fill_draft_extend_buffers(buffers, batch, bs=2, width=4, seq_len_fill=0)
    assert_filled(buffers, expected)


def test_strided_hidden_states_and_flat_temperatures() -> None:
    batch = make_batch(2, 4, hidden=3)
    assert batch.hidden_states is not None and batch.temperatures is not None
    strided = batch.hidden_states.t().contiguous().t()
    assert not strided.is_contiguous()
    fill_and_check(
        make_buffers(3, 12), replace(batch, hidden_states=strided, temperatures=batch.temperatures[:, 0]), bs=3, width=4
    )
    every_second = torch.stack([batch.input_ids, batch.input_ids], 1).flatten()[::2]
    fill_and_check(make_buffers(3, 12), replace(batch, input_ids=every_second), bs=3, width=4)


def test_absent_hidden_states_and_temperatures_leave_nothing_of_an_earlier_batch() -> None:
    batch = replace(make_batch(2, 4), hidden_states=None, temperatures=None)
    fill_and_check(make_buffers(3, 12), batch, bs=3, width=4)
    bare = replace(
        make_buffers(3, 12), hidden_states=None, temperatures=None, global_num_tokens=None,
        global_num_tokens_for_logprob=None,
    )  # fmt: skip
    fill_and_check(bare, batch, bs=2, width=4)


def test_longer_row_sources_with_a_stated_batch_size() -> None:
    long = make_batch(4, 2)
    batch = replace(
        long, input_ids=long.input_ids[:4], positions=long.positions[:4], out_cache_loc=long.out_cache_loc[:4],
        hidden_states=None, raw_bs=2,
    )  # fmt: skip
    fill_and_check(make_buffers(4, 8), batch, bs=3, width=2)


@pytest.mark.parametrize(
    ("changes", "arguments", "error"),
    [
        ({}, {"bs": 1}, sk.BucketError),
        ({}, {"bs": 4}, sk.BucketError),
        ({}, {"bs": 2, "num_front_tokens": 4}, sk.BucketError),
        ({}, {"bs": 2, "num_front_tokens": -1}, sk.BucketError),
        ({}, {"bs": 2, "width": 5}, sk.TokenCountError),
        ({"input_ids": torch.zeros(9, dtype=torch.int64)}, {}, sk.TokenCountError),
        ({"hidden_states": torch.zeros(7, 3)}, {}, sk.TokenCountError),
        ({"hidden_states": torch.zeros(8, 4)}, {}, sk.ShapeError),
        ({"hidden_states": torch.zeros(8, 3).half()}, {}, sk.DtypeError),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, {}, sk.TokenCountError),
        ({"num_accept_tokens": torch.zeros(3, dtype=torch.int32)}, {}, sk.ShapeError),
        ({"temperatures": torch.ones(2, 2)}, {}, sk.ShapeError),
        ({"positions": torch.zeros(8)}, {}, sk.DtypeError),
        ({"num_correct_drafts": torch.tensor([0, 4])}, {}, sk.IndexWidthError),
        ({"num_correct_drafts": torch.tensor([0, -1])}, {}, sk.IndexWidthError),
        ({"num_correct_drafts": torch.tensor([0, 3])}, {"num_front_tokens": 1}, sk.IndexWidthError),
        ({"seq_lens": torch.tensor([1, 2**31])}, {}, sk.IndexWidthError),
        ({"out_cache_loc": torch.zeros(8, dtype=torch.int64, device="meta")}, {}, sk.DeviceError),
    ],
)
def test_refusals_write_nothing(changes: dict[str, Any], arguments: dict[str, Any], error: type[Exception]) -> None:
    buffers = make_buffers(3, 12)
    call = {"bs": 3, "width": 4, "seq_len_fill": 0, **arguments}
    with pytest.raises(error):
        sk.fill_draft_extend_buffers(buffers, replace(make_batch(2, 4), **changes), **call)
    assert (buffers.input_ids == GARBAGE).all() and (buffers.seq_lens == GARBAGE).all()


def test_too_many_tokens_and_buffers_that_do_not_fit() -> None:
    with pytest.raises(sk.TokenCountError, match="largest bucket"):
        sk.fill_draft_extend_buffers(make_buffers(3, 11), make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    buffers = make_buffers(3, 12)
    with pytest.raises(sk.AliasError, match=r"buffers\.(positions|input_ids)"):
        shared = replace(buffers, positions=buffers.input_ids)
        sk.fill_draft_extend_buffers(shared, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    with pytest.raises(sk.ShapeError, match="select_index"):
        short = replace(buffers, select_index=torch.zeros(2, dtype=torch.int64))
        sk.fill_draft_extend_buffers(short, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    with pytest.raises(sk.DtypeError, match="seq_lens"):
        floating = replace(buffers, seq_lens=torch.zeros(3))
        sk.fill_draft_extend_buffers(floating, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    with pytest.raises(sk.ShapeError, match="buffers have none"):
        bare = replace(buffers, hidden_states=None)
        sk.fill_draft_extend_buffers(bare, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    with pytest.raises(sk.DtypeError, match="never narrowed"):
        narrow = make_buffers(3, 12, index=torch.int32)
        sk.fill_draft_extend_buffers(narrow, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)


def test_the_custom_op_is_sound(host_backend: sk.BackendName) -> None:
    load("fill_draft_extend_buffers", host_backend)  # registers it
    names = {"native": "fill_draft_extend_buffers", "triton": "fill_draft_extend_buffers_triton"}
    op = getattr(torch.ops.spec_kernels, names[host_backend])
    for optional in (True, False):
        buffers, batch = make_buffers(3, 12), make_batch(2, 4)
        if not optional:
            buffers = replace(buffers, temperatures=None, hidden_states=None, global_num_tokens=None)
            batch = replace(batch, temperatures=None, hidden_states=None)
        elif batch.temperatures is not None:
            batch = replace(batch, temperatures=batch.temperatures[:, 0])
        arguments = [getattr(buffers, name) for name in OUTPUTS] + [getattr(batch, name) for name in SOURCES]
        torch.library.opcheck(op, tuple(arguments), {"bs": 3, "width": 4, "front": 1, "fill": 1})


@pytest.mark.parametrize("fill", [-1, 2**31])
def test_a_fill_that_does_not_fit_is_refused_before_anything_is_written(fill: int) -> None:
    buffers = make_buffers(3, 12)
    with pytest.raises(sk.IndexWidthError, match="seq_len_fill"):
        sk.fill_draft_extend_buffers(buffers, make_batch(2, 4), bs=3, width=4, seq_len_fill=fill)
    assert (buffers.input_ids == GARBAGE).all() and (buffers.seq_lens == GARBAGE).all()


@pytest.mark.parametrize("name", ["seq_lens", "req_pool_indices", "out_cache_loc"])
def test_negative_lengths_and_addresses_are_refused(name: str) -> None:
    buffers, batch = make_buffers(3, 12), make_batch(2, 4)
    getattr(batch, name)[-1] = -1
    with pytest.raises(sk.IndexWidthError, match=name):
        sk.fill_draft_extend_buffers(buffers, batch, bs=3, width=4, seq_len_fill=0)
    assert (buffers.input_ids == GARBAGE).all()


@pytest.mark.parametrize("value", [-(2**63), -(2**31), 2**31, 2**63 - 1])
@pytest.mark.parametrize("name", ["seq_lens", "num_correct_drafts", "num_accept_tokens"])
def test_numbers_that_do_not_fit_int32_are_refused(name: str, value: int) -> None:
    buffers, batch = make_buffers(3, 12), make_batch(2, 4)
    wide = getattr(batch, name).to(torch.int64)
    wide[-1] = value
    with pytest.raises(sk.IndexWidthError, match=name):
        sk.fill_draft_extend_buffers(buffers, replace(batch, **{name: wide}), bs=3, width=4, seq_len_fill=0)
    assert (buffers.input_ids == GARBAGE).all() and (buffers.num_accept_tokens == GARBAGE).all()


@pytest.mark.parametrize("name", [item.name for item in fields(sk.DraftExtendBuffers)])
def test_a_buffer_whose_elements_share_memory_is_refused(name: str) -> None:
    buffers = make_buffers(3, 12)
    held = getattr(buffers, name)
    shared = held[:1].clone().expand(held.shape)
    with pytest.raises(sk.AliasError, match=name):
        broken = replace(buffers, **{name: shared})
        sk.fill_draft_extend_buffers(broken, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
    assert torch.equal(shared, held) or (shared.isnan().all() and held.isnan().all())


def test_buffers_with_gaps_are_filled() -> None:
    buffers = make_buffers(3, 12)
    gaps = torch.full((12, 2), GARBAGE, dtype=torch.int64)
    turned = torch.full((3, 12), float("nan")).t()
    fill_and_check(replace(buffers, input_ids=gaps[:, 0], hidden_states=turned), make_batch(2, 4), bs=3, width=4)
    assert (gaps[:, 1] == GARBAGE).all()
    overlapping = torch.zeros(14).as_strided((12, 3), (1, 1))
    with pytest.raises(sk.AliasError, match="hidden_states"):
        broken = replace(buffers, hidden_states=overlapping)
        sk.fill_draft_extend_buffers(broken, make_batch(2, 4), bs=3, width=4, seq_len_fill=0)
