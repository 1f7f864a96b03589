"""Owns the proof of the backups of companions that wait: merged, bounded, given up, failed (on a CPU)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_pool.hicache import CopyLimits, UnderWay

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage
from test_pool_hicache_copies import GatedStreams

Text = Callable[[int, int], list[int]]


class Sizes:
    """A real mover, and how many pages each backup was asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.capabilities = inner, inner.capabilities
        self.taken: list[int] = []
        self.broken = False

    def backup(self, device_pages: Any, host_pages: Any) -> None:
        if self.broken:
            raise OSError("backup")
        self.taken.append(len(device_pages))
        self.inner.backup(device_pages, host_pages)

    def load(self, device_pages: Any, host_pages: Any, layer_id: int | None = None) -> None:
        self.inner.load(device_pages, host_pages, layer_id)


def make(batch_pages: int) -> tuple[GroupBench, Any, Sizes]:
    """A cache with a draft apart over gated lanes; the companion at work, and its mover."""
    streams = GatedStreams()
    bench = GroupBench(["draft"], pages=16, host_pages=24, streams=streams, limits=CopyLimits(batch_pages))
    bench.random = PageByPage()  # type: ignore[assignment]
    member: Any = bench.cache._group.member("draft")
    sizes = Sizes(member._movers[0])
    member._movers = [sizes]
    return bench, member, sizes


def on_host(bench: GroupBench, member: Any, tokens: list[int]) -> int:
    """Pages of a text that the companion has on the host."""
    host_pages = bench.index.match(np.array(tokens)).host_pages
    return int((member.on_host(host_pages) > 0).sum())


def test_backups_that_wait_go_together(text: Text) -> None:
    bench, member, sizes = make(4)
    for name, length in ((1, 13), (2, 13), (3, 5)):
        bench.serve(text(name, length))
    assert sizes.taken == [3] and member.pages == (4, 3, 0)
    assert bench.cache.under_way == UnderWay(queued_backups=8, backups=6)
    bench.cache.drain()
    assert sizes.taken == [3, 4] and not bench.cache.pending and bench.index.counts().locks == 0
    bench.cache.evict(16)
    for name, length in ((1, 13), (2, 13), (3, 5)):
        assert bench.serve(text(name, length)) == (0, length - 1)  # checks every byte


def test_a_larger_backup_is_cut_and_the_rest_is_submitted_when_that_has_ended(text: Text) -> None:
    bench, member, sizes = make(2)
    bench.serve(text(1, 21))
    assert sizes.taken == [2] and member.pages == (3, 2, 0)
    streams: Any = bench.options["streams"]
    for expected in ([2, 2], [2, 2, 1]):
        streams.let_go("backup")
        bench.cache.poll()
        assert sizes.taken == expected
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5 and bench.cache.counters.companion_backed_up_pages == 5


def test_what_waits_is_given_up_and_asked_for_again(text: Text) -> None:
    bench, member, sizes = make(2)
    bench.serve(text(1, 21))
    assert bench.cache.cancel_backups() == 3 + 3
    assert member.pages == (0, 2, 0)
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 2 and bench.index.counts().locks == 0
    assert bench.cache.accounting("draft").protected == 0
    bench.serve(text(1, 21))
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5 and sizes.taken == [2, 2, 1]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_submission_keeps_nothing(text: Text, at_once: bool) -> None:
    bench, member, sizes = make(2)
    sizes.broken = at_once
    if at_once:
        with pytest.raises(OSError, match="backup"):
            bench.serve(text(1, 21))
    else:
        bench.serve(text(1, 21))
        sizes.broken = True
        with pytest.raises(OSError, match="backup"):
            bench.cache.drain()
    sizes.broken = False
    bench.cache.drain()
    assert not bench.cache.pending and bench.index.counts().locks == 0
    account = bench.cache.accounting("draft")
    assert (account.protected, account.in_use) == (0, 0)
    member.host.verify()
    member.device.verify()
    bench.serve(text(1, 21))
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5
