"""npu_top_k_top_p: hiding the logits that top-k and top-p sampling leave out.

This module owns the op and its refusals, computed in float32.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault
from .rules import META, declare, note, online, refuse

OP = "npu::npu_top_k_top_p"
_NAME = "npu_top_k_top_p"
_DOC = online("torch_npu-npu_top_k_top_p")
_TEST = "test_kernels_elementwise.py"

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "topkp-logits": ("logits (b, vocabulary) of float32, float16 or bfloat16", "cast and reshape them"),
        "topkp-p": ("p (b,) of the logits' dtype", "cast and reshape p"),
        "topkp-k": ("an int32 k (b,)", "cast and reshape k"),
    },
)
note(
    _NAME,
    "k from 1 to 1024 and the vocabulary, p from 0 to 1",
    _DOC,
    "k outside: a `DeviceFault` (507015); p is not looked at: " + _TEST,
)
note(_NAME, "p or k None", META, "that step is left out, as the schema allows: " + _TEST)


def npu_top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the k largest logits of a row, then the largest whose probabilities reach p; the others become -inf.

    Args:
        logits: Shape: [b, vocabulary]; float32, float16 or bfloat16.
        p: None, or Shape: [b]; dtype of the logits.
        k: None, or Shape: [b]; int32.

    Returns:
        Shape and dtype of the logits. The largest logit always stays.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_top_k_top_p.md.
    """
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or logits.dim() != 2:
        refuse(OP, "topkp-logits", "logits", f"{logits.dtype}, shape {tuple(logits.shape)}")
    rows, width = logits.shape
    if p is not None and (p.dtype != logits.dtype or tuple(p.shape) != (rows,)):
        refuse(OP, "topkp-p", "p", f"{p.dtype}, shape {tuple(p.shape)}")
    if k is not None and (k.dtype != torch.int32 or tuple(k.shape) != (rows,)):
        refuse(OP, "topkp-k", "k", f"{k.dtype}, shape {tuple(k.shape)}")
    if k is not None and rows and not 1 <= int(k.min()) <= int(k.max()) <= min(1024, width):
        raise DeviceFault(OP, f"k reaches from {int(k.min())} to {int(k.max())} of {width} tokens")
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        least = values.gather(1, (width - k.long()).unsqueeze(1))
        values = values.masked_fill(values < least, float("-inf"))
    if p is not None:
        hidden = torch.softmax(values, -1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
        hidden[:, -1] = False
        values = values.masked_fill(hidden, float("-inf"))
    return torch.empty_like(values).scatter(1, order, values).to(logits.dtype)


KERNELS = {OP: npu_top_k_top_p}
