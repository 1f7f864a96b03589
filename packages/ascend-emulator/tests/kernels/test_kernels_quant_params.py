"""Packing 4-bit weights and quantisation parameters against bit-by-bit loops, and the ops' refusals."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

PACK = "npu::npu_convert_weight_to_int4pack"
SCALE = "npu::npu_trans_quant_param"
SCALES = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 3), data=st.data(), columns=st.integers(0, 2))
def test_int4pack(rows: int, columns: int, data: st.DataObject) -> None:
    values = [[data.draw(st.integers(-8, 7)) for _ in range(columns * 8)] for _ in range(rows)]
    weight = torch.tensor(values, dtype=torch.int32).view(rows, columns * 8)
    out = REGISTRY[PACK](weight)
    assert out.dtype == torch.int32 and out.shape == (rows, columns)
    for row, line in enumerate(out.tolist()):
        for column, word in enumerate(line):
            digits = [word % 2**32 // 16**place % 16 for place in range(8)]
            assert [d - 16 if d > 7 else d for d in digits] == values[row][column * 8 : column * 8 + 8]


def bits_of(value: float) -> int:
    out: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return out


def nearest(value: float) -> int:
    """Upper 19 bits of the nearest number that has no others, the even one of two."""
    low = bits_of(value) & 0xFFFFE000
    pair = [low, low + 0x2000]
    exact = [abs(Fraction(struct.unpack("<f", struct.pack("<I", word))[0]) - Fraction(value)) for word in pair]
    if exact[0] == exact[1]:
        return next(word for word in pair if word >> 13 & 1 == 0)
    return pair[exact.index(min(exact))]


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(SCALES, st.floats(-400, 400, width=32)), min_size=1, max_size=4),
    form=st.sampled_from(["alone", "alike", "one scale", "one offset", "row"]),
    mode=st.sampled_from([None, 0, 1]),
)
def test_quant_param(pairs: list[tuple[float, float]], form: str, mode: int | None) -> None:
    scales, offsets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scale, offset = torch.tensor(scales), torch.tensor(offsets)
    if form == "one scale":
        scale = scale[:1].contiguous()
    if form == "one offset":
        offset = offset[:1].contiguous()
    if form == "row":
        scale, offset = scale.unsqueeze(0), offset.unsqueeze(0)
    out = REGISTRY[SCALE](scale, None if form == "alone" else offset, mode)
    assert out.dtype == torch.int64 and out.shape == ((1, len(pairs)) if form == "row" else (len(pairs),))
    for number, word in enumerate(out.flatten().tolist()):
        value = scale.flatten()[0 if form == "one scale" else number].item()
        assert word % 2**32 == (nearest(value) if mode else bits_of(value) & 0xFFFFE000)
        shift = offset.flatten()[0 if form == "one offset" else number].item()
        assert word >> 32 == (1 << 14) + (0 if form == "alone" else (max(-256, min(255, round(shift))) % 512 << 5))


W = torch.zeros(2, 16, dtype=torch.int32)
S = torch.ones(4)
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("int4pack-weight", PACK, [W.long()]),
    ("int4pack-weight", PACK, [W[:, :12].contiguous()]),
    ("int4pack-weight", PACK, [W[0]]),
    ("int4pack-weight", PACK, [torch.zeros(16, 8, dtype=torch.int32).T]),
    ("int4pack-range", PACK, [W + 8]),
    ("int4pack-range", PACK, [W - 9]),
    ("quant-param-scale", SCALE, [S.half()]),
    ("quant-param-scale", SCALE, [S.view(2, 2)]),
    ("quant-param-scale", SCALE, [S[:0]]),
    ("quant-param-scale", SCALE, [S[::2]]),
    ("quant-param-offset", SCALE, [S, S[:3].clone()]),
    ("quant-param-offset", SCALE, [S.view(1, 4), S]),
    ("quant-param-offset", SCALE, [S, S.half()]),
    ("quant-param-round", SCALE, [S, None, 2]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, op, arguments = REFUSED[number]
    refuses(rule, op, *arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_4_bit_floats_say_so() -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[PACK](W.float())
