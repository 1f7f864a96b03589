"""npu::transfer_kv_dim_exchange: whole pages between device [layers, pages, …] and host [pages, layers, …].

This module owns the op's definition (torch_npu has none; the library sgl_kernel_npu brings it), its refusals and its
meaning on CPU tensors. When the bytes move on a device is decided in ``_defined_ops.py``.
"""

from __future__ import annotations

import torch

from .definitions import define
from .rules import declare, note, refuse

OP = "npu::transfer_kv_dim_exchange"
SCHEMA = (
    "transfer_kv_dim_exchange(Tensor device_k, Tensor host_k, Tensor device_v, Tensor host_v, "
    "Tensor device_indices, Tensor host_indices, int page_size, int direct, int flags) -> ()"
)
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
_FLAG_2D = 2
_SOURCE = "sgl-kernel-npu, op transfer_kv_dim_exchange"

declare(
    OP,
    _SOURCE,
    "test_kernels_transfer.py",
    {
        "transfer-rank": ("tensors of 5 axes, an empty V too", "pass [layers, pages, page_size, heads, dim]"),
        "transfer-empty": ("a K with elements", "pass the pools"),
        "transfer-layers": ("as many layers on the host as on the device", "pass all layers of both pools"),
        "transfer-page-size": ("a positive page_size that is axis 2 of every tensor", "pass the pools' page size"),
        "transfer-contiguous": ("pages that are contiguous from axis 2 on", "pass the pools themselves"),
        "transfer-alike": (
            "a V with the layers, device pages, heads and item size of K, from which the op takes them",
            "move a V that differs in a call of its own, as K",
        ),
        "transfer-index-dtype": ("indices of dtype int64", "call .long() on the indices"),
        "transfer-index-count": ("as many device as host indices", "pass one host slot a device slot"),
        "transfer-index-whole": ("a multiple of page_size indices", "pass whole pages"),
        "transfer-direct": ("1 (host to device) or 2 (device to host)", "pass 1 or 2"),
        "transfer-flags": ("flags with bit 1 set (two-dimensional copies)", "pass 2"),
        "transfer-page": ("indices inside the pools", "pass slots of allocated pages"),
    },
)

note(
    "npu::transfer_kv_dim_exchange",
    "tensors of 5 axes with equal layers and the page size on axis 2, int64 indices of equal number in whole pages, "
    "direct 1 or 2, flags with bit 1, pages inside both pools",
    "sgl-kernel-npu, op of that name",
    "refused (161002), and nothing moves: test_kernels_transfer.py",
)
note(
    "npu::transfer_kv_dim_exchange",
    "indices that do not start a page, or do not follow one another",
    "none: the op looks at the first index of each page alone",
    "not refused, another page than meant may move: test_kernels_transfer.py",
)


def _check_pair(letter: str, device: torch.Tensor, host: torch.Tensor, page_size: int) -> None:
    for side, tensor in (("device", device), ("host", host)):
        name = f"{side}_{letter}"
        if tensor.dim() != 5:
            refuse(OP, "transfer-rank", name, f"shape {tuple(tensor.shape)}")
        if not tensor.numel():
            if letter == "k":
                refuse(OP, "transfer-empty", name, f"shape {tuple(tensor.shape)}")
            return
    for side, tensor in (("device", device), ("host", host)):
        if page_size < 1 or tensor.size(2) != page_size:
            refuse(OP, "transfer-page-size", f"{side}_{letter}", f"{tuple(tensor.shape)} with page_size {page_size}")
        if not tensor[0, 0].is_contiguous():
            refuse(OP, "transfer-contiguous", f"{side}_{letter}", f"strides {tensor.stride()}")
    if device.size(0) != host.size(1):
        refuse(OP, "transfer-layers", f"host_{letter}", f"{host.size(1)} layers beside {device.size(0)} of the device")


def _check_alike(device_k: torch.Tensor, device_v: torch.Tensor, host_v: torch.Tensor) -> None:
    if not device_v.numel() or not host_v.numel():
        return
    layers, pages, _, heads, _ = device_k.shape
    kept = (layers, pages, heads, device_k.element_size())
    found = (device_v.size(0), device_v.size(1), device_v.size(3), device_v.element_size())
    if found != kept:
        refuse(OP, "transfer-alike", "device_v", f"{found} beside {kept}")
    if (host_v.size(3), host_v.element_size()) != kept[2:]:
        refuse(OP, "transfer-alike", "host_v", f"{(host_v.size(3), host_v.element_size())} beside {kept[2:]}")


def page_pairs(
    device_k: torch.Tensor,
    host_k: torch.Tensor,
    device_v: torch.Tensor,
    host_v: torch.Tensor,
    device_indices: torch.Tensor,
    host_indices: torch.Tensor,
    page_size: int,
    direct: int,
    flags: int,
) -> list[tuple[int, int]]:
    """Checks a call and returns its (device page, host page) pairs.

    Only the first index of each group of ``page_size`` counts, rounded down to its page: that is what the op does, so
    indices that do not start a page or do not follow one another move a page nobody asked for.

    Raises:
        OpRefused: rows of ``docs/refusals.md``.
    """
    _check_pair("k", device_k, host_k, page_size)
    _check_pair("v", device_v, host_v, page_size)
    _check_alike(device_k, device_v, host_v)
    for name, indices in (("device_indices", device_indices), ("host_indices", host_indices)):
        if indices.dtype != torch.int64:
            refuse(OP, "transfer-index-dtype", name, indices.dtype)
    if device_indices.numel() != host_indices.numel():
        refuse(OP, "transfer-index-count", "host_indices", f"{host_indices.numel()} beside {device_indices.numel()}")
    if device_indices.numel() % page_size:
        refuse(OP, "transfer-index-whole", "device_indices", f"{device_indices.numel()} with page_size {page_size}")
    if direct not in (HOST_TO_DEVICE, DEVICE_TO_HOST):
        refuse(OP, "transfer-direct", "direct", direct)
    if not flags & _FLAG_2D:
        refuse(OP, "transfer-flags", "flags", flags)
    firsts = (indices.reshape(-1)[::page_size].tolist() for indices in (device_indices, host_indices))
    pairs = [(device // page_size, host // page_size) for device, host in zip(*firsts, strict=True)]
    for device, host in pairs:
        if not 0 <= device < device_k.size(1):
            refuse(OP, "transfer-page", "device_indices", f"page {device} of {device_k.size(1)}")
        if not 0 <= host < host_k.size(0):
            refuse(OP, "transfer-page", "host_indices", f"page {host} of {host_k.size(0)}")
    return pairs


def transfer_kv_dim_exchange(
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
    """Copies whole pages of all layers between a device pool and a host pool.

    Args:
        device_k: Shape: [layers, pages, page_size, heads, dim]; any dtype. *Mutated* when ``direct`` is 1.
        host_k: Shape: [pages, layers, page_size, heads, dim]. *Mutated* when ``direct`` is 2.
        device_v: As ``device_k`` with a dim of its own; or empty, of 5 axes.
        host_v: As ``host_k`` with V's dim; or empty.
        device_indices: Slots, ``page_size`` a page. Shape: [tokens]; int64.
        host_indices: Slots of the same number. Shape: [tokens]; int64.
        page_size: Tokens in a page.
        direct: 1 host to device, 2 device to host.
        flags: Bit 1 must be set.

    Raises:
        OpRefused: rows of ``docs/refusals.md``; nothing is copied then.

    Source:
        Op of the same name in the library sgl-kernel-npu; the check of page ids is that of its newer versions.
    """
    pairs = page_pairs(device_k, host_k, device_v, host_v, device_indices, host_indices, page_size, direct, flags)
    for device, host in ((device_k, host_k), (device_v, host_v)):
        if not device.numel() or not host.numel():
            continue
        for device_page, host_page in pairs:
            target, source = (device[:, device_page], host[host_page])[:: 1 if direct == HOST_TO_DEVICE else -1]
            target.copy_(source)


KERNELS = {OP: transfer_kv_dim_exchange}
define(SCHEMA)
