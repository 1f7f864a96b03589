"""Owns the numbers that a cache reports: what it has done so far, and who holds the device pages at this moment."""

from __future__ import annotations

from dataclasses import dataclass

from kv_pool.errors import IntegrityError

__all__ = ["Accounting", "CacheCounters", "CompanionCounters"]


@dataclass(frozen=True)
class CacheCounters:
    """What a cache has done since it was made; tokens are those of finished prompts.

    Attributes:
        finished: Prompts that ended in `finish`.
        aborted: Prompts that ended in `abort`.
        prompt_tokens: Tokens of finished prompts.
        device_hit_tokens: Of these, found on the device.
        host_hit_tokens: Of these, brought back from the host.
        loaded_pages: Pages copied from the host to the device.
        backed_up_pages: Pages whose host copy is complete.
        unbacked_pages: Pages that should have got a host copy and found no room.
        evicted_device_pages: Pages that left the device.
        evicted_host_pages: Pages that left the host.
        load_batches: Submissions of loads to the mover; several loads may share one.
        backup_batches: Submissions of backups to the mover.
        cancelled_load_pages: Pages of loads that were stopped before all their layers were submitted.
        cancelled_backup_pages: Pages whose backup was given up while it waited.
        refused_host_pages: Host pages that left because the canary refused them or one before them.
        uncovered_tokens: Tokens of finished prompts that the cache's own pool had and a companion had not.
        companion_loaded_pages: Pages and rows of companions copied from the host to the device.
        companion_backed_up_pages: Pages and rows of companions whose host copy is complete.
    """

    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    loaded_pages: int = 0
    backed_up_pages: int = 0
    unbacked_pages: int = 0
    evicted_device_pages: int = 0
    evicted_host_pages: int = 0
    load_batches: int = 0
    backup_batches: int = 0
    cancelled_load_pages: int = 0
    cancelled_backup_pages: int = 0
    refused_host_pages: int = 0
    uncovered_tokens: int = 0
    companion_loaded_pages: int = 0
    companion_backed_up_pages: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that were not computed again."""
        return self.device_hit_tokens + self.host_hit_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of finished prompts that were computed: prompt tokens less hits."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(frozen=True)
class CompanionCounters:
    """What a cache has done with the pages (or rows) of one companion since it was made.

    Attributes:
        device_hit_pages: Pages that hits of finished prompts have read and found on the device.
        host_hit_pages: Pages that they have brought back from the host.
        loaded_pages: Pages copied from the host to the device.
        backed_up_pages: Pages whose host copy is complete.
        load_batches: Submissions of loads to the movers.
        backup_batches: Submissions of backups to the movers.
        cancelled_load_pages: Pages of loads that were stopped before all their layers were submitted.
        cancelled_backup_pages: Pages whose backup was given up while it waited.
        refused_host_pages: Host pages that left because the canary refused them.
    """

    device_hit_pages: int = 0
    host_hit_pages: int = 0
    loaded_pages: int = 0
    backed_up_pages: int = 0
    load_batches: int = 0
    backup_batches: int = 0
    cancelled_load_pages: int = 0
    cancelled_backup_pages: int = 0
    refused_host_pages: int = 0


@dataclass(frozen=True)
class Accounting:
    """Who holds the device pages of a pool. Invariant: the first four add up to `total`.

    Attributes:
        available: Free pages.
        evictable: Pages of the index that nobody protects.
        protected: Pages of the index under a lock: of running requests, loads and backups.
        in_use: Pages that requests hold outside the index, and that a load or somebody else's use (`in_use`) keeps.
        total: Pages of the pool without page 0.

    Raises:
        IntegrityError: They do not add up.
    """

    available: int
    evictable: int
    protected: int
    in_use: int
    total: int

    def __post_init__(self) -> None:
        if self.available + self.evictable + self.protected + self.in_use != self.total:
            raise IntegrityError(
                "available + evictable + protected + in_use",
                given=f"{self.available} + {self.evictable} + {self.protected} + {self.in_use}",
                expected=self.total,
                consequence="a page is lost or has two owners",
                remedy="share the allocator with nobody but this cache; otherwise this is a defect to report",
            )
