"""Every documented constraint of fused_infer_attention_score: calls that keep it are taken, others refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_emulator.errors import EmulatorError
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered, OpRefused
from ascend_emulator.kernels.fia_rules import FIA

V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
BF16 = torch.bfloat16
Call = tuple[str, dict[str, Any]]
Build = Callable[[], Call]


def zeros(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def shape_of(layout: str, b: int, n: int, s: int, d: int) -> tuple[int, ...]:
    axes = {"B": b, "N": n, "S": s, "D": d, "H": n * d, "T": b * s}
    return tuple(axes[axis] for axis in layout.split("_")[0])


def dense(
    layout: str = "BSND",
    *,
    b: int = 2,
    q: int = 4,
    kv: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    version: str = V2,
    **over: Any,
) -> Call:
    options = {
        "query": zeros(*shape_of(layout, b, heads, q, dim), dtype=dtype, device=device),
        "key": zeros(*shape_of(layout, b, kv_heads, kv, dim), dtype=dtype, device=device),
        "value": zeros(*shape_of(layout, b, kv_heads, kv, value_dim or dim), dtype=dtype, device=device),
        "num_query_heads" if version == V2 else "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": layout,
    }
    return version, options | over


def paged(
    layout: str = "BSND",
    *,
    b: int = 2,
    q: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 128,
    pages: int = 8,
    rank: int = 3,
    lens: tuple[int, ...] = (130, 5),
    device: str = "cpu",
    **over: Any,
) -> Call:
    cache = (pages, block, kv_heads * dim) if rank == 3 else (pages, kv_heads, block, dim)
    options = {
        "key": zeros(*cache, device=device),
        "value": zeros(*cache, device=device),
        "block_table": torch.zeros(b, 3, dtype=torch.int32),
        "block_size": block,
        "actual_seq_kvlen": list(lens),
    }
    op, base = dense(layout, b=b, q=q, heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    return op, base | options | over


def packed(
    layout: str = "TND", *, dim: int = 128, value_dim: int = 128, dtype: torch.dtype = BF16, **over: Any
) -> Call:
    op, base = dense(layout, b=2, q=4, kv=6, dim=dim, value_dim=value_dim, dtype=dtype)
    return op, base | {"actual_seq_qlen": [4, 8], "actual_seq_kvlen": [6, 12]} | over


def latent(
    layout: str = "BSND", *, q: int = 1, heads: int = 4, block: int = 128, mode: int = 0, version: str = V2, **over: Any
) -> Call:
    b = 2
    options: dict[str, Any] = {
        "query": zeros(*shape_of(layout, b, heads, q, 512)),
        "key": zeros(8, block, 512),
        "value": zeros(8, block, 512),
        "query_rope": zeros(*shape_of(layout, b, heads, q, 64)),
        "key_rope": zeros(8, block, 64),
        "block_table": torch.zeros(b, 3, dtype=torch.int32),
        "block_size": block,
        "num_key_value_heads": 1,
        "input_layout": layout,
        "sparse_mode": mode,
        "atten_mask": TRIANGLE if mode else None,
        "num_query_heads" if version == V2 else "num_heads": heads,
        "actual_seq_kvlen" if version == V2 else "actual_seq_lengths_kv": [20, 30],
    }
    if "T" in layout:
        options["actual_seq_qlen"] = [q, 2 * q]
    return version, options | over


def roped(layout: str = "TND", **over: Any) -> Call:
    rope: dict[str, Any] = {
        "query_rope": zeros(*shape_of(layout, 2, 4, 4, 64), dtype=BF16),
        "key_rope": zeros(*shape_of(layout, 2, 2, 6, 64), dtype=BF16),
    }
    return packed(layout, **(rope | over))


def with_mask(call: Call, mode: int, mask: torch.Tensor | None, **over: Any) -> Call:
    return call[0], call[1] | {"sparse_mode": mode, "atten_mask": mask} | over


def tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: zeros(*shape) for name, shape in shapes.items()}


BAND: dict[str, Any] = {"heads": 128, "mode": 4, "version": V1}
TAKEN: list[Build] = [
    dense,
    lambda: dense("BSH", version=V1),
    lambda: dense("BNSD_BSND"),
    lambda: dense("BSND_NBSD", q=16),
    lambda: with_mask(dense(), 1, torch.zeros(2, 1, 4, 6, dtype=torch.bool)),
    lambda: with_mask(dense(), 0, torch.zeros(16, 32, dtype=torch.int8)),
    lambda: with_mask(dense(q=1), 0, torch.zeros(2, 6, dtype=torch.uint8)),
    lambda: with_mask(dense(), 3, TRIANGLE),
    lambda: with_mask(dense(q=1), 3, None),
    lambda: dense(actual_seq_qlen=[4], actual_seq_kvlen=[6, 2, 9]),
    lambda: dense(query=zeros(2, 4, 4, 64).transpose(1, 2)),
    paged,
    lambda: paged("BNSD", rank=4),
    lambda: paged(block=48),
    lambda: with_mask(paged(q=4, block=256), 1, torch.zeros(2, 1, 4, 256, dtype=torch.bool)),
    packed,
    lambda: packed(dim=192, value_dim=192),
    lambda: packed("NTD_TND", dim=192),
    lambda: with_mask(packed(), 3, TRIANGLE),
    lambda: with_mask(packed(), 4, TRIANGLE, pre_tokens=3, next_tokens=0),
    lambda: with_mask(packed(actual_seq_kvlen=[0, 12]), 3, TRIANGLE),
    lambda: packed(learnable_sink=zeros(4, dtype=BF16)),
    roped,
    latent,
    lambda: latent(block=16),
    lambda: latent(q=4, mode=3),
    lambda: latent("TND_NTD", q=4, mode=3),
    lambda: latent(**BAND),
    lambda: latent(block=64, **BAND),
]
REFUSED: list[tuple[str, Build]] = [
    ("layout", lambda: dense(input_layout="SBH")),
    ("query-rank", lambda: dense(query=zeros(2, 4, 256))),
    ("value-rank", lambda: dense(value=zeros(2, 6, 128))),
    ("value-rank", lambda: paged(key=zeros(128, 128))),
    ("heads", lambda: dense(num_query_heads=0)),
    ("heads", lambda: dense(num_key_value_heads=-1)),
    ("query-dtype", lambda: dense(dtype=torch.float32)),
    ("kv-dtype", lambda: dense(key=zeros(2, 6, 2, 64, dtype=BF16))),
    ("contiguous", lambda: dense(key=zeros(2, 2, 6, 64).transpose(1, 2))),
    ("contiguous", lambda: with_mask(dense(), 3, TRIANGLE.T)),
    ("contiguous", lambda: latent(key_rope=zeros(8, 64, 128).transpose(1, 2))),
    ("head-axis", lambda: dense(num_query_heads=2)),
    ("head-axis", lambda: dense("TND", num_key_value_heads=4)),
    ("width", lambda: dense("BSH", num_query_heads=6)),
    ("width", lambda: paged_odd()),
    ("heads-multiple", lambda: dense("BSH", num_key_value_heads=3)),
    ("heads-ratio", lambda: dense(heads=65, kv_heads=1)),
    ("heads-limit", lambda: dense(heads=320, kv_heads=64, dim=16)),
    ("head-dim", lambda: dense(dim=528)),
    ("head-dim", lambda: dense(q=1, value_dim=520)),
    ("head-dim-align", lambda: dense(dim=24)),
    ("head-dim-align", lambda: dense(value_dim=40)),
    ("head-dim-equal", lambda: dense(key=zeros(2, 6, 2, 32))),
    ("batch-limit", lambda: dense(b=65537, q=1, device="meta")),
    ("q-limit", lambda: dense(b=1, q=20_971_521, device="meta")),
    ("kv-limit", lambda: dense(b=1, q=1, kv=262_145, device="meta")),
    ("hidden-limit", lambda: dense(heads=128, kv_heads=2, dim=512)),
    ("kv-shape", lambda: dense(value=zeros(2, 5, 2, 64))),
    ("kv-shape", lambda: paged(value=zeros(9, 128, 128))),
    ("kv-batch", lambda: dense(**tensors(key=(3, 6, 2, 64), value=(3, 6, 2, 64)))),
    ("q-lens-count", lambda: dense(b=3, actual_seq_qlen=[4, 4])),
    ("q-lens-value", lambda: dense(actual_seq_qlen=[5, 4])),
    ("q-lens-value", lambda: dense(actual_seq_qlen=[4, -1])),
    ("kv-lens-count", lambda: dense(b=3, actual_seq_kvlen=[4, 4])),
    ("kv-lens-count", lambda: packed(actual_seq_kvlen=[12])),
    ("kv-lens-value", lambda: dense(actual_seq_kvlen=[7, 1])),
    ("kv-lens-value", lambda: paged(actual_seq_kvlen=[-1, 1])),
    ("bnsd-bsnd", lambda: dense("BNSD_BSND", q=1)),
    ("nbsd", lambda: dense("BSH_NBSD", q=17)),
    ("inner-precise", lambda: dense(inner_precise=4)),
    ("inner-precise", lambda: dense(q=1, inner_precise=2)),
    ("sparse-mode", lambda: dense(sparse_mode=5)),
    ("mask-dtype", lambda: with_mask(dense(), 3, TRIANGLE.half())),
    ("mask-missing", lambda: with_mask(dense(), 3, None)),
    ("mask-missing", lambda: with_mask(dense(), 1, None)),
    ("mask-compressed", lambda: with_mask(dense(), 3, TRIANGLE[:4, :6].contiguous())),
    ("mask-compressed", lambda: with_mask(dense(), 4, TRIANGLE.expand(2, -1, -1).contiguous())),
    ("mask-triangle", lambda: with_mask(dense(), 2, TRIANGLE.T.contiguous())),
    ("mask-triangle", lambda: with_mask(dense(), 3, torch.ones(2048, 2048, dtype=torch.bool).triu())),
    ("mask-full", lambda: with_mask(dense(), 1, torch.zeros(2, 4, 6, dtype=torch.bool))),
    ("mask-full", lambda: with_mask(dense(), 0, torch.zeros(1, 4, 5, dtype=torch.bool))),
    ("mask-full", lambda: with_mask(dense(value_dim=32), 0, torch.zeros(4, 6, dtype=torch.bool))),
    ("mask-full", lambda: with_mask(dense(q=1), 4, torch.zeros(2, 1, 6, dtype=torch.bool))),
    ("mask-full", lambda: with_mask(paged(), 0, torch.zeros(2, 1, 1, 256, dtype=torch.bool))),
    ("table-dtype", lambda: paged(block_table=torch.zeros(2, 3, dtype=torch.int64))),
    ("table-rank", lambda: paged(block_table=torch.zeros(6, dtype=torch.int32))),
    ("table-batch", lambda: paged(block_table=torch.zeros(3, 3, dtype=torch.int32))),
    ("table-width", lambda: paged(block_table=torch.zeros(2, 1, dtype=torch.int32))),
    ("paged-kv-lens", lambda: paged(actual_seq_kvlen=None)),
    ("paged-kv-lens", lambda: latent("TND", actual_seq_kvlen=None)),
    ("block-size", lambda: paged(q=4, block=64)),
    ("block-size", lambda: paged(q=4, block=640)),
    ("block-size-decode", lambda: paged(block=24, lens=(30, 5))),
    ("block-size-decode", lambda: paged(block=528)),
    ("block-size-band", lambda: latent(block=16, **BAND)),
    ("block-size-axis", lambda: paged(block_size=256)),
    ("cache-layout", lambda: paged("BSND", rank=4)),
    ("cache-layout", lambda: paged("BSH", rank=4)),
    ("cache-layout", lambda: paged("BNSD", rank=4, key=zeros(8, 4, 128, 64))),
    ("cache-nz", lambda: paged(key=zeros(8, 2, 4, 128, 16), value=zeros(8, 2, 4, 128, 16))),
    ("cache-nz", lambda: latent(key=zeros(8, 1, 16, 128, 32), value=zeros(8, 1, 16, 128, 32))),
    ("rope-shape", lambda: latent(key=zeros(8, 1, 32, 128, 16), value=zeros(8, 1, 32, 128, 16))),
    ("cache-row", lambda: paged(heads=128, kv_heads=128, dim=512)),
    ("cache-int32", lambda: paged("BNSD", pages=1 << 20, device="meta")),
    ("blocks-enough", lambda: paged(pages=2)),
    ("tnd-q-lens", lambda: packed(actual_seq_qlen=None)),
    ("tnd-kv-lens", lambda: packed(actual_seq_kvlen=None)),
    ("tnd-monotonic", lambda: packed(actual_seq_qlen=[4, 3])),
    ("tnd-monotonic", lambda: packed(actual_seq_kvlen=[-1, 12])),
    ("tnd-total", lambda: packed(actual_seq_qlen=[4, 9])),
    ("tnd-total", lambda: packed(actual_seq_kvlen=[6, 13])),
    ("tnd-entries", lambda: packed(actual_seq_qlen=[0] * 4097, actual_seq_kvlen=[0] * 4097)),
    ("tnd-tokens", lambda: packed(query=zeros((1 << 20) + 1, 4, 128, dtype=BF16, device="meta"))),
    ("tnd-empty", lambda: packed(key=zeros(0, 2, 128, dtype=BF16), value=zeros(0, 2, 128, dtype=BF16))),
    ("tnd-dims", lambda: packed(dim=256, value_dim=256)),
    ("tnd-dims", lambda: packed("NTD_TND", dim=192, value_dim=192)),
    ("tnd-dims", lambda: packed(dim=512, value_dim=512)),
    ("tnd-layout", lambda: packed("TND_NTD")),
    ("tnd-layout", lambda: latent("NTD_TND")),
    ("tnd-paged", lambda: packed_paged("NTD_TND")),
    ("tnd-sparse", lambda: with_mask(packed(), 2, TRIANGLE)),
    ("tnd-sparse", lambda: with_mask(packed(), 0, TRIANGLE)),
    ("tnd-sparse", lambda: with_mask(packed(), 3, None)),
    ("tnd-longer", lambda: with_mask(packed(actual_seq_kvlen=[3, 12]), 3, TRIANGLE)),
    ("tnd-band", lambda: with_mask(packed(), 4, TRIANGLE, pre_tokens=-2, next_tokens=1)),
    ("tnd-band", lambda: with_mask(packed(), 4, TRIANGLE, pre_tokens=-5)),
    ("rope-pair", lambda: latent(key_rope=None)),
    ("rope-pair", lambda: latent(query_rope=None)),
    ("rope-dtype", lambda: latent(query_rope=zeros(2, 1, 4, 64, dtype=BF16))),
    ("rope-shape", lambda: latent(key_rope=zeros(8, 128, 32))),
    ("rope-head-dim", lambda: dense(query_rope=zeros(2, 4, 4, 64), key_rope=zeros(2, 6, 2, 64))),
    ("rope-head-dim", lambda: dense(dim=128, query_rope=zeros(2, 4, 4, 64), key_rope=zeros(2, 6, 2, 64))),
    ("mla-layout", lambda: latent("BSND_BNSD")),
    ("mla-layout", lambda: latent("BNSD", **BAND)),
    ("mla-heads", lambda: latent(heads=3)),
    ("mla-heads", lambda: latent(heads=64, mode=4, version=V1)),
    ("mla-kv-heads", lambda: latent(value=zeros(8, 128, 256))),
    ("mla-q", lambda: latent(q=17, mode=3)),
    ("mla-paged", lambda: latent_dense()),
    ("mla-sparse", lambda: latent(mode=3)),
    ("mla-sparse", lambda: latent(q=2, mode=0)),
    ("mla-sparse", lambda: latent(q=2, mode=4, heads=128)),
    ("mla-sparse", lambda: latent("TND", q=2, mode=4)),
    ("mla-band", lambda: latent(q=2, actual_seq_lengths_kv=[1, 5], **BAND)),
    ("sink-layout", lambda: dense(learnable_sink=zeros(4, dtype=BF16))),
    ("sink-dtype", lambda: packed(learnable_sink=zeros(4))),
    ("sink-shape", lambda: packed(learnable_sink=zeros(2, dtype=BF16))),
    ("sink-dim", lambda: packed(dim=192, value_dim=192, learnable_sink=zeros(4, dtype=BF16))),
    ("quant-scales", lambda: dense(quant_offset_out=torch.zeros(1))),
    ("quant-scales", lambda: dense(version=V1, quant_offset2=torch.zeros(1))),
    ("quant-scales", lambda: dense(version=V1, quant_scale1=torch.zeros(1))),
    ("out-list", lambda: out_call(zeros(2, 4, 4, 32))),
    ("out-list", lambda: out_call(zeros(2, 4, 4, 64, dtype=BF16))),
    ("workspace", lambda: out_call(zeros(2, 4, 4, 64), workspace=torch.zeros(4))),
]


def paged_odd() -> Call:
    return paged("BSH", key=zeros(8, 128, 127), value=zeros(8, 128, 127))


def packed_paged(layout: str) -> Call:
    cache: dict[str, Any] = {name: zeros(8, 128, 256, dtype=BF16) for name in ("key", "value")}
    table: dict[str, Any] = {
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "block_size": 128,
        "actual_seq_kvlen": [6, 6],
    }
    return packed(layout, **cache, **table)


def latent_dense() -> Call:
    over = tensors(key=(2, 40, 1, 512), value=(2, 40, 1, 512), key_rope=(2, 40, 1, 64))
    return latent(block_table=None, block_size=0, **over)


def out_call(attention: torch.Tensor, **over: Any) -> Call:
    op, options = dense()
    return f"{op}.out", options | {"out": [attention, torch.zeros(0)]} | over


def run(call: Call) -> Any:
    op, options = call
    options = dict(options)
    tensors = [options.pop(name) for name in ("query", "key", "value")]
    return REGISTRY[op](*tensors, **options)


@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_calls_within_the_documents_are_taken(number: int) -> None:
    out, _ = run(TAKEN[number]())
    assert not out.isnan().any()


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int) -> None:
    rule, build = REFUSED[number]
    with pytest.raises(OpRefused) as caught:
        run(build())
    error = caught.value
    assert error.rule is RULES[rule], error
    assert isinstance(error, EmulatorError) and isinstance(error, RuntimeError) and isinstance(error, ValueError)
    text = str(error)
    assert all(part in text for part in (error.op, error.argument, error.rule.allowed, error.rule.source, "161002"))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {
        rule.id for rule in RULES.values() if rule.op == FIA and rule.test == "test_kernels_fia_refusals.py"
    }


@pytest.mark.parametrize(
    "build",
    [
        lambda: dense(sparse_mode=9),
        lambda: dense(dtype=torch.int8),
        lambda: dense(key=zeros(2, 6, 2, 64, dtype=torch.int8)),
        lambda: dense(pse_shift=zeros(2, 4, 4, 6)),
        lambda: dense(quant_scale_out=torch.ones(1)),
        lambda: dense(dequant_scale_key=torch.ones(1)),
        lambda: dense(version=V1, antiquant_scale=zeros(2)),
        lambda: dense(version=V1, key_shared_prefix=zeros(1, 4, 2, 64)),
        lambda: dense(version=V1, kv_padding_size=torch.zeros(1)),
    ],
)
def test_forms_that_are_not_computed_say_so(build: Build) -> None:
    with pytest.raises(KernelNotCovered, match="does not compute"):
        run(build())
