"""npu_fusion_attention against plain loops in every layout, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

OP = "npu::npu_fusion_attention"
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid_out(parts: list[torch.Tensor], layout: str) -> torch.Tensor:
    """Parts [S, N, D], one a request, in a layout."""
    if layout == "TND":
        return torch.cat(parts)
    whole = torch.stack(parts)
    if layout == "BNSD":
        return whole.transpose(1, 2).contiguous()
    if layout == "SBH":
        return whole.flatten(2).transpose(0, 1).contiguous()
    return whole.flatten(2) if layout == "BSH" else whole


def taken_out(out: torch.Tensor, layout: str, lens: list[int], heads: int) -> list[torch.Tensor]:
    """The way back."""
    if layout == "TND":
        return list(torch.split(out[: sum(lens)], lens))
    if layout == "BNSD":
        out = out.transpose(1, 2)
    elif layout != "BSND":
        out = torch.unflatten(out.transpose(0, 1) if layout == "SBH" else out, 2, (heads, -1))
    return list(out)


@settings(max_examples=120, deadline=None)
@given(
    layout=st.sampled_from(["BSH", "SBH", "BSND", "BNSD", "TND", "tnd"]), dtype=st.sampled_from(list(LOOSE)),
    lens=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2), group=st.integers(1, 2), width=st.integers(1, 3), narrow=st.integers(0, 2),
    mode=st.sampled_from([0, 1, 2, 3, 4]), masked=st.sampled_from(["", "all", "each", "heads"]),
    band=st.sampled_from([None, (1, 0), (0, 2)]), sunk=st.booleans(), softmax=st.sampled_from(["", "TND"]),
    missing=st.integers(0, 1),
)  # fmt: skip
def test_attention(
    layout: str, dtype: torch.dtype, lens: list[tuple[int, int]], kv_heads: int, group: int, width: int, narrow: int,
    mode: int, masked: str, band: tuple[int, int] | None, sunk: bool, softmax: str, missing: int,
) -> None:  # fmt: skip
    packed = layout.upper() == "TND"
    if not packed:
        lens, softmax = [lens[0]] * len(lens), ""
    heads, narrow = kv_heads * group, max(1, width - narrow)
    spell = layout.upper()
    queries = [draw(q, heads, width, dtype=dtype, seed=i) for i, (q, _) in enumerate(lens)]
    keys = [draw(k, kv_heads, width, dtype=dtype, seed=20 + i) for i, (_, k) in enumerate(lens)]
    values = [draw(k, kv_heads, narrow, dtype=dtype, seed=40 + i) for i, (_, k) in enumerate(lens)]
    most = max(q for q, _ in lens), max(k for _, k in lens)
    mask = None
    if masked and mode > 1:
        mask = TRIANGLE
    elif masked:
        shape = most if packed or masked == "all" else (len(lens), heads if masked == "heads" else 1, *most)
        mask = draw(*shape, seed=60) > 0.5
    options: dict[str, Any] = {"sparse_mode": mode, "atten_mask": mask, "scale": 0.7}
    if band:
        options |= dict(zip(("pre_tockens", "next_tockens"), band, strict=True))
    sink = draw(heads, dtype=torch.float32, seed=70) if sunk else None
    if packed:
        options["actual_seq_qlen"] = [*np.cumsum([q for q, _ in lens]).tolist(), *[0] * missing]
        options["actual_seq_kvlen"] = [*np.cumsum([k for _, k in lens]).tolist(), *[0] * missing]
    tensors = (laid_out(parts, spell) for parts in (queries, keys, values))
    out, top, total, empty, *zeros = REGISTRY[OP](*tensors, heads, layout, sink=sink, softmax_layout=softmax, **options)
    assert out.dtype == dtype and top.dtype == total.dtype == torch.float32
    assert empty.shape == (0,) and zeros == [0, 0, 0]
    outs = taken_out(out, spell, [q for q, _ in lens], heads)
    tokens = sum(q for q, _ in lens)
    assert top.shape == total.shape == ((tokens, heads, 8) if packed else (len(lens), heads, most[0], 8))
    for request, (q, k) in enumerate(lens):
        for i in range(q):
            for h in range(heads):
                asked = queries[request][i, h].double()
                scores = []
                for j in range(k):
                    seen = True
                    if mask is not None:
                        pre, following = band or (10**9, 10**9)
                        if mode < 2:
                            grid = mask.expand(len(lens), heads, *most) if mask.dim() == 4 else mask.expand(1, 1, *most)
                            row, head = (request, h) if mask.dim() == 4 else (0, 0)
                            seen = not grid[row, head, i, j] and (mode == 1 or i - pre <= j <= i + following)
                        else:
                            at = i if mode == 2 else i + k - q
                            seen = at - pre <= j <= at + following if mode == 4 else j <= at
                    key = keys[request][j, h // group].double()
                    scores.append(0.7 * float(asked @ key) if seen else -math.inf)
                largest = max([*scores, *([float(sink[h])] if sink is not None else [])])
                base = 0.0 if largest == -math.inf else largest
                weights = [math.exp(s - base) for s in scores]
                whole = math.fsum(weights) + (math.exp(float(sink[h]) - base) if sink is not None else 0.0)
                for place in range(narrow):
                    mix = math.fsum(w * float(values[request][j, h // group, place]) for j, w in enumerate(weights))
                    want = mix / whole if whole else 0.0
                    got = float(outs[request][i, h, place])
                    assert math.isclose(got, want, rel_tol=LOOSE[dtype], abs_tol=LOOSE[dtype])
                token = sum(n for n, _ in lens[:request]) + i
                for part, exact in ((top, largest), (total, whole)):
                    if not packed:
                        eight = part[request, h, i]
                    elif softmax:
                        eight = part[token, h]
                    else:
                        eight = part.view(heads, tokens, 8)[h, token]
                    np.testing.assert_allclose(eight, [exact] * 8, rtol=1e-4, atol=1e-4)


def test_tokens_of_no_request_are_zero() -> None:
    x = draw(5, 2, 4)
    out, top, total, *_ = REGISTRY[OP](
        x, x, x, 2, "TND", actual_seq_qlen=[3], actual_seq_kvlen=[5], softmax_layout="TND"
    )
    assert not out[3:].any() and bool(top[3:].isneginf().all()) and not total[3:].any()


Q = draw(2, 3, 2, 8)
T = draw(6, 2, 8)
CALL: dict[str, Any] = {"query": Q, "key": Q, "value": Q, "head_num": 2, "input_layout": "BSND"}
PACKED = CALL | {"query": T, "key": T, "value": T, "input_layout": "TND"}
WIDE: dict[str, Any] = dict.fromkeys(("query", "key", "value"), draw(2, 3, 16))
LENS = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [3, 6]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("fusion-dtype", CALL | {"query": Q.double()}),
    ("fusion-dtype", CALL | {"value": Q.float()}),
    ("fusion-layout", CALL | {"input_layout": "NTD"}),
    ("fusion-shape", CALL | {"query": T}),
    ("fusion-shape", CALL | {"key": Q[:, :0]}),
    ("fusion-shape", CALL | {"value": Q[:, :2]}),
    ("fusion-shape", CALL | {"query": Q[:1]}),
    ("fusion-shape", CALL | {"value": draw(2, 3, 2, 16)}),
    ("fusion-shape", CALL | dict.fromkeys(("query", "key", "value"), draw(1, 1, 2, 769))),
    ("fusion-heads", CALL | {"head_num": 0}),
    ("fusion-heads", CALL | {"head_num": 4}),
    ("fusion-heads", CALL | {"query": draw(2, 3, 3, 8), "head_num": 3}),
    ("fusion-heads", CALL | WIDE | {"input_layout": "BSH", "head_num": 3}),
    ("fusion-lens", PACKED),
    ("fusion-lens", PACKED | LENS | {"actual_seq_kvlen": [6]}),
    ("fusion-lens", PACKED | LENS | {"actual_seq_qlen": [4, 2]}),
    ("fusion-lens", PACKED | LENS | {"actual_seq_qlen": [4, 7]}),
    ("fusion-mode", CALL | {"sparse_mode": 7}),
    ("fusion-mode", PACKED | LENS | {"sparse_mode": 5}),
    ("fusion-mask", CALL | {"atten_mask": torch.zeros(3, 3)}),
    ("fusion-mask", CALL | {"atten_mask": TRIANGLE}),
    ("fusion-mask", CALL | {"atten_mask": TRIANGLE[:3, :3], "sparse_mode": 3}),
    ("fusion-mask", PACKED | LENS | {"atten_mask": torch.zeros(2, 1, 4, 3, dtype=torch.bool)}),
    ("fusion-padding", CALL | {"padding_mask": Q}),
    ("fusion-keep", CALL | {"keep_prob": 0.0}),
    ("fusion-softmax-layout", CALL | {"softmax_layout": "TND"}),
    ("fusion-softmax-layout", PACKED | LENS | {"softmax_layout": "NTD"}),
    ("fusion-sink", CALL | {"sink": torch.zeros(3)}),
    ("fusion-sink", CALL | {"sink": torch.zeros(2).half()}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_document_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "extra", [{"pse": Q}, {"prefix": [1, 1]}, {"dropout_mask": Q}, {"keep_prob": 0.5}, {"sparse_mode": 6}]
)
def test_forms_that_are_not_computed_say_so(extra: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](**CALL | extra)
