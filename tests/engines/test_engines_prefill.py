"""AscendAttnBackend's other ways to attend over new tokens and their prefixes, against ours or a plain float64 loop.

FIA of packed tokens is in `test_engines_attention.py`. Here: atb's operator and SDPA without FIA, FIA one request at a
time for widths that it does not pack, ALiBi, capped scores, mixed batches, diffusion blocks, and rows that pad a batch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import OpRefused
from engines_attention import NPU, PAGE, Q_HEADS, World
from engines_reference import attend
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

PREFIXES = [0, PAGE - 3, 2 * PAGE + 1, 7]
NEWS = [5, 70, 1, PAGE]
BOUND = 1.5e-2


@pytest.fixture(autouse=True)
def no_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))


def extend(
    world: World, news: list[int], *, mode: ForwardMode = ForwardMode.EXTEND, padding: int = 0, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step through SGLang's backend: (query, what it returned for all rows), on the CPU."""
    count = sum(news)
    batch = world.batch(mode, news, global_num_token_non_padded_cpu=count)
    query, (key, value) = world.rows(count + padding, Q_HEADS)[0], world.pair(count + padding)
    if padding:
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(padding)])
    world.backend.init_forward_metadata(batch)
    call = world.backend.forward_mixed if mode == ForwardMode.MIXED else world.backend.forward_extend
    found = call(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch, **more)
    world.mirror(batch.out_cache_loc[:count].cpu(), key[:count], value[:count])
    return query[:count], found.cpu().view(count + padding, Q_HEADS, world.value_dims)


def reference(world: World, query: torch.Tensor, news: list[int], **more: Any) -> torch.Tensor:
    """Shape: [tokens, Q_HEADS, value_dims]; float64."""
    outputs = []
    for row, piece in enumerate(torch.split(query, news)):
        slots = world.slots(row, 0, world.lengths[row] + news[row])
        key, value = world.key.flatten(0, 1)[slots], world.value.flatten(0, 1)[slots]
        outputs.append(attend(piece, key, value, scale=world.dims**-0.5, start=world.lengths[row], **more))
    return torch.cat(outputs)


def compare(found: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("prefixes", "news"), [([0, 0, 0], [5, 70, 1]), (PREFIXES, NEWS)])
def test_atb_without_fia(prefixes: list[int], news: list[int], dtype: torch.dtype) -> None:
    """`_npu_flash_attention_qlens`, whose mask is 128 square."""
    world = World(prefixes, dtype=dtype)
    query, found = extend(world, news)
    compare(found, world.expected(query, news))
    compare(found, reference(world, query, news))


@pytest.mark.parametrize(("dims", "cap"), [(192, 0.0), (128, 30.0), (64, 5.0)])
def test_sdpa_without_fia(dims: int, cap: float) -> None:
    """Heads wider than 128, or capped scores, go through torch's own attention, a request at a time."""
    world = World(PREFIXES, dims=dims, value_dims=dims, cap=cap)
    query, found = extend(world, NEWS)
    compare(found, reference(world, query, NEWS, cap=cap))


@pytest.mark.parametrize("dims", [64, 128])
def test_decode_with_capped_scores(dims: int) -> None:
    world = World(PREFIXES, dims=dims, value_dims=dims, cap=8.0)
    batch = world.batch(ForwardMode.DECODE, [1] * 4)
    query, (key, value) = world.rows(4, Q_HEADS)[0], world.pair(4)
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_decode(query.to(NPU), key.to(NPU), value.to(NPU), world.layer, batch)
    world.mirror(batch.out_cache_loc.cpu(), key, value)
    compare(found.cpu().view(query.shape), reference(world, query, [1] * 4, cap=8.0))


@pytest.mark.parametrize("dims", [64, 80])
def test_fia_a_request_at_a_time(monkeypatch: pytest.MonkeyPatch, dims: int) -> None:
    """Widths that FIA does not take packed; a request without new tokens is passed over."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    world, news = World(PREFIXES, dims=dims, value_dims=dims), [5, 70, 0, PAGE]
    assert not world.backend._can_use_tnd(world.layer)
    query, found = extend(world, news)
    compare(found, world.expected(query, news))


@pytest.mark.parametrize("padding", [1, 9])
def test_rows_that_pad_the_batch_are_zero(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """Data-parallel ranks pad their tokens: the backend cuts them off and puts zeros back."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    world = World(PREFIXES)
    query, found = extend(world, NEWS, padding=padding)
    compare(found[:-padding], world.expected(query, NEWS))
    assert not found[-padding:].any()


def test_a_mixed_batch() -> None:
    """Prefill chunks and decode steps in one call, with the mask of int8; the operator is FIA's without FIA too."""
    world, news = World(PREFIXES), [30, 1, 1, 64]
    query, found = extend(world, news, mode=ForwardMode.MIXED)
    compare(found, world.expected(query, news))


def test_a_mixed_batch_takes_fias_cache_for_pages_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FIA the pool's views are [slots, 1, heads, dims], and the page size is read off their second axis."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    world, news = World(PREFIXES), [30, 1, 1, 64]
    assert world.pool.get_key_buffer(0).shape[1] == 1
    with pytest.raises(OpRefused, match="limit 3"):
        extend(world, news, mode=ForwardMode.MIXED)
