"""Owns what a running request has of the cache: its pages, how many tokens were found, and the waits for loads.

A handle is made, changed and ended by the controller; it does not free anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_pool._arguments import check_kind
from kv_pool.errors import CacheError, HitError
from kv_pool.hicache._group import Group, named
from kv_pool.tables import INT64_MAX, whole_number

if TYPE_CHECKING:
    from kv_planner import PrefixLock

    from kv_pool.hicache._inflight import Load
    from kv_pool.hicache._share import Share
    from kv_pool.tables import IntArray

__all__ = ["Acquired", "AcquiredState", "Namespace", "check_handle"]

Namespace: TypeAlias = "str | tuple[str | None, str | None] | None"
AcquiredState: TypeAlias = Literal["acquired", "loaded", "failed", "finished", "aborted"]


class Acquired:
    """Pages for a whole prompt: those that were found first, then new ones.

    Attributes:
        tokens: The prompt. Shape: [tokens]; dtype int64.
        namespace: Where it was looked up.
        state: Where it is in its life.
    """

    def __init__(
        self,
        *,
        tokens: IntArray,
        namespace: Namespace,
        page_size: int,
        nodes: IntArray,
        known: int,
        host_pages: IntArray,
        device_hit: int,
        pages: IntArray,
        lock: PrefixLock,
        wait: Callable[[Acquired, int], None],
        pending: list[Load],
        shares: list[Share],
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.state: AcquiredState = "acquired"
        self._page_size = page_size
        self._nodes = nodes
        self._known = known
        self._host_pages = host_pages
        self._device_hit = device_hit
        self._hit = nodes.size
        self._pages = pages
        self._owned: npt.NDArray[np.bool_] = np.arange(pages.size) >= device_hit
        self._lock = lock
        self._wait = wait
        self._pending = pending
        self._shares = shares

    @property
    def pages(self) -> IntArray:
        """Device pages of the whole prompt, in token order, hits first. Shape: [pages]; dtype int64; read-only.

        `limit` and `extend` replace the array.
        """
        pages: IntArray = self._pages.view()
        pages.flags.writeable = False
        return pages

    def companion_pages(self, name: str) -> IntArray:
        """Device pages of a companion, one a page of the prompt; 0 where it has none, behind the window or not reached.

        Shape: [pages]; dtype int64. Before `load`, those that are not on the device are 0.

        Raises:
            CacheError: There is no such companion, or the handle has ended.
        """
        self._expect("companion_pages", "acquired", "loaded")
        return self._share(name).member.device.find(self._pages)

    def row(self, name: str) -> int:
        """The running row of states: after `load` it holds the state at the end of the hit, zeros without a hit.

        Raises:
            CacheError: There is no such companion, or it has no rows.
        """
        row = self._share(name).row
        if not row:
            raise self._refuse(
                "row", "one of states", "there is no running row", "ask a companion of snapshots, in time"
            )
        return row

    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be computed: whole pages, and always fewer than the prompt has."""
        return self._hit * self._page_size

    @property
    def device_hit_tokens(self) -> int:
        """Of the hit, tokens that were on the device."""
        return self._device_hit * self._page_size

    @property
    def host_hit_tokens(self) -> int:
        """Of the hit, tokens that `load` brings back."""
        return (self._hit - self._device_hit) * self._page_size

    @property
    def found_tokens(self) -> int:
        """Tokens of the hit when it was found, before `limit`."""
        return self._nodes.size * self._page_size

    @property
    def known_tokens(self) -> int:
        """Tokens that the cache's own pool had: more than were found where a companion lacks something.

        The prompt parts from all known ones here, so this is where a snapshot serves the next one like it.
        """
        return self._known * self._page_size

    def restorable(self, at_most: int) -> int:
        """Return the longest hit of at most so many tokens that all companions can serve; 0 for a negative number.

        Raises:
            HitError: `at_most` is no whole number.
        """
        consequence = "there is no such hit"
        least = -INT64_MAX
        whole = whole_number("at_most", at_most, least=least, most=None, error=HitError, consequence=consequence)
        at_most = max(0, whole)
        most = min(at_most // self._page_size, self._nodes.size)
        depths = Group.depths(self._shares, self._nodes.size)
        return int(np.flatnonzero(depths[: most + 1])[-1]) * self._page_size

    @property
    def lock(self) -> PrefixLock:
        """The index's lock over the pages that were found."""
        return self._lock

    def wait_layer(self, layer_id: int) -> None:
        """Let the current stream wait until this layer of all pages that were found has arrived.

        Does not block the host. With a mover that moves all layers at once, it waits for all of them.

        Args:
            layer_id: Global layer id of a layer held here, by the cache's own pool or a companion.

        Raises:
            CacheError: Host pages were found, or there are states, and `load` was not called; or the handle has ended.
            UnknownLayer: The layer is not held here.
        """
        self._expect("wait_layer", "acquired", "loaded", "failed")
        if self._must_load and self.state == "acquired":
            raise self._refuse(
                "wait_layer", "loaded", "attention would read pages that nobody fills", "call load first"
            )
        self._wait(self, layer_id)

    @property
    def _must_load(self) -> bool:
        return self.host_hit_tokens > 0 or any(share.must_load for share in self._shares)

    @property
    def _served(self) -> dict[str, int]:
        """Its tokens, by the names of `CacheCounters`."""
        return {
            "prompt_tokens": self.tokens.size,
            "device_hit_tokens": self.device_hit_tokens,
            "host_hit_tokens": self.host_hit_tokens,
            "uncovered_tokens": self.known_tokens - self.found_tokens,
        }

    def _share(self, name: str) -> Share:
        return named("name", name, {share.member.companion.name: share for share in self._shares})

    def _path(self, place: int) -> tuple[IntArray, Namespace]:
        """The text up to the end of a page, and where it was looked up."""
        return self.tokens[: (place + 1) * self._page_size], self.namespace

    def _lower_hit(self, hit_tokens: int) -> int:
        """Check a lower hit; returns it in pages."""
        size = self._page_size
        hit_tokens = whole_number("hit_tokens", hit_tokens, error=HitError, consequence="there is no such hit")
        if hit_tokens % size or not 0 <= hit_tokens <= self.hit_tokens or self.restorable(hit_tokens) != hit_tokens:
            raise HitError(
                "hit_tokens",
                given=hit_tokens,
                expected=f"a multiple of {size} in 0..{self.hit_tokens} that every companion can serve",
                consequence="tokens that were not found would not be computed",
                remedy="pass the least hit over all ranks, each in whole pages; see restorable",
            )
        return hit_tokens // size

    def _own_position(self, tokens: int) -> int:
        """Check where a snapshot is to be saved; returns the page that ends there."""
        size = self._page_size
        tokens = whole_number("tokens", tokens, error=CacheError, consequence="no page ends there")
        if tokens % size or not self.hit_tokens < tokens <= self._pages.size * size:
            raise CacheError(
                "tokens",
                given=tokens,
                expected=f"a multiple of {size} above {self.hit_tokens} and up to {self._pages.size * size}",
                consequence="the states would be found under a text that they are not of",
                remedy="save states where a page of this request ends",
            )
        return tokens // size - 1

    def _expect(self, call: str, *states: AcquiredState) -> None:
        if self.state not in states:
            raise self._refuse(
                call,
                " or ".join(states),
                "its pages may belong to others by now",
                "call it once, in the handle's order",
            )

    def _expect_whole(self) -> None:
        if self._must_load:
            self._expect("finish", "loaded")
        if any(load.failure for load in self._pending) or any(share.failure for share in self._shares):
            raise CacheError(
                "finish(acquired)",
                given="a handle of which a load has failed",
                expected="one whose pages hold what was computed",
                consequence="others would find pages that nobody filled",
                remedy="abort it, and serve the prompt again",
            )

    def _refuse(self, call: str, expected: str, consequence: str, remedy: str) -> CacheError:
        return CacheError(
            f"{call}(acquired)",
            given=f"a handle that is {self.state}",
            expected=f"one that is {expected}",
            consequence=consequence,
            remedy=remedy,
        )

    def __repr__(self) -> str:
        return (
            f"Acquired({self.tokens.size} tokens, {self.device_hit_tokens} on the device, "
            f"{self.host_hit_tokens} on the host, {self.state})"
        )


def check_handle(acquired: Acquired, wait: Callable[[Acquired, int], None], call: str, *states: AcquiredState) -> None:
    """Refuse what is no handle of a cache, or in another state than `call` needs.

    Args:
        acquired: The handle.
        wait: The method of the cache by which its handles wait.
        call: What is to be called.
        *states: When it may be.

    Raises:
        CacheError: As said.
    """
    if check_kind("acquired", acquired, Acquired, CacheError)._wait != wait:
        raise CacheError(
            "acquired",
            given="a handle of another cache",
            expected="one that this cache has made",
            consequence="pages of another pool would be read or freed",
            remedy="call the cache that acquired it",
        )
    acquired._expect(call, *states)
