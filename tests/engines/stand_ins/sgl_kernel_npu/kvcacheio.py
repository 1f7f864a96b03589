"""Wrappers that spread keyword arguments over `npu::transfer_kv_dim_exchange`; they own no copying."""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["TransferDirection", "TransferFlag", "transfer_kv_dim_exchange"]


class TransferDirection(Enum):
    """Which way pages go."""

    H2D = 1
    D2H = 2


class TransferFlag(Enum):
    """How the operator copies."""

    FAST2D = 2


def transfer_kv_dim_exchange(
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    device_k: torch.Tensor,
    host_k: torch.Tensor,
    device_v: torch.Tensor,
    host_v: torch.Tensor,
    device_index_k: torch.Tensor | None = None,
    host_index_k: torch.Tensor | None = None,
    page_size: int = 128,
    direction: TransferDirection = TransferDirection.H2D,
    flags: TransferFlag = TransferFlag.FAST2D,
) -> None:
    """Move the pages of K and V, then those of the index keys, whose call has an empty V."""
    operator = torch.ops.npu.transfer_kv_dim_exchange
    rest = (device_indices, host_indices, page_size, direction.value, flags.value)
    operator(device_k, host_k, device_v, host_v, *rest)
    if device_index_k is not None and host_index_k is not None:
        operator(device_index_k, host_index_k, torch.empty(0), torch.empty(0), *rest)
