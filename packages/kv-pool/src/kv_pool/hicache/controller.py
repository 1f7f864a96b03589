"""Owns the life of a prompt in the cache: find, load, compute, keep, back up, evict.

The controller decides; the index knows which tokens lie in which pages, the mover moves bytes, `_copies` keeps their
order, and a third level (`storage`) is filled from the host and read by `prefetch`. One owner calls it, as one
scheduler owns a pool. It does not compute attention, nor talk to other ranks: their hits come in by `limit`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from kv_planner import StaleNode, TierOrder

from kv_pool.errors import CacheError, CanaryMismatch, HitError
from kv_pool.hicache._copies import Copies
from kv_pool.hicache._device import DevicePages
from kv_pool.hicache._inflight import CopyLimits, Load, UnderWay
from kv_pool.hicache._parts import WritePolicy, bad_tokens, check_parts, no_storage
from kv_pool.hicache.accounting import Accounting, CacheCounters
from kv_pool.hicache.acquired import Acquired, Namespace
from kv_pool.hicache.movers import Mover, MoverName, create_mover
from kv_pool.hicache.storage.tier import take_host_pages
from kv_pool.hicache.streams import Streams, create_streams
from kv_pool.tables import IndexLike, IntArray, as_index_array

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.allocator import PageAllocator
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.host_pool import HostPool, MirroredPool
    from kv_pool.hicache.storage import Prefetch, StorageTier

__all__ = ["HiCacheController", "WritePolicy"]

_USES: dict[WritePolicy, int | None] = {"write_through": 1, "write_through_selective": 2, "write_back": None}


class HiCacheController:
    """A prefix cache over a device pool and the host pool that mirrors it.

    Invariants, true before and after every call:

    1. `available + evictable + protected + in_use == total` (see `accounting`);
    2. a page is read or written by a copy only while it is locked or held;
    3. a node counts as backed up only when its bytes are on the host;
    4. a device page that was given back or evicted is poisoned before anybody gets it again.

    Args:
        pool: The device pool.
        allocator: Its pages; shared with nobody else.
        host: The host pool that mirrors `pool`.
        index: Which tokens lie in which pages; empty, over as many pages as both pools have.
        policy: When a page gets its host copy: when its first prompt has finished (`write_through`), its second
            (`write_through_selective`), or when it has to leave the device (`write_back`).
        mover: A mover for `host`, or the name of one; `None` is `"auto"`.
        streams: Lanes for copies; `None` makes those of the pool's device.
        poison: Whether freed device pages are overwritten, so that a stale read shows.
        storage: The third level, over the same host pool and index; `None` for two levels.
        canary: Checksums that are taken of every backed-up token and asked at every load; `None` for none.
        limits: How much is copied at a time; `None` for the defaults of `CopyLimits`.

    Raises:
        HostPoolError: Pools, allocator and index do not belong together, or the policy does not exist.
        UnsupportedMover: No mover serves the host's layout on the device.
    """

    def __init__(
        self,
        pool: MirroredPool,
        allocator: PageAllocator,
        host: HostPool,
        index: PrefixIndex,
        *,
        policy: WritePolicy = "write_through",
        mover: Mover | MoverName | None = None,
        streams: Streams | None = None,
        poison: bool = True,
        storage: StorageTier | None = None,
        canary: Canary | None = None,
        limits: CopyLimits | None = None,
    ) -> None:
        check_parts(pool, allocator, host, index, policy, storage, canary)
        self._page_size = pool.page_size
        self._index = index
        self._host = host
        self._policy: WritePolicy = policy
        self._mover = create_mover(mover or "auto", host) if mover is None or isinstance(mover, str) else mover
        self._streams = streams if streams is not None else create_streams(pool.device)
        self._device = DevicePages(allocator, host, poison=poison)
        self._storage = storage
        backed_up = storage.back_up if storage is not None else None
        self._copies = Copies(
            self._device, host, index, self._mover, self._streams,
            failed=self._unload, limits=limits, backed_up=backed_up, canary=canary,
        )  # fmt: skip
        self._device_page: dict[int, int] = {}
        self._open: dict[int, Acquired] = {}
        self._count = dict.fromkeys(CacheCounters.__dataclass_fields__, 0)

    @property
    def policy(self) -> WritePolicy:
        """When pages get their host copy."""
        return self._policy

    @property
    def mover(self) -> Mover:
        """What moves the bytes."""
        return self._mover

    @property
    def host(self) -> HostPool:
        """The host pool."""
        return self._host

    @property
    def counters(self) -> CacheCounters:
        """What the cache has done so far."""
        copied = self._copies.counts
        unbacked = self._count["unbacked_pages"] + copied["unbacked_pages"]
        return CacheCounters(**self._count | copied | {"unbacked_pages": unbacked})

    @property
    def under_way(self) -> UnderWay:
        """Pages that wait or travel between the levels at this moment."""
        between = self._copies.under_way
        return between if self._storage is None else replace(between, **self._storage.under_way)

    @property
    def pending(self) -> bool:
        """Whether anything is under way between the levels."""
        return self._copies.pending or (self._storage is not None and self._storage.pending)

    def accounting(self) -> Accounting:
        """Count who holds the device pages.

        Raises:
            IntegrityError: The numbers do not add up to the pool.
        """
        counts = self._index.counts().device
        held = [acquired.pages[acquired._owned] for acquired in self._open.values()]
        held += [load.device_pages for load in self._copies.loading()]
        of_index = np.fromiter(self._device_page.values(), dtype=np.int64)
        outside = np.setdiff1d(np.concatenate([np.zeros(0, np.int64), *held]), of_index)
        return Accounting(
            available=self._device.available,
            evictable=counts.evictable,
            protected=counts.protected,
            in_use=outside.size,
            total=self._device.total,
        )

    def acquire(self, tokens: IndexLike, namespace: Namespace = None) -> Acquired:
        """Find the longest known prefix of a prompt and take pages for all of it.

        The last token is never a hit, so at least one token is left to compute.

        Args:
            tokens: The prompt. Shape: [tokens]; any integer dtype; at least one.
            namespace: Only what was finished under the same one is found.

        Raises:
            CacheError: No token.
            OutOfPages: Not enough pages, even after everything unprotected was evicted. Nothing is held then.
        """
        prompt = as_index_array("tokens", tokens, CacheError).copy()
        if not prompt.size:
            raise CacheError(
                "tokens",
                given="none",
                expected="at least one token",
                consequence="there is nothing to compute",
                remedy="do not acquire an empty prompt",
            )
        self.poll()
        found, lock = self._index.match_locked(prompt, namespace=namespace, max_tokens=prompt.size - 1)
        device_hit = found.device_tokens // self._page_size
        try:
            fresh = self._take(-(-prompt.size // self._page_size) - device_hit)
        except BaseException:
            self._index.unlock(lock)
            raise
        hits = found.device_pages[:device_hit]
        acquired = Acquired(
            tokens=prompt,
            namespace=namespace,
            page_size=self._page_size,
            nodes=found.nodes,
            host_pages=found.host_pages,
            device_hit=device_hit,
            pages=np.concatenate([hits, fresh]),
            lock=lock,
            wait=self._copies.wait_layer,
            pending=[load for load in self._copies.loading() if np.isin(load.device_pages, hits).any()],
        )
        self._open[id(acquired)] = acquired
        return acquired

    def limit(self, acquired: Acquired, hit_tokens: int) -> None:
        """Lower the hit before `load`, because another rank or stage has found less.

        Pages of the device beyond the new hit are replaced by new ones: others may be reading them.

        Args:
            acquired: A handle that has not been loaded.
            hit_tokens: A multiple of the page size, at most `acquired.hit_tokens`.

        Raises:
            CacheError: The handle is past that.
            HitError: Not such a number.
            OutOfPages: No page for a replacement. The handle is unchanged.
        """
        acquired._expect("limit", "acquired")
        if hit_tokens % self._page_size or not 0 <= hit_tokens <= acquired.hit_tokens:
            raise HitError(
                "hit_tokens",
                given=hit_tokens,
                expected=f"a multiple of {self._page_size} in 0..{acquired.hit_tokens}",
                consequence="tokens that were not found would not be computed",
                remedy="pass the least hit over all ranks, each in whole pages",
            )
        hit = hit_tokens // self._page_size
        given_up = acquired._device_hit - hit
        if given_up > 0:
            pages = acquired._pages.copy()
            pages[hit : acquired._device_hit] = self._take(given_up)
            acquired._pages = pages
            acquired._owned[hit : acquired._device_hit] = True
            acquired._device_hit = hit
            left = pages[:hit]
            acquired._pending = [load for load in acquired._pending if np.isin(load.device_pages, left).any()]
        acquired._hit = hit

    def extend(self, acquired: Acquired, count: int) -> None:
        """Take further pages, for tokens that follow the prompt.

        Raises:
            CacheError: The handle has ended.
            OutOfPages: Not enough pages. The handle is unchanged.
        """
        acquired._expect("extend", "acquired", "loaded")
        acquired._pages = np.concatenate([acquired._pages, self._take(count)])
        acquired._owned = np.concatenate([acquired._owned, np.ones(count, dtype=np.bool_)])

    def load(self, acquired: Acquired) -> None:
        """Start to bring the host's part of the hit back; does not wait (see `Acquired.wait_layer`).

        Raises:
            CacheError: The handle was loaded or has ended.
            CanaryMismatch: Page `position` of the host's part is not what was backed up; `limit` to those before it. It
                and all behind it have left the host, and it the third level, so that nobody else finds them.
            Exception: What the mover or device raised; then nothing counts as loaded, and the handle can be aborted.
        """
        acquired._expect("load", "acquired")
        start, stop = acquired._device_hit, acquired._hit
        if start < stop:
            nodes, pages = acquired._nodes[start:stop], acquired._pages[start:stop].copy()
            absent = np.array([node not in self._device_page for node in nodes.tolist()])
            try:
                load = self._copies.start_load(
                    nodes[absent], acquired._host_pages[start:stop], pages, lambda: self._index.lock(nodes)
                )
            except CanaryMismatch as error:
                self._forget(acquired, start + error.position)
                raise
            acquired._pending.append(load)
            self._index.loaded(nodes[absent], pages[absent])
            self._device_page.update(zip(nodes[absent].tolist(), pages[absent].tolist(), strict=True))
            acquired._owned[start:stop][absent] = False
        acquired.state = "loaded"

    def finish(self, acquired: Acquired, tokens: IndexLike) -> None:
        """Hand a request's whole pages to the index, free the rest, and start the backups that the policy asks for.

        Args:
            acquired: A handle whose pages hold K and V of all of `tokens` (or will, by work issued before this call).
            tokens: The prompt, or its beginning, or the prompt and what followed it. Shape: [tokens].

        Raises:
            CacheError: Host pages were found and never loaded, or their load has failed; the handle has ended; the
                tokens are not those of the prompt, or need more pages than the handle has. Nothing is changed.
            Exception: What a mover or device raised when the backup was started; the pages are in the index and the
                handle has ended, without a host copy.
        """
        acquired._expect("finish", *(("loaded",) if acquired.host_hit_tokens else ("acquired", "loaded")))
        acquired._expect_whole()
        done = as_index_array("tokens", tokens, CacheError)
        common = min(done.size, acquired.tokens.size)
        if not np.array_equal(done[:common], acquired.tokens[:common]) or done.size < acquired.hit_tokens:
            raise bad_tokens(f"{done.size} other tokens", "the prompt, a longer text that begins with it, or less")
        whole = done.size // self._page_size
        if -(-done.size // self._page_size) > acquired.pages.size:
            raise bad_tokens(f"{done.size} tokens", f"at most {acquired.pages.size * self._page_size}")
        pages, owned = acquired._pages, acquired._owned
        inserted = self._index.insert(done[: whole * self._page_size], pages[:whole], namespace=acquired.namespace)
        self._device_page.update(zip(inserted.nodes.tolist(), inserted.pages.tolist(), strict=True))
        owned[inserted.taken] = False
        self._end(acquired, "finished")
        self._count["prompt_tokens"] += acquired.tokens.size
        self._count["device_hit_tokens"] += acquired.device_hit_tokens
        self._count["host_hit_tokens"] += acquired.host_hit_tokens
        lock = self._index.lock(inserted.nodes)
        self._index.unlock(acquired.lock)
        try:
            self._device.release(pages[owned])
            least = _USES[self._policy]
            if least is not None:
                self._back_up(self._wanting(inserted.nodes, least))
        finally:
            self._index.unlock(lock)
        self.poll()

    def abort(self, acquired: Acquired) -> None:
        """Give a request's pages back; what it found stays in the index.

        A load that nobody else waits for is stopped: layers that were not submitted are not moved, its pages are free
        when the others have ended, and none of it counts. One that is wholly submitted is left to end.

        Raises:
            CacheError: The handle has ended.
        """
        acquired._expect("abort", "acquired", "loaded")
        self._end(acquired, "aborted")
        for load in acquired._pending:
            if not any(load in other._pending for other in self._open.values()):
                self._copies.cancel(load, lambda: self._unload(load))  # noqa: B023
        self._index.unlock(acquired.lock)
        self._device.release(acquired._pages[acquired._owned])
        self.poll()

    def cancel_backups(self) -> int:
        """Give up the backups that wait for others to end; returns their pages, which may be backed up later."""
        return self._copies.cancel_backups()

    def prefetch(self, tokens: IndexLike, namespace: Namespace = None) -> Prefetch:
        """Start to bring what the third level has of a prompt to the host; see `StorageTier.prefetch`.

        Raises:
            CacheError: The cache has no third level.
        """
        if self._storage is None:
            raise no_storage()
        return self._storage.prefetch(tokens, namespace)

    def poll(self) -> None:
        """Acknowledge copies that have ended; never blocks. Raises what the device reports of them."""
        self._copies.poll()
        if self._storage is not None:
            self._storage.poll()

    def drain(self) -> None:
        """Wait until no copy is under way, in any level. Raises what the device reports."""
        self._copies.drain()
        if self._storage is not None:
            self._storage.drain()

    def evict(self, pages: int) -> int:
        """Let the least recently used pages leave the device until `pages` are free; returns how many left."""
        before = self._count["evicted_device_pages"]
        self._make_room(pages)
        return self._count["evicted_device_pages"] - before

    def _end(self, acquired: Acquired, state: Literal["finished", "aborted"]) -> None:
        acquired.state = state
        del self._open[id(acquired)]
        self._count[state] += 1

    def _forget(self, acquired: Acquired, place: int) -> None:
        """A host page is not what was backed up: it and all behind it leave the host, it alone the third level."""
        with suppress(StaleNode):  # it has left already, and another request found it before
            gone = self._index.drop_host(acquired._nodes[place : place + 1])
            self._host.allocator.release(gone.pages)
            self._count["refused_host_pages"] += int(gone.pages.size) + gone.shortfall
        if self._storage is not None:
            self._storage.forget(acquired.tokens[: (place + 1) * self._page_size], acquired.namespace)

    def _unload(self, load: Load) -> bool:
        """Take the pages of a load that failed or is stopped out of the index, unless somebody has built on them."""
        try:
            pages = self._index.unloaded(load.nodes)
        except TierOrder:
            return False
        for node in load.nodes.tolist():
            del self._device_page[node]
        for acquired in self._open.values():  # who has them keeps them until he ends
            mine = np.isin(acquired._pages, pages) & ~acquired._owned
            self._device.retain(acquired._pages[mine])
            acquired._owned[mine] = True
        self._device.release(pages)
        return True

    def _take(self, count: int) -> IntArray:
        self._make_room(count)
        return self._device.alloc(count)

    def _make_room(self, count: int) -> None:
        """Evict until `count` pages are free, or nothing more can leave."""
        if count <= self._device.available:
            return
        self.poll()
        if self._policy == "write_back":
            left = self._evict(count - self._device.available, keep_unbacked=True)
            if left.size:
                self._back_up(left)
                self._copies.drain()
        self._evict(count - self._device.available)
        if count > self._device.available:
            self._copies.drain()
            if self._storage is not None:
                self._storage.drain(reads=False)  # pages are locked until the store has them
            self._evict(count - self._device.available)

    def _evict(self, count: int, *, keep_unbacked: bool = False) -> IntArray:
        """Evict from the device; returns the nodes that need a host copy first."""
        if count <= 0:
            return np.zeros(0, dtype=np.int64)
        gone = self._index.evict_device(count, keep_unbacked=keep_unbacked)
        for node in (*gone.removed.tolist(), *gone.kept.tolist()):
            del self._device_page[node]
        self._device.release(gone.pages)
        self._count["evicted_device_pages"] += gone.pages.size
        return gone.needs_backup

    def _wanting(self, nodes: IntArray, least: int) -> IntArray:
        """Those of a prefix's nodes that have no host copy, are used often enough, and are not under way."""
        under_way = self._copies.being_backed_up()
        pending = self._index.pending_backup(len(self._device_page), min_uses=least, in_flight=under_way)
        wanting: IntArray = nodes[np.isin(nodes, pending)]
        return wanting

    def _back_up(self, nodes: IntArray) -> None:
        """Start the backup of as many nodes as the host has room for, from the first."""
        if not nodes.size:
            return
        lock = self._index.lock(nodes)
        try:
            host_pages, gone = take_host_pages(self._host, self._index, len(nodes))
            count = len(host_pages)
            self._count["evicted_host_pages"] += gone
            self._count["unbacked_pages"] += len(nodes) - count
        except BaseException:
            self._index.unlock(lock)
            raise
        if not count:
            self._index.unlock(lock)
            return
        device_pages = np.array([self._device_page[node] for node in nodes[:count].tolist()], dtype=np.int64)
        self._copies.start_backup(nodes[:count], device_pages, host_pages, lock)
