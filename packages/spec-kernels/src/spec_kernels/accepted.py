"""Owns what happens to the KV of accepted tokens: the list of their slots, and their moves to the front of each block.

It does not decide what is accepted, and it frees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from spec_kernels._checks import check_disjoint, check_number, check_tensor, output
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import ShapeError

__all__ = ["SlotMoves", "accepted_moves", "compact_accepted_locs", "move_kv"]


class SlotMoves(NamedTuple):
    """KV moves, token by token; a pair of zeros moves nothing.

    Attributes:
        sources: Slots to read. Shape: [moves]; dtype int64.
        targets: Slots to write. Shape: [moves]; dtype int64.
    """

    sources: torch.Tensor
    targets: torch.Tensor


def compact_accepted_locs(
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Pack the slots of accepted tokens to the front, in order.

    Args:
        out_cache_loc: Slots of the verify block. Shape: [tokens]; dtype int32 or int64.
        accept_index: Token rows that were accepted; what lies outside `out_cache_loc` (-1) is skipped. Its width is the
            longest chain plus one, not the block's. Shape: [bs, depth] or [entries]; dtype int32 or int64.
        out: Shape: [entries].
        backend: Insist on a backend.

    Returns:
        Shape: [entries]; dtype of the slots.

    Padding: elements past the last accepted slot are 0.

    Mutates: `out`, every element.

    Raises:
        ShapeError, DtypeError, DeviceError, IndexWidthError, AliasError: See `cache_locs.uniform_cache_locs`.

    Source: contracts.md §1.4, `fill_accept_out_cache_loc`; field_faults F03.
    """
    check_tensor("out_cache_loc", out_cache_loc, ("tokens",))
    flat = accept_index.reshape(-1)
    check_tensor("accept_index", flat, ("entries",), device=out_cache_loc.device)
    dtype = out_cache_loc.dtype
    packed = output("out", out, flat.shape, dtype=dtype, device=out_cache_loc.device, holds=dtype)
    check_disjoint({"out": packed}, {"out_cache_loc": out_cache_loc, "accept_index": accept_index})
    chosen = choose("compact_accepted_locs", out_cache_loc.device, backend)
    if flat.numel():
        load("compact_accepted_locs", chosen)(out_cache_loc, flat, packed)
    return packed


def accepted_moves(
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    *,
    width: int,
    sources_out: torch.Tensor | None = None,
    targets_out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> SlotMoves:
    """List the moves that put each request's accepted tokens into the first slots of its verify block.

    The token in column `j` of `accept_index` moves from its own slot to slot `j` of the request's block.

    Args:
        out_cache_loc: Slots of the verify block. Shape: [bs * width]; dtype int32 or int64.
        accept_index: Accepted token rows, then -1. Shape: [bs, depth], `depth <= width`; dtype int32 or int64.
        width: Tokens a request in the block.
        sources_out: Shape: [bs * depth]; dtype int64.
        targets_out: Shape: [bs * depth]; dtype int64.
        backend: Insist on a backend.

    Returns:
        The moves. A token that stays moves onto itself.

    Padding: entries outside the block give a pair of zeros.

    Mutates: both outputs, every element.

    Raises: as `compact_accepted_locs`.

    Source: field_faults F03, F04.
    """
    check_number("width", width, least=1)
    check_tensor("accept_index", accept_index, ("bs", "depth"))
    bs, depth = accept_index.shape
    check_number("accept_index.shape[1]", int(depth), least=0, most=width)
    device = accept_index.device
    check_tensor("out_cache_loc", out_cache_loc, (bs * width,), device=device)
    sources = output("sources_out", sources_out, (bs * depth,), dtype=torch.int64, device=device, holds=torch.int64)
    targets = output("targets_out", targets_out, (bs * depth,), dtype=torch.int64, device=device, holds=torch.int64)
    check_disjoint(
        {"sources_out": sources, "targets_out": targets}, {"out_cache_loc": out_cache_loc, "accept_index": accept_index}
    )
    chosen = choose("accepted_moves", device, backend)
    if sources.numel():
        load("accepted_moves", chosen)(out_cache_loc, accept_index, sources, targets, width)
    return SlotMoves(sources, targets)


def move_kv(caches: Sequence[torch.Tensor], moves: SlotMoves, *, backend: BackendName | None = None) -> None:
    """Copy KV token by token between slots of paged caches, in and across pages, as if all reads came first.

    Args:
        caches: Caches of all layers; each holds `slots` rows of its own width. Shape: [pages, page_size, ...];
            contiguous; any dtype.
        moves: Pairs of slots; targets above 0 are distinct. A pair with a slot below 1 or past the cache moves nothing.
        backend: Insist on a backend.

    Padding: no pairs, or only pairs that move nothing, leave every byte as it was.

    Mutates: the target slots of every cache.

    Raises:
        ShapeError: A cache is not contiguous, has fewer than two axes, or another number of slots than the first.
        DtypeError, DeviceError, AliasError: See `compact_accepted_locs`.

    Source: field_faults F04: tokens, never whole pages, are what moves.
    """
    check_tensor("moves.sources", moves.sources, ("moves",))
    check_tensor("moves.targets", moves.targets, moves.sources.shape, device=moves.sources.device)
    for index, cache in enumerate(caches):
        name = f"caches[{index}]"
        first = caches[0].shape[:2]
        if cache.ndim < 2 or cache.shape[:2] != first or not cache.is_contiguous():
            raise ShapeError(
                name,
                given=f"shape {tuple(cache.shape)} with strides {cache.stride()}",
                expected=f"contiguous [{', '.join(map(str, first))}, ...]",
                consequence="a slot would name another token's bytes",
                remedy="pass the pool's storage, layer by layer",
            )
        check_tensor(name, cache, cache.shape, dtypes=(cache.dtype,), device=moves.sources.device)
    check_disjoint(
        {f"caches[{index}]": cache for index, cache in enumerate(caches)},
        {"moves.sources": moves.sources, "moves.targets": moves.targets},
    )
    chosen = choose("move_kv", moves.sources.device, backend)
    if moves.sources.numel() and caches and caches[0].shape[0] * caches[0].shape[1]:
        slots = caches[0].shape[0] * caches[0].shape[1]
        flat = [cache.view(slots, -1).view(torch.uint8) for cache in caches if cache.numel()]
        load("move_kv", chosen)(flat, moves.sources.contiguous(), moves.targets.contiguous())
