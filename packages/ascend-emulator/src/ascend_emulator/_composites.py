"""Operators for which torch_npu has kernels of its own and the CPU has none: written with other operators."""

from __future__ import annotations

import torch

__all__ = ["lstm_cell", "matmul_backward", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The operator in its composite form; torch_npu's own would launch a flash attention kernel."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def matmul_backward(
    grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `torch.matmul` for operands of one and more dimensions, with broadcast batches."""
    left = self.unsqueeze(0) if self.dim() == 1 else self
    right = other.unsqueeze(-1) if other.dim() == 1 else other
    if self.dim() == 1:
        grad = grad.unsqueeze(-1 if other.dim() == 1 else -2)
    if other.dim() == 1:
        grad = grad.unsqueeze(-1)
    to_left = torch.matmul(grad, right.mT).sum_to_size(left.shape).reshape(self.shape) if mask[0] else None
    to_right = torch.matmul(left.mT, grad).sum_to_size(right.shape).reshape(other.shape) if mask[1] else None
    return to_left, to_right


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_thnn_fused_lstm_cell`, to which torch's LSTM comes on a device: new hidden state, new cell state, workspace.

    Gradients come from the operators inside, so the workspace, which a fused backward would read, is empty.
    """
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        if bias is not None:
            gates = gates + bias
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell, gates.new_empty(0)
