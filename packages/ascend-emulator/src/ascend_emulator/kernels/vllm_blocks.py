"""vLLM-Ascend's moves of cache blocks: store_kv_block with its plan, transpose_kv_cache_by_block, swap_blocks[_batch].

This module owns the ops' definitions (torch_npu has none), their refusals and their meaning on CPU tensors. When the
swapped bytes move on a device is decided in ``_defined_ops.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .definitions import define
from .errors import DeviceFault
from .rules import declare, note, refuse

OP_PLAN, OP_STORE = "_C_ascend::store_kv_block_metadata", "_C_ascend::store_kv_block"
OP_TRANSPOSE = "_C_ascend::transpose_kv_cache_by_block"
OP_SWAP, OP_SWAP_BATCH = "_C_ascend::swap_blocks", "_C_ascend::swap_blocks_batch"
SCHEMAS = (
    "store_kv_block_metadata(Tensor slot_mapping_npu, Tensor group_len, Tensor group_key_idx, "
    "Tensor group_key_cache_idx, int block_size=0) -> ()",
    "store_kv_block(Tensor key_in, Tensor key_cache_in, Tensor group_len, Tensor group_key_idx, "
    "Tensor group_key_cache_idx, int block_size=0) -> ()",
    "transpose_kv_cache_by_block(Tensor[] kCache, Tensor[] vCache, Tensor blockIDs, int blockSize, int headNum, "
    "int headDim, int splitNum, int layerNum) -> ()",
    "swap_blocks(Tensor! x, Tensor! y, Tensor z) -> ()",
    "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()",
)
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 0, 1, 2
_UB_BYTES = 180 * 1024
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_TEST = "test_kernels_vllm_blocks.py"

declare(
    "_C_ascend::store_kv_block_metadata, store_kv_block",
    _SOURCE + "attention/store_kv_block, store_kv_block_metadata",
    _TEST,
    {
        "store-numbers": (
            "contiguous int32 numbers of one axis, with elements; the three of the plan equally long, and of the plan "
            "at least as long as slot_mapping_npu",
            "allocate three as long as the slots",
        ),
        "store-block-size": ("a block_size above 0", "pass the cache's"),
    },
)
declare(
    OP_STORE,
    _SOURCE + "attention/store_kv_block/op_host",
    _TEST,
    {
        "store-rank": ("a key_in and a cache of 2 to 7 axes, contiguous", "reshape them"),
        "store-dtype": (
            "int8, float16 or bfloat16 alike for both (int32: the kernel has it, its list has not)",
            "view them so",
        ),
        "store-room": (f"a block of at most {_UB_BYTES} elements", "use smaller blocks"),
    },
)
declare(
    OP_TRANSPOSE,
    _SOURCE + "moe/transpose_kv_cache_by_block/op_host",
    _TEST,
    {
        "turn-dtype": ("float16 or bfloat16 caches, int64 blockIDs", "cast them"),
        "turn-dim": ("a headDim of whole 32 bytes: a multiple of 16", "pad the heads"),
        "turn-shape": (
            "layerNum caches of K and of V, contiguous (blocks, blockSize, headNum, headDim) each (the kernel reads V "
            "with K's width), a headNum of a multiple of splitNum",
            "pass the layers' pools; reformat pools with two widths in another way",
        ),
    },
)
declare(
    "_C_ascend::swap_blocks, swap_blocks_batch",
    _SOURCE + "torch_binding.cpp",
    _TEST,
    {
        "swap-mapping": ("a CPU z of int64 (blocks, 2)", "pass pairs of source and destination"),
        "swap-shape": ("contiguous x and y of one dtype with blocks of one size", "pass the pools themselves"),
        "swap-device": ("x, y or both on one NPU", "copy between host tensors with torch"),
        "swap-pointers": ("three CPU int64 tensors of one length", "pass addresses and sizes"),
        "swap-direction": (
            "a direction of 0 (host to device), 1 (device to host) or 2 (device to device)",
            "pass one of them",
        ),
    },
)
note(
    "_C_ascend::store_kv_block_metadata, store_kv_block, transpose_kv_cache_by_block",
    "schemas without a mark on what they write",
    _SOURCE + "torch_binding.cpp",
    "the plan's three, the cache, and both lists of caches are written",
)
note(
    "_C_ascend::store_kv_block, transpose_kv_cache_by_block, swap_blocks",
    "(not documented) rows and blocks within the tensors",
    "—",
    "others are a `DeviceFault` (507015), also the index behind the last block, which the host code of swap_blocks "
    "takes: " + _TEST,
)
note(
    OP_SWAP_BATCH,
    "addresses of pinned host memory and of device memory, as the direction says",
    "CANN, aclrtMemcpyAsync: host memory of aclrtMallocHost",
    "others are a `DeviceFault` (507015), and nothing moves: " + _TEST,
)


def _check_plan(op: str, block_size: int, **numbers: torch.Tensor) -> None:
    for name, tensor in numbers.items():
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.numel() or not tensor.is_contiguous():
            refuse(op, "store-numbers", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    sizes = {name: tensor.numel() for name, tensor in numbers.items()}
    slots = sizes.pop("slot_mapping_npu", 0)
    if len(set(sizes.values())) > 1 or min(sizes.values()) < slots:
        refuse(op, "store-numbers", "group_len", f"{sizes} for {slots} slots")
    if block_size <= 0:
        refuse(op, "store-block-size", "block_size", block_size)


def store_kv_block_metadata(
    slot_mapping_npu: torch.Tensor,
    group_len: torch.Tensor,
    group_key_idx: torch.Tensor,
    group_key_cache_idx: torch.Tensor,
    block_size: int = 0,
) -> None:
    """Joins tokens whose slots follow one another within a block.

    Args:
        slot_mapping_npu: slot of each token, negative for none. Shape: [tokens]; int32.
        group_len: tokens of each group, then zeros. Shape: [at least tokens]; int32. *Mutated*, as the next two.
        group_key_idx: first token of each group.
        group_key_cache_idx: first slot of each group.
        block_size: slots of a block.

    Raises:
        OpRefused: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/attention/store_kv_block_metadata.
    """
    plan = {"group_len": group_len, "group_key_idx": group_key_idx, "group_key_cache_idx": group_key_cache_idx}
    _check_plan(OP_PLAN, block_size, slot_mapping_npu=slot_mapping_npu, **plan)
    groups: list[list[int]] = []
    before = None
    for token, slot in enumerate(slot_mapping_npu.tolist()):
        if slot >= 0:
            if before is not None and slot == before + 1 and slot // block_size == before // block_size:
                groups[-1][0] += 1
            else:
                groups.append([1, token, slot])
        before = slot if slot >= 0 else None
    for column, target in enumerate(plan.values()):
        target.zero_()
        target[: len(groups)] = torch.tensor([group[column] for group in groups], dtype=torch.int32)


def store_kv_block(
    key_in: torch.Tensor,
    key_cache_in: torch.Tensor,
    group_len: torch.Tensor,
    group_key_idx: torch.Tensor,
    group_key_cache_idx: torch.Tensor,
    block_size: int = 0,
) -> None:
    """Copies the groups of a plan from rows of keys to slots of a cache.

    Args:
        key_in: Shape: [tokens, ...]; int8, float16 or bfloat16.
        key_cache_in: slots one after the other, each of a token's elements; dtype of ``key_in``. *Mutated*.
        group_len: from ``store_kv_block_metadata``, as the next two; groups of 0 are skipped.
        group_key_idx: first token of each group.
        group_key_cache_idx: first slot of each group.
        block_size: slots of a block, the most tokens of a group.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/attention/store_kv_block.
    """
    plan = {"group_len": group_len, "group_key_idx": group_key_idx, "group_key_cache_idx": group_key_cache_idx}
    _check_plan(OP_STORE, block_size, **plan)
    for name, tensor in (("key_in", key_in), ("key_cache_in", key_cache_in)):
        if not 2 <= tensor.dim() <= 7 or not tensor.is_contiguous() or not tensor.size(0):
            refuse(OP_STORE, "store-rank", name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")
        if tensor.dtype not in (torch.int8, torch.float16, torch.bfloat16) or tensor.dtype != key_in.dtype:
            refuse(OP_STORE, "store-dtype", name, tensor.dtype)
    width = key_in[0].numel()
    if block_size * width > _UB_BYTES:
        refuse(OP_STORE, "store-room", "block_size", f"{block_size} slots of {width} elements")
    source, target = key_in.view(-1), key_cache_in.view(-1)
    for number, (count, token, slot) in enumerate(zip(*(part.tolist() for part in plan.values()), strict=True)):
        if count <= 0 or token < 0 or slot < 0:
            continue
        if count > block_size or token + count > key_in.size(0) or (slot + count) * width > target.numel():
            detail = f"group {number} copies {count} of {key_in.size(0)} tokens from {token} to slot {slot}"
            raise DeviceFault(OP_STORE, detail, slot=slot)
        target[slot * width : (slot + count) * width] = source[token * width : (token + count) * width]


def transpose_kv_cache_by_block(
    kCache: Sequence[torch.Tensor],
    vCache: Sequence[torch.Tensor],
    blockIDs: torch.Tensor,
    blockSize: int,
    headNum: int,
    headDim: int,
    splitNum: int,
    layerNum: int,
) -> None:
    """Turns blocks that arrived as one part of the heads after the other into blocks with all heads a token.

    Args:
        kCache: Shape: [blocks, blockSize, headNum, headDim] each; float16 or bfloat16. *Mutated*.
        vCache: the same. *Mutated*.
        blockIDs: blocks to turn. Shape: [n]; int64.
        blockSize: tokens of a block.
        headNum: heads.
        headDim: width of a head.
        splitNum: parts that the heads arrived in.
        layerNum: number of caches.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/moe/transpose_kv_cache_by_block.
    """
    if blockIDs.dtype != torch.int64 or blockIDs.dim() != 1:
        refuse(OP_TRANSPOSE, "turn-dtype", "blockIDs", f"{blockIDs.dtype}, shape {tuple(blockIDs.shape)}")
    if headDim % 16:
        refuse(OP_TRANSPOSE, "turn-dim", "headDim", headDim)
    for name, caches in (("kCache", kCache), ("vCache", vCache)):
        if len(caches) != layerNum or splitNum < 1 or headNum % splitNum:
            refuse(OP_TRANSPOSE, "turn-shape", name, f"{len(caches)} of {layerNum}, {headNum} heads in {splitNum}")
        for cache in caches:
            if cache.dtype not in (torch.float16, torch.bfloat16):
                refuse(OP_TRANSPOSE, "turn-dtype", name, cache.dtype)
            if tuple(cache.shape[1:]) != (blockSize, headNum, headDim) or not cache.is_contiguous():
                refuse(OP_TRANSPOSE, "turn-shape", name, f"shape {tuple(cache.shape)}, strides {cache.stride()}")
    ids: list[int] = blockIDs.tolist()
    for cache in (*kCache, *vCache):
        for block in ids:
            if not 0 <= block < cache.size(0):
                raise DeviceFault(OP_TRANSPOSE, f"block {block} of {cache.size(0)}", page=block)
    for cache in (*kCache, *vCache):
        parts = cache.view(cache.size(0), splitNum, blockSize, -1)
        for block in ids:
            cache[block] = parts[block].transpose(0, 1).contiguous().clone().view(cache.shape[1:])


def swap_pairs(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[tuple[int, int]]:
    """Checks a call of ``swap_blocks``; (source block, destination block) pairs.

    Raises:
        OpRefused, DeviceFault: see ``errors``.
    """
    if z.device.type != "cpu" or z.dtype != torch.int64 or z.dim() != 2 or z.size(1) != 2:
        refuse(OP_SWAP, "swap-mapping", "z", f"{z.device}, {z.dtype}, shape {tuple(z.shape)}")
    alike = x.dtype == y.dtype and x.shape[1:] == y.shape[1:] and x.dim() > 0
    if not alike or not x.is_contiguous() or not y.is_contiguous():
        refuse(OP_SWAP, "swap-shape", "y", f"{y.dtype}, shape {tuple(y.shape)} beside {x.dtype}, {tuple(x.shape)}")
    pairs = [(int(source), int(target)) for source, target in z.tolist()]
    for source, target in pairs:
        if not 0 <= source < x.size(0) or not 0 <= target < y.size(0):
            raise DeviceFault(OP_SWAP, f"block {source} of {x.size(0)} to block {target} of {y.size(0)}", page=source)
    return pairs


def swap_blocks(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    """Copies blocks of ``x`` to blocks of ``y``.

    Args:
        x: Shape: [blocks, ...].
        y: Shape: [blocks, ...], with blocks of the same shape and dtype. *Mutated*.
        z: pairs of source and destination. Shape: [n, 2]; int64, on the CPU.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/torch_binding.cpp.
    """
    for source, target in swap_pairs(x, y, z):
        y[target] = x[source]


def batch_moves(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, direction: int) -> list[tuple[int, int, int]]:
    """Checks a call of ``swap_blocks_batch``; (source address, destination address, bytes) of each copy.

    Raises:
        OpRefused: see ``errors``.
    """
    for name, tensor in (("x", x), ("y", y), ("z", z)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.int64 or tensor.shape != x.shape or x.dim() != 1:
            refuse(OP_SWAP_BATCH, "swap-pointers", name, f"{tensor.device}, {tensor.dtype}, {tuple(tensor.shape)}")
    if direction not in (HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE):
        refuse(OP_SWAP_BATCH, "swap-direction", "direction", direction)
    return list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))


def swap_blocks_batch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, direction: int) -> None:
    """Copies bytes between addresses.

    Args:
        x: source addresses. Shape: [n]; int64, on the CPU, as the next two.
        y: destination addresses.
        z: bytes of each copy.
        direction: 0 host to device, 1 device to host, 2 device to device.

    Raises:
        OpRefused: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/torch_binding.cpp.
    """
    for source, target, count in batch_moves(x, y, z, direction):
        ctypes.memmove(target, source, count)


for _schema in SCHEMAS:
    define(_schema, "_C_ascend", None if "swap" in _schema else lambda *args: None)
UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    OP_PLAN: ("group_len", "group_key_idx", "group_key_cache_idx"),
    OP_STORE: ("key_cache_in",),
    OP_TRANSPOSE: ("kCache", "vCache"),
}
KERNELS: dict[str, Callable[..., Any]] = {
    OP_PLAN: store_kv_block_metadata,
    OP_STORE: store_kv_block,
    OP_TRANSPOSE: transpose_kv_cache_by_block,
    OP_SWAP: swap_blocks,
    OP_SWAP_BATCH: swap_blocks_batch,
}
