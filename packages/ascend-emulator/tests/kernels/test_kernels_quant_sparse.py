"""quant_lightning_indexer and kv_quant_sparse_flash_attention against plain loops, and their refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, pose
from ascend_emulator.kernels.faults import fill_poison_
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_batch import FORMS, INT32, LENS, Batch, draw

INDEXER = "npu::npu_quant_lightning_indexer"
SFA = "npu::npu_kv_quant_sparse_flash_attention"
INT8, FP8, HALF, BF16 = torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def bytes8(*shape: int, dtype: torch.dtype = INT8, seed: int = 0) -> torch.Tensor:
    numbers = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(INT8) if dtype == INT8 else (numbers.float() / 16).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS, lens=LENS, mode=st.sampled_from([0, 3]), heads=st.sampled_from([8, 16]),
    count=st.sampled_from([1, 4, 24]), kind=st.sampled_from(["int8", "half", "wide"]),
)  # fmt: skip
def test_quant_lightning_indexer(
    form: tuple[str, bool], lens: list[tuple[int, int]], mode: int, heads: int, count: int, kind: str
) -> None:
    q_lens, kv_lens = [q for q, _ in lens], [k for _, k in lens]
    dtype, weight, scale = {"int8": (INT8, HALF, HALF), "half": (FP8, HALF, HALF), "wide": (FP8, BF16, torch.float32)}[
        kind
    ]
    keys = {
        "key": [bytes8(k, 128, dtype=dtype, seed=9 * i) for i, k in enumerate(kv_lens)],
        "scale": [draw(k, 1, seed=7 * i + 1).abs().to(scale) for i, k in enumerate(kv_lens)],
    }
    batch = Batch(q_lens, kv_lens, *form, keys)
    queries = [bytes8(q, heads, 128, dtype=dtype, seed=40 + i) for i, q in enumerate(q_lens)]
    scales = [draw(q, heads, seed=50 + i).abs().to(scale) for i, q in enumerate(q_lens)]
    factors = [draw(q, heads, seed=60 + i).to(weight) for i, q in enumerate(q_lens)]
    options = {name.replace("_kv", "_key"): value for name, value in batch.options.items()}
    pose.set_pose(chip=None if dtype == INT8 else "950")
    out = REGISTRY[INDEXER](
        batch.queries(queries), batch.key("key"), batch.queries(factors), batch.queries(scales),
        batch.key("scale").squeeze(-1), 0, 0, sparse_count=count, sparse_mode=mode, **options,
    )  # fmt: skip
    assert out.dtype == INT32
    for request, q in enumerate(q_lens):
        for i in range(q):
            scores = []
            for j in range(min(batch.sees(request, i, mode), kv_lens[request])):
                total = []
                for h in range(heads):
                    product = float(queries[request][i, h].double() @ keys["key"][request][j].double())
                    both = float(scales[request][i, h]) * float(keys["scale"][request][j, 0])
                    total.append(max(0.0, product * both) * float(factors[request][i, h]))
                scores.append(math.fsum(total))
            got = batch.row(out, request, i)[0].tolist()
            kept = [j for j in got if j >= 0]
            assert len(got) == count and len(kept) == min(count, len(scores)) == len(set(kept))
            assert got == kept + [-1] * (count - len(kept))
            worst = min((scores[j] for j in kept), default=0.0)
            largest = max(map(abs, scores), default=0.0)
            assert all(s <= worst + 1e-4 * largest for j, s in enumerate(scores) if j not in kept)


def cached(latent: torch.Tensor, rope: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of a cache, put together byte by byte."""
    rows = []
    for one, two, three in zip(latent, rope, scales, strict=True):
        raw = one.view(torch.uint8).numpy().tobytes() + two.view(torch.uint8).numpy().tobytes()
        rows.append(list(raw + np.array(three.tolist(), dtype="<f4").tobytes()))
    return torch.tensor(rows, dtype=torch.uint8).view(-1, 656).view(latent.dtype)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS, lens=LENS, mode=st.sampled_from([0, 3]), heads=st.sampled_from([1, 2]), size=st.sampled_from([1, 4]),
    dtype=st.sampled_from([HALF, BF16]), kind=st.sampled_from([INT8, FP8]), seed=st.integers(0, 99),
)  # fmt: skip
def test_kv_quant_sparse_flash_attention(
    form: tuple[str, bool], lens: list[tuple[int, int]], mode: int, heads: int, size: int, dtype: torch.dtype,
    kind: torch.dtype, seed: int,
) -> None:  # fmt: skip
    size = size if kind == INT8 else 1
    q_lens, kv_lens = [q for q, _ in lens], [k for _, k in lens]
    latents = [bytes8(k, 512, dtype=kind, seed=seed + i) for i, k in enumerate(kv_lens)]
    ropes = [draw(k, 64, dtype=dtype, seed=20 + i) for i, k in enumerate(kv_lens)]
    scales = [draw(k, 4, seed=30 + i).abs().float() / 64 for i, k in enumerate(kv_lens)]
    rows = [cached(*parts) for parts in zip(latents, ropes, scales, strict=True)]
    batch = Batch(q_lens, kv_lens, *form, {"key": rows})
    queries = [draw(q, heads, 576, dtype=dtype, seed=40 + i) for i, q in enumerate(q_lens)]
    random = torch.Generator().manual_seed(seed)
    indices = []
    for q, k in lens:
        chosen = [torch.randperm(-(-k // size), generator=random)[:3] for _ in range(q)]
        padded = [torch.nn.functional.pad(c, (1, 4 - c.numel()), value=-1) for c in chosen]
        indices.append(torch.stack(padded).to(INT32))
    pose.set_pose(chip="910B" if kind == INT8 else "950")
    key = batch.key("key")
    out = REGISTRY[SFA](
        batch.queries(queries), key, key, batch.queries([x.unsqueeze(1) for x in indices]), 0.05, 2, 2,
        sparse_block_size=size, sparse_mode=mode, attention_mode=2, **batch.options,
    )  # fmt: skip
    assert out.dtype == dtype and out.shape[-1] == 512
    for request, q in enumerate(q_lens):
        wide = latents[request].double()
        for token in range(kv_lens[request]):
            for place in range(512):
                wide[token, place] *= float(scales[request][token, place // 128])
        for i in range(q):
            limit = min(batch.sees(request, i, mode), kv_lens[request])
            tokens = [int(b) * size + t for b in indices[request][i] if b >= 0 for t in range(size)]
            tokens = [t for t in tokens if t < limit]
            for h in range(heads):
                asked = queries[request][i, h].double()
                scores = [
                    0.05 * float(asked[:512] @ wide[t] + asked[512:] @ ropes[request][t].double()) for t in tokens
                ]
                weights = [math.exp(s - max(scores)) for s in scores]
                mix = sum((w * wide[t] for w, t in zip(weights, tokens, strict=True)), torch.zeros(512).double())
                want = mix / math.fsum(weights) if weights else mix
                loose = 4e-3 if dtype == HALF else 3e-2
                np.testing.assert_allclose(batch.row(out, request, i)[h].double(), want, rtol=loose, atol=loose)


Call = tuple[str, dict[str, Any]]
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=INT32)


def indexer(paged: bool = False, **over: Any) -> Call:
    rows = (4, 16) if paged else (2, 5)
    options: dict[str, Any] = {
        "query": bytes8(2, 3, 8, 128), "key": bytes8(*rows, 1, 128), "weights": draw(2, 3, 8),
        "query_dequant_scale": draw(2, 3, 8), "key_dequant_scale": draw(*rows, 1), "query_quant_mode": 0,
        "key_quant_mode": 0,
    }  # fmt: skip
    if paged:
        options |= {"block_table": TABLE, "layout_key": "PA_BSND"}
        options |= {"actual_seq_lengths_key": torch.tensor([20, 7], dtype=INT32)}
    return INDEXER, options | over


def sfa(paged: bool = False, **over: Any) -> Call:
    rows = (4, 16) if paged else (2, 5)
    key = bytes8(*rows, 1, 656)
    key[..., 512:] = 0
    options: dict[str, Any] = {
        "query": draw(2, 3, 4, 576), "key": key, "value": key, "sparse_indices": torch.zeros(2, 3, 1, 2, dtype=INT32),
        "scale_value": 1.0, "key_quant_mode": 2, "value_quant_mode": 2, "attention_mode": 2,
    }  # fmt: skip
    if paged:
        options |= {"block_table": TABLE, "layout_kv": "PA_BSND"}
        options |= {"actual_seq_lengths_kv": torch.tensor([20, 7], dtype=INT32)}
    return SFA, options | over


FLOATS: dict[str, Any] = {"query": bytes8(2, 3, 8, 128, dtype=FP8), "key": bytes8(2, 5, 1, 128, dtype=FP8)}
REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("qindexer-heads", lambda: indexer(query=bytes8(2, 3, 65, 128), weights=draw(2, 3, 65))),
    ("qindexer-heads", lambda: indexer(query=bytes8(2, 3, 8, 64), key=bytes8(2, 5, 1, 64))),
    ("qindexer-heads-950", lambda: indexer(query=bytes8(2, 3, 4, 128))),
    ("qindexer-dtype", lambda: indexer(query=draw(2, 3, 8, 128))),
    ("qindexer-dtype", lambda: indexer(key=FLOATS["key"])),
    ("qindexer-int8", lambda: indexer(**FLOATS)),
    ("qindexer-shapes", lambda: indexer(weights=draw(6, 8))),
    ("qindexer-shapes", lambda: indexer(query_dequant_scale=draw(2, 8, 3).transpose(1, 2))),
    ("qindexer-shapes", lambda: indexer(key_dequant_scale=draw(2, 5))),
    ("qindexer-scales", lambda: indexer(weights=draw(2, 3, 8, dtype=BF16))),
    ("qindexer-scales", lambda: indexer(key_dequant_scale=draw(2, 5, 1, dtype=torch.float32))),
    ("qindexer-mode", lambda: indexer(query_quant_mode=1)),
    ("qindexer-mode", lambda: indexer(key_quant_mode=2)),
    ("qindexer-count", lambda: indexer(sparse_count=3072)),
    ("qsfa-modes", lambda: sfa(attention_mode=0)),
    ("qsfa-modes", lambda: sfa(tile_size=64)),
    ("qsfa-modes", lambda: sfa(value_quant_mode=0)),
    ("qsfa-query", lambda: sfa(query=draw(2, 3, 4, 512))),
    ("qsfa-query", lambda: sfa(query=draw(2, 3, 4, 576, dtype=torch.float32))),
    ("qsfa-key", lambda: sfa(key=bytes8(2, 5, 1, 576))),
    ("qsfa-key", lambda: sfa(value=bytes8(2, 4, 1, 656))),
    ("qsfa-key-dtype", lambda: sfa(key=draw(2, 5, 1, 656))),
    ("qsfa-int8", lambda: sfa(key=bytes8(2, 5, 1, 656, dtype=FP8))),
    ("qsfa-scales", lambda: sfa(key_dequant_scale=torch.ones(4))),
    ("qsfa-indices", lambda: sfa(sparse_indices=torch.zeros(2, 3, 1, 2).long())),
    ("qsfa-indices", lambda: sfa(sparse_indices=torch.zeros(2, 3, 2, dtype=INT32))),
    ("qsfa-heads", lambda: sfa(query=draw(2, 3, 48, 576))),
    ("qsfa-block", lambda: sfa(sparse_block_size=32)),
    ("qsfa-block-950", lambda: sfa(sparse_block_size=2)),
    ("choice-contiguous", lambda: indexer(paged=True, key=bytes8(4, 32, 1, 128)[:, ::2])),
    ("choice-lens", lambda: sfa(paged=True, actual_seq_lengths_kv=None)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_heads_that_a_950_does_not_take(refuses: Callable[..., None]) -> None:
    pose.set_pose(chip="950")
    refuses("qsfa-heads-950", SFA, **sfa(query=draw(2, 3, 3, 576))[1])
    REGISTRY[SFA](**sfa(query=draw(2, 3, 48, 576))[1])


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, _ in REFUSED if rule.startswith("q")} | {"qsfa-heads-950"}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("paged", [False, True])
def test_calls_within_the_documents_are_taken(paged: bool) -> None:
    for op, options in (indexer(paged), sfa(paged)):
        REGISTRY[op](**options)


def test_blocks_of_index_keys_may_lie_apart() -> None:
    op, options = indexer(paged=True)
    apart = torch.zeros(8, 16, 1, 128, dtype=INT8)[::2]
    apart.copy_(options["key"])
    assert torch.equal(REGISTRY[op](**options | {"key": apart}), REGISTRY[op](**options))


@pytest.mark.parametrize(
    "call", [indexer(query_dtype=290), indexer(key_dtype=290), sfa(key_dtype=290), sfa(value_dtype=290)]
)
def test_forms_that_are_not_computed_say_so(call: Call) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


FRESH = fill_poison_(torch.empty(4, 16, 1, 656, dtype=INT8))


@pytest.mark.parametrize(
    "call",
    [
        indexer(paged=True, block_table=torch.tensor([[1, 4], [3, 0]], dtype=INT32)),
        indexer(actual_seq_lengths_key=torch.tensor([6, 1], dtype=INT32)),
        indexer(key=FRESH[:2, :5, :, :128].contiguous()),
        indexer(key_dequant_scale=fill_poison_(torch.empty(2, 5, 1, dtype=HALF))),
        sfa(sparse_indices=torch.full((2, 3, 1, 2), 5, dtype=INT32)),
        sfa(paged=True, key=FRESH),
    ],
)
def test_reads_outside_and_of_fresh_memory_fault(call: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[call[0]](**call[1])


def test_fresh_rows_that_no_index_names_are_not_read() -> None:
    op, options = sfa(paged=True)
    cache = FRESH.clone()
    cache[1, 0], cache[3, 0] = options["key"][1, 0], options["key"][3, 0]
    assert not REGISTRY[op](**options | {"key": cache}).isnan().any()
