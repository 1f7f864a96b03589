"""Owns the contracts of cache locations: which KV slots the tokens of a step read and write.

Slots come from `req_to_token`, one row a request. A position outside the row, a pool index outside the table and a
stored -1 give slot 0, which lies in the reserved page 0: no overrun reads a neighbour's row, and -1 never becomes an
address. It does not allocate slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_kernels._checks import check_disjoint, check_number, check_tensor, output
from spec_kernels.dispatch import BackendName, choose, load

__all__ = [
    "LocsAndPositions",
    "compact_window_rows",
    "draft_cache_locs",
    "extend_cache_locs",
    "front_cache_locs",
    "translate_locs",
    "uniform_cache_locs",
]


class LocsAndPositions(NamedTuple):
    """Slots of tokens and the positions of tokens or branches.

    Attributes:
        locs: KV slots; dtype of the table, unless the caller's output says int64.
        positions: dtype int64.
    """

    locs: torch.Tensor
    positions: torch.Tensor


def check_table(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, **rows: torch.Tensor) -> int:
    """Check a slot table and values of each of its requests; the number of requests."""
    check_tensor("req_to_token", req_to_token, ("requests", "positions"))
    check_tensor("req_pool_indices", req_pool_indices, ("bs",), device=req_to_token.device)
    bs = int(req_pool_indices.shape[0])
    for name, tensor in rows.items():
        check_tensor(name, tensor, (bs,), device=req_to_token.device)
    return bs


def uniform_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    *,
    width: int,
    out: torch.Tensor | None = None,
    positions_out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> LocsAndPositions:
    """Return the slots of `width` consecutive positions of each request, as a verify block writes them.

    Args:
        req_to_token: Slot of each position of each request. Shape: [requests, positions]; dtype int32 or int64; any
            strides.
        req_pool_indices: Table row of each request. Shape: [bs]; dtype int32 or int64.
        starts: First position of each request. Shape: [bs]; dtype int32 or int64.
        width: Positions a request.
        out: Where slots go. Shape: [bs * width]; at least as wide as the table's dtype. None: a new tensor.
        positions_out: Where positions go. Shape: [bs * width]. None: a new int64 tensor.
        backend: Insist on a backend.

    Returns:
        Slots and `starts + 0..width-1`, both of shape [bs * width].

    Padding: what lies outside the table gives slot 0. Zero requests write nothing.

    Mutates: `out` and `positions_out`, every element.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.
        IndexWidthError: `out` is narrower than the table.
        AliasError: An output shares memory with another argument.

    Source: contracts.md §1.3, `assign_extend_cache_locs_uniform`.
    """
    check_table(req_to_token, req_pool_indices, starts=starts)
    check_number("width", width, least=1)
    return _consecutive(req_to_token, req_pool_indices, starts, width, width, out, positions_out, backend)


def draft_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    steps: int,
    out: torch.Tensor | None = None,
    positions_out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> LocsAndPositions:
    """Return the slots that the draft steps write: `topk * steps` consecutive ones from each request's length on.

    Args:
        req_to_token: See `uniform_cache_locs`.
        req_pool_indices: See `uniform_cache_locs`.
        seq_lens: Committed tokens of each request. Shape: [bs]; dtype int32 or int64.
        topk: Branches.
        steps: Draft steps.
        out: Shape: [bs * topk * steps].
        positions_out: Shape: [bs * topk].
        backend: Insist on a backend.

    Returns:
        Slots of shape [bs * topk * steps], branch by branch, and the first position of each branch, `seq_lens` repeated
        `topk` times, of shape [bs * topk].

    Padding, Mutates, Raises: as `uniform_cache_locs`.

    Source: contracts.md §1.3, `assign_draft_cache_locs_contiguous`.
    """
    check_table(req_to_token, req_pool_indices, seq_lens=seq_lens)
    check_number("topk", topk, least=1)
    check_number("steps", steps, least=1)
    return _consecutive(req_to_token, req_pool_indices, seq_lens, topk * steps, -topk, out, positions_out, backend)


def _consecutive(
    table: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor,
    width: int,
    per_row: int,
    out: torch.Tensor | None,
    positions_out: torch.Tensor | None,
    backend: BackendName | None,
) -> LocsAndPositions:
    """Positions a row: `per_row` counted ones, or `-per_row` copies of the start."""
    bs, device = int(indices.shape[0]), table.device
    locs = output("out", out, (bs * width,), dtype=table.dtype, device=device, holds=table.dtype)
    positions = output("positions_out", positions_out, (bs * abs(per_row),), dtype=torch.int64, device=device)
    inputs = {"req_to_token": table, "req_pool_indices": indices, "starts": starts}
    check_disjoint({"out": locs, "positions_out": positions}, inputs)
    chosen = choose("uniform_cache_locs", device, backend)
    if bs:
        load("uniform_cache_locs", chosen)(table, indices, starts, locs, positions, width, per_row)
    return LocsAndPositions(locs, positions)


def extend_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    total: int,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Return the slots of positions `starts[i]..ends[i]` of each request, one request after another.

    Args:
        req_to_token: See `uniform_cache_locs`.
        req_pool_indices: See `uniform_cache_locs`.
        starts: First position of each request. Shape: [bs]; dtype int32 or int64.
        ends: One past the last position; not above `starts` means no token. Shape: [bs]; dtype int32 or int64.
        total: Tokens that the output holds, known to the host.
        out: Where slots go. Shape: [total].
        backend: Insist on a backend.

    Returns:
        Shape: [total]; dtype of the table. Tokens past `total` are dropped.

    Padding: elements past the last token are 0; what lies outside the table gives slot 0.

    Mutates: `out`, every element.

    Raises: as `uniform_cache_locs`.

    Source: contracts.md §1.3, `assign_extend_cache_locs`; field_faults C12, C14.
    """
    bs = check_table(req_to_token, req_pool_indices, starts=starts, ends=ends)
    check_number("total", total, least=0)
    device = req_to_token.device
    locs = output("out", out, (total,), dtype=req_to_token.dtype, device=device, holds=req_to_token.dtype)
    inputs = {"req_to_token": req_to_token, "req_pool_indices": req_pool_indices, "starts": starts, "ends": ends}
    check_disjoint({"out": locs}, inputs)
    chosen = choose("extend_cache_locs", device, backend)
    if total and not bs:
        locs.zero_()
    elif total:
        load("extend_cache_locs", chosen)(req_to_token, req_pool_indices, starts, ends, locs)
    return locs


def front_cache_locs(
    out_cache_loc: torch.Tensor,
    num_front: torch.Tensor,
    *,
    width: int,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Pack the first `num_front[i]` slots of each request's window, one request after another.

    Args:
        out_cache_loc: Slots of the windows. Shape: [bs * width]; dtype int32 or int64.
        num_front: Slots to take of each window; more than `width` gives slot 0 past its end. Shape: [bs]; dtype int32
            or int64.
        width: Slots of a window.
        out: Shape: [bs * width].
        backend: Insist on a backend.

    Returns:
        Shape: [bs * width]; dtype of the slots.

    Padding, Mutates, Raises: as `extend_cache_locs`.

    Source: contracts.md §1.3, `fill_front_out_cache_loc_func`.
    """
    check_number("width", width, least=1)
    check_tensor("num_front", num_front, ("bs",))
    bs = int(num_front.shape[0])
    check_tensor("out_cache_loc", out_cache_loc, (bs * width,), device=num_front.device)
    windows = out_cache_loc.reshape(bs, width)
    rows = torch.arange(bs, device=num_front.device)
    starts = torch.zeros_like(num_front)
    return extend_cache_locs(windows, rows, starts, num_front, total=bs * width, out=out, backend=backend)


def translate_locs(
    locs: torch.Tensor,
    page_map: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Translate slots of one pool into those of another, page by page: virtual to physical, or full to window.

    Args:
        locs: Slots. Shape: [tokens]; dtype int32 or int64.
        page_map: Page of the other pool for each page; -1 where it has none. Shape: [pages]; dtype int32 or int64.
        page_size: Tokens in a page; 1 for a map of single slots.
        out: Shape: [tokens]; int64.
        backend: Insist on a backend.

    Returns:
        `page_map[loc // page_size] * page_size + loc % page_size`, computed in int64. Shape: [tokens]; dtype int64.

    Padding: slots below 1, pages outside the map and pages that map below 1 give 0.

    Mutates: `out`, every element.

    Raises: as `uniform_cache_locs`.

    Source: contracts.md §1.3 and §4.2 (`full_to_swa`); field_faults D05.
    """
    check_tensor("locs", locs, ("tokens",))
    check_tensor("page_map", page_map, ("pages",), device=locs.device)
    check_number("page_size", page_size, least=1)
    found = output("out", out, locs.shape, dtype=torch.int64, device=locs.device, holds=torch.int64)
    check_disjoint({"out": found}, {"locs": locs, "page_map": page_map})
    chosen = choose("translate_locs", locs.device, backend)
    if locs.numel():
        load("translate_locs", chosen)(locs, page_map, found, page_size)
    return found


def compact_window_rows(
    draft_req_to_token: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    verify_locs: torch.Tensor,
    *,
    backend: BackendName | None = None,
) -> None:
    """Rebuild the draft's table rows from a window of the target's row and the slots of the verify block.

    Row `req_pool_indices[i]` becomes `lengths[i]` slots of the target from position `starts[i]` on, then the verify
    slots, then zeros.

    Args:
        draft_req_to_token: Shape: [requests, draft positions]; dtype int32 or int64.
        req_to_token: The target's table. Shape: [requests, positions]; dtype not wider than the draft's.
        req_pool_indices: Distinct rows; an index outside the tables is skipped. Shape: [bs].
        starts: First position of the window. Shape: [bs].
        lengths: Positions of the window; below 0 counts as 0. Shape: [bs].
        verify_locs: Shape: [bs, width]; any strides; dtype of either table.
        backend: Insist on a backend.

    Padding: what lies outside the target's row gives slot 0; what does not fit the draft's row is dropped.

    Mutates: the named rows of `draft_req_to_token`, every column.

    Raises: as `uniform_cache_locs`.

    Source: contracts.md §1.3, `rebuild_compact_draft_req_to_token`.
    """
    bs = check_table(req_to_token, req_pool_indices, starts=starts, lengths=lengths)
    check_tensor("verify_locs", verify_locs, (bs, "width"), device=req_to_token.device)
    wide = torch.promote_types(req_to_token.dtype, verify_locs.dtype)
    shape = (int(req_to_token.shape[0]), int(draft_req_to_token.shape[-1]))
    output("draft_req_to_token", draft_req_to_token, shape, dtype=wide, device=req_to_token.device, holds=wide)
    check_disjoint(
        {"draft_req_to_token": draft_req_to_token}, {"req_to_token": req_to_token, "verify_locs": verify_locs}
    )
    chosen = choose("compact_window_rows", req_to_token.device, backend)
    if bs and draft_req_to_token.numel():
        load("compact_window_rows", chosen)(
            draft_req_to_token, req_to_token, req_pool_indices, starts, lengths, verify_locs
        )
