"""npu::npu_fused_infer_attention_score: the op, its out form, its shape and workspace helpers.

This module owns the signatures of version 1, exactly as torch_npu declares them. The work is in ``fia_run``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .fia_antiquant import antiquant_of
from .fia_call import UNBOUNDED, V1_NAMES, FiaCall
from .fia_rules import refuse
from .fia_run import infer_output as _infer_output
from .fia_run import not_covered, run, run_out, workspace

OP = "npu::npu_fused_infer_attention_score"


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    dequant_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    key_antiquant_scale: torch.Tensor | None = None,
    key_antiquant_offset: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_padding_size: torch.Tensor | None = None,
    kv_padding_size: torch.Tensor | None = None,
    key_shared_prefix: torch.Tensor | None = None,
    value_shared_prefix: torch.Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    key_rope_antiquant_scale: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> FiaCall:
    if query.dtype in (torch.float16, torch.bfloat16):
        scales = {"dequant_scale1": dequant_scale1, "quant_scale1": quant_scale1, "dequant_scale2": dequant_scale2}
        for argument, given in scales.items():
            if given is not None:
                refuse(OP, "quant-scales", argument, f"a tensor beside a query of {query.dtype}")
        if quant_offset2 is not None and quant_scale2 is None:
            refuse(OP, "quant-scales", "quant_offset2", "a tensor without quant_scale2")
    not_covered(
        OP,
        pse_shift=pse_shift,
        dequant_scale1=dequant_scale1,
        quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        key_shared_prefix=key_shared_prefix,
        value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
    )
    return FiaCall(
        op=OP,
        names=V1_NAMES,
        query=query,
        key=key,
        value=value,
        query_rope=query_rope,
        key_rope=key_rope,
        mask=atten_mask,
        q_lens=actual_seq_lengths,
        kv_lens=actual_seq_lengths_kv,
        block_table=block_table,
        sink=None,
        heads=num_heads,
        kv_heads_given=num_key_value_heads,
        scale=scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
        inner_precise=inner_precise,
        want_lse=softmax_lse_flag,
        antiquant=antiquant_of(
            OP,
            (key_antiquant_scale, value_antiquant_scale),
            (key_antiquant_offset, value_antiquant_offset),
            (key_antiquant_mode, value_antiquant_mode),
        ),
    )


def npu_fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over dense or paged keys and values.

    Args:
        query: as ``input_layout`` spells; float16 or bfloat16.
        key: as the query, or a cache of blocks when ``block_table`` is given.
        value: as the key; heads may be narrower.
        **options: keyword arguments of the op's schema; what each takes is in ``docs/refusals.md``.

    Returns:
        Attention output (dtype of the query) and log-sum-exp (float32; shape [0] unless ``softmax_lse_flag``).

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        Document of torch_npu.npu_fused_infer_attention_score in the torch_npu 2.12.0 wheel.
    """
    return run(_call(query, key, value, **options))


def npu_fused_infer_attention_score_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: Sequence[torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into given outputs. *Mutates* ``out``; see ``npu_fused_infer_attention_score``."""
    return run_out(_call(query, key, value, **options), workspace, out)


def get_max_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Scratch memory for the out form; see ``npu_fused_infer_attention_score`` for the arguments."""
    return workspace(_call(query, key, value, **options))


def infer_output(
    query: torch.Tensor,
    value: torch.Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the shapes and dtypes that the op would return, content undefined."""
    not_covered(OP, quant_scale2=quant_scale2)
    return _infer_output(
        OP,
        query,
        value,
        heads_name=V1_NAMES.heads,
        input_layout=input_layout,
        paged=block_table is not None,
        heads=num_heads,
        kv_heads=num_key_value_heads,
        want_lse=softmax_lse_flag,
    )


KERNELS = {
    OP: npu_fused_infer_attention_score,
    f"{OP}.out": npu_fused_infer_attention_score_out,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": get_max_workspace,
    "npu::_npu_fused_infer_attention_score_infer_output": infer_output,
}
