"""Owns what moves by rows: recurrent states, resharded where TP differs, and the auxiliary rows of a request.

A row is one request's item in a buffer. Rings of unequal length and other kinds of addresses are not rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import kv_planner

from kv_transfer.errors import TransferFailed
from kv_transfer.integrations.sglang.engine import BlockList
from kv_transfer.integrations.sglang.names import refusal
from kv_transfer.integrations.sglang.pages import Buffers

__all__ = ["StateShape", "aux_rows", "pair_aux", "state_rows"]


@dataclasses.dataclass(frozen=True)
class StateShape:
    """How one tensor of a recurrent state is sharded.

    Attributes:
        source_dim: Channels of this rank; 0: every rank holds the whole item.
        destination_dim: Channels of the peer's rank.
        groups: Channels over all ranks of each group that is sharded apart; empty: one group.
        outer: Rows before the sharded axis.
    """

    source_dim: int
    destination_dim: int
    groups: tuple[int, ...] = ()
    outer: int = 1


def state_rows(
    pairs: Sequence[tuple[int, int]],
    source: Buffers,
    destination: Buffers,
    source_row: int,
    destination_row: int,
    *,
    shapes: Sequence[StateShape] | None = None,
    source_rank: tuple[int, int] = (0, 1),
    destination_rank: tuple[int, int] = (0, 1),
) -> Iterator[kv_planner.Batch]:
    """Blocks of one request's state.

    Args:
        pairs: Positions of the tensors that hold the same.
        source: This rank's tensors; an item is a request's row.
        destination: The peer's.
        source_row: The request's row here.
        destination_row: Its row there.
        shapes: How each tensor of the source is sharded; None: TP is equal, rows are copied whole.
        source_rank: Rank and size of this side.
        destination_rank: Rank and size of the peer.

    Raises:
        UnsupportedLayout: Rows of unlike length, or shapes that do not give them.
        PlanError: Channels that do not split over the ranks, or a row outside a tensor.
    """
    rows = kv_planner.Runs([source_row], [destination_row], item_kind="request_row")
    for own, other in pairs:
        item, wanted = source.item_bytes[own], destination.item_bytes[other]
        shape = None if shapes is None else shapes[own]
        if shape is None or not (shape.source_dim or shape.destination_dim):
            if item != wanted:
                raise refusal(
                    f"state tensor {own}", item, wanted, f"rows of {item} and of {wanted} bytes (source, destination)",
                    "allocate the state with decode's shape on both sides (its window counts the draft's tokens)",
                )  # fmt: skip
            first = shape is None or _brings_replica(source_rank, destination_rank)
            groups, width, outer, ranks = [(1, item)], 1, 1, ((0, 1), (0, 1))
            if not first:
                continue
        else:
            groups, width, outer = _sharded(own, shape, item, wanted, source_rank[1], destination_rank[1])
            ranks = (source_rank, destination_rank)
        route = kv_planner.StateRoute(groups, rows=outer, source=ranks[0], destination=ranks[1])
        if (route.source_bytes, route.destination_bytes) != (item, wanted):
            raise refusal(
                f"state tensor {own}", (item, route.source_bytes), (wanted, route.destination_bytes),
                f"{outer} rows of {sum(g for g, _ in groups)} channels of {width} bytes are no such items",
                "publish dims, groups and outer counts as the pool has them",
            )  # fmt: skip
        yield route.lower(
            rows,
            source=(source.addresses[own], item, _count(source, own, source_row)),
            destination=(destination.addresses[other], wanted, _count(destination, other, destination_row)),
        )


def _sharded(
    entry: int, shape: StateShape, item: int, wanted: int, own_size: int, other_size: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Groups with the bytes of a channel; a channel has as many on both sides."""
    sizes = []
    for side, bytes_, dim in (("source", item, shape.source_dim), ("destination", wanted, shape.destination_dim)):
        width, odd = divmod(bytes_, max(dim * shape.outer, 1))
        if dim <= 0 or shape.outer <= 0 or odd or not width:
            raise refusal(
                f"state tensor {entry}", bytes_, dim, f"{bytes_} bytes are no {shape.outer} x {dim} channels at {side}",
                "publish the channels of every tensor on both sides",
            )  # fmt: skip
        sizes.append(width)
    if sizes[0] != sizes[1]:
        raise refusal(
            f"state tensor {entry}", sizes[0], sizes[1], "channels of unlike width", "use one dtype and one shape"
        )
    total = shape.source_dim * own_size
    if shape.destination_dim * other_size != total:
        raise refusal(
            f"state tensor {entry}", total, shape.destination_dim * other_size, "unlike channels over all ranks",
            "serve one model on both sides",
        )  # fmt: skip
    groups = shape.groups or (total,)
    if sum(groups) != total:
        raise refusal(
            f"state tensor {entry}", sum(groups), total, "groups that do not add up to the channels over all ranks",
            "publish the widths of the groups over all ranks",
        )  # fmt: skip
    return [(group, sizes[0]) for group in groups], sizes[0], shape.outer


def _brings_replica(source: tuple[int, int], destination: tuple[int, int]) -> bool:
    """Whether this rank is the first of those that the peer reads; all of them hold the same."""
    (rank, size), (_, other) = source, destination
    return size <= other or (rank % size) % (size // other) == 0


def _count(buffers: Buffers, entry: int, row: int) -> int:
    """Rows of a tensor; a peer that does not say has as many as are used."""
    if buffers.nbytes is None:
        return row + 1
    return buffers.nbytes[entry] // buffers.item_bytes[entry]


def pair_aux(source: Buffers, destination: Buffers, *, said: bool) -> None:
    """Compares the auxiliary buffers of both sides.

    Args:
        source: Prefill's.
        destination: Decode's.
        said: Whether decode published its row lengths.

    Raises:
        UnsupportedLayout: Another number of buffers, or rows of other lengths.
    """
    if len(source.addresses) != len(destination.addresses):
        raise refusal(
            "aux_data_ptrs", len(source.addresses), len(destination.addresses),
            "auxiliary buffers have no names, so that with one more or less none is known for sure",
            "switch checksums, sampling masks and top-k buffers on at both sides or at none",
        )  # fmt: skip
    if said and source.item_bytes != destination.item_bytes:
        pairs = enumerate(zip(source.item_bytes, destination.item_bytes, strict=True))
        entry = next(number for number, (own, other) in pairs if own != other)
        raise refusal(
            f"aux_item_lens[{entry}]", source.item_bytes[entry], destination.item_bytes[entry],
            "rows of unlike length; hidden states have the width of the draft's input on both sides",
            "load the same target and draft on both sides",
        )  # fmt: skip


def aux_rows(source: Buffers, destination: Buffers, source_row: int, destination_row: int) -> BlockList:
    """Blocks of one request's auxiliary rows.

    Raises:
        TransferFailed: A row outside a buffer.
    """
    for side, buffers, row in (("source", source, source_row), ("destination", destination, destination_row)):
        for entry, item in enumerate(buffers.item_bytes):
            if row < 0 or (buffers.nbytes is not None and (row + 1) * item > buffers.nbytes[entry]):
                raise TransferFailed(
                    f"auxiliary row {row} of {side} buffer {entry}", local=row,
                    remote=None if buffers.nbytes is None else buffers.nbytes[entry] // max(item, 1),
                    consequence="nothing was written", remedy="give a row of the metadata buffers",
                )  # fmt: skip
    return BlockList.of(
        [at + source_row * item for at, item in zip(source.addresses, source.item_bytes, strict=True)],
        [at + destination_row * item for at, item in zip(destination.addresses, source.item_bytes, strict=True)],
        source.item_bytes,
    )
