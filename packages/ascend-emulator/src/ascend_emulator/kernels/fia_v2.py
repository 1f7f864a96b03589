"""npu::npu_fused_infer_attention_score_v2: the op, its out form, its shape and workspace helpers.

This module owns the signatures of version 2, exactly as torch_npu declares them. The work is in ``fia_run``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .fia_call import UNBOUNDED, V2_NAMES, FiaCall
from .fia_rules import refuse
from .fia_run import infer_output, not_covered, run, run_out, workspace

OP = "npu::npu_fused_infer_attention_score_v2"


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    dequant_scale_query: torch.Tensor | None = None,
    dequant_scale_key: torch.Tensor | None = None,
    dequant_offset_key: torch.Tensor | None = None,
    dequant_scale_value: torch.Tensor | None = None,
    dequant_offset_value: torch.Tensor | None = None,
    dequant_scale_key_rope: torch.Tensor | None = None,
    quant_scale_out: torch.Tensor | None = None,
    quant_offset_out: torch.Tensor | None = None,
    quant_scale_p: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> FiaCall:
    if quant_offset_out is not None and quant_scale_out is None:
        refuse(OP, "quant-scales", "quant_offset_out", "a tensor without quant_scale_out")
    not_covered(
        OP,
        pse_shift=pse_shift,
        dequant_scale_query=dequant_scale_query,
        dequant_scale_key=dequant_scale_key,
        dequant_offset_key=dequant_offset_key,
        dequant_scale_value=dequant_scale_value,
        dequant_offset_value=dequant_offset_value,
        dequant_scale_key_rope=dequant_scale_key_rope,
        quant_scale_out=quant_scale_out,
        quant_scale_p=quant_scale_p,
    )
    return FiaCall(
        op=OP,
        names=V2_NAMES,
        query=query,
        key=key,
        value=value,
        query_rope=query_rope,
        key_rope=key_rope,
        mask=atten_mask,
        q_lens=actual_seq_qlen,
        kv_lens=actual_seq_kvlen,
        block_table=block_table,
        sink=learnable_sink,
        heads=num_query_heads,
        kv_heads_given=num_key_value_heads,
        scale=softmax_scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
        inner_precise=inner_precise,
        want_lse=return_softmax_lse,
    )


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over dense or paged keys and values.

    Args:
        query: as ``input_layout`` spells; float16 or bfloat16.
        key: as the query, or a cache of blocks when ``block_table`` is given.
        value: as the key; heads may be narrower.
        **options: keyword arguments of the op's schema; what each takes is in ``docs/refusals.md``.

    Returns:
        Attention output (dtype of the query) and log-sum-exp (float32; shape [0] unless ``return_softmax_lse``).

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        Document of torch_npu.npu_fused_infer_attention_score_v2 in the torch_npu 2.12.0 wheel.
    """
    return run(_call(query, key, value, **options))


def npu_fused_infer_attention_score_v2_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: Sequence[torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into given outputs. *Mutates* ``out``; see ``npu_fused_infer_attention_score_v2``."""
    return run_out(_call(query, key, value, **options), workspace, out)


def get_max_workspace_v2(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Scratch memory for the out form; see ``npu_fused_infer_attention_score_v2`` for the arguments."""
    return workspace(_call(query, key, value, **options))


def infer_output_v2(
    query: torch.Tensor,
    value: torch.Tensor,
    *,
    query_dtype: int | None = None,
    value_dtype: int | None = None,
    input_layout: str = "BSH",
    quant_scale_out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: torch.Tensor | None = None,
    out_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the shapes and dtypes that the op would return, content undefined."""
    not_covered(OP, quant_scale_out=quant_scale_out)
    return infer_output(
        OP,
        query,
        value,
        heads_name=V2_NAMES.heads,
        input_layout=input_layout,
        paged=block_table is not None,
        heads=num_query_heads,
        kv_heads=num_key_value_heads,
        want_lse=return_softmax_lse,
    )


KERNELS = {
    OP: npu_fused_infer_attention_score_v2,
    f"{OP}.out": npu_fused_infer_attention_score_v2_out,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": get_max_workspace_v2,
    "npu::_npu_fused_infer_attention_score_v2_infer_output": infer_output_v2,
}
