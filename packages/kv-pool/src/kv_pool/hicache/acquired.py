"""Owns what a running request has of the cache: its pages, how many tokens were found, and the waits for loads.

A handle is made, changed and ended by the controller; it does not free anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_pool.errors import CacheError

if TYPE_CHECKING:
    from kv_planner import PrefixLock

    from kv_pool.hicache._inflight import Load
    from kv_pool.tables import IntArray

__all__ = ["Acquired", "AcquiredState", "Namespace"]

Namespace: TypeAlias = "str | tuple[str | None, str | None] | None"
AcquiredState: TypeAlias = Literal["acquired", "loaded", "finished", "aborted"]


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
        host_pages: IntArray,
        device_hit: int,
        pages: IntArray,
        lock: PrefixLock,
        wait: Callable[[Load, int], None],
        pending: list[Load],
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.state: AcquiredState = "acquired"
        self._page_size = page_size
        self._nodes = nodes
        self._host_pages = host_pages
        self._found_on_device = device_hit
        self._device_hit = device_hit
        self._hit = nodes.size
        self._pages = pages
        self._owned: npt.NDArray[np.bool_] = np.arange(pages.size) >= device_hit
        self._lock = lock
        self._wait = wait
        self._pending = pending

    @property
    def pages(self) -> IntArray:
        """Device pages of the whole prompt, in token order, hits first. Shape: [pages]; dtype int64; read-only.

        `limit` and `extend` replace the array.
        """
        pages: IntArray = self._pages.view()
        pages.flags.writeable = False
        return pages

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
    def lock(self) -> PrefixLock:
        """The index's lock over the pages that were found."""
        return self._lock

    def wait_layer(self, layer_id: int) -> None:
        """Let the current stream wait until this layer of all pages that were found has arrived.

        Does not block the host. With a mover that moves all layers at once, it waits for all of them.

        Args:
            layer_id: Global layer id of a layer held here.

        Raises:
            CacheError: Host pages were found and `load` was not called.
            UnknownLayer: The layer is not held here.
        """
        if self.host_hit_tokens and self.state == "acquired":
            raise self._refuse(
                "wait_layer", "loaded", "attention would read pages that nobody fills", "call load first"
            )
        for load in self._pending:
            self._wait(load, layer_id)

    def _expect(self, call: str, *states: AcquiredState) -> None:
        if self.state not in states:
            raise self._refuse(
                call,
                " or ".join(states),
                "its pages may belong to others by now",
                "call it once, in the handle's order",
            )

    def _expect_whole(self) -> None:
        if any(load.failed for load in self._pending):
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
