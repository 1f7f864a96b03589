"""One call of every op through the real torch_npu: its Meta kernel's shapes, and on the device what the kernel says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator.kernels import REGISTRY, UNDECLARED_WRITES
from emulator_engine_samples import ENGINE_SAMPLES, I32, B, Call, F, H, b8, i32, r

CACHE = (4, 16, 2, 32)
DELTA = [r(3, 2, 16, dtype=B), r(3, 2, 16, dtype=B, seed=1), r(3, 4, 8, dtype=B), r(5, 4, 8, 16, dtype=B)]
GATES = {
    "beta": r(3, 4, dtype=B),
    "scale": 0.25,
    "actual_seq_lengths": i32(2, 1),
    "ssm_state_indices": i32(4, 0, 2),
}
TABLE = i32([1, 2], [3, 0])
KV: dict[str, Any] = {
    "kv": r(2, 1, 3, 576), "gamma": r(512), "cos": r(2, 1, 3, 64), "sin": r(2, 1, 3, 64), "index": torch.arange(6),
    "k_cache": torch.zeros(3, 4, 1, 64, dtype=H), "ckv_cache": torch.zeros(3, 4, 1, 512, dtype=H), "cache_mode": "PA",
    "is_output_kv": True,
}  # fmt: skip


def prolog(he: int) -> dict[str, Any]:
    """Hidden states of two tokens, the weights of one head, and caches."""
    return {
        "token_x": r(2, he, dtype=B), "weight_dq": r(he, 1536, dtype=B), "weight_uq_qr": r(1536, 192, dtype=B),
        "weight_uk": r(1, 128, 512, dtype=B), "weight_dkv_kr": r(he, 576, dtype=B),
        "rmsnorm_gamma_cq": r(1536, dtype=B), "rmsnorm_gamma_ckv": r(512, dtype=B),
        "rope_sin": r(2, 64, dtype=B), "rope_cos": r(2, 64, dtype=B),
        "kv_cache": torch.zeros(2, 16, 1, 512, dtype=B), "kr_cache": torch.zeros(2, 16, 1, 64, dtype=B),
        "cache_index": torch.tensor([17, 0]),
    }  # fmt: skip


LATENT: list[Any] = [r(2, 4, 512), r(2, 4, 64), r(4, 16, 1, 512), r(4, 16, 1, 64), TABLE, [20, 7], 4, 0.1, 1]
PAGED: list[Any] = [r(2, 4, 32), r(*CACHE), r(*CACHE), 2, 4, 0.2, TABLE, i32(20, 7), torch.zeros(2, 4, 32, dtype=H)]
LENS = {"actual_seq_lengths_kv": i32(20, 7)}
SFA: dict[str, Any] = {
    "query_rope": r(2, 3, 4, 64), "key_rope": r(4, 16, 1, 64), "block_table": TABLE, "layout_kv": "PA_BSND",
    "attention_mode": 2, "actual_seq_lengths_kv": i32(20, 7),
}  # fmt: skip
QROWS = torch.cat([b8(4, 16, 1, 512), torch.zeros(4, 16, 1, 144, dtype=torch.int8)], -1)
ROUTED = torch.arange(6, dtype=I32).view(2, 3).T.contiguous()
SLOTS = i32(5, 0, 40)
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)

SAMPLES: dict[str, Callable[[], Call]] = {
    "atb::_npu_reshape_and_cache": lambda: ([r(3, 2, 32), r(3, 2, 32, seed=1), r(*CACHE), r(*CACHE), SLOTS], {}),
    "atb::_npu_reshape_and_cache_siso": lambda: ([r(3, 2, 32), r(*CACHE), SLOTS], {}),
    "npu::npu_scatter_pa_kv_cache": lambda: (
        [r(3, 2, 32), r(3, 2, 32, seed=1), r(*CACHE), r(*CACHE), SLOTS], {"cache_mode": "Norm"},
    ),
    "npu::npu_scatter_pa_kv_cache_functional": lambda: (
        [r(3, 2, 32), r(3, 2, 32, seed=1), r(4, 4, 16, 16), r(4, 4, 16, 16), SLOTS], {},
    ),
    "npu::npu_scatter_pa_cache.value": lambda: ([r(3, 2, 32), SLOTS], {"key_cache": r(*CACHE)}),
    "npu::npu_gather_pa_kv_cache": lambda: (
        [r(*CACHE), r(*CACHE), TABLE, i32(17, 3), torch.zeros(20, 2, 32, dtype=H), torch.zeros(20, 2, 32, dtype=H)], {},
    ),
    "npu::npu_gather_pa_kv_cache_functional": lambda: (
        [r(*CACHE), r(*CACHE), TABLE, i32(17, 3), torch.zeros(20, 2, 32, dtype=H), torch.zeros(20, 2, 32, dtype=H)], {},
    ),
    "atb::npu_paged_cache_load": lambda: ([r(*CACHE), r(*CACHE), TABLE, i32(17, 3)], {}),
    "atb::npu_paged_cache_load.out": lambda: (
        [r(*CACHE), r(*CACHE), TABLE, i32(17, 3)], {n: torch.zeros(20, 2, 32, dtype=H) for n in ("key", "value")},
    ),
    "npu::npu_scatter_nd_update": lambda: ([r(4, 3), torch.tensor([[1], [3]]), r(2, 3)], {}),
    "npu::npu_scatter_nd_update_": lambda: ([r(4, 3), torch.tensor([[1], [3]]), r(2, 3)], {}),
    "npu::npu_rms_norm": lambda: ([r(2, 3, 4), r(3, 4)], {}),
    "npu::npu_add_rms_norm": lambda: ([r(2, 4), r(2, 4, seed=1), r(4)], {}),
    "npu::npu_gemma_rms_norm": lambda: ([r(2, 3, 4), r(4)], {}),
    "npu::npu_add_rms_norm_cast": lambda: ([r(2, 4), r(2, 4, seed=1), r(4)], {}),
    "npu::npu_add_rms_norm_v2": lambda: ([r(2, 4), r(2, 4, seed=1), r(4)], {}),
    "npu::npu_add_rms_norm_v2_functional": lambda: ([r(2, 4), r(2, 4, seed=1), r(4)], {}),
    "npu::npu_add_rms_norm_quant": lambda: (
        [r(2, 4), r(2, 4, seed=1), r(4), torch.full((4,), 0.1), None], {"scales2": torch.full((4,), 0.2)},
    ),
    "npu::npu_add_rms_norm_dynamic_quant": lambda: (
        [r(2, 4), r(2, 4, seed=1), r(4)], {"smooth_scale1": r(4), "smooth_scale2": r(4), "output_mask": [True, True]},
    ),
    "npu::npu_rms_norm_quant": lambda: ([r(2, 4), r(4), r(4), r(1) * 30, torch.ones(1, dtype=torch.int8)], {}),
    "npu::npu_interleave_rope": lambda: ([r(2, 3, 4, 64), r(2, 1, 4, 64), r(2, 1, 4, 64)], {}),
    "npu::npu_apply_rotary_pos_emb": lambda: ([r(2, 3, 4, 64), r(2, 3, 1, 64), r(2, 3, 1, 64), r(2, 3, 1, 64)], {}),
    "npu::npu_mrope": lambda: ([torch.tensor([1, 0, 4]), r(3, 64), r(3, 32), r(5, 32), 32], {}),
    "atb::_npu_rotary_embedding": lambda: ([torch.tensor([1, 0, 4]), r(3, 64), r(3, 32), 32, r(5, 32), True], {}),
    "npu::npu_rotary_mul": lambda: ([r(2, 3, 4, 8), r(1, 1, 4, 8), r(1, 1, 4, 8)], {}),
    "npu::npu_kv_rmsnorm_rope_cache": lambda: ([], dict(KV)),
    "npu::npu_kv_rmsnorm_rope_cache_v2": lambda: ([], dict(KV)),
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional": lambda: ([], dict(KV)),
    "npu::npu_mla_prolog_v2": lambda: ([], prolog(7168)),
    "npu::npu_mla_prolog_v3": lambda: ([], prolog(1024) | {"query_norm_flag": True}),
    "npu::npu_mla_prolog_v3_functional": lambda: ([], prolog(1024)),
    "npu::npu_swiglu": lambda: ([r(2, 6)], {}),
    "npu::npu_dequant_swiglu_quant": lambda: ([r(3, 128)], {"quant_mode": 1, "group_index": torch.tensor([2, 1])}),
    "npu::npu_swiglu_quant": lambda: ([r(3, 8)], {"smooth_scales": torch.ones(1, 4), "dst_type": torch.int8}),
    "npu::npu_clipped_swiglu": lambda: ([r(2, 6)], {}),
    "npu::npu_dtype_cast": lambda: ([r(2, 3), F], {}),
    "npu::_npu_dtype_cast": lambda: ([r(2, 3), F], {}),
    "npu::npu_format_cast": lambda: ([r(2, 3), 29], {}),
    "npu::npu_format_cast.Tensor": lambda: ([r(2, 3), r(1)], {}),
    "npu::npu_format_cast_": lambda: ([r(2, 3), r(1)], {}),
    "npu::npu_format_cast_.acl_format": lambda: ([r(2, 3), 29], {}),
    "npu::_npu_format_cast": lambda: ([r(2, 3), 29], {}),
    "npu::_npu_format_cast.aclnn": lambda: ([r(2, 3), 29, 1], {}),
    "npu::_npu_format_cast.input_dtype": lambda: ([r(2, 3), 29, 1, 1], {}),
    "npu::npu_prefetch": lambda: ([r(2, 3), None, 6], {}),
    "npu::npu_top_k_top_p": lambda: ([r(2, 9), r(2).abs(), i32(3, 5)], {}),
    "npu::npu_weight_quant_batchmatmul": lambda: ([r(2, 8), b8(8, 3), r(3)], {}),
    "npu::npu_grouped_matmul_swiglu_quant": lambda: (
        [b8(4, 3), b8(2, 3, 6), torch.tensor([1, 4]), torch.ones(2, 6), torch.ones(4)], {},
    ),
    "npu::npu_grouped_matmul_swiglu_quant_v2": lambda: (
        [b8(4, 3), [b8(2, 3, 6)], [torch.ones(2, 6)], torch.ones(4), torch.tensor([1, 4])],
        {"dequant_dtype": torch.float32},
    ),
    "npu::npu_convert_weight_to_int4pack": lambda: ([b8(3, 16).to(I32) >> 4], {}),
    "npu::npu_trans_quant_param": lambda: ([r(4, dtype=F), r(1, dtype=F), 1], {}),
    "npu::npu_dynamic_quant": lambda: ([r(2, 3, 8)], {}),
    "npu::npu_dynamic_block_quant": lambda: ([r(3, 130)], {}),
    "npu::npu_dynamic_mx_quant": lambda: ([r(3, 66)], {"dst_type": 24}),
    "npu::npu_rms_norm_dynamic_mx_quant": lambda: ([r(3, 66), r(66)], {}),
    "npu::npu_add_rms_norm_dynamic_mx_quant": lambda: ([r(3, 66), r(3, 66, seed=1), r(66)], {"dst_type": 23}),
    "npu::npu_dynamic_dual_level_mx_quant": lambda: ([r(3, 66)], {}),
    "npu::npu_transpose_quant_batchmatmul": lambda: (
        [r(2, 3, 512).to(torch.float8_e4m3fn), r(3, 512, 128).to(torch.float8_e4m3fn), 15],
        {"x1_scale": torch.ones(2), "x2_scale": torch.ones(128), "perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2],
         "perm_y": [1, 0, 2]},
    ),
    "npu::npu_dual_level_quant_matmul": lambda: (
        [torch.ones(2, 32, dtype=torch.uint8), torch.ones(3, 32, dtype=torch.uint8), torch.ones(2, 1),
         torch.ones(1, 3), *(torch.full((n, 1, 2), 127, dtype=torch.uint8) for n in (2, 3))], {},
    ),
    "npu::npu_kronecker_quant": lambda: ([r(2, 3, 16), r(3, 3), r(16, 16), 0.8], {}),
    "npu::npu_sign_bits_unpack": lambda: ([torch.tensor([5, 255], dtype=torch.uint8), 2, F], {}),
    "npu::npu_moe_init_routing_quant": lambda: (
        [r(3, 8), i32([0, 2], [1, 0], [2, 2])], {"expert_num": 3, "expert_tokens_num_mode": 1, "active_num": 5},
    ),
    "atb::_npu_matmul_add_fp32": lambda: ([r(2, 4), r(2, 5), torch.ones(4, 5)], {}),
    "npu::npu_quantize": lambda: ([r(3, 8, dtype=F), torch.ones(8), None, torch.qint8, -1], {}),
    "npu::npu_quant_matmul": lambda: (
        [b8(3, 4), b8(4, 5), torch.full((5,), 0.01)], {"pertoken_scale": torch.ones(3), "output_dtype": torch.bfloat16},
    ),
    "npu::npu_grouped_matmul": lambda: (
        [[r(4, 3)], [r(2, 3, 5)]], {"group_list": torch.tensor([1, 4]), "group_type": 0, "split_item": 3},
    ),
    "npu::npu_grouped_matmul.List": lambda: ([[r(4, 3)], [r(3, 5), r(3, 5)]], {"group_list": [1, 4], "split_item": 3}),
    "npu::npu_transpose_batchmatmul": lambda: ([r(2, 3, 16), r(2, 16, 32)], {}),
    "npu::npu_fusion_attention": lambda: (
        [r(6, 2, 16), r(6, 2, 16, seed=1), r(6, 2, 16, seed=2), 2, "TND"],
        {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [3, 6], "atten_mask": TRIANGLE, "sparse_mode": 3},
    ),
    "npu::npu_prompt_flash_attention": lambda: (
        [r(2, 2, 3, 16), r(2, 2, 3, 16, seed=1), r(2, 2, 3, 16, seed=2)],
        {"num_heads": 2, "input_layout": "BNSD_BSND", "atten_mask": torch.ones(3, 3).triu(1).bool()},
    ),
    "atb::_npu_group_topk": lambda: ([r(3, 16), 2, 4, 2], {}),
    "atb::npu_fused_add_topk_div": lambda: ([r(3, 16), r(16)], {"group_num": 4, "group_topk": 2, "k": 3}),
    "atb::npu_fused_add_topk_div.out": lambda: (
        [r(3, 16), r(16)], {"k": 3, "y": torch.zeros(3, 3), "indices": torch.zeros(3, 3, dtype=I32)},
    ),
    "npu::npu_moe_gating_top_k_softmax": lambda: ([r(3, 8)], {"k": 2}),
    "npu::npu_moe_gating_top_k_softmax_v2": lambda: ([r(3, 8)], {"k": 2, "output_softmax": True}),
    "npu::npu_moe_gating_top_k": lambda: ([r(3, 8), 2], {"norm_type": 1, "out_flag": True}),
    "npu::npu_moe_compute_expert_tokens": lambda: ([i32(0, 0, 2), 4], {}),
    "npu::npu_moe_init_routing": lambda: ([r(3, 8), ROUTED, i32([0, 2], [1, 0], [2, 2]), 3], {}),
    "npu::npu_moe_init_routing_v2": lambda: (
        [r(3, 8), i32([0, 2], [1, 0], [2, 2])],
        {"expert_num": 3, "expert_tokens_num_flag": True, "quant_mode": 1, "active_expert_range": [0, 3]},
    ),
    "npu::npu_moe_re_routing": lambda: ([r(6, 4), i32([1, 2], [3, 0])], {"per_token_scales": r(6, dtype=F)}),
    "npu::npu_moe_token_permute": lambda: ([r(3, 8), torch.tensor([[0, 2], [1, 0], [2, 2]])], {}),
    "npu::npu_moe_token_unpermute": lambda: ([r(6, 8), i32(0, 3, 2, 1, 4, 5), r(3, 2)], {}),
    "npu::npu_moe_finalize_routing": lambda: (
        [r(6, 8), r(3, 8), None, None, r(3, 2), i32(0, 3, 2, 1, 4, 5), i32([0, 2], [1, 0], [2, 2])],
        {"drop_pad_mode": 2},
    ),
    "atb::_npu_paged_attention": lambda: (PAGED, {}),
    "atb::_npu_paged_attention_get_workspace": lambda: (PAGED, {}),
    "atb::_npu_paged_attention_mla": lambda: (
        [r(2, 4, 32), r(4, 16, 1, 32), 1, 4, 0.2, TABLE, i32(20, 7), 16, torch.zeros(2, 4, 16, dtype=H)], {},
    ),
    "atb::_npu_flash_attention_qlens": lambda: (
        [r(3, 128), r(*CACHE), r(*CACHE), TABLE, r(8, 8).abs().triu(1), i32(1, 2), i32(20, 7), 2, 4, 0.2,
         torch.zeros(3, 128, dtype=H)], {},
    ),
    "atb::_npu_flash_attention_unpad": lambda: (
        [r(3, 4, 32), r(3, 2, 32), r(3, 2, 32), i32(1, 2), 0.2, 4, 2, torch.zeros(3, 4, 32, dtype=H)], {},
    ),
    "atb::npu_multi_head_latent_attention": lambda: (LATENT, {}),
    "atb::npu_multi_head_latent_attention.out": lambda: (LATENT, {"output": torch.zeros(2, 4, 512, dtype=H)}),
    "atb::npu_multi_head_latent_attention.lse": lambda: ([*LATENT, True], {}),
    "atb::npu_multi_head_latent_attention.lse_out": lambda: (
        [*LATENT, True], {"output": torch.zeros(2, 4, 512, dtype=H), "lse": torch.zeros(2, 4, 1, dtype=H)},
    ),
    "atb::_npu_multi_head_latent_attention_get_workspace.lse": lambda: ([*LATENT, True], {}),
    "npu::cache_loc_assign": lambda: (
        [torch.tensor([1, 0]), i32([0] * 8, [1] * 8), torch.tensor([2, 0]), torch.tensor([4, 1]), i32(7, 8, 9)], {},
    ),
    "npu::cache_loc_update": lambda: (
        [torch.tensor([1, 0]), i32([0] * 8, [1] * 8), torch.tensor([2, 0]), torch.tensor([4, 1]), i32(7, 8, 9)], {},
    ),
    "npu::assign_cache_op": lambda: (
        [r(2, 8), r(2, 8, seed=1), *(torch.tensor(x) for x in ([1, 2], [3, 3], [0, 5], [2, 6]))], {},
    ),
    "npu::alloc_extend": lambda: (
        [*(torch.tensor([x]) for x in (3, 6, 10, 5)), 4, torch.zeros(3).long(), torch.zeros(1).long()], {},
    ),
    "npu::build_tree_kernel_efficient": lambda: (
        [torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2]]), torch.tensor([4]), torch.ones(21).bool(),
         *(torch.full((1, 3), -9) for _ in range(4)), 2, 2, 3, 0], {},
    ),
    "npu::apply_token_bitmask": lambda: ([r(2, 40), i32([5, 1], [0, 3])], {}),
    "npu::npu_recurrent_gated_delta_rule": lambda: (DELTA, GATES),
    "npu::npu_recurrent_gated_delta_rule_functional": lambda: (DELTA, GATES),
    "npu::recurrent_gated_delta_rule": lambda: (
        [r(1, 2, 96, dtype=B), r(4, 4, 8, 16, dtype=B), r(1, 2, 4, dtype=B), 0.25, i32(2), i32([0, 3]), 2, 4], {},
    ),
    "npu::npu_chunk_gated_delta_rule": lambda: (
        [r(3, 1, 128, dtype=B), r(3, 1, 128, dtype=B, seed=1), r(3, 2, 128, dtype=B)],
        {"beta": r(3, 2, dtype=B), "initial_state": r(2, 2, 128, 128, dtype=B), "actual_seq_lengths": i32(2, 1)},
    ),
    "npu::npu_geglu": lambda: ([r(2, 8)], {}),
    "npu::npu_fast_gelu": lambda: ([r(2, 8)], {}),
    "npu::batch_matmul_transpose": lambda: ([r(3, 2, 4), r(2, 4, 5), torch.zeros(3, 2, 5, dtype=H)], {}),
    "npu::causal_conv1d": lambda: (
        [r(3, 16), r(4, 16), r(2, 6, 16), None, i32(0, 2, 3), i32(1, 0)], {"activation_mode": 1, "run_mode": 1},
    ),
    "npu::npu_attention_update": lambda: ([[r(3, dtype=F)] * 2, [r(3, 8), r(3, 8, seed=1)], 1], {}),
    "npu::npu_lightning_indexer": lambda: (
        [r(2, 3, 4, 128), r(4, 16, 1, 128), r(2, 3, 4)],
        {"block_table": TABLE, "layout_key": "PA_BSND", "actual_seq_lengths_key": i32(20, 7), "sparse_count": 4},
    ),
    "npu::npu_quant_lightning_indexer": lambda: (
        [b8(2, 3, 8, 128), b8(4, 16, 1, 128), r(2, 3, 8), r(2, 3, 8), r(4, 16, 1), 0, 0],
        {"block_table": TABLE, "layout_key": "PA_BSND", "actual_seq_lengths_key": i32(20, 7), "sparse_count": 4},
    ),
    "npu::npu_kv_quant_sparse_flash_attention": lambda: (
        [r(2, 3, 4, 576), QROWS, QROWS, torch.zeros(2, 3, 1, 2, dtype=I32), 0.1, 2, 2],
        {"block_table": TABLE, "layout_kv": "PA_BSND", "actual_seq_lengths_kv": i32(20, 7), "attention_mode": 2},
    ),
    "npu::npu_sparse_flash_attention": lambda: (
        [r(2, 3, 4, 512), r(4, 16, 1, 512), r(4, 16, 1, 512), torch.zeros(2, 3, 1, 2, dtype=I32), 0.1], SFA,
    ),
}  # fmt: skip
SAMPLES |= ENGINE_SAMPLES
if hasattr(torch.ops.npu, "_npu_moe_token_unpermute"):  # torch_npu from 2.13 on
    SAMPLES["npu::_npu_moe_token_unpermute"] = SAMPLES["npu::npu_moe_token_unpermute"]
ELSEWHERE = (
    "fused_infer_attention_score",
    "transfer_",
    "moe_distribute",
    "swap_blocks",
    "npu_mm_",
    "dispatch_",
    "matmul_allreduce",
)


def overload(name: str) -> Any:
    qualified, _, variant = name.partition(".")
    space, op = qualified.split("::")
    return getattr(getattr(getattr(torch.ops, space), op), variant or "default")


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if device == "cpu" else value.to(device)
    return [moved(item, device) for item in value] if isinstance(value, list) else value


def on(call: Call, device: str) -> Call:
    return [moved(x, device) for x in call[0]], {name: moved(x, device) for name, x in call[1].items()}


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [part for item in value for part in flat(item)] if isinstance(value, (list, tuple)) else []


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = (x.contiguous().view(-1).view(torch.uint8) for x in (one.cpu(), other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*pair)


def as_numbers(call: Call) -> Call:
    """Arguments as the dispatcher hands them on: dtypes for schema's ints as numbers."""
    numbers = {torch.qint8: 12, torch.bfloat16: 15, torch.float32: 6}
    change = {name: numbers.get(x, x) if isinstance(x, torch.dtype) else x for name, x in call[1].items()}
    return [numbers.get(x, x) if isinstance(x, torch.dtype) else x for x in call[0]], change


def test_every_op_has_a_sample_here_or_a_test_of_its_own() -> None:
    assert set(SAMPLES) == {name for name in REGISTRY if not any(part in name for part in ELSEWHERE)}


@pytest.mark.parametrize("name", SAMPLES)
def test_on_the_device_it_is_the_kernel(name: str) -> None:
    call = SAMPLES[name]()
    arguments, options = as_numbers(on(call, "cpu"))
    wanted = flat(REGISTRY[name](*arguments, **options))
    given_arguments, given_options = on(call, "npu")
    got = flat(overload(name)(*given_arguments, **given_options))
    assert len(got) == len(wanted)
    if "_get_workspace" not in name:  # scratch memory: content without meaning
        assert all(same(one, other) for one, other in zip(got, wanted, strict=True))
    after = [*given_arguments, *given_options.values()], [*arguments, *options.values()]
    assert all(same(one, other) for one, other in zip(*map(flat, after), strict=True))


@pytest.mark.parametrize(
    "name", [n for n in SAMPLES if torch._C._dispatch_has_kernel_for_dispatch_key(n.removesuffix(".default"), "Meta")]
)
def test_results_have_the_shapes_of_the_meta_kernels(name: str) -> None:
    arguments, options = as_numbers(on(SAMPLES[name](), "cpu"))
    meta_arguments, meta_options = on(SAMPLES[name](), "meta")
    wanted = flat(overload(name)(*meta_arguments, **meta_options))
    got = flat(REGISTRY[name](*arguments, **options))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in wanted]


def test_writes_that_schemas_do_not_declare_reach_the_device() -> None:
    for name, written in UNDECLARED_WRITES.items():
        schema = overload(name)._schema
        arguments, options = on(SAMPLES[name](), "npu")
        named = {a.name: x for a, x in zip(schema.arguments, arguments, strict=False)} | options
        before = {argument: [part.cpu() for part in flat(named[argument])] for argument in written}
        overload(name)(*arguments, **options)
        for argument in written:
            pairs = zip(flat(named[argument]), before[argument], strict=True)
            assert not any(torch.equal(part.cpu(), old) for part, old in pairs)
        assert not any(a.alias_info for a in schema.arguments if a.name in written)


@pytest.mark.parametrize("name", UNDECLARED_WRITES)
def test_writes_that_schemas_do_not_declare_race_with_reads(name: str) -> None:
    side = torch_npu.npu.Stream()
    for argument in UNDECLARED_WRITES[name]:
        arguments, options = on(SAMPLES[name](), "npu")
        schema = overload(name)._schema
        written = ({a.name: x for a, x in zip(schema.arguments, arguments, strict=False)} | options)[argument]
        torch_npu.npu.synchronize()
        overload(name)(*arguments, **options)
        with torch_npu.npu.stream(side), pytest.raises(ascend_emulator.RaceError) as caught:
            flat(written)[0] + 1
        assert (caught.value.earlier.operator, caught.value.earlier.writes) == (name, True)
        torch_npu.npu.synchronize()


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith(("npu::", "_C_ascend::"))])
def test_a_tensor_on_another_device_is_refused(name: str) -> None:
    arguments, options = on(SAMPLES[name](), "npu")
    named = {a.name: x for a, x in zip(overload(name)._schema.arguments, arguments, strict=False)} | options
    tensors = [argument for argument, x in named.items() if flat(x)]
    before = [x.cpu() for x in flat(list(named.values()))]
    for argument in tensors[1:]:  # the first says where the call runs
        for device in ("cpu", "npu:1"):
            there = [x.to(device) for x in flat(named[argument])]
            with pytest.raises(ascend_emulator.WrongDeviceError, match="Expected NPU tensor") as caught:
                overload(name)(**named | {argument: there if isinstance(named[argument], list) else there[0]})
            assert (caught.value.argument, caught.value.device) == (argument, torch.device(device))
    assert all(same(x, y) for x, y in zip(flat(list(named.values())), before, strict=True))
