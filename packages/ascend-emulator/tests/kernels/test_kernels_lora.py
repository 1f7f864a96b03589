"""Products with adapters against plain loops, their schemas, refusals and faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, lora
from hypothesis import given, settings
from hypothesis import strategies as st

H, B, F = torch.float16, torch.bfloat16, torch.float32
I32, I64 = torch.int32, torch.int64


def draw(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_schemas_are_those_of_the_libraries() -> None:
    for namespace, schemas in (("_C_ascend", lora.SCHEMAS), ("npu", lora.SGL_SCHEMAS)):
        for text in schemas:
            name = text.partition("(")[0]
            registered = getattr(getattr(torch.ops, namespace), name).default._schema
            assert registered == torch._C.parse_schema(f"{namespace}::{text}")


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(), dtype=st.sampled_from([H, B]), by_request=st.booleans(), rank=st.sampled_from([8, 16]),
    deep=st.booleans(), scale=st.floats(0.1, 2),
)  # fmt: skip
def test_an_adapter_for_each_token(
    data: st.DataObject, dtype: torch.dtype, by_request: bool, rank: int, deep: bool, scale: float
) -> None:
    adapters, hidden, out = 3, 20, 24
    lens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)) if by_request else [1, 1, 1, 1]
    chosen = [data.draw(st.integers(-1, adapters - 1)) for _ in lens]
    spare = data.draw(st.integers(0, 2)) if by_request else 0
    of_token = [a for a, n in zip(chosen, lens, strict=True) for _ in range(n)] + [-1] * spare
    tokens = len(of_token)
    down, up = draw(adapters, rank, hidden, dtype=dtype), draw(adapters, out - 4, rank, dtype=dtype, seed=1)
    x, y, total = draw(tokens, hidden, dtype=dtype, seed=2), draw(tokens, rank, dtype=F), draw(tokens, out, dtype=dtype)
    wanted, wanted_total = y.tolist(), total.float().tolist()
    index = [torch.tensor(chosen)] + ([torch.tensor(lens)] if by_request else [])
    for token, adapter in enumerate(of_token):
        for r in range(rank if adapter >= 0 else 0):
            wanted[token][r] = scale * sum(float(down[adapter, r, i]) * float(x[token, i]) for i in range(hidden))
    names = (lora.SGMV_SHRINK, lora.SGMV_EXPAND) if by_request else (lora.BGMV_SHRINK, lora.BGMV_EXPAND)
    REGISTRY[names[0]](x, down.unsqueeze(1) if deep else down, *index, y, scale)
    assert torch.allclose(y, torch.tensor(wanted).view(y.shape), rtol=1e-3, atol=1e-3)
    for token, adapter in enumerate(of_token):
        for column in range(out - 4 if adapter >= 0 else 0):
            part = sum(float(up[adapter, column, r]) * float(y[token, r]) for r in range(rank))
            wanted_total[token][2 + column] += part
    assert REGISTRY[names[1]](y, up.unsqueeze(1) if deep else up, *index, total, 2, out - 4) is total
    assert torch.allclose(total.float(), torch.tensor(wanted_total).view(total.shape), rtol=2e-2, atol=5e-2)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([H, B]), slices=st.integers(1, 3))
def test_ranks_and_scales_of_adapters(data: st.DataObject, dtype: torch.dtype, slices: int) -> None:
    most, hidden, width = 16, 20, 6
    ranks, scales = [8, 16, 0], draw(3).abs()
    lens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    chosen = [data.draw(st.integers(-1, 2)) for _ in lens]
    of_token = [a for a, n in zip(chosen, lens, strict=True) for _ in range(n)]
    tokens, out = len(of_token), slices * width
    index = [torch.tensor(numbers, dtype=I32) for numbers in (chosen, lens, ranks)]
    down, x, y = (
        draw(3, most, hidden, dtype=dtype),
        draw(tokens, hidden, dtype=dtype, seed=1),
        draw(tokens, most, dtype=F),
    )
    wanted = y.tolist()
    for token, adapter in enumerate(of_token):
        for r in range(ranks[adapter] if adapter >= 0 else 0):
            dot = sum(float(down[adapter, r, i]) * float(x[token, i]) for i in range(hidden))
            wanted[token][r] = dot * float(scales[adapter])
    REGISTRY[lora.SGEMMV_SHRINK](x, down, *index, scales, y)
    assert torch.allclose(y, torch.tensor(wanted).view(y.shape), rtol=1e-3, atol=1e-3)
    low, up = draw(tokens, slices * most, dtype=F, seed=3), draw(3, out, most, dtype=dtype, seed=4)
    total = draw(tokens, out, dtype=dtype, seed=5)
    sums = total.float().tolist()
    offsets = torch.tensor([width * i for i in range(slices + 1)], dtype=I32)
    for token, adapter in enumerate(of_token):
        rank = ranks[adapter] if adapter >= 0 else 0
        for column in range(out if rank else 0):
            first = rank * (column // width)
            sums[token][column] += sum(
                float(up[adapter, column, r]) * float(low[token, first + r]) for r in range(rank)
            )
    assert REGISTRY[lora.SGEMMV_EXPAND](low, up, *index, offsets, total) is total
    assert torch.allclose(total.float(), torch.tensor(sums).view(total.shape), rtol=2e-2, atol=5e-2)


def shrink(**over: Any) -> tuple[str, list[Any]]:
    options = {
        "x": draw(2, 20), "weight": draw(3, 8, 20), "indices": torch.tensor([0, 2]), "y": torch.zeros(2, 8),
        "scale": 1.0,
    }  # fmt: skip
    return lora.BGMV_SHRINK, list((options | over).values())


def expand(**over: Any) -> tuple[str, list[Any]]:
    options = {
        "x": draw(2, 8, dtype=F), "weight": draw(3, 10, 8), "indices": torch.tensor([0, 2]), "y": draw(2, 12),
        "slice_offset": 2, "slice_size": 10,
    }  # fmt: skip
    return lora.BGMV_EXPAND, list((options | over).values())


def by_request(**over: Any) -> tuple[str, list[Any]]:
    options = {
        "x": draw(2, 20), "weight": draw(3, 8, 20), "lora_indices": torch.tensor([0, 2]),
        "seq_len": torch.tensor([1, 1]), "y": torch.zeros(2, 8), "scale": 1.0,
    }  # fmt: skip
    return lora.SGMV_SHRINK, list((options | over).values())


def ranked(**over: Any) -> tuple[str, list[Any]]:
    options = {
        "x": draw(2, 20), "weight": draw(3, 8, 20), "lora_indices": torch.tensor([0, 2], dtype=I32),
        "seq_len": torch.tensor([1, 1], dtype=I32), "ranks": torch.tensor([8, 8, 8], dtype=I32), "scales": draw(3),
        "y": torch.zeros(2, 8),
    }  # fmt: skip
    return lora.SGEMMV_SHRINK, list((options | over).values())


def ranked_expand(**over: Any) -> tuple[str, list[Any]]:
    options = {
        "x": draw(2, 16, dtype=F), "weight": draw(3, 10, 8), "lora_indices": torch.tensor([0, 2], dtype=I32),
        "seq_len": torch.tensor([1, 1], dtype=I32), "ranks": torch.tensor([8, 8, 8], dtype=I32),
        "offsets": torch.tensor([0, 4, 10], dtype=I32), "y": draw(2, 10),
    }  # fmt: skip
    return lora.SGEMMV_EXPAND, list((options | over).values())


REFUSED: list[tuple[str, Callable[[], tuple[str, list[Any]]]]] = [
    ("lora-dtype", lambda: shrink(x=draw(2, 20, dtype=F))),
    ("lora-dtype", lambda: shrink(y=torch.zeros(2, 8).half())),
    ("lora-dtype", lambda: expand(x=draw(2, 8))),
    ("lora-dtype", lambda: expand(y=draw(2, 12, dtype=B))),
    ("lora-index-dtype", lambda: shrink(indices=torch.tensor([0, 2], dtype=I32))),
    ("lora-index-dtype", lambda: ranked(seq_len=torch.tensor([1, 1]))),
    ("lora-index-dtype", lambda: ranked(scales=draw(3, dtype=F))),
    ("lora-shape", lambda: shrink(y=torch.zeros(3, 8))),
    ("lora-shape", lambda: shrink(weight=draw(3, 7, 20))),
    ("lora-shape", lambda: shrink(weight=draw(3, 2, 8, 20))),
    ("lora-shape", lambda: shrink(indices=torch.tensor([0]))),
    ("lora-shape", lambda: by_request(lora_indices=torch.tensor([0]))),
    ("lora-shape", lambda: ranked(scales=draw(2))),
    ("lora-shrink", lambda: shrink(x=draw(2, 8), weight=draw(3, 8, 8))),
    ("lora-slice", lambda: expand(slice_offset=3)),
    ("lora-slice", lambda: expand(slice_offset=-1)),
    ("lora-slice", lambda: expand(slice_size=4, weight=draw(3, 4, 8))),
    ("lora-slice", lambda: ranked_expand(offsets=torch.tensor([0, 4, 11], dtype=I32))),
    ("lora-slice", lambda: ranked_expand(weight=draw(3, 9, 8))),
    ("lora-rank", lambda: expand(x=draw(2, 9, dtype=F), weight=draw(3, 10, 9))),
    ("lora-rank", lambda: ranked_expand(ranks=torch.tensor([4, 8, 8], dtype=I32))),
    ("lora-contiguous", lambda: shrink(weight=draw(3, 20, 8).transpose(1, 2))),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_sources_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, arguments = build()
    refuses(rule, op, *arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("call", [shrink(), expand(), by_request(), ranked(), ranked_expand()])
def test_calls_within_the_limits_are_taken(call: tuple[str, list[Any]]) -> None:
    REGISTRY[call[0]](*call[1])


@pytest.mark.parametrize(
    "call",
    [
        shrink(indices=torch.tensor([0, 3])),
        expand(indices=torch.tensor([3, 0])),
        by_request(lora_indices=torch.tensor([3, 0])),
        ranked(ranks=torch.tensor([9, 8, 8], dtype=I32)),
        ranked(ranks=torch.tensor([8, 8], dtype=I32)),
        ranked(ranks=torch.tensor([-1, 8, 8], dtype=I32)),
    ],
)
def test_adapters_outside_the_weights_fault(call: tuple[str, list[Any]]) -> None:
    with pytest.raises(DeviceFault, match="adapter"):
        REGISTRY[call[0]](*call[1])


def test_lengths_of_requests_end_with_the_tokens_and_are_not_negative() -> None:
    op, arguments = by_request(seq_len=torch.tensor([1, 2**62]))
    REGISTRY[op](*arguments)
    once = by_request()
    REGISTRY[once[0]](*once[1])
    assert torch.equal(arguments[4], once[1][4])
    op, arguments = by_request(seq_len=torch.tensor([-1, 2]))
    with pytest.raises(DeviceFault, match="request 0 has -1 tokens"):
        REGISTRY[op](*arguments)
    assert not arguments[4].any()
