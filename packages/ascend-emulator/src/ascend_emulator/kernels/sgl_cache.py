"""Ops of sgl_kernel_npu over slot tables: cache_loc_assign, cache_loc_update, assign_cache_op and alloc_extend.

This module owns the ops' definitions (torch_npu has none), their refusals and their limits, which the library's own
checks leave to the device.
"""

from __future__ import annotations

import torch

from .definitions import define
from .errors import DeviceFault
from .rules import declare, note, refuse

OP_ASSIGN = "npu::cache_loc_assign"
OP_UPDATE = "npu::cache_loc_update"
OP_COPY = "npu::assign_cache_op"
OP_EXTEND = "npu::alloc_extend"
_LOC = "npu::cache_loc_assign, cache_loc_update"
_SOURCE = "sgl-kernel-npu f425bdf, csrc/"
_TEST = "test_kernels_sgl.py"
MAX_STEP = 16
"""Positions of one row that the kernel of cache_loc_assign and cache_loc_update holds."""
SCHEMAS = (
    "cache_loc_assign(Tensor req_indices, Tensor token_pool, Tensor start_offset, Tensor end_offset, "
    "Tensor out_cache_loc) -> Tensor",
    "cache_loc_update(Tensor req_indices, Tensor token_pool, Tensor start_offset, Tensor end_offset, "
    "Tensor out_cache_loc) -> Tensor",
    "assign_cache_op(Tensor(a!) out, Tensor src, Tensor dst_start_idx, Tensor dst_end_idx, Tensor src_start_idx, "
    "Tensor src_end_idx) -> bool",
    "alloc_extend(Tensor pre_lens, Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size, "
    "Tensor(a!) out_indices, Tensor(b!) values) -> ()",
)

declare(
    _LOC,
    _SOURCE + "cache_location_assign/op_host",
    _TEST,
    {
        "cache-loc-dtype": (
            "int32 or int64 requests, int32 token_pool, int64 offsets, int32 out_cache_loc",
            "cast them; SGLang's slot tables are int32",
        ),
    },
)
declare(
    "npu::assign_cache_op",
    _SOURCE + "assign_cache_op/op_host",
    _TEST,
    {
        "assign-shape": ("out and src of 1 axis or more, one offset a row", "pass four offsets for each row"),
        "assign-dtype": ("out and src of one dtype, int64 offsets", "cast them"),
    },
)
declare(
    "npu::alloc_extend",
    _SOURCE + "alloc_extend/op_host",
    _TEST,
    {"alloc-dtype": ("int64 throughout", "call .long() on lengths, pages and outputs")},
)
note(
    _LOC,
    f"at most {MAX_STEP} positions a row (MAX_STEP)",
    _SOURCE + "cache_location_assign/op_kernel",
    "the library does not check it and reads its neighbour's buffer; here a `DeviceFault` (507015): " + _TEST,
)
note(
    _LOC,
    f"out_cache_loc of rows * {MAX_STEP} elements",
    _SOURCE + "cache_location_assign/op_host",
    "smaller ones are taken, as engines pass them; on a device cache_loc_update rewrites what lies behind them with "
    "its "
    "own old content, which races with other writers of that memory",
)
note(_LOC, "(not checked) requests and offsets within the pool", "—", "others are a `DeviceFault` (507015): " + _TEST)
note(
    "npu::alloc_extend",
    "values[0], the number of pages used, is written only when the last request ends within a page that it opened",
    _SOURCE + "alloc_extend/op_kernel",
    "as the kernel does it; otherwise values keep what they had: " + _TEST,
)
note("npu::alloc_extend", "(not checked) enough free pages", "—", "too few are a `DeviceFault` (507015): " + _TEST)


def _spans(
    op: str,
    requests: torch.Tensor,
    pool: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
) -> list[tuple[int, int, int, int]]:
    """(request, first position, end, place in out) of each row."""
    dtypes = {"token_pool": (pool, torch.int32), "start_offset": (start, torch.int64)}
    dtypes |= {"end_offset": (end, torch.int64), "out_cache_loc": (out, torch.int32)}
    if requests.dtype not in (torch.int32, torch.int64):
        refuse(op, "cache-loc-dtype", "req_indices", requests.dtype)
    for name, (tensor, dtype) in dtypes.items():
        if tensor.dtype != dtype:
            refuse(op, "cache-loc-dtype", name, tensor.dtype)
    spans, place = [], 0
    for row, (request, first, last) in enumerate(zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)):
        count = max(0, last - first)
        if count > MAX_STEP:
            raise DeviceFault(op, f"row {row} covers {count} positions, the kernel holds {MAX_STEP} of a row")
        if not 0 <= request < pool.size(0) or not 0 <= first <= first + count <= pool.size(1):
            raise DeviceFault(op, f"row {row} covers [{request}, {first}:{last}] of a pool of {tuple(pool.shape)}")
        if place + count > out.numel():
            raise DeviceFault(op, f"row {row} needs out_cache_loc up to {place + count}, it has {out.numel()}")
        spans.append((request, first, first + count, place))
        place += count
    return spans


def cache_loc_assign(
    req_indices: torch.Tensor,
    token_pool: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> torch.Tensor:
    """Writes each row's slots into its request's row of the slot table.

    Args:
        req_indices: Shape: [rows]; int32 or int64.
        token_pool: Shape: [requests, positions]; int32. *Mutated*.
        start_offset: Shape: [rows]; int64.
        end_offset: Shape: [rows]; int64; at most 16 above the start.
        out_cache_loc: slots, one row after the other; int32.

    Returns:
        ``token_pool``.

    Raises:
        OpRefused, DeviceFault: see ``errors``; nothing is written then.

    Source:
        sgl-kernel-npu, csrc/cache_location_assign.
    """
    slots = out_cache_loc.view(-1)
    for request, first, last, place in _spans(OP_ASSIGN, req_indices, token_pool, start_offset, end_offset, slots):
        token_pool[request, first:last] = slots[place : place + last - first]
    return token_pool


def cache_loc_update(
    req_indices: torch.Tensor,
    token_pool: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> torch.Tensor:
    """Reads each row's slots from the slot table; the other way round of ``cache_loc_assign``.

    *Mutates* and returns ``out_cache_loc``.
    """
    slots = out_cache_loc.view(-1)
    for request, first, last, place in _spans(OP_UPDATE, req_indices, token_pool, start_offset, end_offset, slots):
        slots[place : place + last - first] = token_pool[request, first:last]
    return out_cache_loc


def assign_cache_op(
    out: torch.Tensor,
    src: torch.Tensor,
    dst_start_idx: torch.Tensor,
    dst_end_idx: torch.Tensor,
    src_start_idx: torch.Tensor,
    src_end_idx: torch.Tensor,
) -> bool:
    """Copies a slice of each row: ``out[i, dst_start:dst_end] = src[i, src_start:src_end]``.

    Args:
        out: Shape: [rows, n]. *Mutated*.
        src: Shape: [rows, m]; dtype of ``out``.
        dst_start_idx: Shape: [rows]; int64, as the three others.
        dst_end_idx: Shape: [rows].
        src_start_idx: Shape: [rows].
        src_end_idx: Shape: [rows].

    Returns:
        True.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu, csrc/assign_cache_op.
    """
    offsets = {"dst_start_idx": dst_start_idx, "dst_end_idx": dst_end_idx}
    offsets |= {"src_start_idx": src_start_idx, "src_end_idx": src_end_idx}
    if out.dim() != 2 or src.dim() != 2 or src.size(0) != out.size(0):
        refuse(OP_COPY, "assign-shape", "src", f"shape {tuple(src.shape)} for an out of {tuple(out.shape)}")
    for name, tensor in offsets.items():
        if tuple(tensor.shape) != (out.size(0),):
            refuse(OP_COPY, "assign-shape", name, f"shape {tuple(tensor.shape)} for {out.size(0)} rows")
        if tensor.dtype != torch.int64:
            refuse(OP_COPY, "assign-dtype", name, tensor.dtype)
    if src.dtype != out.dtype:
        refuse(OP_COPY, "assign-dtype", "src", f"{src.dtype} beside an out of {out.dtype}")
    for row, (to, to_end, at, at_end) in enumerate(zip(*(x.tolist() for x in offsets.values()), strict=True)):
        fits = 0 <= to <= to_end <= out.size(1) and 0 <= at <= at_end <= src.size(1) and to_end - to == at_end - at
        if not fits:
            raise DeviceFault(OP_COPY, f"row {row} copies [{at}:{at_end}] of {src.size(1)} to [{to}:{to_end}]")
        out[row, to:to_end] = src[row, at:at_end]
    return True


def alloc_extend(
    pre_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    out_indices: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Gives each request's new tokens slots: the rest of its last page, then free pages in order.

    Args:
        pre_lens: tokens that requests have. Shape: [requests]; int64.
        seq_lens: tokens that they shall have. Shape: [requests]; int64.
        last_loc: slot of each request's last token. Shape: [requests]; int64.
        free_pages: page ids; int64.
        page_size: tokens in a page.
        out_indices: Shape: [at least the new tokens]; int64. *Mutated*.
        values: values[0] becomes the pages used, under the condition in ``docs/refusals.md``; int64. *Mutated*.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu, csrc/alloc_extend.
    """
    named = {"pre_lens": pre_lens, "seq_lens": seq_lens, "last_loc": last_loc, "free_pages": free_pages}
    for name, tensor in (named | {"out_indices": out_indices, "values": values}).items():
        if tensor.dtype != torch.int64:
            refuse(OP_EXTEND, "alloc-dtype", name, tensor.dtype)
    pages, taken, slots, opened = free_pages.tolist(), 0, [], False
    for row, (before, after, last) in enumerate(
        zip(pre_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True)
    ):
        whole = -(-before // page_size) * page_size
        rest = min(after, whole) - before
        slots += [last + 1 + i for i in range(rest)]
        needed = max(0, -(-after // page_size) - -(-before // page_size))
        if taken + needed > len(pages):
            raise DeviceFault(OP_EXTEND, f"request {row} needs {needed} pages, {len(pages) - taken} are free")
        for page in pages[taken : taken + needed]:
            slots += [page * page_size + i for i in range(min(page_size, after - whole))]
            whole += page_size
        taken += needed
        opened = needed > 0 and after % page_size != 0
    if len(slots) > out_indices.numel():
        raise DeviceFault(OP_EXTEND, f"{len(slots)} new tokens for {out_indices.numel()} elements of out_indices")
    out_indices[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
    if opened:
        values[0] = taken


for _schema in SCHEMAS:
    define(_schema)
UNDECLARED_WRITES = {OP_ASSIGN: ("token_pool",), OP_UPDATE: ("out_cache_loc",)}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {
    OP_ASSIGN: cache_loc_assign,
    OP_UPDATE: cache_loc_update,
    OP_COPY: assign_cache_op,
    OP_EXTEND: alloc_extend,
}
