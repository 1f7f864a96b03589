"""Rotary embedding ops and kv_rmsnorm_rope_cache against plain loops, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, pose
from hypothesis import given, settings
from hypothesis import strategies as st

INTERLEAVE = "npu::npu_interleave_rope"
APPLY = "npu::npu_apply_rotary_pos_emb"
MROPE = "npu::npu_mrope"
ATB = "atb::_npu_rotary_embedding"
KV = "npu::npu_kv_rmsnorm_rope_cache"
LOOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
FLOATS = list(LOOSE)


def draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(row: torch.Tensor) -> list[float]:
    out: list[float] = row.double().flatten().tolist()
    return out


def rotated(row: list[float], cos: list[float], sin: list[float], mode: str) -> list[float]:
    """One head, of which the first len(cos) elements turn."""
    width, out = len(cos), list(row)
    for d in range(width):
        if mode == "interleave":
            partner, sign = d ^ 1, -1 if d % 2 == 0 else 1
        else:
            block = width if mode == "half" else width // 2
            start, inner = d // block * block, d % block
            partner, sign = start + (inner + block // 2) % block, -1 if inner < block // 2 else 1
        out[d] = row[d] * cos[d] + sign * row[partner] * sin[d]
    return out


def close(got: torch.Tensor, want: list[float], dtype: torch.dtype) -> None:
    np.testing.assert_allclose(numbers(got), want, rtol=LOOSE[dtype], atol=LOOSE[dtype])


def halves(row: torch.Tensor) -> list[float]:
    values = numbers(row)
    return values[::2] + values[1::2]


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("shared", [False, True])
def test_interleave_rope(dtype: torch.dtype, shared: bool) -> None:
    x, cos, sin = (
        draw(2, 3, 4, 64, dtype=dtype),
        *(draw(2, 1, 1 if shared else 4, 64, dtype=dtype, seed=i) for i in (1, 2)),
    )
    out = REGISTRY[INTERLEAVE](x, cos, sin)
    for b, n, s in np.ndindex(2, 3, 4):
        at = b, 0, 0 if shared else s
        close(out[b, n, s], rotated(halves(x[b, n, s]), numbers(cos[at]), numbers(sin[at]), "half"), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("layout", "mode", "dims"),
    [("BSND", "half", (64, 64)), ("TND", "half", (128, 128)), ("SBND", "half", (12, 8)), ("BNSD", "quarter", (16, 16)),
     ("TND", "interleave", (10, 6))],
)  # fmt: skip
def test_apply_rotary_pos_emb(dtype: torch.dtype, layout: str, mode: str, dims: tuple[int, int]) -> None:
    sizes = {"B": 2, "S": 3, "T": 5}
    heads = layout.index("N")

    def shape(n: int, d: int) -> list[int]:
        return [{"N": n, "D": d}.get(axis, sizes.get(axis, 0)) for axis in layout]

    query, key = draw(*shape(4, dims[0]), dtype=dtype), draw(*shape(2, dims[0]), dtype=dtype, seed=1)
    cos, sin = (draw(*shape(1, dims[1]), dtype=dtype, seed=i) for i in (2, 3))
    before = query.clone(), key.clone()
    if layout in ("SBND", "BNSD") or mode != "half":
        pose.set_pose(chip="950")
    try:
        results = REGISTRY[APPLY](query, key, cos, sin, layout, mode)
    finally:
        pose.set_pose()
    assert results[0] is query and results[1] is key
    for now, then in zip((query, key), before, strict=True):
        for at in np.ndindex(*now.shape[:-1]):
            one = tuple(0 if axis == heads else i for axis, i in enumerate(at))
            close(now[at], rotated(numbers(then[at]), numbers(cos[one]), numbers(sin[one]), mode), dtype)


SECTIONS: list[list[int] | None] = [None, [0, 0, 0], [24, 20, 20], [16, 16, 16, 16], [8, 12, 12]]


@settings(max_examples=40, deadline=None)
@given(
    section=st.sampled_from(SECTIONS),
    dtype=st.sampled_from(FLOATS),
    rotary=st.sampled_from(["half", "interleaved"]),
    merged=st.booleans(),
    wider=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_mrope(
    section: list[int] | None, dtype: torch.dtype, rotary: str, merged: bool, wider: bool, index: torch.dtype
) -> None:
    parts = section if section and any(section) else []
    dim = 2 * sum(parts) if parts else 32
    head = dim + 32 * wider
    query, key = draw(3, 2 * head, dtype=dtype), draw(3, head, dtype=dtype, seed=1)
    cache = draw(7, dim, dtype=dtype, seed=2)
    positions = torch.randint(0, 7, (len(parts), 3) if parts else (3,), generator=torch.Generator().manual_seed(1))
    mode = "interleave" if merged and len(parts) == 3 else "default"
    options: dict[str, Any] = {"mrope_section": section, "rotary_mode": rotary, "cache_mode": mode}
    outs = REGISTRY[MROPE](positions.to(index), query, key, cache, head, **options)

    def source(f: int) -> int:
        """Row of positions that frequency f follows."""
        if mode == "interleave":
            return f % 3 if f < 3 * parts[1] and f % 3 else 0
        return next(row for row in range(len(parts)) if f < sum(parts[: row + 1]))

    for out, x in zip(outs, (query, key), strict=True):
        for t in range(3):
            table = [numbers(cache[int(p)]) for p in (positions[:, t] if parts else positions[t : t + 1])]
            chosen = [source(f) if parts else 0 for f in range(dim // 2)]
            cos, sin = ([table[r][f + shift] for f, r in enumerate(chosen)] for shift in (0, dim // 2))
            if rotary == "half":
                cos, sin = cos + cos, sin + sin
            else:
                cos, sin = ([v for v in half for _ in (0, 1)] for half in (cos, sin))
            for got, then in zip(out[t].view(-1, head), x[t].view(-1, head), strict=True):
                turn = "half" if rotary == "half" else "interleave"
                close(got, rotated(numbers(then), cos, sin, turn), dtype)


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("neox", [False, True])
def test_rotary_embedding_in_place(dtype: torch.dtype, neox: bool) -> None:
    query, key, cache = draw(3, 2 * 16, dtype=dtype), draw(3, 16, dtype=dtype, seed=1), draw(5, 8, dtype=dtype, seed=2)
    positions = torch.tensor([4, 0, 2])
    before = query.clone(), key.clone()
    assert REGISTRY[ATB](positions, query, key, 16, cache, neox) is None
    for now, then in zip((query, key), before, strict=True):
        for t in range(3):
            cos, sin = (numbers(half) for half in cache[positions[t]].chunk(2))
            cos, sin = (half + half if neox else [v for v in half for _ in (0, 1)] for half in (cos, sin))
            for got, old in zip(now[t].view(-1, 16), then[t].view(-1, 16), strict=True):
                close(got, rotated(numbers(old), cos, sin, "half" if neox else "interleave"), dtype)


def place(mode: str, size: int, slot: int, d: int, batch: int = 0) -> tuple[int, ...]:
    """Where element d of a token is in a cache's storage, counted as (block, rest in elements)."""
    if mode == "Norm":
        return batch, 0, slot, d
    if mode.endswith("NZ"):
        flat = (d // 16) * size * 16 + (slot % size) * 16 + d % 16
        return slot // size, flat
    return slot // size, slot % size, 0, d


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]),
    dtype=st.sampled_from(FLOATS[:2]),
    seq=st.integers(1, 5),
    wanted=st.booleans(),
)
def test_kv_rmsnorm_rope_cache(mode: str, dtype: torch.dtype, seq: int, wanted: bool) -> None:
    batch, size, blocks = 2, 4, 6
    random = torch.Generator().manual_seed(seq)
    kv, gamma = draw(batch, 1, seq, 576, dtype=dtype), draw(512, dtype=dtype, seed=1)
    cos, sin = (draw(batch, 1, seq, 64, dtype=dtype, seed=i) for i in (2, 3))
    shape = (batch, 1, 9) if mode == "Norm" else (blocks, size, 1)
    caches = [torch.zeros(*shape, width, dtype=dtype) for width in (64, 512)]
    if mode == "Norm":
        index = torch.stack([torch.randperm(9, generator=random)[:seq] for _ in range(batch)])
    elif "BLK" in mode:
        index = torch.randperm(blocks, generator=random)[: batch * -(-seq // size)] * size
    else:
        index = torch.randperm(blocks * size, generator=random)[: batch * seq]
        index[0] = -1
    after = [cache.clone() for cache in caches]
    rows = []
    for b in range(batch):
        for s in range(seq):
            latent = numbers(kv[b, 0, s, :512])
            factor = 1 / math.sqrt(math.fsum(v * v for v in latent) / 512 + 1e-5)
            normed = [v * factor * g for v, g in zip(latent, numbers(gamma), strict=True)]
            turned = rotated(halves(kv[b, 0, s, 512:]), numbers(cos[b, 0, s]), numbers(sin[b, 0, s]), "half")
            rows.append((turned, normed))
            if mode == "Norm":
                slot = int(index[b, s])
            elif "BLK" in mode:
                slot = int(index.view(batch, -1)[b, s // size]) + s % size
            else:
                slot = int(index[b * seq + s])
            for cache, row in zip(after, rows[-1], strict=True):
                target = cache.view(blocks, -1) if mode.endswith("NZ") else cache
                for d, value in enumerate(row if slot >= 0 else []):
                    target[place(mode, size, slot, d, b)] = value
    options: dict[str, Any] = {"cache_mode": mode, "is_output_kv": wanted}
    copies = REGISTRY[f"{KV}_v2_functional"](kv, gamma, cos, sin, index, *caches, **options)
    assert not any(cache.any() for cache in caches)
    second = [cache.clone() for cache in caches]
    pair = REGISTRY[f"{KV}_v2"](kv, gamma, cos, sin, index, *second, **options)
    results = REGISTRY[KV](kv, gamma, cos, sin, index, *caches, **options)
    assert results[0] is caches[0] and results[1] is caches[1]
    for now, other, copy, want in zip(caches, second, copies[2:], after, strict=True):
        close(now, numbers(want), dtype)
        assert torch.equal(now, other) and torch.equal(now, copy)
    for number, width in ((0, 64), (1, 512)):
        part = results[2 + number]
        assert part.shape == (batch, 1, seq, width) and pair[number].shape == part.shape
        if wanted and mode != "Norm":
            close(part, [v for row in rows for v in row[number]], dtype)
            assert torch.equal(part, pair[number]) and torch.equal(part, copies[number])
        else:
            assert bool(part.isnan().all())


Call = tuple[str, dict[str, Any]]
H = torch.float16


def interleave(x: tuple[int, ...] = (2, 3, 4, 64), r: tuple[int, ...] = (2, 1, 4, 64), **over: Any) -> Call:
    options = {"x": torch.zeros(x, dtype=H), "cos": torch.zeros(r, dtype=H), "sin": torch.zeros(r, dtype=H)}
    return INTERLEAVE, options | over


def apply(q: tuple[int, ...] = (2, 3, 4, 64), c: tuple[int, ...] = (2, 3, 1, 64), **over: Any) -> Call:
    tensors = {"query": q, "key": q, "cos": c, "sin": c}
    return APPLY, {name: torch.zeros(shape, dtype=H) for name, shape in tensors.items()} | over


def mrope(**over: Any) -> Call:
    options = {
        "positions": torch.zeros(3).int(), "query": torch.zeros(3, 64, dtype=H), "key": torch.zeros(3, 32, dtype=H),
        "cos_sin_cache": torch.zeros(5, 32, dtype=H), "head_size": 32,
    }  # fmt: skip
    return MROPE, options | over


def embed(**over: Any) -> Call:
    options = mrope()[1] | {"is_neox_style": True}
    return ATB, options | over


def kvnorm(mode: str = "PA", **over: Any) -> Call:
    shape = (2, 1, 9) if mode == "Norm" else (3, 4, 1)
    options = {
        "kv": torch.zeros(2, 1, 3, 576, dtype=H), "gamma": torch.zeros(512, dtype=H), "cache_mode": mode,
        "cos": torch.zeros(2, 1, 3, 64, dtype=H), "sin": torch.zeros(2, 1, 3, 64, dtype=H),
        "index": torch.arange(6).view(2, 3) if mode == "Norm" else torch.arange(6),
        "k_cache": torch.zeros(*shape, 64, dtype=H), "ckv_cache": torch.zeros(*shape, 512, dtype=H),
    }  # fmt: skip
    return KV, options | over


STRIDED = torch.zeros(2, 4, 3, 64, dtype=H).transpose(1, 2)
ONE_BLOCK: dict[str, Any] = {
    name: torch.zeros(1, 4, 1, width, dtype=H) for name, width in (("k_cache", 64), ("ckv_cache", 512))
}
THREE = torch.zeros(3, 3).int()
REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("interleave-dtype", lambda: (INTERLEAVE, interleave()[1] | {"x": torch.zeros(2, 3, 4, 64)})),
    ("interleave-shape", lambda: interleave(x=(2, 3, 4, 32), r=(2, 1, 4, 32))),
    ("interleave-shape", lambda: interleave(r=(2, 3, 4, 64))),
    ("interleave-shape", lambda: interleave(r=(2, 1, 2, 64))),
    ("interleave-contiguous", lambda: (INTERLEAVE, interleave()[1] | {"x": STRIDED})),
    ("apply-rotary-dtype", lambda: apply(key=torch.zeros(2, 3, 4, 64))),
    ("apply-rotary-shape", lambda: apply(c=(2, 3, 4, 64))),
    ("apply-rotary-shape", lambda: apply(key=torch.zeros(2, 2, 4, 64, dtype=H))),
    ("apply-rotary-shape", lambda: apply(key=torch.zeros(2, 3, 4, 128, dtype=H))),
    ("apply-rotary-layout", lambda: apply(layout="BSH")),
    ("apply-rotary-mode", lambda: apply(rotary_mode="third")),
    ("apply-rotary-a2-layout", lambda: apply(q=(2, 4, 3, 64), c=(2, 1, 3, 64), layout="BNSD")),
    ("apply-rotary-a2-mode", lambda: apply(rotary_mode="interleave")),
    ("apply-rotary-a2-dim", lambda: apply(q=(2, 3, 4, 32), c=(2, 3, 1, 32))),
    ("mrope-dtype", lambda: mrope(key=torch.zeros(3, 32))),
    ("mrope-positions", lambda: mrope(positions=torch.zeros(3))),
    ("mrope-positions", lambda: mrope(positions=THREE)),
    ("mrope-section", lambda: mrope(mrope_section=[4, 6, 6], positions=THREE)),
    ("mrope-section", lambda: mrope(mrope_section=[8, 12, 12], positions=THREE)),
    ("mrope-mode", lambda: mrope(rotary_mode="interleave")),
    ("mrope-cache-mode", lambda: mrope(cache_mode="interleave")),
    ("mrope-dims", lambda: mrope(cos_sin_cache=torch.zeros(5, 64, dtype=H))),
    ("mrope-dims", lambda: mrope(query=torch.zeros(3, 2, 32, dtype=H))),
    ("mrope-align", lambda: mrope(head_size=16, cos_sin_cache=torch.zeros(5, 16, dtype=H))),
    ("atb-rope-dtype", lambda: embed(query=torch.zeros(3, 64))),
    ("atb-rope-dtype", lambda: embed(positions=torch.zeros(3))),
    ("atb-rope-dims", lambda: embed(positions=torch.zeros(2).int())),
    ("atb-rope-dims", lambda: embed(head_size=48)),
    ("kvnorm-dtype", lambda: kvnorm(k_cache=torch.zeros(3, 4, 1, 64).bfloat16())),
    ("kvnorm-index-dtype", lambda: kvnorm(index=torch.arange(6).int())),
    ("kvnorm-kv", lambda: kvnorm(kv=torch.zeros(2, 1, 3, 320, dtype=H))),
    ("kvnorm-kv", lambda: kvnorm(cos=torch.zeros(2, 1, 1, 64, dtype=H))),
    ("kvnorm-mode", lambda: kvnorm(cache_mode="PA_BSND")),
    ("kvnorm-cache", lambda: kvnorm(k_cache=torch.zeros(3, 1, 4, 64, dtype=H))),
    ("kvnorm-cache", lambda: kvnorm("Norm", ckv_cache=torch.zeros(2, 1, 2, 512, dtype=H))),
    ("kvnorm-blocks", lambda: kvnorm(**ONE_BLOCK)),
    ("kvnorm-index", lambda: kvnorm(index=torch.arange(6).view(2, 3))),
    ("kvnorm-index", lambda: kvnorm("PA_BLK_NZ")),
    ("kvnorm-offset", lambda: kvnorm(k_rope_offset=torch.zeros(64))),
    ("kvnorm-scales", lambda: kvnorm(c_kv_scale=torch.zeros(512))),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_calls_within_the_documents_are_taken() -> None:
    for op, options in (interleave(), apply(), mrope(), embed(), kvnorm(), kvnorm("Norm")):
        REGISTRY[op](**options)


@pytest.mark.parametrize(
    "over", [{"k_rope_scale": torch.ones(64), "c_kv_scale": torch.ones(512)}, {"v": torch.ones(1)}]
)
def test_forms_that_are_not_computed_say_so(over: dict[str, Any]) -> None:
    op, options = kvnorm()
    with pytest.raises(KernelNotCovered):
        REGISTRY[op](**options | over)


@pytest.mark.parametrize(
    "call",
    [
        kvnorm(index=torch.tensor([0, 1, 2, 12, 4, 5])),
        kvnorm("Norm", index=torch.tensor([[0, 1, 9], [0, 1, 2]])),
        mrope(positions=torch.tensor([0, 5, 1])),
        embed(positions=torch.tensor([0, -1, 1])),
    ],
)
def test_indices_outside_fault_and_nothing_is_written(call: Call) -> None:
    op, options = call
    options = {name: x.clone() + (x.dtype == H) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    before = {name: x.clone() for name, x in options.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(DeviceFault):
        REGISTRY[op](**options)
    assert all(torch.equal(options[name], x) for name, x in before.items())
