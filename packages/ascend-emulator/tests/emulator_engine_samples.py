"""One call of every op that an engine's own library brings, and how samples are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = tuple[list[Any], dict[str, Any]]
H = torch.float16
I32 = torch.int32


def r(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def b8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(1)).to(torch.int8)


def i32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=I32)


F = torch.float32
B = torch.bfloat16


def caches(block: int, heads: int, latent: int, rope: int = 64) -> list[torch.Tensor]:
    """Latents and rotary keys of two pages."""
    return [torch.zeros(2, block, heads, width, dtype=B) for width in (latent, rope)]


def scales(columns: int) -> list[torch.Tensor]:
    """Scale, offset and bias of a product of int8."""
    return [torch.full((1,), 0.1, dtype=B), torch.ones(1, dtype=torch.int8), b8(columns).to(I32)]


def outs(tokens: int, heads: int, latent: int, rope: int = 64) -> dict[str, torch.Tensor]:
    """Outputs of mla_preprocess, in order."""
    query = {n: torch.zeros(tokens, heads, w, dtype=B) for n, w in (("q_out0", latent), ("q_out1", rope))}
    kept = dict(zip(("kv_cache_out0", "kv_cache_out1"), caches(16, 1, latent, rope), strict=True))
    return {name: (query | kept)[name] for name in ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1")}


ENGINE_SAMPLES: dict[str, Callable[[], Call]] = {
    "_C_ascend::bgmv_shrink": lambda: ([r(2, 20), r(3, 8, 20), torch.tensor([2, 0]), torch.zeros(2, 8), 0.5], {}),
    "_C_ascend::bgmv_expand": lambda: ([r(2, 8, dtype=F), r(3, 10, 8), torch.tensor([2, 0]), r(2, 12), 2, 10], {}),
    "_C_ascend::sgmv_shrink": lambda: (
        [r(3, 20), r(3, 8, 20), torch.tensor([2, 0]), torch.tensor([2, 1]), torch.zeros(3, 8), 0.5], {},
    ),
    "_C_ascend::sgmv_expand": lambda: (
        [r(3, 8, dtype=F), r(3, 10, 8), torch.tensor([2, 0]), torch.tensor([2, 1]), r(3, 12), 2, 10], {},
    ),
    "npu::sgemmv_shrink": lambda: (
        [r(2, 20), r(3, 16, 20), i32(2, 0), i32(1, 1), i32(8, 16, 16), r(3), torch.zeros(2, 16)], {},
    ),
    "npu::sgemmv_expand": lambda: (
        [r(2, 32, dtype=F), r(3, 10, 16), i32(2, 0), i32(1, 1), i32(8, 16, 16), i32(0, 4, 10), r(2, 10)], {},
    ),
    "_C_ascend::npu_add_rms_norm_bias": lambda: ([r(2, 3, 4), r(2, 3, 4, seed=1), r(4), r(4, seed=2)], {}),
    "_C_ascend::npu_gemma_rms_norm": lambda: ([r(2, 3, 4), r(3, 4)], {}),
    "_C_ascend::npu_rms_norm_dynamic_quant": lambda: ([r(2, 3, 8), r(8)], {"smooth_scale": r(8, seed=1)}),
    "_C_ascend::npu_copy_and_expand_eagle_inputs": lambda: (
        [i32(1, 2, 3, 4), i32(0, 1, 5, 6), i32(8, 9), i32(0, 2, 4), i32(1, 2), 0, 7, 2, False, 8], {},
    ),
    "_C_ascend::npu_ngram_spec_decode": lambda: (
        [i32([1, 2, 1, 0, 0], [3, 3, 0, 0, 0]), i32(3, 2), i32([2], [-1]), i32(0, 0), 9, 1, 2, 2], {},
    ),
    "_C_ascend::get_masked_input_and_mask": lambda: ([i32([1, 5], [20, 9]), 4, 8, 2, 20, 24], {}),
    "npu::mla_preprocess": lambda: (
        [r(2, 2048, dtype=B), r(1), r(1), b8(1, 64, 2112, 32), r(2112, dtype=F).abs(), r(1536, dtype=B),
         r(1536, dtype=B), b8(1, 48, 192, 32), r(192, dtype=F).abs(), r(512, dtype=B), r(2, 64, dtype=B),
         r(2, 64, dtype=B), r(1, 128, 512, dtype=B), *caches(128, 1, 512), i32(3, 0), *scales(2112), *scales(192)],
        {"cache_mode": "krope_ctkv", "quant_mode": "per_tensor_quant_asymm", **outs(2, 1, 512)},
    ),
    "_C_ascend::mla_preprocess": lambda: (
        [r(2, 2048, dtype=B), b8(1, 64, 144, 32), r(144, dtype=F).abs(), r(64, dtype=B), r(64, dtype=B),
         b8(1, 2, 48, 32), r(48, dtype=F).abs(), r(64, dtype=B), r(2, 16, dtype=B), r(2, 16, dtype=B),
         r(1, 32, 64, dtype=B), *caches(16, 1, 64, 16), i32(3, 0), *scales(144), *scales(48), None, None, None,
         "per_tensor_quant_asymm", True, *outs(2, 1, 64, 16).values(), torch.zeros(2, 64, dtype=B)], {},
    ),
    "_C_ascend::moe_gating_top_k": lambda: ([r(3, 8), 2, 1, 1, 0, 0, 1, True, 1.0, 1e-20, r(8, seed=1)], {}),
    "_C_ascend::npu_moe_init_routing_custom": lambda: (
        [r(3, 8), i32([0, 2], [1, 0], [2, 2])],
        {"expert_num": 3, "expert_tokens_num_flag": True, "quant_mode": 1, "active_expert_range": [0, 3],
         "expert_tokens_num_type": 1},
    ),
    "_C_ascend::grouped_matmul_swiglu_quant": lambda: (
        [b8(4, 3), b8(2, 3, 6), torch.ones(2, 6), torch.ones(4), torch.tensor([1, 4])], {},
    ),
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz": lambda: (
        [b8(4, 3), b8(2, 3, 6), torch.ones(2, 6), torch.ones(4), torch.tensor([1, 4])], {"swiglu_limit": 2.0},
    ),
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list": lambda: (
        [b8(4, 3), [b8(3, 6), b8(3, 6)], [torch.ones(6)] * 2, torch.ones(4), torch.tensor([1, 4])], {},
    ),
    "_C_ascend::grouped_matmul_swiglu_quant_v2": lambda: (
        [b8(4, 3), [b8(2, 3, 6)], [torch.ones(2, 6)], torch.ones(4), torch.tensor([1, 3])], {"group_list_type": 1},
    ),
    "_C_ascend::npu_dequant_swiglu_quant": lambda: (
        [b8(3, 8).to(I32)], {"weight_scale": torch.ones(8), "activation_scale": torch.ones(3, 1), "quant_mode": 1},
    ),
    "_C_ascend::npu_causal_conv1d_custom": lambda: (
        [torch.zeros(3, 16, dtype=H), r(3, 16), r(4, 16), r(2, 6, 16), None, i32(0, 2, 3), i32(1, 0), None, None, 1, -1,
         1], {},
    ),
    "_C_ascend::npu_recurrent_gated_delta_rule": lambda: (
        [r(3, 1, 4, dtype=B), r(3, 1, 4, dtype=B), r(3, 2, 4, dtype=B), r(4, 2, 4, 4, dtype=F)],
        {"beta": r(3, 2, dtype=B), "scale": 0.5, "actual_seq_lengths": i32(0, 2, 1), "ssm_state_indices": i32(3, 1, 2)},
    ),
    "_C_ascend::npu_fused_gdn_gating": lambda: ([r(3, dtype=F), r(2, 3), r(2, 3, seed=1), r(3, dtype=F, seed=2)], {}),
    "_C_ascend::npu_lightning_indexer": lambda: (
        [r(2, 3, 4, 128), r(4, 16, 1, 128), r(2, 3, 4)],
        {"block_table": i32([1, 2], [3, 0]), "layout_key": "PA_BSND", "actual_seq_lengths_key": i32(20, 7),
         "sparse_count": 4},
    ),
    "_C_ascend::npu_lightning_indexer_quant": lambda: (
        [b8(2, 3, 8, 128), b8(4, 16, 1, 128), r(2, 3, 8), r(2, 3, 8, seed=1).abs(), r(4, 16, 1).abs()],
        {"block_table": i32([1, 2], [3, 0]), "layout_key": "PA_BSND", "actual_seq_lengths_key": i32(20, 7),
         "sparse_count": 4},
    ),
    "_C_ascend::npu_sparse_flash_attention": lambda: (
        [r(2, 3, 4, 512), r(4, 16, 1, 512), r(4, 16, 1, 512), torch.zeros(2, 3, 1, 2, dtype=I32), 0.1],
        {"query_rope": r(2, 3, 4, 64), "key_rope": r(4, 16, 1, 64), "block_table": i32([1, 2], [3, 0]),
         "layout_kv": "PA_BSND", "actual_seq_lengths_kv": i32(20, 7), "return_softmax_lse": True},
    ),
    "_C_ascend::npu_kv_quant_sparse_flash_attention": lambda: (
        [r(2, 3, 4, 576), torch.ones(4, 16, 1, 656, dtype=torch.int8), torch.ones(4, 16, 1, 656, dtype=torch.int8),
         torch.zeros(2, 3, 1, 2, dtype=I32), 0.1],
        {"key_quant_mode": 2, "value_quant_mode": 2, "block_table": i32([1, 2], [3, 0]), "layout_kv": "PA_BSND",
         "actual_seq_lengths_kv": i32(20, 7)},
    ),
    "_C_ascend::batch_matmul_transpose": lambda: ([r(3, 2, 4), r(2, 4, 5), torch.zeros(3, 2, 5, dtype=H)], {}),
    "_C_ascend::store_kv_block_metadata": lambda: ([i32(4, 5, -1, 8), *(i32(9, 9, 9, 9) for _ in range(3)), 4], {}),
    "_C_ascend::store_kv_block": lambda: (
        [b8(3, 1, 8), torch.zeros(2, 4, 1, 8, dtype=torch.int8), i32(2, 1, 0), i32(0, 2, 0), i32(5, 2, 0), 4], {},
    ),
    "_C_ascend::transpose_kv_cache_by_block": lambda: (
        [[r(2, 3, 2, 16)], [r(2, 3, 2, 16, seed=1)], torch.tensor([1, 0]), 3, 2, 16, 2, 1], {},
    ),
}  # fmt: skip
