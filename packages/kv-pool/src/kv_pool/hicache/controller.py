"""Owns the life of a prompt in the cache: find, load, compute, keep, back up, evict.

The controller leads each request through its life; the index knows which tokens lie in which pages, `_levels` makes
room and keeps, `_copies` orders what movers move, and a third level (`storage`) is read by `prefetch`. Models with more
than one pool have companions. One owner calls it. It does not compute attention, nor talk to other ranks (see `limit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.errors import CanaryMismatch
from kv_pool.hicache import _parts
from kv_pool.hicache._copies import Copies
from kv_pool.hicache._device import DevicePages
from kv_pool.hicache._group import Group
from kv_pool.hicache._inflight import CopyLimits
from kv_pool.hicache._levels import Failed, Levels
from kv_pool.hicache._reports import CacheReports
from kv_pool.hicache.accounting import CacheCounters
from kv_pool.hicache.acquired import Acquired, Namespace, check_handle
from kv_pool.hicache.movers import Mover, MoverName, create_mover
from kv_pool.hicache.storage.companions import CompanionStorage
from kv_pool.hicache.streams import Streams, create_streams

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.allocator import PageAllocator
    from kv_pool.hicache._inflight import Load
    from kv_pool.hicache._share import Share
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.host_pool import HostPool, MirroredPool
    from kv_pool.hicache.storage import Prefetch, StorageTier
    from kv_pool.hicache.storage.companions import CompanionPrefetch
    from kv_pool.tables import IndexLike

__all__ = ["HiCacheController"]


class HiCacheController(CacheReports):
    """A prefix cache over a device pool and the host pool that mirrors it, and over the companions of both.

    Invariants, true before and after every call:

    1. `available + evictable + protected + in_use == total`, in every pool (see `accounting`);
    2. a page is read or written by a copy only while it is locked or held;
    3. a node counts as backed up only when its bytes are on the host, and those that companions have of it before;
    4. a device page that was given back or evicted is poisoned before anybody gets it again;
    5. a companion's page never outlives the page that it belongs to, on no level; it may leave earlier, and a hit is
       never deeper than all companions can serve.

    Args:
        pool: The device pool.
        allocator: Its pages; shared with nobody else.
        host: The host pool that mirrors `pool`.
        index: Which tokens lie in which pages; empty, over as many pages as both pools have.
        policy: When a page gets its host copy: when its first prompt has finished (`write_through`), its second
            (`write_through_selective`), or when it has to leave the device (`write_back`).
        mover: A mover for `host`, or the name of one; `None` is `"auto"`. Companions use the name, or `"auto"`.
        streams: Lanes for copies; `None` makes those of the pool's device.
        poison: Whether freed device pages are overwritten, so that a stale read shows.
        storage: The third level, over the same host pool and index; `None` for two levels.
        canary: Checksums of every backed-up token, asked at every load; `None` for none. Companions get their own then.
        limits: How much of a pool is copied at a time; `None` for the defaults of `CopyLimits`.
        companions: Further pools of the model: see `Companion`.

    Raises:
        HostPoolError: Pools, allocator, index and companions do not belong together, or the policy does not exist.
        UnsupportedMover: No mover serves the host's layout on the device.
    """

    def __init__(
        self,
        pool: MirroredPool,
        allocator: PageAllocator,
        host: HostPool,
        index: PrefixIndex,
        *,
        policy: _parts.WritePolicy = "write_through",
        mover: Mover | MoverName | None = None,
        streams: Streams | None = None,
        poison: bool = True,
        storage: StorageTier | None = None,
        canary: Canary | None = None,
        limits: CopyLimits | None = None,
        companions: Sequence[Companion] = (),
    ) -> None:
        _parts.check_parts(pool, allocator, host, index, policy, storage, canary)
        companions = _parts.check_options(mover, streams, poison, limits, companions)
        self._page_size = pool.page_size
        self._index, self._host, self._storage, self._policy = index, host, storage, policy
        name: MoverName = mover if isinstance(mover, str) else "auto"
        self._mover = mover if isinstance(mover, Mover) else create_mover(name, host)
        lanes = streams if streams is not None else create_streams(pool.device)
        stored = CompanionStorage(storage, companions) if storage is not None and companions else None
        self._group = Group(
            companions, allocator, host, index, lanes,
            mover=name, poison=poison, storage=stored, canary=canary is not None, limits=limits or CopyLimits(),
            failed=partial(self._unload, failed="companion"),
        )  # fmt: skip
        self._companion_storage = stored
        self._device = DevicePages(allocator, host, poison=poison)  # behind all that may refuse: it watches
        self._copies = Copies(
            self._device, host, index, self._mover, lanes,
            failed=partial(self._unload, failed="own"), limits=limits or CopyLimits(), canary=canary,
            backed_up=storage.back_up if storage is not None else None,
        )  # fmt: skip
        self._levels = Levels(index, self._device, host, self._copies, self._group, policy, storage, stored)
        self._open: dict[int, Acquired] = {}
        self._count = dict.fromkeys(CacheCounters.__dataclass_fields__, 0)

    def acquire(self, tokens: IndexLike, namespace: Namespace = None, *, reach: int | None = None) -> Acquired:
        """Find the longest known prefix of a prompt that all pools can serve, and take pages for all of it.

        The last token is never a hit, so at least one token is left to compute.

        Args:
            tokens: The prompt. Shape: [tokens]; any integer dtype; at least one.
            namespace: Only what was finished under the same one is found.
            reach: Companions get pages for the tokens below this one, the rest by `advance` in chunks; `None` for all.

        Raises:
            CacheError: No token, or a `reach` that is no whole number.
            OutOfPages: Not enough pages, even after everything unprotected was evicted. Nothing is held then.
        """
        prompt = _parts.check_prompt(tokens, reach)
        self.poll()
        found, lock = self._index.match_locked(prompt, namespace=namespace, max_tokens=prompt.size - 1)
        nodes, on_device, on_host = found.nodes, found.device_pages, found.host_pages
        device_hit, known = found.device_tokens // self._page_size, nodes.size
        shares: list[Share] = []
        pages = fresh = np.zeros(0, dtype=np.int64)
        try:
            if self._group:
                hit, shares = self._group.find(on_device, on_host)
                device_hit = min(device_hit, hit)
                nodes, on_host = nodes[:hit], on_host[:hit]
                if hit < known:
                    whole, lock = lock, self._index.lock(nodes)
                    self._index.unlock(whole)
            fresh = self._levels.take(-(-prompt.size // self._page_size) - device_hit)
            pages = np.concatenate([on_device[:device_hit], fresh])
            self._group.open(shares, pages, nodes.size, reach)
        except BaseException:
            self._device.release(fresh)
            for share in shares:
                share.close()
            self._index.unlock(lock)
            raise
        acquired = Acquired(
            tokens=prompt,
            namespace=namespace,
            page_size=self._page_size,
            nodes=nodes,
            known=known,
            host_pages=on_host,
            device_hit=device_hit,
            pages=pages,
            lock=lock,
            wait=self._wait,
            pending=[load for load in self._copies.loading() if np.isin(load.device_pages, pages[:device_hit]).any()],
            shares=shares,
        )
        self._open[id(acquired)] = acquired
        return acquired

    def limit(self, acquired: Acquired, hit_tokens: int) -> None:
        """Lower the hit before `load`, because another rank or stage has found less.

        Pages of the device beyond the new hit are replaced by new ones: others may be reading them.

        Args:
            acquired: A handle that has not been loaded.
            hit_tokens: At most `acquired.hit_tokens`, and such that `acquired.restorable(hit_tokens)` is the same.

        Raises:
            CacheError: The handle is past that.
            HitError: Not such a number.
            OutOfPages: No page for a replacement. The handle is unchanged.
        """
        check_handle(acquired, self._wait, "limit", "acquired")
        hit = acquired._lower_hit(hit_tokens)
        pages, given_up = acquired._pages.copy(), max(0, acquired._device_hit - hit)
        pages[hit : hit + given_up] = self._levels.take(given_up)
        try:
            self._group.open(acquired._shares, pages, hit, 0)
        except BaseException:
            self._device.release(pages[hit : hit + given_up])
            raise
        acquired._pages = pages
        acquired._owned[hit : hit + given_up] = True
        acquired._device_hit = min(acquired._device_hit, hit)
        left = pages[: acquired._device_hit]
        acquired._pending = [load for load in acquired._pending if np.isin(load.device_pages, left).any()]
        acquired._hit = hit

    def extend(self, acquired: Acquired, count: int) -> None:
        """Take further pages, for tokens that follow the prompt; of companions too, unless `advance` is to take them.

        Raises:
            CacheError: The handle has ended.
            PageError: `count` is negative or no whole number.
            OutOfPages: Not enough pages. The handle has none of them.
        """
        check_handle(acquired, self._wait, "extend", "acquired", "loaded")
        pages = np.concatenate([acquired._pages, self._levels.take(count)])
        try:
            self._group.extend(acquired._shares, pages, acquired._pages.size)
        except BaseException:
            self._device.release(pages[pages.size - count :])
            raise
        acquired._pages = pages
        acquired._owned = np.concatenate([acquired._owned, np.ones(count, dtype=np.bool_)])

    def advance(self, acquired: Acquired, computed: int, *, reach: int | None = None) -> None:
        """Say how far a request has come, so that pages behind its window may leave, and take those ahead.

        Args:
            acquired: A loaded handle.
            computed: Tokens that are computed, from the first of the prompt.
            reach: As for `acquire`.

        Raises:
            CacheError: The handle is not loaded, or a number of tokens is negative or no whole one.
            OutOfPages: Not enough pages; those behind the window may leave all the same.
        """
        check_handle(acquired, self._wait, "advance", "loaded")
        _parts.check_progress(computed, reach)
        self._group.advance(acquired._shares, acquired._pages, computed, reach)

    def snapshot(self, acquired: Acquired, tokens: int) -> bool:
        """Save the running states of a request, so that a later prompt can go on from here.

        Args:
            acquired: A loaded handle whose running rows hold the states after exactly these tokens, by work that was
                issued before this call.
            tokens: A multiple of the page size beyond the hit, within the pages of the handle. `acquired.known_tokens`
                and the end of the prompt are good places.

        Returns:
            Whether there was room.

        Raises:
            CacheError: The handle is not loaded, or there is no such place.
        """
        check_handle(acquired, self._wait, "snapshot", "loaded")
        position = acquired._own_position(tokens)
        page = acquired._pages[position : position + 1]
        shares = [share for share in acquired._shares if share.member.companion.coverage == "snapshots"]
        return all([share.snapshot(page) for share in shares])

    def load(self, acquired: Acquired) -> None:
        """Start to bring the host's part of the hit back; does not wait (see `Acquired.wait_layer`).

        Raises:
            CacheError: The handle was loaded or has ended.
            CanaryMismatch: Page `position` of the host's part is not what was backed up. It and all behind it have left
                the host, and it the third level: `limit` to those before it. Or it is a companion's and has left host
                and third level: `limit` to what is `restorable` without it.
            Exception: What a mover or the device raised; the handle can be aborted then.
        """
        check_handle(acquired, self._wait, "load", "acquired")
        self._group.check(
            acquired._shares, acquired._pages, acquired._hit, acquired._host_pages,
            refused=lambda name, place: self._levels.forget_companion(name, *acquired._path(place)),
        )  # fmt: skip
        start, stop = acquired._device_hit, acquired._hit
        if start < stop:
            nodes, pages = acquired._nodes[start:stop], acquired._pages[start:stop].copy()
            try:
                load, absent = self._levels.load(nodes, acquired._host_pages[start:stop], pages)
            except CanaryMismatch as error:
                self._levels.forget(int(nodes[error.position]), *acquired._path(start + error.position))
                raise
            acquired._pending.append(load)
            acquired._owned[start:stop][absent] = False
        acquired.state = "failed"
        self._group.load(acquired._shares, acquired._pages, stop, acquired._nodes, acquired._host_pages)
        acquired.state = "loaded"

    def finish(self, acquired: Acquired, tokens: IndexLike) -> None:
        """Hand a request's whole pages to the index, free the rest, and start the backups that the policy asks for.

        Args:
            acquired: A handle whose pages hold K and V of all of `tokens` (or will, by work issued before this call).
            tokens: The prompt, or its beginning, or the prompt and what followed it. Shape: [tokens].

        Raises:
            CacheError: Something was found to be loaded and never was, or its load has failed; the handle has ended;
                the tokens are not those of the prompt, or need more pages than the handle has. Nothing is changed.
            Exception: What a mover or device raised when the backup was started; the pages are in the index and the
                handle has ended, without a host copy.
        """
        check_handle(acquired, self._wait, "finish", "acquired", "loaded")
        acquired._expect_whole()
        done = _parts.check_text(acquired, tokens, self._page_size)
        whole = done.size // self._page_size
        pages = acquired._pages
        inserted = self._index.insert(done[: whole * self._page_size], pages[:whole], namespace=acquired.namespace)
        self._levels.record(inserted.nodes, inserted.pages)
        acquired._owned[inserted.taken] = False
        for share in acquired._shares:
            share.settle(pages[:whole], inserted.pages, acquired._hit)
        for name, tokens_served in acquired._served.items():
            self._count[name] += tokens_served
        lock = self._index.lock(inserted.nodes)
        try:
            acquired.state = "finished"
            del self._open[id(acquired)]
            self._release(acquired)
            self._levels.keep(inserted.nodes, inserted.pages)
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
        check_handle(acquired, self._wait, "abort", "acquired", "loaded", "failed")
        acquired.state = "aborted"
        del self._open[id(acquired)]
        for load in acquired._pending:
            if not any(load in other._pending for other in self._open.values()):
                self._copies.cancel(load, partial(self._unload, load))
        self._group.stop(acquired._shares, [share for other in self._open.values() for share in other._shares])
        self._release(acquired)
        self.poll()

    def cancel_backups(self) -> int:
        """Give up the backups that wait for others to end; returns their pages, which may be backed up later."""
        return self._copies.cancel_backups() + self._group.cancel_backups()

    def prefetch(self, tokens: IndexLike, namespace: Namespace = None) -> Prefetch | CompanionPrefetch:
        """Start to bring what the third level has of a prompt to the host; see `StorageTier.prefetch`.

        Raises:
            CacheError: The cache has no third level.
        """
        if self._storage is None:
            raise _parts.no_storage()
        prefetch = self._storage.prefetch(tokens, namespace)
        return prefetch if self._companion_storage is None else self._companion_storage.prefetch(prefetch)

    def poll(self) -> None:
        """Acknowledge copies that have ended; never blocks. Raises what the device reports of them."""
        self._levels.poll()

    def drain(self) -> None:
        """Wait until no copy is under way, in any level. Raises what the device reports."""
        self._levels.drain()

    def evict(self, pages: int, companion: str | None = None) -> int:
        """Let the least recently used pages leave the device until `pages` are free; returns how many left.

        Args:
            pages: How many are to be free.
            companion: Those of a companion; `None` for the cache's own, with which those of companions leave.

        Raises:
            CacheError: There is no such companion.
            PageError: `pages` is negative or no whole number.
        """
        return self._levels.evict(pages) if companion is None else self._group.member(companion).evict(pages)

    def _release(self, acquired: Acquired) -> None:
        self._count[acquired.state] += 1
        self._index.unlock(acquired.lock)
        for share in acquired._shares:
            share.close()
        self._device.release(acquired._pages[acquired._owned])

    def _unload(self, load: Load, failed: Failed | None = None) -> bool:
        """Take the pages of a load that is stopped or failed out of the index; says whether: see `Levels.unload`."""
        pages = self._levels.unload(load, failed)
        if pages is None:
            return False
        for acquired in self._open.values():  # who has them keeps them until he ends
            mine = np.isin(acquired._pages, pages) & ~acquired._owned
            self._device.retain(acquired._pages[mine])
            acquired._owned[mine] = True
        self._device.release(pages)
        return True

    def _wait(self, acquired: Acquired, layer_id: int) -> None:
        self._group.wait(acquired._shares, layer_id)
        if not self._group.alone_holds(layer_id):
            for load in acquired._pending:
                self._copies.wait_layer(load, layer_id)
