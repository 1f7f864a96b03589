"""vLLM-Ascend's sparse attention and product of heads against plain loops, their schemas, shapes and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered, vllm_sparse
from emulator_engine_samples import ENGINE_SAMPLES

INDEXER, QUANT_INDEXER, ATTENTION, QUANT_ATTENTION, PRODUCT = vllm_sparse.KERNELS
H, INT32 = torch.float16, torch.int32
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=INT32)
Q_LENS, KV_LENS = [2, 1], [20, 7]


def draw(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-60, 61, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def lens(name: str, tnd: bool) -> dict[str, Any]:
    """Two requests over pages; the query packed, or one row each."""
    queries = [2, 3] if tnd else Q_LENS
    return {
        "block_table": TABLE, "actual_seq_lengths_query": torch.tensor(queries, dtype=INT32),
        f"actual_seq_lengths_{name}": torch.tensor(KV_LENS, dtype=INT32), "layout_query": "TND" if tnd else "BSND",
        f"layout_{name}": "PA_BSND",
    }  # fmt: skip


def rows_of(cache: torch.Tensor, request: int) -> torch.Tensor:
    flat = cache[TABLE[request].long()].flatten(0, 1)
    return flat[: KV_LENS[request]]


def tokens(tnd: bool) -> list[tuple[int, int, tuple[int, ...]]]:
    """Request, last key that is seen, and place of each query token."""
    out: list[tuple[int, int, tuple[int, ...]]] = []
    for request, count in enumerate(Q_LENS):
        for i in range(count):
            place = (len(out),) if tnd else (request, i)
            out.append((request, KV_LENS[request] - count + i + 1, place))
    return out


def meta_of(op: str, call: dict[str, Any]) -> list[tuple[torch.Size, torch.dtype]]:
    on_meta = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in call.items()}
    results = getattr(torch.ops._C_ascend, op.partition("::")[2])(**on_meta)
    return [(t.shape, t.dtype) for t in (results if isinstance(results, tuple) else (results,))]


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_sparse.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@pytest.mark.parametrize("tnd", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_best_positions(tnd: bool, quantised: bool) -> None:
    lead, count = (3,) if tnd else (2, 2), 6
    call: dict[str, Any] = {
        "query": draw(*lead, 8, 128),
        "key": draw(4, 16, 1, 128, seed=1),
        "weights": draw(*lead, 8, seed=2),
    }
    call |= {"sparse_count": count, **lens("key", tnd)}
    op = INDEXER
    if quantised:
        op = QUANT_INDEXER
        call |= {"query": bytes8(*lead, 8, 128), "key": bytes8(4, 16, 1, 128, seed=1)}
        call |= {"query_dequant_scale": draw(*lead, 8, seed=3).abs(), "key_dequant_scale": draw(4, 16, 1, seed=4).abs()}
    results = REGISTRY[op](**call)
    out = results if quantised else results[0]
    got = [results] if quantised else list(results)
    assert [(t.shape, t.dtype) for t in got] == meta_of(op, call)
    for request, seen, place in tokens(tnd):
        keys = rows_of(call["key"], request).double()
        scores = []
        for position in range(seen):
            score = 0.0
            for head in range(8):
                dot = float(call["query"][place][head].double() @ keys[position, 0])
                if quantised:
                    scale = rows_of(call["key_dequant_scale"], request)[position]
                    dot *= float(call["query_dequant_scale"][place][head]) * float(scale)
                score += float(call["weights"][place][head]) * max(dot, 0.0)
            scores.append(score)
        best = sorted(range(seen), key=lambda i: -scores[i])[:count]
        named = [i for i in out[place][0].tolist() if i >= 0]
        assert len(named) == len(best) and sorted(scores[i] for i in named) == pytest.approx(
            sorted(scores[i] for i in best), rel=1e-3, abs=1e-3
        )


@pytest.mark.parametrize("tnd", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_attention_over_chosen_pages(tnd: bool, lse: bool) -> None:
    lead, heads = (3,) if tnd else (2, 2), 4
    indices = torch.tensor([[0, 5, 19, -1], [3, 1, 6, 2], [4, 0, -1, -1], [0, 1, 2, -1]], dtype=INT32)
    chosen = indices[:3].view(3, 1, 4) if tnd else indices.view(2, 2, 1, 4)
    call: dict[str, Any] = {
        "query": draw(*lead, heads, 512), "key": draw(4, 16, 1, 512, seed=1), "sparse_indices": chosen,
        "scale_value": 0.05, "query_rope": draw(*lead, heads, 64, seed=3), "key_rope": draw(4, 16, 1, 64, seed=4),
        "return_softmax_lse": lse, **lens("kv", tnd),
    }  # fmt: skip
    call["value"] = call["key"]
    out, top, total = REGISTRY[ATTENTION](**call)
    shape = ((1, 3, heads) if tnd else (2, 1, 2, heads)) if lse else (0,)
    assert out.shape == call["query"].shape and tuple(top.shape) == tuple(total.shape) == shape
    assert [(t.shape, t.dtype) for t in (out, top, total)] == meta_of(ATTENTION, call)
    for request, seen, place in tokens(tnd):
        keys, ropes = (rows_of(call[name], request)[:, 0].double() for name in ("key", "key_rope"))
        picked = [i for i in chosen[place][0].tolist() if 0 <= i < seen]
        for head in range(heads):
            nope, rope = call["query"][place][head].double(), call["query_rope"][place][head].double()
            scores = [0.05 * float(nope @ keys[i] + rope @ ropes[i]) for i in picked]
            weights = [math.exp(s - max(scores)) for s in scores]
            mix = sum((w * keys[i] for w, i in zip(weights, picked, strict=True)), torch.zeros(512).double())
            assert torch.allclose(out[place][head].double(), mix / sum(weights), rtol=1e-2, atol=1e-2)
            if lse:
                at = (0, *place, head) if tnd else (place[0], 0, place[1], head)
                assert float(top[at]) == pytest.approx(max(scores), rel=1e-3, abs=1e-3)
                assert float(total[at]) == pytest.approx(sum(weights), rel=1e-3)


def quant_attention(**over: Any) -> dict[str, Any]:
    key = bytes8(4, 16, 1, 656)
    key[..., 512:640] = draw(4, 16, 1, 64, seed=1).view(torch.int8)
    key[..., 640:] = (torch.rand(4, 16, 1, 4, generator=torch.Generator().manual_seed(2)) / 64).view(torch.int8)
    options: dict[str, Any] = {
        "query": draw(3, 4, 576), "key": key, "value": key, "scale_value": 0.05, "key_quant_mode": 2,
        "value_quant_mode": 2, "sparse_indices": torch.tensor([[[0, 5, 19]], [[3, 1, 6]], [[4, 0, -1]]], dtype=INT32),
    }  # fmt: skip
    return options | lens("kv", True) | over


def test_attention_over_quantised_pages() -> None:
    call = quant_attention()
    out, top, total = REGISTRY[QUANT_ATTENTION](**call)
    assert [(t.shape, t.dtype) for t in (out, top, total)] == meta_of(QUANT_ATTENTION, call)
    for request, seen, (place,) in tokens(True):
        rows = rows_of(call["key"], request)[:, 0].contiguous()
        scales = rows[:, 640:].contiguous().view(torch.float32).double()
        keys = torch.stack([rows[:, i].double() * scales[:, i // 128] for i in range(512)], 1)
        ropes = rows[:, 512:640].contiguous().view(H).double()
        picked = [i for i in call["sparse_indices"][place, 0].tolist() if 0 <= i < seen]
        for head in range(4):
            asked = call["query"][place, head].double()
            scores = [0.05 * float(asked[:512] @ keys[i] + asked[512:] @ ropes[i]) for i in picked]
            weights = [math.exp(s - max(scores)) for s in scores]
            mix = sum((w * keys[i] for w, i in zip(weights, picked, strict=True)), torch.zeros(512).double())
            assert torch.allclose(out[place, head].double(), mix / sum(weights), rtol=1e-2, atol=1e-2)


def test_product_of_heads() -> None:
    a, b, c = draw(3, 2, 8), draw(2, 8, 5, seed=1), torch.zeros(3, 2, 5, dtype=H)
    assert REGISTRY[PRODUCT](a, b, c) is None
    for row in range(3):
        for head in range(2):
            want = [sum(float(a[row, head, k]) * float(b[head, k, n]) for k in range(8)) for n in range(5)]
            assert c[row, head].tolist() == pytest.approx(want, rel=1e-2, abs=1e-2)


def indexer(**over: Any) -> dict[str, Any]:
    return {"query": draw(2, 3, 4, 128), "key": draw(2, 5, 1, 128), "weights": draw(2, 3, 4)} | over


def attention(**over: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "query": draw(2, 3, 4, 512), "query_rope": draw(2, 3, 4, 64), "key": draw(2, 5, 1, 512), "scale_value": 1.0,
        "value": draw(2, 5, 1, 512), "key_rope": draw(2, 5, 1, 64), "sparse_indices": torch.zeros(2, 3, 1, 2).to(INT32),
    }  # fmt: skip
    return options | over


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("vsparse-empty", INDEXER, indexer(weights=draw(0, 3, 4))),
    ("vsparse-empty", ATTENTION, attention(sparse_indices=torch.zeros(0, 3, 1, 2, dtype=INT32))),
    ("vsparse-empty", QUANT_ATTENTION, quant_attention(value=bytes8(0, 16, 1, 656))),
]
SHARED: list[tuple[str, str, dict[str, Any]]] = [
    ("indexer-count", INDEXER, indexer(sparse_count=2049)),
    ("choice-mode", ATTENTION, attention(sparse_mode=4)),
    ("sfa-shape", ATTENTION, attention(query_rope=None)),
    ("qsfa-modes", QUANT_ATTENTION, quant_attention(tile_size=64)),
    ("bmt-dtype", PRODUCT, {"tensor_a": draw(3, 2, 8), "tensor_b": draw(2, 8, 5), "tensor_c": torch.zeros(3, 2, 5)}),
]


@pytest.mark.parametrize(("rule", "op", "call"), [*REFUSED, *SHARED])
def test_it_refuses(refuses: Callable[..., None], rule: str, op: str, call: dict[str, Any]) -> None:
    refuses(rule, op, **call)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {r.id for r in RULES.values() if r.test == Path(__file__).name}


@pytest.mark.parametrize(
    ("op", "call"),
    [(INDEXER, indexer(return_value=True)), (QUANT_ATTENTION, quant_attention(return_softmax_lse=True))],
)
def test_what_is_not_computed_says_so(op: str, call: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered, match=op):
        REGISTRY[op](**call)


@pytest.mark.parametrize("op", [INDEXER, QUANT_INDEXER, ATTENTION, QUANT_ATTENTION])
def test_pages_that_no_table_names_may_be_filled_meanwhile(op: str) -> None:
    arguments, options = ENGINE_SAMPLES[op]()
    options["block_table"] = torch.tensor([[1, 2], [3, 0]], dtype=INT32).to("npu")
    options["actual_seq_lengths_key" if "indexer" in op else "actual_seq_lengths_kv"] = torch.tensor(
        [16, 7], dtype=INT32
    )
    arguments = [x.to("npu") if isinstance(x, torch.Tensor) else x for x in arguments]
    options = {name: x.to("npu") if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    torch_npu.npu.synchronize()
    call = getattr(torch.ops._C_ascend, op.partition("::")[2])
    call(*arguments, **options)
    with torch_npu.npu.stream(torch_npu.npu.Stream()):
        arguments[1][2].fill_(1)
        with pytest.raises(ascend_emulator.RaceError):
            arguments[1][3].fill_(1)
    torch_npu.npu.synchronize()
