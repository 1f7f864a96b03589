"""Every documented constraint of the smaller ops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, OpRefused

SCATTER = "npu::npu_scatter_nd_update_"
CACHE = "atb::_npu_reshape_and_cache"
SWIGLU = "npu::npu_swiglu"
ROTARY = "npu::npu_rotary_mul"
Build = Callable[[], tuple[str, list[Any]]]


def scatter(
    shape: tuple[int, ...] = (4, 3),
    indices: tuple[int, ...] = (2, 1),
    updates: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float16,
    index_dtype: torch.dtype = torch.int32,
    update_dtype: torch.dtype | None = None,
) -> tuple[str, list[Any]]:
    rows = torch.zeros(updates, dtype=update_dtype or dtype)
    return SCATTER, [torch.zeros(shape, dtype=dtype), torch.zeros(indices, dtype=index_dtype), rows]


def cache(
    dtype: torch.dtype = torch.float16, slot_dtype: torch.dtype = torch.int32, **over: Any
) -> tuple[str, list[Any]]:
    parts = {
        "key": torch.zeros(5, 2, 8, dtype=dtype),
        "value": torch.zeros(5, 2, 4, dtype=dtype),
        "key_cache": torch.zeros(3, 16, 2, 8, dtype=dtype),
        "value_cache": torch.zeros(3, 16, 2, 4, dtype=dtype),
        "slots": torch.arange(5, dtype=slot_dtype),
    }
    return CACHE, list((parts | over).values())


def rotary(x: tuple[int, ...] = (2, 3, 5, 8), r: tuple[int, ...] = (1, 1, 5, 8), *rest: Any) -> tuple[str, list[Any]]:
    return ROTARY, [torch.zeros(x), torch.zeros(r), torch.zeros(r), *rest]


TAKEN: list[Build] = [
    scatter,
    lambda: scatter(dtype=torch.bool, index_dtype=torch.int64),
    lambda: scatter((4, 2, 3), (2, 1), (2, 2, 3)),
    lambda: scatter((4, 1, 2, 3), (2, 2), (2, 2, 3)),
    cache,
    lambda: cache(dtype=torch.int8),
    lambda: (SWIGLU, [torch.zeros(4)]),
    rotary,
    lambda: rotary((2, 3, 5, 8), (2, 3, 5, 8)),
    lambda: rotary((2, 3, 5, 8), (2, 3, 1, 8)),
    lambda: rotary((2000, 3, 4, 8), (2000, 1, 1, 8)),
]
REFUSED: list[tuple[str, Build]] = [
    ("scatter-dtype", lambda: scatter(dtype=torch.int32)),
    ("scatter-dtype", lambda: scatter(dtype=torch.float64)),
    ("scatter-same-dtype", lambda: scatter(update_dtype=torch.float32)),
    ("scatter-rank", lambda: (SCATTER, [torch.zeros(1).view(*[1] * 9), torch.zeros(1, 9).int(), torch.zeros(1)])),
    ("scatter-rank", lambda: (SCATTER, [torch.zeros(()), torch.zeros(1, 1).int(), torch.zeros(1)])),
    ("scatter-index-dtype", lambda: scatter(index_dtype=torch.int16)),
    ("scatter-index-rank", lambda: scatter(indices=(2,))),
    ("scatter-index-width", lambda: scatter(indices=(2, 3))),
    ("scatter-index-width", lambda: scatter(indices=(2, 0))),
    ("scatter-updates", lambda: scatter(updates=(2, 4))),
    ("scatter-4d", lambda: scatter((4, 1, 2, 3), (2, 1), (2, 1, 2, 3))),
    ("cache-dtype", lambda: cache(dtype=torch.float32)),
    ("cache-dtype", lambda: cache(value=torch.zeros(5, 2, 4, dtype=torch.bfloat16))),
    ("cache-dtype", lambda: cache(key_cache=torch.zeros(3, 16, 2, 8, dtype=torch.bfloat16))),
    ("cache-slots-dtype", lambda: cache(slot_dtype=torch.int64)),
    ("cache-slots-shape", lambda: cache(slots=torch.arange(4, dtype=torch.int32))),
    ("cache-slots-shape", lambda: cache(slots=torch.zeros(5, 1, dtype=torch.int32))),
    ("cache-shapes", lambda: cache(key=torch.zeros(5, 2, 4).half())),
    ("cache-shapes", lambda: cache(key=torch.zeros(5, 16).half())),
    ("cache-shapes", lambda: cache(value_cache=torch.zeros(4, 16, 2, 4).half())),
    ("cache-contiguous", lambda: cache(key_cache=torch.zeros(3, 2, 16, 8).half().transpose(1, 2))),
    ("swiglu-dtype", lambda: (SWIGLU, [torch.zeros(4).int()])),
    ("swiglu-rank", lambda: (SWIGLU, [torch.zeros(())])),
    ("gelu-dtype", lambda: ("npu::npu_fast_gelu", [torch.zeros(2, dtype=torch.float64)])),
    ("gelu-rank", lambda: ("npu::npu_fast_gelu", [torch.zeros([1] * 9)])),
    ("swiglu-even", lambda: (SWIGLU, [torch.zeros(3)])),
    ("swiglu-even", lambda: (SWIGLU, [torch.zeros(4), 1])),
    ("rotary-dtype", lambda: (ROTARY, [torch.zeros(2, 3, 5, 8).double(), *rotary()[1][1:]])),
    ("rotary-rank", lambda: rotary((3, 5, 8))),
    ("rotary-mode", lambda: rotary((2, 3, 5, 8), (1, 1, 5, 8), "quarter")),
    ("rotary-dim", lambda: rotary((2, 3, 5, 7), (1, 1, 5, 7))),
    ("rotary-dim", lambda: rotary((1, 1, 1, 896), (1, 1, 1, 896))),
    ("rotary-shape", lambda: rotary((2, 3, 5, 8), (1, 3, 5, 8))),
    ("rotary-shape", lambda: rotary((2, 3, 5, 8), (1, 1, 5, 4))),
    ("rotary-shape", lambda: rotary((2, 3, 5, 8), (2, 1, 5, 8), "interleave")),
    ("rotary-shape", lambda: rotary((1000, 3, 5, 8), (1, 1, 5, 8))),
    ("rotary-rotate", lambda: rotary((2, 3, 5, 8), (1, 1, 5, 8), "half", torch.zeros(8, 4))),
]


@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_calls_within_the_documents_are_taken(number: int) -> None:
    op, arguments = TAKEN[number]()
    REGISTRY[op](*arguments)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int) -> None:
    rule, build = REFUSED[number]
    op, arguments = build()
    before = [some.clone() if isinstance(some, torch.Tensor) else some for some in arguments]
    with pytest.raises(OpRefused) as caught:
        REGISTRY[op](*arguments)
    assert caught.value.rule is RULES[rule], caught.value
    for now, then in zip(arguments, before, strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_kernels_import_torch_alone() -> None:
    code = "import ascend_emulator.kernels, sys; assert 'torch' in sys.modules and 'torch_npu' not in sys.modules"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)
