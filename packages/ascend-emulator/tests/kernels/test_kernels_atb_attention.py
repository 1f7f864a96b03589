"""atb's attention ops and attention_update against plain float64 loops; their refusals and faults."""

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

PAGED = "atb::_npu_paged_attention"
MLA = "atb::_npu_paged_attention_mla"
PREFIX = "atb::_npu_flash_attention_qlens"
UNPAD = "atb::_npu_flash_attention_unpad"
LATENT = "atb::npu_multi_head_latent_attention"
UPDATE = "npu::npu_attention_update"
INT32 = torch.int32
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float
) -> tuple[list[float], float]:
    """One query row [dim] over rows of keys and values: output, and log-sum-exp."""
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(query, key, strict=True)) for key in keys]
    if not scores:
        return [0.0] * 0, -math.inf
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    out = [
        math.fsum(w * float(value[d]) for w, value in zip(weights, values, strict=True)) / total
        for d in range(values[0].numel())
    ]
    return out, top + math.log(total)


def token(cache: torch.Tensor, table: torch.Tensor, row: int, position: int, head: int) -> torch.Tensor:
    size = cache.size(1)
    return cache[int(table[row, position // size]), position % size, head]


def close(got: torch.Tensor, want: list[float], dtype: torch.dtype) -> None:
    wanted = want or [0.0] * got.numel()
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=LOOSE[dtype], atol=LOOSE[dtype] / 4)


class Pages:
    """Caches of permuted pages and a table over them."""

    def __init__(self, dims: tuple[int, ...], heads: int, lens: list[int], dtype: torch.dtype, size: int = 16) -> None:
        width = max(1, -(-max(lens) // size))
        pages = len(lens) * width + 1
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(5)) + 1
        self.table = order[: len(lens) * width].view(len(lens), width).to(INT32)
        self.caches = [draw(pages, size, heads, dim, dtype=dtype, seed=20 + i) for i, dim in enumerate(dims)]


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    dims=st.sampled_from([(16, 16), (32, 16)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    flat=st.booleans(),
)
def test_paged_attention(
    lens: list[int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, flat: bool
) -> None:
    n, kv = heads
    pages = Pages(dims, kv, lens, dtype)
    query = draw(len(lens), n, dims[0], dtype=dtype)
    out = torch.full((len(lens), n, dims[1]), 7.0, dtype=dtype)
    arguments = [query.flatten(1) if flat else query, *pages.caches, kv, n, 0.3]
    context = torch.tensor(lens, dtype=INT32)
    workspace = REGISTRY[f"{PAGED}_get_workspace"](*arguments, pages.table, context, out)
    assert workspace.dtype == torch.uint8 and workspace.dim() == 1
    REGISTRY[PAGED](*arguments, pages.table, context, out.flatten(1) if flat else out, workspace=workspace)
    for row, length in enumerate(lens):
        for head in range(n):
            keys, values = (
                [token(c, pages.table, row, j, head // (n // kv)) for j in range(length)] for c in pages.caches
            )
            close(out[row, head], attend(query[row, head], keys, values, 0.3)[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paged_latent_attention(dtype: torch.dtype) -> None:
    lens = [20, 0, 3]
    pages = Pages((48,), 1, lens, dtype)
    query, out = draw(3, 2, 48, dtype=dtype), torch.empty(3, 2, 32, dtype=dtype)
    REGISTRY[MLA](query, pages.caches[0], 1, 2, 0.2, pages.table, torch.tensor(lens, dtype=INT32), 32, out)
    for row, length in enumerate(lens):
        rows = [token(pages.caches[0], pages.table, row, j, 0) for j in range(length)]
        for head in range(2):
            close(out[row, head], attend(query[row, head], rows, [r[:32] for r in rows], 0.2)[0], dtype)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    news=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dtype=st.sampled_from(list(LOOSE)),
    side=st.sampled_from([8, 128]),
)
def test_prefill_with_a_prefix(data: st.DataObject, news: list[int], dtype: torch.dtype, side: int) -> None:
    lens = [new + data.draw(st.integers(0, 30)) for new in news]
    pages = Pages((16, 32), 2, lens, dtype)
    query, out = draw(sum(news), 4 * 16, dtype=dtype), torch.empty(sum(news), 4 * 32, dtype=dtype)
    mask = torch.full((side, side), float("-inf")).triu(1).to(dtype)
    lengths = torch.tensor(news, dtype=INT32), torch.tensor(lens, dtype=INT32)
    REGISTRY[PREFIX](query, *pages.caches, pages.table, mask, *lengths, 2, 4, 0.3, out)
    at = 0
    for row, (new, length) in enumerate(zip(news, lens, strict=True)):
        for i in range(new):
            for head in range(4):
                seen = range(length - new + i + 1)
                keys, values = ([token(c, pages.table, row, j, head // 2) for j in seen] for c in pages.caches)
                q = query.view(-1, 4, 16)[at, head]
                close(out.view(-1, 4, 32)[at, head], attend(q, keys, values, 0.3)[0], dtype)
            at += 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_attention_without_mask(dtype: torch.dtype) -> None:
    lens = [3, 1, 5]
    query, key, value = draw(9, 4, 16, dtype=dtype), draw(9, 2, 16, dtype=dtype, seed=1), draw(9, 2, 8, dtype=dtype)
    out = torch.empty(9, 4, 8, dtype=dtype)
    REGISTRY[UNPAD](query, key, value, torch.tensor(lens, dtype=INT32), 0.4, 4, 2, out)
    start = 0
    for length in lens:
        span = range(start, start + length)
        for i in span:
            for head in range(4):
                keys, values = [key[j, head // 2] for j in span], [value[j, head // 2] for j in span]
                close(out[i, head], attend(query[i, head], keys, values, 0.4)[0], dtype)
        start += length


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latent_attention_in_its_four_forms(dtype: torch.dtype) -> None:
    lens = [18, 0, 5]
    pages = Pages((512, 64), 1, lens, dtype)
    nope, rope = draw(3, 2, 512, dtype=dtype), draw(3, 2, 64, dtype=dtype, seed=3)
    arguments = [nope, rope, *pages.caches, pages.table, lens, 2, 0.05, 1]
    out = REGISTRY[LATENT](*arguments)
    for row, length in enumerate(lens):
        latents, ropes = ([token(c, pages.table, row, j, 0) for j in range(length)] for c in pages.caches)
        keys = [torch.cat(pair) for pair in zip(latents, ropes, strict=True)]
        for head in range(2):
            want, lse = attend(torch.cat((nope[row, head], rope[row, head])), keys, latents, 0.05)
            close(out[row, head], want, dtype)
            got, got_lse = REGISTRY[f"{LATENT}.lse"](*arguments, True)
            close(got[row, head], want, dtype)
            assert got_lse.dtype == dtype
            if length:
                close(got_lse[row, head], [lse], dtype)
    given_out, given_lse = torch.empty_like(out), torch.full((3, 2, 1), 9.0, dtype=dtype)
    assert REGISTRY[f"{LATENT}.out"](*arguments, output=given_out) is given_out
    assert torch.equal(given_out, out)
    REGISTRY[f"{LATENT}.lse_out"](*arguments, False, output=torch.empty_like(out), lse=given_lse)
    assert bool((given_lse == 9).all())
    REGISTRY[f"{LATENT}.lse_out"](*arguments, True, output=torch.empty_like(out), lse=given_lse)
    assert torch.equal(given_lse, REGISTRY[f"{LATENT}.lse"](*arguments, True)[1])
    workspace = REGISTRY["atb::_npu_multi_head_latent_attention_get_workspace.lse"](*arguments, True)
    assert workspace.dim() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_attention_update(dtype: torch.dtype, parts: int) -> None:
    lse = [draw(4, dtype=torch.float32, seed=i) * 3 for i in range(parts)]
    lse[0][1] = float("-inf") if parts > 1 else 0.0
    outs = [draw(4, 8, dtype=dtype, seed=50 + i) for i in range(parts)]
    out, joint = REGISTRY[UPDATE](lse, outs, 1)
    for row in range(4):
        total = math.log(math.fsum(math.exp(float(part[row])) for part in lse))
        np.testing.assert_allclose(float(joint[row]), total, rtol=1e-5, atol=1e-5)
        for d in range(8):
            terms = (float(o[row, d]) * math.exp(float(part[row]) - total) for o, part in zip(outs, lse, strict=True))
            want = math.fsum(terms)
            np.testing.assert_allclose(
                float(out[row, d]), want, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=2e-2
            )
    assert out.dtype == dtype and joint.dtype == torch.float32
    silent = REGISTRY[UPDATE](lse, outs, 0)
    assert torch.equal(silent[0], out) and bool(silent[1].isnan().all())


def test_the_whole_is_its_parts_joined() -> None:
    lens = [40]
    pages = Pages((16, 16), 1, lens, torch.float16)
    query = draw(1, 1, 1, 16)
    op = REGISTRY["npu::npu_fused_infer_attention_score_v2"]
    options: dict[str, Any] = {"num_query_heads": 1, "input_layout": "BSND", "return_softmax_lse": True}
    rows = [cache[pages.table[0].long()].flatten(0, 1)[:40].unsqueeze(0) for cache in pages.caches]
    whole = op(query, *rows, **options)
    halves = [op(query, *(r[:, a:b].contiguous() for r in rows), **options) for a, b in ((0, 13), (13, 40))]
    out, joint = REGISTRY[UPDATE]([h[1].flatten() for h in halves], [h[0].float().view(1, 16) for h in halves], 1)
    np.testing.assert_allclose(out.flatten(), whole[0].flatten().float(), atol=2e-3)
    np.testing.assert_allclose(joint.flatten(), whole[1].flatten(), atol=1e-5)


def paged(**over: Any) -> tuple[str, dict[str, Any]]:
    cache = torch.zeros(4, 16, 2, 32).half()
    options = {
        "query": torch.zeros(3, 4, 32).half(), "key_cache": cache, "value_cache": cache.clone(), "num_kv_heads": 2,
        "num_heads": 4, "scale_value": 1.0, "block_table": torch.zeros(3, 2, dtype=INT32),
        "context_lens": torch.tensor([1, 2, 3], dtype=INT32), "out": torch.zeros(3, 4, 32).half(),
    }  # fmt: skip
    return PAGED, options | over


def prefix(**over: Any) -> tuple[str, dict[str, Any]]:
    options = paged()[1] | {"mask": torch.ones(8, 8).triu(1), "seq_len": torch.ones(3, dtype=INT32)}
    return PREFIX, options | over


def latent(size: int = 16, **over: Any) -> tuple[str, dict[str, Any]]:
    options = {
        "q_nope": torch.zeros(2, 4, 512).half(), "q_rope": torch.zeros(2, 4, 64).half(),
        "ctkv": torch.zeros(3, size, 1, 512).half(), "k_rope": torch.zeros(3, size, 1, 64).half(),
        "block_tables": torch.zeros(2, 2, dtype=INT32), "context_lens": [4, 5], "q_headnum": 4, "qk_scale": 1.0,
        "kv_headnum": 1,
    }  # fmt: skip
    return LATENT, options | over


def update(n: int = 2, dim: int = 8, **over: Any) -> tuple[str, dict[str, Any]]:
    options = {"lse": [torch.zeros(3)] * n, "local_out": [torch.zeros(3, dim)] * n, "update_type": 0}
    return UPDATE, options | over


def wide(dim: int, size: int = 16) -> dict[str, Any]:
    cache = torch.zeros(2, size, 2, dim).half()
    query = torch.zeros(3, 4, dim).half()
    return {"query": query, "key_cache": cache, "value_cache": cache.clone(), "out": query.clone()}


REFUSED: list[tuple[str, Callable[[], tuple[str, dict[str, Any]]]]] = [
    ("atb-dtype", lambda: paged(query=torch.zeros(3, 4, 32))),
    ("atb-dtype", lambda: paged(out=torch.zeros(3, 4, 32).bfloat16())),
    ("atb-heads", lambda: paged(num_heads=3)),
    ("atb-heads", lambda: paged(num_kv_heads=0)),
    ("atb-query", lambda: paged(query=torch.zeros(3, 4, 16).half())),
    ("atb-cache", lambda: paged(key_cache=torch.zeros(4, 2, 16, 32).half())),
    ("atb-cache", lambda: paged(value_cache=torch.zeros(4, 2, 16, 32).half().transpose(1, 2))),
    ("atb-block-size", lambda: paged(**wide(32, 24))),
    ("atb-head-dim", lambda: paged(**wide(272))),
    ("atb-block-bytes", lambda: paged(**wide(256, 128))),
    ("atb-table", lambda: paged(block_table=torch.zeros(3, 2).long())),
    ("atb-table", lambda: paged(block_table=torch.zeros(2, 2, dtype=INT32))),
    ("atb-lens", lambda: paged(context_lens=torch.tensor([1, 2, 3]))),
    ("atb-lens", lambda: paged(context_lens=torch.tensor([1, 2], dtype=INT32))),
    ("atb-lens", lambda: prefix(seq_len=torch.ones(2, dtype=INT32))),
    ("atb-out", lambda: paged(out=torch.zeros(3, 4, 16).half())),
    ("atb-mask", lambda: prefix(mask=torch.ones(8, 8))),
    ("atb-mask", lambda: prefix(mask=torch.ones(2, 8, 8).triu(1))),
    ("latent-dtype", lambda: latent(k_rope=torch.zeros(3, 16, 1, 64).bfloat16())),
    ("latent-shapes", lambda: latent(q_rope=torch.zeros(2, 4, 32).half())),
    ("latent-shapes", lambda: latent(kv_headnum=2)),
    ("latent-block-size", lambda: latent(size=256)),
    ("latent-batch", lambda: latent(context_lens=[4])),
    ("latent-batch", lambda: latent(block_tables=torch.zeros(2, 2).long())),
    ("latent-mode", lambda: latent(mask_type="mask_type_spec")),
    ("update-parts", lambda: update(17)),
    ("update-parts", lambda: update(lse=[torch.zeros(3)])),
    ("update-dtype", lambda: update(lse=[torch.zeros(3).half()] * 2)),
    ("update-dtype", lambda: update(local_out=[torch.zeros(3, 8), torch.zeros(3, 8).half()])),
    ("update-shape", lambda: update(lse=[torch.zeros(3, 1)] * 2)),
    ("update-dim", lambda: update(dim=12)),
    ("update-type", lambda: update(update_type=2)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_calls_within_the_documents_are_taken() -> None:
    for op, options in (paged(), prefix(), latent(), update(1)):
        REGISTRY[op](**options)


def test_large_blocks_are_taken_by_later_releases() -> None:
    op, options = paged(**wide(256, 128))
    pose.set_pose(cann="8.5")
    try:
        REGISTRY[op](**options)
    finally:
        pose.set_pose()


@pytest.mark.parametrize("over", [{"cache_mode": "int8_nzcache"}, {"mask": torch.zeros(1)}, {"qseqlen": [1, 1]}])
def test_forms_that_are_not_computed_say_so(over: dict[str, Any]) -> None:
    op, options = latent(**over)
    with pytest.raises(KernelNotCovered):
        REGISTRY[op](**options)


def test_a_page_outside_the_cache_faults() -> None:
    op, options = paged(block_table=torch.tensor([[0, 0], [1, 0], [4, 0]], dtype=INT32))
    with pytest.raises(DeviceFault) as caught:
        REGISTRY[op](**options)
    assert caught.value.page == 4
