"""CPU kernels of NPU operators, and the list of them by op name.

Each kernel takes and returns CPU tensors with the parameters of torch_npu's schema, refuses what the op's document
refuses, and faults where a device would. This package imports torch alone; registering the kernels with torch_npu is
the runtime's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import fia_v1, fia_v2
from .activation import npu_swiglu
from .casts import _npu_dtype_cast, npu_dtype_cast, npu_format_cast
from .errors import DeviceFault, KernelError, KernelNotCovered, OpRefused, Rule
from .norms import npu_add_rms_norm, npu_rms_norm
from .reshape_and_cache import npu_reshape_and_cache
from .rotary import npu_rotary_mul
from .rules import NOTES, RULES, Note
from .scatter import npu_scatter_nd_update, npu_scatter_nd_update_
from .transfer import transfer_kv_dim_exchange

REGISTRY: dict[str, Callable[..., Any]] = {
    "npu::npu_fused_infer_attention_score": fia_v1.npu_fused_infer_attention_score,
    "npu::npu_fused_infer_attention_score.out": fia_v1.npu_fused_infer_attention_score_out,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": fia_v1.get_max_workspace,
    "npu::_npu_fused_infer_attention_score_infer_output": fia_v1.infer_output,
    "npu::npu_fused_infer_attention_score_v2": fia_v2.npu_fused_infer_attention_score_v2,
    "npu::npu_fused_infer_attention_score_v2.out": fia_v2.npu_fused_infer_attention_score_v2_out,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": fia_v2.get_max_workspace_v2,
    "npu::_npu_fused_infer_attention_score_v2_infer_output": fia_v2.infer_output_v2,
    "npu::npu_scatter_nd_update": npu_scatter_nd_update,
    "npu::npu_scatter_nd_update_": npu_scatter_nd_update_,
    "atb::_npu_reshape_and_cache": npu_reshape_and_cache,
    "npu::npu_dtype_cast": npu_dtype_cast,
    "npu::_npu_dtype_cast": _npu_dtype_cast,
    "npu::npu_format_cast": npu_format_cast,
    "npu::npu_rms_norm": npu_rms_norm,
    "npu::npu_add_rms_norm": npu_add_rms_norm,
    "npu::npu_swiglu": npu_swiglu,
    "npu::npu_rotary_mul": npu_rotary_mul,
    "npu::transfer_kv_dim_exchange": transfer_kv_dim_exchange,
}
"""Kernel of each op, by full name and overload as torch.ops spells them."""

__all__ = ["NOTES", "REGISTRY", "RULES", "DeviceFault", "KernelError", "KernelNotCovered", "Note", "OpRefused", "Rule"]
