"""lightning_indexer and sparse_flash_attention against plain loops, and their refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
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

INDEXER = "npu::npu_lightning_indexer"
SFA = "npu::npu_sparse_flash_attention"
LOOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def keys_of(kv_lens: list[int], widths: dict[str, int], dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    return {n: [draw(k, w, dtype=dtype, seed=9 * i + w) for i, k in enumerate(kv_lens)] for n, w in widths.items()}


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS, lens=LENS, mode=st.sampled_from([0, 3]), heads=st.integers(1, 3), count=st.sampled_from([1, 4, 24]),
    dtype=st.sampled_from(list(LOOSE)), wide=st.booleans(),
)  # fmt: skip
def test_lightning_indexer(
    form: tuple[str, bool],
    lens: list[tuple[int, int]],
    mode: int,
    heads: int,
    count: int,
    dtype: torch.dtype,
    wide: bool,
) -> None:
    q_lens, kv_lens = [q for q, _ in lens], [k for _, k in lens]
    batch = Batch(q_lens, kv_lens, *form, keys_of(kv_lens, {"key": 128}, dtype))
    queries = [draw(q, heads, 128, dtype=dtype, seed=40 + i) for i, q in enumerate(q_lens)]
    factors = [draw(q, heads, dtype=torch.float32 if wide else dtype, seed=50 + i) for i, q in enumerate(q_lens)]
    options = {name.replace("_kv", "_key"): value for name, value in batch.options.items()}
    out, values = REGISTRY[INDEXER](
        batch.queries(queries),
        batch.key("key"),
        batch.queries(factors),
        sparse_count=count,
        sparse_mode=mode,
        **options,
    )
    assert values.shape == (0,) and out.dtype == INT32
    for request, q in enumerate(q_lens):
        for i in range(q):
            seen = batch.sees(request, i, mode)
            scores = []
            for j in range(min(seen, kv_lens[request])):
                key = batch.keys["key"][request][j].double()
                products = [max(0.0, float(queries[request][i, h].double() @ key)) for h in range(heads)]
                scores.append(math.fsum(p * float(factors[request][i, h]) for h, p in enumerate(products)))
            got = batch.row(out, request, i)[0].tolist()
            kept = [j for j in got if j >= 0]
            assert len(got) == count and len(kept) == min(count, len(scores)) == len(set(kept))
            assert got == kept + [-1] * (count - len(kept))
            worst = min((scores[j] for j in kept), default=0.0)
            rest = [s for j, s in enumerate(scores) if j not in kept]
            assert all(s <= worst + 1e-3 + 1e-3 * abs(s) for s in rest)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS, lens=LENS, mode=st.sampled_from([0, 3]), heads=st.sampled_from([1, 2]), size=st.sampled_from([1, 4]),
    dtype=st.sampled_from(list(LOOSE)), lse=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_sparse_flash_attention(
    form: tuple[str, bool],
    lens: list[tuple[int, int]],
    mode: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    lse: bool,
    seed: int,
) -> None:
    q_lens, kv_lens = [q for q, _ in lens], [k for _, k in lens]
    batch = Batch(q_lens, kv_lens, *form, keys_of(kv_lens, {"key": 512, "value": 512, "key_rope": 64}, dtype))
    batch.keys["value"] = [draw(k, 512, dtype=dtype, seed=70 + i) for i, k in enumerate(kv_lens)]
    nope = [draw(q, heads, 512, dtype=dtype, seed=40 + i) for i, q in enumerate(q_lens)]
    rope = [draw(q, heads, 64, dtype=dtype, seed=50 + i) for i, q in enumerate(q_lens)]
    random = torch.Generator().manual_seed(seed)
    indices = []
    for q, k in lens:
        blocks = -(-k // size)
        chosen = [torch.randperm(blocks, generator=random)[:3] for _ in range(q)]
        indices.append(
            torch.stack([torch.nn.functional.pad(c, (1, 4 - c.numel()), value=-1) for c in chosen]).to(INT32)
        )
    wanted = lse and not form[1]
    pose.set_pose(chip="910B")
    try:
        out, top, total = REGISTRY[SFA](
            batch.queries(nope), batch.key("key"), batch.key("value"), batch.queries([x.unsqueeze(1) for x in indices]),
            0.05, query_rope=batch.queries(rope), key_rope=batch.key("key_rope"), sparse_block_size=size,
            sparse_mode=mode, attention_mode=2, return_softmax_lse=wanted, **batch.options,
        )  # fmt: skip
    finally:
        pose.set_pose()
    assert out.dtype == dtype and (top.shape == (0,)) == (not wanted)
    for request, q in enumerate(q_lens):
        for i in range(q):
            limit = min(batch.sees(request, i, mode), kv_lens[request])
            tokens = [int(b) * size + t for b in indices[request][i] if b >= 0 for t in range(size)]
            tokens = [t for t in tokens if t < limit]
            keys, ropes, values = (batch.keys[name][request].double() for name in ("key", "key_rope", "value"))
            for h in range(heads):
                a, b = nope[request][i, h].double(), rope[request][i, h].double()
                scores = [0.05 * float(a @ keys[t] + b @ ropes[t]) for t in tokens]
                largest = max(scores, default=-math.inf)
                weights = [math.exp(s - largest) for s in scores]
                mix = sum((w * values[t] for w, t in zip(weights, tokens, strict=True)), torch.zeros(512).double())
                want = mix / math.fsum(weights) if weights else mix
                got = batch.row(out, request, i)[h]
                np.testing.assert_allclose(got.double(), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] / 2)
                if wanted:
                    flat = (top[0], total[0]) if form[0] == "TND" else (top[:, 0], total[:, 0])
                    pair = [float(batch.row(part, request, i)[h]) for part in flat]
                    np.testing.assert_allclose(pair, [largest, math.fsum(weights)], rtol=1e-3, atol=1e-3)


Call = tuple[str, dict[str, Any]]


def indexer(paged: bool = False, **over: Any) -> Call:
    options: dict[str, Any] = {"query": draw(2, 3, 4, 128), "key": draw(2, 5, 1, 128), "weights": draw(2, 3, 4)}
    if paged:
        options |= {"key": draw(4, 16, 1, 128), "block_table": torch.tensor([[1, 2], [3, 0]], dtype=INT32)}
        options |= {"layout_key": "PA_BSND", "actual_seq_lengths_key": torch.tensor([20, 7], dtype=INT32)}
    return INDEXER, options | over


def sfa(paged: bool = False, **over: Any) -> Call:
    rows = (4, 16) if paged else (2, 5)
    options: dict[str, Any] = {
        "query": draw(2, 3, 4, 512), "query_rope": draw(2, 3, 4, 64), "key": draw(*rows, 1, 512), "scale_value": 1.0,
        "value": draw(*rows, 1, 512), "key_rope": draw(*rows, 1, 64), "attention_mode": 2,
        "sparse_indices": torch.zeros(2, 3, 1, 2, dtype=INT32),
    }  # fmt: skip
    if paged:
        options |= {"block_table": torch.tensor([[1, 2], [3, 0]], dtype=INT32), "layout_kv": "PA_BSND"}
        options |= {"actual_seq_lengths_kv": torch.tensor([20, 7], dtype=INT32)}
    return SFA, options | over


HEADS3: dict[str, Any] = {"query": draw(2, 3, 3, 512), "query_rope": draw(2, 3, 3, 64)}
REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("choice-dtype", lambda: indexer(query=draw(2, 3, 4, 128, dtype=torch.float32))),
    ("choice-dtype", lambda: sfa(value=draw(2, 5, 1, 512, dtype=torch.bfloat16))),
    ("choice-layout", lambda: indexer(layout_query="BNSD")),
    ("choice-layout", lambda: indexer(layout_key="TND")),
    ("choice-layout", lambda: sfa(block_table=torch.zeros(2, 1, dtype=INT32))),
    ("choice-rank", lambda: indexer(query=draw(6, 4, 128))),
    ("choice-rank", lambda: indexer(key=draw(2, 5, 2, 128))),
    ("choice-contiguous", lambda: indexer(query=draw(2, 4, 3, 128).transpose(1, 2))),
    ("choice-lens", lambda: indexer(paged=True, actual_seq_lengths_key=None)),
    ("choice-lens", lambda: indexer(actual_seq_lengths_query=torch.tensor([3, 3]))),
    ("choice-lens", lambda: sfa(actual_seq_lengths_kv=torch.tensor([3], dtype=INT32))),
    ("choice-table", lambda: indexer(paged=True, block_table=torch.zeros(2, 2).long())),
    ("choice-table", lambda: sfa(paged=True, block_table=torch.zeros(3, 2, dtype=INT32))),
    ("choice-block-size", lambda: indexer(paged=True, key=draw(4, 8, 1, 128))),
    ("choice-mode", lambda: sfa(sparse_mode=4)),
    ("choice-band", lambda: indexer(pre_tokens=2**31 - 1)),
    ("indexer-heads", lambda: indexer(query=draw(2, 3, 65, 128), weights=draw(2, 3, 65))),
    ("indexer-heads", lambda: indexer(query=draw(2, 3, 4, 64), key=draw(2, 5, 1, 64))),
    ("indexer-weights", lambda: indexer(weights=draw(2, 3, 4, dtype=torch.bfloat16))),
    ("indexer-weights", lambda: indexer(weights=draw(6, 4))),
    ("indexer-count", lambda: indexer(sparse_count=2049)),
    ("sfa-mode", lambda: sfa(attention_mode=0)),
    ("sfa-shape", lambda: sfa(query_rope=None)),
    ("sfa-shape", lambda: sfa(query=draw(2, 3, 4, 256))),
    ("sfa-indices", lambda: sfa(sparse_indices=torch.zeros(2, 3, 1, 2).long())),
    ("sfa-indices", lambda: sfa(sparse_indices=torch.zeros(2, 3, 2, dtype=INT32))),
    ("sfa-lse", lambda: sfa(paged=True, return_softmax_lse=True)),
    ("sfa-heads", lambda: sfa(**HEADS3)),
    ("sfa-block", lambda: sfa(sparse_block_size=3)),
    ("sfa-block", lambda: sfa(paged=True, sparse_block_size=32)),
    ("sfa-block-950", lambda: sfa(sparse_block_size=2)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_more_heads_than_a_950_takes(refuses: Callable[..., None]) -> None:
    pose.set_pose(chip="950")
    try:
        refuses("sfa-heads-950", SFA, **sfa(query=draw(2, 3, 129, 512), query_rope=draw(2, 3, 129, 64))[1])
        op, options = sfa(query=HEADS3["query"], query_rope=HEADS3["query_rope"])
        REGISTRY[op](**options)
    finally:
        pose.set_pose()


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, _ in REFUSED} | {"sfa-heads-950"}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("paged", [False, True])
def test_calls_within_the_documents_are_taken(paged: bool) -> None:
    for op, options in (indexer(paged), sfa(paged)):
        REGISTRY[op](**options)


@pytest.mark.parametrize("call", [indexer(return_value=True), sfa(sinks=torch.zeros(4)), sfa(value=None)])
def test_forms_that_are_not_computed_say_so(call: Call) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


FRESH = fill_poison_(torch.empty(4, 16, 1, 512, dtype=torch.float16))


@pytest.mark.parametrize(
    "call",
    [
        indexer(paged=True, block_table=torch.tensor([[1, 4], [3, 0]], dtype=INT32)),
        indexer(actual_seq_lengths_key=torch.tensor([6, 1], dtype=INT32)),
        indexer(key=FRESH[:2, :5, :, :128].contiguous()),
        sfa(sparse_indices=torch.full((2, 3, 1, 2), 5, dtype=INT32)),
        sfa(paged=True, value=FRESH),
    ],
)
def test_reads_outside_and_of_fresh_memory_fault(call: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[call[0]](**call[1])


def test_fresh_memory_that_no_index_names_is_not_read() -> None:
    op, options = sfa(paged=True)
    for name in ("key", "value", "key_rope"):
        cache = fill_poison_(torch.empty_like(options[name]))
        cache[1, 0], cache[3, 0] = options[name][1, 0], options[name][3, 0]
        options[name] = cache
    out, _, _ = REGISTRY[op](**options)
    assert not out.isnan().any()
