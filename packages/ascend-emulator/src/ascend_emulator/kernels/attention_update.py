"""npu_attention_update: one attention output from several, each over a part of the keys, by their log-sum-exps.

This module owns the op, computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .faults import fill_poison_
from .rules import declare, note, online, refuse

OP = "npu::npu_attention_update"
_NAME = "npu_attention_update"
_DOC = online("torch_npu-npu_attention_update")

declare(
    _NAME,
    _DOC,
    "test_kernels_atb_attention.py",
    {
        "update-parts": ("1 to 16 parts, as many lse as local_out", "pass one log-sum-exp an output"),
        "update-dtype": ("lse float32; local_out float32, float16 or bfloat16, all alike", "cast them"),
        "update-shape": ("lse (n,), local_out (n, head_dim), all alike", "flatten tokens and heads"),
        "update-dim": ("a head dim of 8 to 512 that is a multiple of 8", "pad the head dim"),
        "update-type": ("update_type 0 or 1", "pass 1 for the joint log-sum-exp"),
    },
)
note(_NAME, "(not documented) a row that no part has keys for (all lse -inf)", "—", "NaN, as the formula gives it")
note(_NAME, "lse_out valid with update_type 1 only", _DOC, "poison otherwise, in the shape of the Meta kernel")


def npu_attention_update(
    lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighs outputs by ``exp(lse_i - lse)``, lse being the log-sum-exp of all.

    Args:
        lse: Shape: [n] each; float32.
        local_out: Shape: [n, head_dim] each; float32, float16 or bfloat16.
        update_type: 0, or 1 for the joint log-sum-exp too.

    Returns:
        Shape: [n, head_dim] in the outputs' dtype, and [n] float32 (undefined with update_type 0).

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_attention_update.md.
    """
    if len(lse) != len(local_out) or not 1 <= len(lse) <= 16:
        refuse(OP, "update-parts", "lse", f"{len(lse)} beside {len(local_out)} of local_out")
    if update_type not in (0, 1):
        refuse(OP, "update-type", "update_type", update_type)
    first = local_out[0]
    for part, out in zip(lse, local_out, strict=True):
        if part.dtype != torch.float32:
            refuse(OP, "update-dtype", "lse", part.dtype)
        if out.dtype not in (torch.float32, torch.float16, torch.bfloat16) or out.dtype != first.dtype:
            refuse(OP, "update-dtype", "local_out", out.dtype)
        if out.dim() != 2 or out.shape != first.shape or tuple(part.shape) != (out.size(0),):
            refuse(OP, "update-shape", "local_out", f"shape {tuple(out.shape)} beside lse of {tuple(part.shape)}")
    if first.size(1) % 8 or not 8 <= first.size(1) <= 512:
        refuse(OP, "update-dim", "local_out", first.size(1))
    parts = torch.stack(list(lse))
    joint = torch.logsumexp(parts, 0)
    weights = torch.exp(parts - joint).unsqueeze(-1)
    out = (torch.stack(list(local_out)).float() * weights).sum(0).to(first.dtype)
    return out, joint if update_type else fill_poison_(torch.empty_like(joint))


KERNELS = {OP: npu_attention_update}
