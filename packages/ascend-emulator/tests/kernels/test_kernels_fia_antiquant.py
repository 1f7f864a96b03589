"""Attention over int8 keys and values against plain loops, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

OP = "npu::npu_fused_infer_attention_score"
INT8, HALF, BF16 = torch.int8, torch.float16, torch.bfloat16
LOOSE = {HALF: 4e-3, BF16: 3e-2}


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(INT8)


def scales(form: str, heads: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    shapes = {"one": (1,), "nd": (heads, width), "n1d": (heads, 1, width), "1nd": (1, heads, width)}
    shapes |= {"1n1d": (1, heads, 1, width), "h": (heads * width,), "1h": (1, heads * width)}
    return (draw(*shapes[form], seed=seed).abs() / 64 + 1 / 256).to(dtype)


def factor(scale: torch.Tensor, head: int, place: int, width: int) -> float:
    return float(scale.flatten()[0 if scale.numel() == 1 else head * width + place])


def attend(query: torch.Tensor, keys: list[list[float]], values: list[list[float]], scale: float) -> list[float]:
    scores = [scale * math.fsum(a * b for a, b in zip(query.tolist(), key, strict=True)) for key in keys]
    weights = [math.exp(s - max(scores)) for s in scores]
    total = math.fsum(weights)
    return [math.fsum(w * v[d] for w, v in zip(weights, values, strict=True)) / total for d in range(len(values[0]))]


def check(
    out: torch.Tensor, query: torch.Tensor, rows: tuple[list[torch.Tensor], list[torch.Tensor]],
    factors: tuple[torch.Tensor, torch.Tensor], shifts: tuple[torch.Tensor, torch.Tensor] | None,
    seen: Callable[[int, int], int],
) -> None:  # fmt: skip
    """``out`` and ``query`` [B, N, S, D]; ``rows`` of each request [N, KV, D]."""
    heads, kv_heads = query.size(1), rows[0][0].size(0)
    for request in range(query.size(0)):
        for head in range(heads):
            at = head // (heads // kv_heads)
            wide: list[list[list[float]]] = []
            for which in range(2):
                part = rows[which][request][at]
                width = part.size(1)
                wide.append(
                    [
                        [
                            (v + (factor(shifts[which], at, d, width) if shifts else 0.0))
                            * factor(factors[which], at, d, width)
                            for d, v in enumerate(token)
                        ]
                        for token in part.tolist()
                    ]
                )
            for i in range(query.size(2)):
                count = seen(request, i)
                want = attend(query[request, head, i].double(), wide[0][:count], wide[1][:count], 0.2)
                for got, exact in zip(out[request, head, i].tolist(), want, strict=True):
                    assert math.isclose(got, exact, rel_tol=LOOSE[out.dtype], abs_tol=LOOSE[out.dtype])


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(["BNSD", "BSND", "BSH"]), dtype=st.sampled_from([HALF, BF16]), q=st.integers(1, 3),
    lens=st.lists(st.integers(1, 5), min_size=1, max_size=2), kv_heads=st.integers(1, 2), group=st.integers(1, 2),
    form=st.sampled_from(["one", "nd", "n1d", "1nd", "1n1d", "h", "1h"]), shifted=st.booleans(),
)  # fmt: skip
def test_dense(
    layout: str, dtype: torch.dtype, q: int, lens: list[int], kv_heads: int, group: int, form: str, shifted: bool
) -> None:
    heads, width, batch, longest = kv_heads * group, 16, len(lens), max(lens)
    query = draw(batch, heads, q, width, dtype=dtype)
    keys, values = bytes8(batch, kv_heads, longest, width, seed=1), bytes8(batch, kv_heads, longest, width, seed=2)

    def spell(x: torch.Tensor) -> torch.Tensor:
        if layout == "BNSD":
            return x
        x = x.transpose(1, 2).contiguous()
        return x.flatten(2) if layout == "BSH" else x

    pair = scales(form, kv_heads, width, dtype, 3), scales(form, kv_heads, width, dtype, 4)
    shifts = (scales(form, kv_heads, width, dtype, 5) * 64, scales(form, kv_heads, width, dtype, 6) * 64)
    options = {"key_antiquant_scale": pair[0], "value_antiquant_scale": pair[1]}
    if shifted:
        options |= {"key_antiquant_offset": shifts[0], "value_antiquant_offset": shifts[1]}
    out, _ = REGISTRY[OP](
        spell(query), spell(keys), spell(values), num_heads=heads, num_key_value_heads=kv_heads, scale=0.2,
        input_layout=layout, actual_seq_lengths_kv=lens, **options,
    )  # fmt: skip
    if layout == "BSH":
        out = torch.unflatten(out, 2, (heads, -1))
    out = out if layout == "BNSD" else out.transpose(1, 2)
    rows = [k[:, :n] for k, n in zip(keys, lens, strict=True)], [v[:, :n] for v, n in zip(values, lens, strict=True)]
    check(out, query, rows, pair, shifts if shifted else None, lambda request, _: lens[request])


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("kind", ["rows", "heads", "nz", "nz verify"])
def test_paged(kind: str) -> None:
    nz = kind.startswith("nz")
    heads, kv_heads, width, size, q = (10, 1, 128, 128, 3 if "verify" in kind else 1) if nz else (4, 2, 32, 16, 1)
    lens, dtype = [size + 3, 4], BF16
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    query = draw(2, heads, q, width, dtype=dtype)
    rows = [[bytes8(kv_heads, n, width, seed=10 * which + n) for n in lens] for which in range(2)]
    caches = []
    for which in range(2):
        cache = bytes8(3, kv_heads, size, width, seed=which)
        for request, part in enumerate(rows[which]):
            for token in range(part.size(1)):
                cache[int(table[request, token // size]), :, token % size] = part[:, token]
        if nz:
            cache = torch.unflatten(cache, 3, (width // 32, 32)).transpose(2, 3).contiguous()
        elif kind == "rows":
            cache = cache.transpose(1, 2).flatten(2).contiguous()
        caches.append(cache)
    pair = scales("n1d", kv_heads, width, dtype, 3), scales("n1d", kv_heads, width, dtype, 4)
    options: dict[str, Any] = {"sparse_mode": 3, "atten_mask": TRIANGLE} if q > 1 else {}
    out, _ = REGISTRY[OP](
        query, *caches, key_antiquant_scale=pair[0], value_antiquant_scale=pair[1], block_table=table, num_heads=heads,
        num_key_value_heads=kv_heads, scale=0.2, input_layout="BNSD", block_size=size, actual_seq_lengths_kv=lens,
        inner_precise=1, **options,
    )  # fmt: skip
    check(out, query, (rows[0], rows[1]), pair, None, lambda request, i: lens[request] - q + i + 1)


def dense(**over: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "query": draw(1, 2, 2, 16), "key": bytes8(1, 2, 3, 16), "value": bytes8(1, 2, 3, 16), "num_heads": 2,
        "input_layout": "BNSD", "key_antiquant_scale": torch.ones(1).half(),
        "value_antiquant_scale": torch.ones(1).half(),
    }  # fmt: skip
    return options | over


def nz(**over: Any) -> dict[str, Any]:
    ones = torch.ones(1, dtype=BF16)
    options = dense(
        query=draw(1, 10, 1, 128, dtype=BF16), key=bytes8(2, 1, 4, 128, 32), value=bytes8(2, 1, 4, 128, 32),
        num_heads=10, num_key_value_heads=1, key_antiquant_scale=ones, value_antiquant_scale=ones, block_size=128,
        block_table=torch.zeros(1, 2, dtype=torch.int32), actual_seq_lengths_kv=[9],
    )  # fmt: skip
    return options | over


ROWS: dict[str, Any] = {"key": bytes8(2, 1, 128, 128), "value": bytes8(2, 1, 128, 128)}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("antiquant-pair", dense(value_antiquant_scale=None)),
    ("antiquant-pair", dense(key_antiquant_offset=torch.ones(1).half())),
    ("antiquant-mode", dense(key_antiquant_mode=6, value_antiquant_mode=6)),
    ("antiquant-mode", dense(key_antiquant_mode=1)),
    ("antiquant-dtype", dense(key=draw(1, 2, 3, 16))),
    ("antiquant-dtype", dense(key_antiquant_scale=torch.ones(1))),
    ("antiquant-shape", dense(key_antiquant_scale=torch.ones(2, 8).half())),
    ("antiquant-layout", dense(query_rope=draw(1, 2, 2, 64), key_rope=draw(1, 2, 3, 64))),
    ("antiquant-paged", nz(query=draw(1, 10, 2, 128, dtype=BF16), **ROWS)),
    ("antiquant-nz", nz(block_size=256, key=bytes8(2, 1, 4, 256, 32), value=bytes8(2, 1, 4, 256, 32))),
    ("antiquant-nz-heads", nz(query=draw(1, 8, 1, 128, dtype=BF16), num_heads=8)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_document_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_calls_within_the_document_are_taken() -> None:
    for options in (dense(), nz(), nz(**ROWS)):
        REGISTRY[OP](**options)


@pytest.mark.parametrize("mode", range(1, 6))
def test_scales_of_tokens_are_not_computed(mode: int) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](**dense(key_antiquant_mode=mode, value_antiquant_mode=mode))
