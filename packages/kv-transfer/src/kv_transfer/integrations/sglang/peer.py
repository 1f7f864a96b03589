"""Owns what one prefill rank knows of one decode rank: its registration, compared whole when it arrives.

Made from SGLang's `KVArgsRegisterInfo` and, from peers with this package, a `Published` frame. Everything that can be
refused is refused here, before a room is served; plans are kept for the session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import kv_planner
import numpy as np

from kv_transfer.engine import Blocks
from kv_transfer.integrations.sglang.names import entry_list, optional_list, own_names, pair_with_peer, refusal, stated
from kv_transfer.integrations.sglang.pages import Buffers, PagePlan, Ranks
from kv_transfer.integrations.sglang.published import Published
from kv_transfer.integrations.sglang.rows import StateShape, aux_rows, pair_aux, state_rows
from kv_transfer.integrations.sglang.words import MAMBA, PAGED, SLICED, word

__all__ = ["Local", "Peer", "StatePlan"]


@dataclasses.dataclass(frozen=True)
class Local:
    """A prefill rank.

    Attributes:
        kv_args: SGLang's `KVArgs`.
        mla: Latents, which every rank holds whole, not K and V.
        tp_rank: Rank within its attention TP group.
        tp_size: Size of that group.
        state_tp_size: TP size that states are sharded over; usually the same.
        pp_rank: Pipeline stage.
        pp_size: Pipeline stages.
    """

    kv_args: Any
    mla: bool
    tp_rank: int = 0
    tp_size: int = 1
    state_tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def stage(self) -> dict[str, Any]:
        """What naming needs of the placement."""
        return {"mla": self.mla, "pp_size": self.pp_size, "last": self.pp_rank == self.pp_size - 1}

    def heads(self) -> int | None:
        """KV heads over all ranks; None: `KVArgs` does not say."""
        total, own = (stated(self.kv_args, name) or 0 for name in ("total_kv_head_num", "kv_head_num"))
        return total or own * self.tp_size or None

    def ranks(self, tp_rank: object, tp_size: object) -> Ranks:
        """Places of this rank and a peer.

        Raises:
            UnsupportedLayout: A TP size is None, or sizes differ and nobody says how many heads there are.
        """
        plain = Ranks((self.tp_rank, self.tp_size), (tp_rank, tp_size))  # type: ignore[arg-type]  # checked there
        if self.mla or self.tp_size == tp_size:
            return plain
        heads = self.heads()
        if heads is None:
            raise refusal(
                "total_kv_head_num", self.tp_size, tp_size, "TP sizes differ, and nobody says how many heads there are",
                "set total_kv_head_num, the KV heads of the whole model",
            )  # fmt: skip
        return dataclasses.replace(plain, heads=heads)

    def buffers(self) -> Buffers:
        """The KV buffers."""
        args = self.kv_args
        lists = (tuple(entry_list(args, field)) for field in ("kv_data_ptrs", "kv_item_lens", "kv_data_lens"))
        return Buffers(*lists)

    def plan(
        self,
        addresses: Sequence[int],
        item_bytes: Sequence[int] | None,
        ranks: Ranks,
        *,
        first_item: object = None,
        layer_ids: Sequence[int] = (),
        published: Published | None = None,
        shared: Sequence[bool] = (),
    ) -> PagePlan:
        """Pairs and compares a peer's KV buffers.

        Args:
            addresses: The peer's pointers.
            item_bytes: Its page bytes; None: it gave those of its first buffer alone.
            ranks: Places of both.
            first_item: Page bytes of its first buffer, where it gave no others.
            layer_ids: Its layer ids.
            published: What it said beside.
            shared: Where decode ranks share contexts, whether an own buffer carries all their slots at the peer.

        Raises:
            UnsupportedLayout: Something is not said, or contradicts itself.
            PlanError: The sides do not fit.
        """
        own = self.buffers()
        pairs = pair_with_peer(
            self.kv_args, len(addresses), names=published.names if published else None, layer_ids=layer_ids,
            **self.stage,
        )  # fmt: skip
        slots = _slots(pairs, len(addresses), ranks.share[1], shared)
        single = (
            self._scaled(own, pairs, len(addresses), ranks, first_item)
            if item_bytes is None
            else _single(item_bytes, slots)
        )
        nbytes = tuple(published.kv_nbytes) if published and published.kv_nbytes else None
        return PagePlan(
            own_names(self.kv_args, **self.stage), pairs, own, Buffers(tuple(addresses), single, nbytes, slots),
            page_size=self.kv_args.page_size, ranks=ranks,
        )  # fmt: skip

    def _scaled(
        self, own: Buffers, pairs: Sequence[tuple[int, int]], count: int, ranks: Ranks, first: object
    ) -> tuple[int, ...]:
        """Page bytes of a peer that gave one of them: what its heads make of ours, and the first as it said."""
        if not isinstance(first, int):
            raise refusal(
                "dst_kv_item_len", own.item_bytes[:1], first, "without the peer's item length no page can be found",
                "publish the item length of every buffer",
            )  # fmt: skip
        found = [1] * count
        places, heads = ranks.places(), ranks.heads or 1
        held = [int(np.subtract(*kv_planner.split_heads(heads, tp_rank=r, tp_size=s)[::-1])) for r, s in places]
        for mine, theirs in pairs:
            found[theirs] = own.item_bytes[mine] * held[1] // held[0]
        if pairs and any(theirs == 0 for _, theirs in pairs):
            found[0] = first
        elif pairs and first != own.item_bytes[0] * held[1] // held[0]:
            raise refusal(
                "dst_kv_item_len", own.item_bytes[0], first, "the peer's pages have another length",
                "use one page size, one dtype and one model on both sides",
            )  # fmt: skip
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """One state component.

    Attributes:
        kind: SGLang's name for it.
        pages: How its pages or rows go, one by one; None: a recurrent state.
        pairs: Positions of the tensors that hold the same.
        source: This rank's tensors.
        destination: The peer's.
        shapes: How tensors are sharded; None: TP is equal.
        ranks: Rank and size of both sides.
    """

    kind: str
    pages: PagePlan | None
    pairs: tuple[tuple[int, int], ...]
    source: Buffers
    destination: Buffers
    shapes: tuple[StateShape, ...] | None = None
    ranks: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (0, 1))

    def batches(
        self, source: Sequence[int], destination: Sequence[int], capabilities: kv_planner.Capabilities | None
    ) -> Iterator[Blocks]:
        """Blocks of one request.

        Raises:
            PlanError: Lists of unequal length, places outside a tensor.
            UnsupportedLayout: A recurrent state that is not one row.
        """
        if self.pages is not None:
            own, other = (np.asarray(places, np.int64).reshape(-1) for places in (source, destination))
            if len(own) or len(other):
                yield from self.pages.batches(own, other, capabilities)
            return
        if len(source) != 1 or len(destination) != 1:
            raise refusal(
                f"{self.kind} state", len(source), len(destination), "a recurrent state is one row a request",
                "offer one row on both sides",
            )  # fmt: skip
        yield from state_rows(
            self.pairs, self.source, self.destination, int(source[0]), int(destination[0]), shapes=self.shapes,
            source_rank=self.ranks[0], destination_rank=self.ranks[1],
        )  # fmt: skip


class Peer:
    """A registered decode rank.

    Args:
        local: This rank.
        info: SGLang's `KVArgsRegisterInfo`.
        published: What the peer said beside; None: it runs SGLang's own manager.
        shared: Whether an own KV buffer carries the slots of all context-parallel ranks at the peer.

    Raises:
        UnsupportedLayout: Something is not said, or contradicts itself, or is not moved.
        PlanError: The sides do not fit; every difference is named.
    """

    def __init__(
        self, local: Local, info: Any, published: Published | None = None, *, shared: Sequence[bool] = ()
    ) -> None:
        for field in ("dst_kv_ptrs", "dst_kv_item_lens", "dst_aux_ptrs"):
            entry_list(info, field)
        optional_list(info, "dst_kv_layer_ids")
        self.info, self.published = info, published
        self._local = local
        args = local.kv_args
        if published is not None:
            word_ = str(getattr(args, "kv_cache_dtype_str", "") or "")
            for field, own, other in (
                ("page_size", args.page_size, published.page_size),
                ("kv_cache_dtype", word_, published.dtype or word_),
            ):
                if own != other:
                    raise refusal(field, own, other, "the sides differ", "use the same value on both sides")
        share = (info.dst_dcp_rank, info.dst_dcp_size)
        self.ranks = dataclasses.replace(local.ranks(info.dst_tp_rank, info.dst_attn_tp_size), share=share)
        self.kv: PagePlan | None = None
        if args.kv_data_ptrs:
            self.kv = local.plan(
                info.dst_kv_ptrs, list(info.dst_kv_item_lens) or None, self.ranks, first_item=info.dst_kv_item_len,
                layer_ids=info.dst_kv_layer_ids, published=published, shared=shared,
            )  # fmt: skip
        self._own_aux = Buffers(tuple(args.aux_data_ptrs), tuple(args.aux_item_lens), tuple(args.aux_data_lens))
        said = published is not None and bool(published.aux_item_bytes)
        there = tuple(info.dst_aux_ptrs)
        items, sizes = (
            self._own_aux.item_bytes if len(there) == len(self._own_aux.addresses) else (0,) * len(there),
            None,
        )
        if published is not None and said:
            items, sizes = tuple(published.aux_item_bytes), tuple(published.aux_nbytes) or None
        self._aux = Buffers(there, items, sizes)
        pair_aux(self._own_aux, self._aux, said=said)
        self.states = tuple(self._state(number, word(kind)) for number, kind in enumerate(args.state_types or ()))

    def aux(self, source_row: int, destination_row: int) -> Blocks:
        """Auxiliary rows of one request."""
        return aux_rows(self._own_aux, self._aux, source_row, destination_row)

    def _state(self, number: int, kind: str) -> StatePlan | None:
        """One component; None for kinds whose addresses SGLang's own code works out."""
        local, info, args = self._local, self.info, self._local.kv_args
        if kind != MAMBA and kind not in PAGED:
            return None
        said = self.published.state_types if self.published is not None else ()
        if said and (number >= len(said) or said[number] != kind):
            raise refusal(
                f"state_types[{number}]", kind, said[number] if number < len(said) else None,
                "components are told apart by their place", "load the same model and the same draft on both sides",
            )  # fmt: skip
        source = Buffers(
            *(tuple(lists[number]) for lists in (args.state_data_ptrs, args.state_item_lens, args.state_data_lens))
        )
        there = [_at(lists, number) for lists in (info.dst_state_data_ptrs, info.dst_state_item_lens)]
        if not there[1] and len(there[0]):
            raise refusal(
                f"state_item_lens[{number}]", source.item_bytes, None, f"the peer names no item lengths of {kind}",
                "publish the item length of every state tensor",
            )  # fmt: skip
        sizes = self.published.state_nbytes[number] if self.published is not None and said else ()
        destination = Buffers(tuple(there[0]), tuple(there[1]), tuple(sizes) or None)
        ids = (_at(args.state_layer_ids, number), _at(info.dst_state_layer_ids, number))
        pairs = _state_pairs(number, kind, len(source.addresses), len(destination.addresses), *ids, pp=local.pp_size)
        if kind == MAMBA:
            return self._recurrent(number, kind, pairs, source, destination)
        elided = [(own, other) for own, other in pairs if source.item_bytes[own] and destination.item_bytes[other]]
        ranks = self.ranks
        if ranks.heads is not None and kind not in SLICED:
            raise refusal(
                f"{kind} state", local.tp_size, info.dst_attn_tp_size, "TP sizes differ, and it is not cut by heads",
                "use the same TP size on both sides",
            )  # fmt: skip
        ranks = dataclasses.replace(ranks, share=(0, 1)) if kind in SLICED else Ranks()
        # K and V of a window: which is which matters to nobody who copies whole heads
        names = tuple(("key", "target", own, 0) for own in range(len(source.addresses)))
        size = args.page_size if ranks.heads is not None else 1
        plan = PagePlan(names, elided, source, destination, page_size=size, ranks=ranks)  # type: ignore[arg-type]
        return StatePlan(kind, plan, pairs, source, destination)

    def _recurrent(
        self, number: int, kind: str, pairs: tuple[tuple[int, int], ...], source: Buffers, destination: Buffers
    ) -> StatePlan:
        local, info, args = self._local, self.info, self._local.kv_args
        size, other = local.state_tp_size, info.dst_attn_tp_size
        dims = _at(getattr(args, "state_dim_per_tensor", ()), number)
        wanted = _at(info.dst_state_dim_per_tensor, number)
        shapes = None
        places = ((args.engine_rank % size, size), (info.dst_tp_rank % other, other))
        if size != other and (dims or wanted):
            if len(dims) != len(source.addresses) or len(wanted) != len(destination.addresses):
                raise refusal(
                    f"state_dim_per_tensor[{number}]", len(dims), len(wanted), "not one for every state tensor",
                    "publish the sharded channels of every tensor",
                )  # fmt: skip
            groups = _at(getattr(args, "state_conv_shard_groups", ()), number)
            outer = _at(getattr(args, "state_slice_outer_counts", ()), number)
            target = dict(pairs)
            shapes = tuple(
                StateShape(
                    int(dim), int(wanted[target[entry]]) if entry in target else 0,
                    tuple(_at(groups, entry)), int(outer[entry]) if entry < len(outer) else 1,
                )
                for entry, dim in enumerate(dims)
            )  # fmt: skip
        plan = StatePlan(kind, None, pairs, source, destination, shapes, places)
        for _ in plan.batches([1], [1], None):  # geometry is refused now and not at the first request
            pass
        return plan


def _state_pairs(
    number: int, kind: str, own: int, other: int, ids: Sequence[int], peer_ids: Sequence[int], *, pp: int
) -> tuple[tuple[int, int], ...]:
    """Pairs tensors by layer id and occurrence, or by place where both sides hold the same whole list."""
    if ids and peer_ids:
        if len(ids) != own or len(peer_ids) != other:
            raise refusal(f"state_layer_ids[{number}]", len(ids), len(peer_ids), "not one for every tensor", "give all")
        found: dict[tuple[int, int], int] = {}
        for place, key in enumerate(_occurrences(peer_ids)):
            found[key] = place
        keys = _occurrences(ids)
        absent = [key for key in keys if key not in found]
        if absent or any(list(ids).count(i) != list(peer_ids).count(i) for i in set(ids)):
            raise refusal(
                f"state_layer_ids[{number}]", list(ids), list(peer_ids), f"{kind}: layers without their tensors",
                "load the same model on both sides",
            )  # fmt: skip
        return tuple((place, found[key]) for place, key in enumerate(keys))
    if own != other or pp != 1:
        sides = "both sides" if not ids and not peer_ids else "one side"
        raise refusal(
            f"state_data_ptrs[{number}]", own, other,
            f"{kind}: tensors have no layer ids on {sides}, and this rank is one of {pp} stages",
            "publish layer ids, as setup_state_kv_args of this package does",
        )  # fmt: skip
    return tuple((place, place) for place in range(own))


def _occurrences(ids: Sequence[int]) -> list[tuple[int, int]]:
    seen: dict[int, int] = {}
    keys = []
    for layer in ids:
        seen[layer] = seen.get(layer, -1) + 1
        keys.append((int(layer), seen[layer]))
    return keys


def _slots(pairs: Sequence[tuple[int, int]], count: int, size: int, shared: Sequence[bool]) -> tuple[int, ...]:
    """Pages for each page id in the peer's buffers: as many as ranks share contexts, where all keep their slots."""
    found = [1] * count
    for own, other in pairs:
        if own < len(shared) and shared[own]:
            found[other] = size
    return tuple(found)


def _single(items: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """Bytes of one page of each buffer, from those of a page id."""
    for entry, (item, pages) in enumerate(zip(items, slots, strict=False)):
        if isinstance(item, int) and item % pages:
            raise refusal(
                f"dst_kv_item_lens[{entry}]", pages, item, "no page of every sharing rank",
                "publish the pages that the pool has",
            )  # fmt: skip
    return tuple(item // pages if isinstance(item, int) else item for item, pages in zip(items, slots, strict=False))


def _at(lists: Any, number: int) -> list[Any]:
    """An item of a list that may be shorter, or None."""
    values = lists[number] if lists is not None and number < len(lists) else None
    return list(values) if values is not None else []
