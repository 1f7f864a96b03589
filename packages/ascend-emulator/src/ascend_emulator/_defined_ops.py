"""Runs operators that move host memory when the stream says so. It owns those that `kernels/` itself defines.

The wrapper of `_operators.py` takes host tensors by value, which is right for arguments and wrong for memory that a
copy reads or writes later. Here each page is one non-blocking copy with the rules of `_copies.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch_npu

from ._calls import move_bytes
from ._copies import copy_
from ._fallback import _implement
from ._operators import current_queue
from ._runtime import PINNED, runtime
from ._schema import find_operator
from .errors import OperatorNotEmulatedError
from .kernels import ABSENT, transfer, transfer_state, vllm_blocks
from .kernels.errors import DeviceFault
from .kernels.rules import refuse

__all__ = ["implement"]


def _dim_exchange(
    device_k: torch.Tensor,
    host_k: torch.Tensor,
    device_v: torch.Tensor,
    host_v: torch.Tensor,
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    page_size: int,
    direct: int,
    flags: int,
) -> None:
    pairs = transfer.page_pairs(
        device_k, host_k, device_v, host_v, device_indices.cpu(), host_indices.cpu(), page_size, direct, flags
    )
    both = [(device_k, host_k), *([(device_v, host_v)] if device_v.numel() and host_v.numel() else [])]
    for device_page, host_page in pairs:
        for device, host in both:
            if direct == transfer.HOST_TO_DEVICE:
                copy_(device[:, device_page], host[host_page], non_blocking=True)
            else:
                copy_(host[host_page], device[:, device_page], non_blocking=True)


def _state_load(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    flags: int,
) -> None:
    pairs = transfer_state.load_pairs(src, dst, src_indices.cpu(), dst_indices.cpu(), layer_id, flags)
    for device_slot, host_slot in pairs:
        copy_(dst[device_slot], src[host_slot, layer_id, 0], non_blocking=True)


def _state_backup(
    device_states: list[torch.Tensor],
    host_states: list[torch.Tensor],
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    flags: int,
) -> None:
    pairs = transfer_state.backup_pairs(device_states, host_states, device_indices.cpu(), host_indices.cpu(), flags)
    for device, host in zip(device_states, host_states, strict=True):
        for device_slot, host_slot in pairs:
            copy_(host[host_slot, :, 0], device[:, device_slot], non_blocking=True)


def _swap_blocks(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    devices = {tensor.device for tensor in (x, y) if not tensor.is_cpu}
    if len(devices) != 1:
        refuse(vllm_blocks.OP_SWAP, "swap-device", "x", f"{x.device} beside {y.device}")
    for source, target in vllm_blocks.swap_pairs(x, y, z):
        copy_(y[target], x[source], non_blocking=True)


def _swap_blocks_batch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, direction: int) -> None:
    moves = vllm_blocks.batch_moves(x, y, z, direction)
    on_host = (direction == vllm_blocks.HOST_TO_DEVICE, direction == vllm_blocks.DEVICE_TO_HOST)
    for source, target, count in moves:
        for name, address, host in zip(("x", "y"), (source, target), on_host, strict=True):
            owner, start, size = runtime.locate(address)
            inside = (owner == PINNED if host else owner >= 0) and address + count <= start + size
            if not inside:
                where = "pinned host memory" if host else "device memory"
                detail = f"{name}: {count} bytes at {address:#x} are not within one allocation of {where}"
                raise DeviceFault(vllm_blocks.OP_SWAP_BATCH, detail)
    stream = current_queue(torch_npu.npu.current_device()).address
    for source, target, count in moves:
        move_bytes(stream, target, source, count)


def _absent(name: str) -> Callable[..., NoReturn]:
    def refuse_call(*args: Any, **kwargs: Any) -> NoReturn:
        raise OperatorNotEmulatedError(name, str(find_operator(name)._schema), "a kernel of the engine's own library")

    return refuse_call


def implement() -> None:
    """Put these kernels in the place of the ones that `_fallback.register` made, and name what has none."""
    for name in ABSENT:
        _implement(name, _absent(name), "CompositeExplicitAutograd")
    _implement(transfer.OP, _dim_exchange)
    _implement(transfer_state.OP_LOAD, _state_load)
    _implement(transfer_state.OP_BACKUP, _state_backup)
    _implement(vllm_blocks.OP_SWAP, _swap_blocks)
    _implement(vllm_blocks.OP_SWAP_BATCH, _swap_blocks_batch, "CPU")
