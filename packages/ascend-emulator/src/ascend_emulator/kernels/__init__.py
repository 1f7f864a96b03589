"""CPU kernels of NPU operators, and the list of them by op name.

Each kernel takes and returns CPU tensors with the parameters of torch_npu's schema, refuses what the op's document
refuses, and faults where a device would. This package imports torch alone; registering the kernels with torch_npu is
the runtime's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    activation,
    atb_attention,
    atb_gating,
    atb_latent,
    atb_linear,
    attention_update,
    batch_matmul,
    block_quant,
    casts,
    causal_conv,
    chunk_delta,
    dual_level_matmul,
    engine_absent,
    fia_v1,
    fia_v2,
    fusion_attention,
    gated,
    gated_delta,
    gather_pa,
    grouped_matmul,
    grouped_swiglu,
    kv_norm_rope,
    lightning_indexer,
    lora,
    matmul_collective,
    mla_preprocess,
    mla_prolog,
    moe_combine,
    moe_combine_norm,
    moe_dispatch,
    moe_finalize,
    moe_gating,
    moe_routing,
    moe_routing_quant,
    mx_quant,
    norms,
    norms_quant,
    prefetch,
    prompt_attention,
    quant,
    quant_batch_matmul,
    quant_lightning_indexer,
    quant_matmul,
    quant_params,
    quant_sparse_attention,
    reshape_and_cache,
    rope,
    rotary,
    scatter,
    scatter_pa,
    sgl_cache,
    sgl_matmul,
    sgl_sampling,
    sign_bits,
    sparse_flash_attention,
    top_k_top_p,
    transfer,
    transfer_state,
    vllm_blocks,
    vllm_delta,
    vllm_drafts,
    vllm_expert_parallel,
    vllm_experts,
    vllm_norms,
    vllm_routing,
    vllm_sparse,
    weight_quant_matmul,
)
from .errors import DeviceFault, KernelError, KernelNotCovered, OpRefused, Rule
from .rules import NOTES, RULES, Note

_MODULES: tuple[Any, ...] = (
    *(fia_v1, fia_v2, prompt_attention, fusion_attention, atb_attention, atb_latent, attention_update),
    *(lightning_indexer, sparse_flash_attention, quant_lightning_indexer, quant_sparse_attention),
    *(scatter, scatter_pa, gather_pa, reshape_and_cache, transfer, transfer_state),
    *(sgl_cache, sgl_sampling, sgl_matmul),
    *(norms, norms_quant, rotary, rope, kv_norm_rope, mla_prolog, activation, gated, casts),
    *(quant, quant_params, quant_matmul, weight_quant_matmul, grouped_matmul, grouped_swiglu, batch_matmul),
    *(
        block_quant,
        mx_quant,
        quant_batch_matmul,
        dual_level_matmul,
        atb_linear,
        matmul_collective,
        top_k_top_p,
        prefetch,
        sign_bits,
    ),
    *(
        moe_gating,
        atb_gating,
        moe_routing,
        moe_routing_quant,
        moe_finalize,
        moe_dispatch,
        moe_combine,
        moe_combine_norm,
    ),
    *(gated_delta, chunk_delta, causal_conv),
    *(lora, mla_preprocess, vllm_norms, vllm_drafts, vllm_routing, vllm_experts, vllm_delta, vllm_sparse, vllm_blocks),
    vllm_expert_parallel,
)
REGISTRY: dict[str, Callable[..., Any]] = {
    name: kernel for module in _MODULES for name, kernel in module.KERNELS.items()
}
"""Kernel of each op, by full name and overload as torch.ops spells them."""
ABSENT = engine_absent.ABSENT
"""Ops that are defined and have no kernel, and why."""
UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    name: arguments
    for module in (
        rope,
        kv_norm_rope,
        mla_prolog,
        atb_gating,
        sgl_cache,
        sgl_sampling,
        causal_conv,
        vllm_delta,
        vllm_sparse,
        vllm_blocks,
    )
    for name, arguments in module.UNDECLARED_WRITES.items()
}
"""Arguments that an op writes on a device although its schema does not say so, by full name of the op."""

__all__ = [
    "ABSENT",
    "NOTES",
    "REGISTRY",
    "RULES",
    "UNDECLARED_WRITES",
    "DeviceFault",
    "KernelError",
    "KernelNotCovered",
    "Note",
    "OpRefused",
    "Rule",
]
