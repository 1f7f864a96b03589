"""Owns the companions of one cache together: which hit all of them can serve, and what a node's backup includes.

A cache without companions has an empty group, which does nothing and costs nothing. It does not move bytes (see
`_member`), nor keep a request's pages (see `_share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kv_pool.errors import CacheError, HostPoolError, UnknownLayer
from kv_pool.hicache._member import Member
from kv_pool.hicache._share import Share
from kv_pool.hicache.movers import create_mover
from kv_pool.tables import is_whole, shown

if TYPE_CHECKING:
    import numpy.typing as npt
    from kv_planner import PrefixIndex

    from kv_pool.allocator import PageAllocator
    from kv_pool.hicache._inflight import CopyLimits, Load
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import MoverName
    from kv_pool.hicache.storage.companions import CompanionStorage
    from kv_pool.hicache.streams import Streams
    from kv_pool.tables import IntArray

__all__ = ["Group", "covered", "named"]


_Held = TypeVar("_Held")


def named(argument: str, name: object, held: Mapping[str, _Held]) -> _Held:
    """What is held of the companion of a name.

    Raises:
        CacheError: There is no such companion.
    """
    if isinstance(name, str) and name in held:
        return held[name]
    raise CacheError(
        argument,
        given=shown(name),
        expected=f"one of {list(held)}",
        consequence="there are no such pages",
        remedy="declare the companion at construction of the cache",
    )


class Group:
    """The companions of a cache, at work.

    Args:
        companions: What they are.
        allocator: The cache's device pages.
        host: The cache's host pool.
        index: The cache's index.
        streams: The cache's lanes.
        mover: Name of the movers.
        poison: Whether freed device pages are overwritten.
        storage: Where companions' pages go when their host copies are complete; `None` for two levels.
        canary: Whether checksums are taken after backup and asked at load.
        limits: How much of each is copied at a time.
        failed: Called with each load of a companion that has failed after it was started.

    Raises:
        HostPoolError: A companion is of another cache, or two have one name, allocator or host pool.
        UnsupportedMover: See `create_mover`.
    """

    def __init__(
        self,
        companions: Sequence[Companion],
        allocator: PageAllocator,
        host: HostPool,
        index: PrefixIndex,
        streams: Streams,
        *,
        mover: MoverName,
        poison: bool,
        storage: CompanionStorage | None,
        canary: bool,
        limits: CopyLimits,
        failed: Callable[[Load], object],
    ) -> None:
        names = [companion.name for companion in companions]
        rules: list[tuple[str, object, object]] = [("names of companions", len(set(names)), len(names))]
        for companion in companions:
            at_home = companion.hosts[0].pool.device
            rules.append((f"pages.lead of {companion.name}", companion.pages.lead is allocator, True))
            rules.append((f"device of {companion.name}", at_home, host.pool.device))
        owners = [allocator, host.allocator]
        owners += [side for companion in companions for side in (companion.pages.own, companion.host.allocator)]
        rules.append(("allocators of cache and companions", len(set(map(id, owners))), len(owners)))
        for argument, given, expected in rules:
            if given != expected:
                raise HostPoolError(
                    argument,
                    given=given,
                    expected=expected,
                    consequence="pages of the companion would follow those of another cache",
                    remedy="make a map from this cache's allocator for each companion, and give each its own name",
                )
        movers = [[create_mover(mover, own) for own in companion.hosts] for companion in companions]
        self._members = [
            Member(
                companion,
                host.allocator,
                own_movers,
                streams,
                index,
                poison=poison,
                canary=canary,
                limits=limits,
                failed=failed,
                backed_up=storage.back_up if storage is not None else None,
            )
            for companion, own_movers in zip(companions, movers, strict=True)
        ]
        if storage is not None:
            storage.attach(self._members)
        self._page_size = allocator.page_size
        self._own_layers = frozenset(layer for mirror in host.mirrors for layer in mirror.layer_ids)
        self._layers = self._own_layers.union(*(member.layers for member in self._members))
        self._index = index

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return any(member.pending for member in self._members)

    def member(self, name: str) -> Member:
        """Return a companion by its name.

        Raises:
            CacheError: There is none.
        """
        return named("companion", name, {member.companion.name: member for member in self._members})

    def find(self, device: IntArray, host: IntArray) -> tuple[int, list[Share]]:
        """Return the deepest hit, in pages, that every companion can serve, and what a request has of each.

        What was found up to there is kept until the shares are closed.

        Args:
            device: The cache's device page of each node of a prefix, below 1 for none. Shape: [pages].
            host: Its host page, below 1 for none. Shape: [pages].
        """
        own = [(member.device.find(device), member.on_host(host)) for member in self._members]
        have = [(near > 0) | (far > 0) for near, far in own]
        depths = self.depths(
            [Share(member, held) for member, held in zip(self._members, have, strict=True)], len(device)
        )
        depth = int(np.flatnonzero(depths)[-1])
        shares = []
        for member, (near, far), held in zip(self._members, own, have, strict=True):
            share = Share(member, held[:depth])
            share.keep(near[:depth], far[:depth])
            reading = share.needed(depth)
            for pages, found in ((member.device, device[reading]), (member.host, host[reading])):
                used = found[pages.find(found) > 0]
                pages.touch(used[::-1] if member.companion.trailing is None else used)
            shares.append(share)
        return depth, shares

    @staticmethod
    def depths(shares: Sequence[Share], pages: int) -> npt.NDArray[np.bool_]:
        """Which hits, in pages, all companions can serve. Shape: [pages + 1]; the first is always True."""
        depths = np.ones(pages + 1, dtype=np.bool_)
        for share in shares:
            depths &= covered(share.have, share.member.companion.trailing)
        return depths

    def open(self, shares: Sequence[Share], lead: IntArray, hit: int, reach: int | None = None) -> None:
        """Take what a request needs of every companion, for the tokens below `reach`.

        Raises:
            OutOfPages: One of them has not enough. What the others have kept ready stays with the request.
        """
        bare = [lead[share.member.device.find(lead) == 0] for share in shares]
        ready = [dict(share.ready) for share in shares]
        try:
            for share in shares:
                share.open(lead, hit, self._pages(reach, lead.size))
        except BaseException:
            for share, given, kept in zip(shares, bare, ready, strict=True):
                share.give_back(given, kept)
            raise

    def extend(self, shares: Sequence[Share], lead: IntArray, before: int) -> None:
        """Take pages for the positions from `before` on, where those before have been reached.

        Raises:
            OutOfPages: See `Share.extend`. Then none counts as reached.
        """
        chosen = [share for share in shares if share.reached >= before]
        try:
            for share in chosen:
                share.extend(lead, lead.size)
        except BaseException:
            for share in chosen:
                share.give_back(lead[before:])
                share.reached = before
            raise

    def advance(self, shares: Sequence[Share], lead: IntArray, computed: int, reach: int | None) -> None:
        """Let go of what no token after the computed ones reads, and take pages up to `reach`.

        Raises:
            OutOfPages: See `Share.advance`.
        """
        for share in shares:
            share.advance(lead, min(computed // self._page_size, lead.size), self._pages(reach, lead.size))

    def check(
        self,
        shares: Sequence[Share],
        lead: IntArray,
        hit: int,
        lead_host: IntArray,
        refused: Callable[[str, int], object],
    ) -> None:
        """Compare what `load` would bring from the host with the checksums that were taken, where there are any.

        Raises:
            CanaryMismatch: See `Share.check`.
            Exception: What the device has said of a load that others have started; the hit lacks its pages.
        """
        for share in shares:
            if share.failure is not None:
                raise share.failure
            share.check(lead, hit, lead_host, refused)

    def load(self, shares: Sequence[Share], lead: IntArray, hit: int, nodes: IntArray, lead_host: IntArray) -> None:
        """Start to bring what a hit needs from the host; see `Share.load`."""
        for share in shares:
            share.load(lead, hit, nodes, lead_host)

    def wait(self, shares: Sequence[Share], layer_id: int) -> None:
        """Let compute that is issued from now on begin after a layer of all loads that a hit reads.

        Raises:
            UnknownLayer: It lies neither in the cache's own pool nor with a companion.
            Exception: What a mover or the device has said of one of the loads.
        """
        if not is_whole(layer_id) or layer_id not in self._layers:
            raise UnknownLayer(
                "layer_id",
                given=shown(layer_id),
                expected=f"one of {sorted(self._layers)}",
                consequence="the wait would be for nothing",
                remedy="pass the global layer id of a layer held here",
            )
        for share in shares:
            if layer_id in share.member.layers:
                if share.failure is not None:
                    raise share.failure
                for load in share.loads:
                    share.member.wait_layer(load, layer_id)

    @staticmethod
    def stop(shares: Sequence[Share], others: Sequence[Share]) -> None:
        """Stop the loads of a request that ends, but for those that others read; see `Member.stop`."""
        needed = {id(load) for share in others for load in share.loads}
        for share in shares:
            for load in share.loads:
                if id(load) not in needed:
                    share.member.stop(load)

    def alone_holds(self, layer_id: int) -> bool:
        """Whether a layer lies with a companion, and not in the cache's own pool."""
        return layer_id not in self._own_layers and any(layer_id in member.layers for member in self._members)

    def back_up(self, nodes: IntArray, device: IntArray, host: IntArray) -> None:
        """Start to copy what all companions have of nodes to the host; see `Member.back_up`."""
        for member in self._members:
            member.back_up(nodes, device, host)

    def catch_up(self, nodes: IntArray, device: IntArray) -> None:
        """Copy to the host what companions have got of nodes whose own host copies are there already."""
        if self._members and nodes.size:
            host = self._index.residency(nodes)[1]
            self.back_up(nodes[host > 0], device[host > 0], host[host > 0])

    def cancel_backups(self) -> int:
        """Give up the backups that wait; returns their pages."""
        return sum(member.cancel_backups() for member in self._members)

    def poll(self) -> None:
        """Acknowledge copies that have ended."""
        for member in self._members:
            member.poll()

    def drain(self) -> None:
        """Wait for all copies."""
        for member in self._members:
            member.drain()

    def _pages(self, reach: int | None, most: int) -> int:
        """Pages of the tokens below `reach`; all of them without one."""
        return most if reach is None else min(most, -(-max(0, reach) // self._page_size))


def covered(have: npt.NDArray[np.bool_], trailing: int | None) -> npt.NDArray[np.bool_]:
    """Return which hits a companion can serve that needs the last `trailing` pages of each.

    Args:
        have: Which pages it has. Shape: [pages].
        trailing: As for `Companion`.

    Returns:
        Shape: [pages + 1]; for each hit from 0 on.
    """
    ends = np.arange(1, have.size + 1)
    run = ends - np.maximum.accumulate(np.where(have, 0, ends)) if have.size else ends
    need = ends if trailing is None else np.minimum(ends, trailing)
    return np.concatenate([[True], run >= need])
