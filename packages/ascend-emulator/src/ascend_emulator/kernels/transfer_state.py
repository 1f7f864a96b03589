"""transfer_state_per_layer_direct_pf_lf and transfer_state_all_layer_direct_lf_pf of sgl_kernel_npu.

This module owns the definitions of the ops, which move recurrent states between device [layers, slots, ...] and host
[slots, layers, 1, ...], their refusals, and their meaning on CPU tensors. When the bytes move on a device is decided in
``_defined_ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .definitions import define
from .rules import declare, note, refuse

OP_LOAD = "npu::transfer_state_per_layer_direct_pf_lf"
OP_BACKUP = "npu::transfer_state_all_layer_direct_lf_pf"
_FAMILY = "npu::transfer_state_per_layer_direct_pf_lf, transfer_state_all_layer_direct_lf_pf"
_SOURCE = "sgl-kernel-npu f425bdf, csrc/transfer_state_dim_exchange/op_host"
_TEST = "test_kernels_sgl.py"
_FLAG_2D = 2
SCHEMAS = (
    "transfer_state_per_layer_direct_pf_lf(Tensor src, Tensor dst, Tensor src_indices, Tensor dst_indices, "
    "int layer_id, int flags) -> ()",
    "transfer_state_all_layer_direct_lf_pf(Tensor[] device_states, Tensor[] host_states, Tensor device_indices, "
    "Tensor host_indices, int flags) -> ()",
)

declare(
    _FAMILY,
    _SOURCE,
    _TEST,
    {
        "state-count": (
            "as many device as host components, one at least, and as many device as host indices",
            "match them",
        ),
        "state-flags": ("flags with bit 1 set (two-dimensional copies)", "pass 2"),
        "state-empty": ("no empty state", "pass the pools"),
        "state-dtype": ("host and device states of one dtype", "allocate the host pool with the device's dtype"),
        "state-shape": (
            "device (layers, slots, ...), one layer (slots, ...); host (slots, layers, 1, ...) with the same layers "
            "and "
            "trailing axes",
            "pass the pools themselves",
        ),
        "state-dense": ("a contiguous host pool; device slots that are dense and follow one another", "pass the pools"),
        "state-layer": ("a layer_id of the host pool", "count layers from the host pool's first"),
        "state-index": ("indices within the smallest component", "pass allocated slots"),
    },
)
note(_FAMILY, "pinned host memory", _SOURCE, "on a device, `transfer` of pageable memory is refused by the copy itself")


def _dense(tensor: torch.Tensor, first: int) -> bool:
    """Whether axes from ``first`` on are dense in some order."""
    pairs = sorted((tensor.stride(i), tensor.size(i)) for i in range(first, tensor.dim()) if tensor.size(i) > 1)
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def _check_pair(op: str, device: torch.Tensor, host: torch.Tensor, layered: bool) -> None:
    names = ("device_states", "host_states") if layered else ("dst", "src")
    slots = 1 if layered else 0
    for name, tensor in zip(names, (device, host), strict=True):
        if tensor.numel() == 0:
            refuse(op, "state-empty", name, f"shape {tuple(tensor.shape)}")
    if device.dtype != host.dtype:
        refuse(op, "state-dtype", names[1], f"{host.dtype} beside {device.dtype}")
    fits = device.dim() >= slots + 2 and host.dim() == device.dim() + (1 if layered else 2)
    fits = fits and host.size(2) == 1 and host.shape[3:] == device.shape[slots + 1 :]
    if not fits or (layered and device.size(0) != host.size(1)):
        refuse(op, "state-shape", names[1], f"{tuple(host.shape)} for a device state of {tuple(device.shape)}")
    elements = host[0, 0].numel()
    dense = host.is_contiguous() and _dense(device, slots + 1) and device.stride(slots) == elements
    if not dense or (layered and device.stride(0) < device.size(1) * elements):
        refuse(op, "state-dense", names[0], f"strides {device.stride()}, host strides {host.stride()}")


def _pairs(op: str, device: torch.Tensor, host: torch.Tensor, limits: tuple[int, int]) -> list[tuple[int, int]]:
    if device.numel() != host.numel():
        refuse(op, "state-count", "indices", f"{device.numel()} device and {host.numel()} host indices")
    pairs = list(zip(device.flatten().tolist(), host.flatten().tolist(), strict=True))
    for pair in pairs:
        if not all(0 <= index < limit for index, limit in zip(pair, limits, strict=True)):
            refuse(op, "state-index", "indices", f"device {pair[0]}, host {pair[1]} of {limits}")
    return pairs


def load_pairs(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    flags: int,
) -> list[tuple[int, int]]:
    """Checks a load of one layer; (device slot, host slot) pairs. An empty list when there is nothing to do.

    Raises:
        OpRefused: rows of ``docs/refusals.md``.
    """
    if not flags & _FLAG_2D:
        refuse(OP_LOAD, "state-flags", "flags", flags)
    if src_indices.numel() == dst_indices.numel() == 0:
        return []
    _check_pair(OP_LOAD, dst, src, layered=False)
    if not 0 <= layer_id < src.size(1):
        refuse(OP_LOAD, "state-layer", "layer_id", f"{layer_id} of {src.size(1)}")
    return _pairs(OP_LOAD, dst_indices, src_indices, (dst.size(0), src.size(0)))


def backup_pairs(
    device_states: Sequence[torch.Tensor],
    host_states: Sequence[torch.Tensor],
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    flags: int,
) -> list[tuple[int, int]]:
    """Checks a backup of all layers; (device slot, host slot) pairs.

    Raises:
        OpRefused: rows of ``docs/refusals.md``.
    """
    if not device_states or len(device_states) != len(host_states):
        refuse(OP_BACKUP, "state-count", "host_states", f"{len(host_states)} beside {len(device_states)} components")
    if not flags & _FLAG_2D:
        refuse(OP_BACKUP, "state-flags", "flags", flags)
    if device_indices.numel() == host_indices.numel() == 0:
        return []
    for device, host in zip(device_states, host_states, strict=True):
        _check_pair(OP_BACKUP, device, host, layered=True)
    limits = min(x.size(1) for x in device_states), min(x.size(0) for x in host_states)
    return _pairs(OP_BACKUP, device_indices, host_indices, limits)


def transfer_state_per_layer_direct_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    flags: int,
) -> None:
    """Loads one layer's states of some slots from the host.

    Args:
        src: Shape: [host slots, layers, 1, ...].
        dst: one layer. Shape: [device slots, ...]. *Mutated*.
        src_indices: host slots; any integer dtype.
        dst_indices: device slots, as many.
        layer_id: layer of the host pool.
        flags: Bit 1 must be set.

    Raises:
        OpRefused: rows of ``docs/refusals.md``; nothing moves then.

    Source:
        Op of the same name in the library sgl-kernel-npu.
    """
    for device_slot, host_slot in load_pairs(src, dst, src_indices, dst_indices, layer_id, flags):
        dst[device_slot].copy_(src[host_slot, layer_id, 0])


def transfer_state_all_layer_direct_lf_pf(
    device_states: Sequence[torch.Tensor],
    host_states: Sequence[torch.Tensor],
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    flags: int,
) -> None:
    """Saves all layers' states of some slots to the host.

    Args:
        device_states: components. Shape: [layers, device slots, ...] each.
        host_states: as many. Shape: [host slots, layers, 1, ...] each. *Mutated*.
        device_indices: device slots; any integer dtype.
        host_indices: host slots, as many.
        flags: Bit 1 must be set.

    Raises:
        OpRefused: rows of ``docs/refusals.md``; nothing moves then.

    Source:
        Op of the same name in the library sgl-kernel-npu.
    """
    pairs = backup_pairs(device_states, host_states, device_indices, host_indices, flags)
    for device, host in zip(device_states, host_states, strict=True):
        for device_slot, host_slot in pairs:
            host[host_slot, :, 0].copy_(device[:, device_slot])


for _schema in SCHEMAS:
    define(_schema)
KERNELS = {OP_LOAD: transfer_state_per_layer_direct_pf_lf, OP_BACKUP: transfer_state_all_layer_direct_lf_pf}
