"""The prefix index, case by case: what the field's reports ask for."""

from __future__ import annotations

import threading
from typing import Any

import kv_planner as kp
import numpy as np
import pytest


def filled(*, host: bool = False) -> kp.PrefixIndex:
    """Two sequences that share one page of 4: pages 1, 2 and 1, 3; on the host the same numbers."""
    index = kp.PrefixIndex(4, device_pages=8, host_pages=8)
    index.insert(list(range(8)), [1, 2])
    index.insert([0, 1, 2, 3, 9, 9, 9, 9], [1, 3])
    if host:
        index.backed_up(index.pending_backup(9), [1, 2, 3])
    return index


@pytest.mark.parametrize(("asked", "held"), [(10, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0)])
def test_a_match_floors_at_page_edges(asked: int, held: int) -> None:
    index = kp.PrefixIndex(4, device_pages=8)
    done = index.insert(np.arange(10, dtype=np.int32), [5, 6])
    assert (done.tokens, done.taken.tolist()) == (8, [0, 1]), "the partial page stays with the caller"
    found = index.match(np.arange(asked))
    assert (found.tokens, found.device_tokens, found.host_tokens, found.page_size) == (held, held, 0, 4)
    assert found.device_pages.tolist() == [5, 6][: held // 4]
    assert index.match(np.arange(10), max_tokens=asked) == found


def test_namespaces_are_disjoint() -> None:
    index = kp.PrefixIndex(2, device_pages=9)
    spaces: list[Any] = [None, "", ("", ""), "a", (None, "a")]
    for page, space in enumerate(spaces, start=1):
        assert index.match([1, 2], namespace=space).tokens == 0
        index.insert([1, 2], [page], namespace=space)
    assert [index.match([1, 2], namespace=space).device_pages.tolist() for space in spaces] == [[1], [2], [3], [4], [5]]
    assert index.counts().namespaces == 5
    index.evict_device(5)
    assert index.counts().namespaces == 0


def test_wide_tokens_are_not_cut() -> None:
    index = kp.PrefixIndex(1, device_pages=4)
    index.insert([2**32 + 1], [1])
    assert index.match([1]).tokens == 0 and index.match([2**32 + 1]).tokens == 1


def test_inserted_pages_are_taken_duplicate_or_shared() -> None:
    index = filled()
    done = index.insert([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8], [1, 5, 6])
    assert (done.shared.tolist(), done.duplicate.tolist(), done.taken.tolist()) == ([1], [5], [2])
    assert done.pages.tolist() == [1, 2, 6], "the block table that the request goes on with"
    assert index.counts().device.held == 4


@pytest.mark.parametrize(
    ("tokens", "pages", "kind"),
    [
        ([8, 8, 8, 8], [3], kp.PageAlreadyHeld),
        ([0, 1, 2, 3], [2], kp.PageAlreadyHeld),
        ([8] * 8, [5, 5], kp.PageAlreadyHeld),
        ([8] * 8, [5], kp.UnequalPages),
        ([8] * 7, [5, 6], kp.UnequalPages),
        ([8] * 8, [5, 0], kp.ReservedPage),
        ([8] * 8, [5, 8], kp.PageOutOfRange),
        ([8] * 8, [5, -1], kp.PageOutOfRange),
        ([8, 8, 8, -1], [5], kp.TokenOutOfRange),
        ([8, 8, 8, 8], np.zeros((1, 1)), kp.ArgumentError),
    ],
)
def test_a_refused_insert_changes_nothing(tokens: list[int], pages: Any, kind: type[kp.PlanError]) -> None:
    index = filled()
    before = index.counts()
    with pytest.raises(kind):
        index.insert(tokens, pages)
    assert index.counts() == before and index.match([8] * 8).tokens == 0


def test_eviction_takes_the_oldest_leaf_first() -> None:
    index = filled()
    index.match(list(range(8)))
    assert index.evict_device(1).pages.tolist() == [3]
    assert index.evict_device(9).pages.tolist() == [2, 1]
    assert index.evict_device(2).shortfall == 2


def test_a_page_with_a_copy_stays_matchable_from_the_host() -> None:
    index = filled(host=True)
    done = index.evict_device(3)
    assert (len(done.kept), len(done.removed)) == (3, 0)
    found = index.match(list(range(8)))
    assert (found.tokens, found.device_tokens, found.host_tokens) == (8, 0, 8)
    assert (found.device_pages.tolist(), found.host_pages.tolist()) == ([-1, -1], [1, 2])
    index.loaded(found.nodes, [6, 7])
    assert index.match(list(range(8))).device_pages.tolist() == [6, 7]
    put = index.insert([0, 1, 2, 3, 9, 9, 9, 9], [6, 4])
    assert (put.shared.tolist(), put.taken.tolist()) == ([6], [1]), "a recomputed page replaces a load"


def test_eviction_without_host_room_drops_and_never_calls_it_backed_up() -> None:
    """G15: nothing could be written to the host; the page is kept or dropped and the counts balance."""
    index = kp.PrefixIndex(4, device_pages=8, host_pages=1)
    index.insert(list(range(8)), [1, 2])
    with pytest.raises(kp.PageOutOfRange):
        index.backed_up(index.pending_backup(2), [1, 2])
    kept = index.evict_device(1, keep_unbacked=True)
    assert (kept.pages.size, kept.shortfall, len(kept.needs_backup)) == (0, 1, 2)
    assert index.match(list(range(8))).device_tokens == 8
    done = index.evict_device(2)
    assert (done.pages.tolist(), len(done.removed)) == ([2, 1], 2)
    assert (index.counts().nodes, index.counts().host.held) == (0, 0)


def test_every_lock_ends_once() -> None:
    """G17, G32: 19 locks, 19 unlocks, nothing protected; a 20th is an error."""
    index = filled()
    locks = [index.lock(index.match(list(range(8)))) for _ in range(19)]
    assert (index.counts().locks, index.counts().device.protected) == (19, 2)
    for lock in locks:
        index.unlock(lock)
    assert (index.counts().locks, index.counts().device.protected) == (0, 0)
    with pytest.raises(kp.LockError):
        index.unlock(locks[0])
    with pytest.raises(kp.LockError):
        filled().unlock(index.lock(index.match([0, 1, 2, 3])))
    with pytest.raises(kp.LockError):
        filled().lock(index.match([0, 1, 2, 3]))
    with pytest.raises(kp.LockError, match="1 against no lock held"):
        index.clear()


def test_a_child_is_never_backed_up_under_a_bare_parent() -> None:
    """G18."""
    index = filled()
    first, second, third = index.pending_backup(9).tolist()
    for nodes in ([second], [second, first], [third, first, second]):
        with pytest.raises(kp.TierOrder):
            index.backed_up(nodes, range_of(nodes))
    assert index.counts().host.held == 0, "refused as a whole"
    index.backed_up([first, third], [4, 5])
    assert index.pending_backup(9).tolist() == [second]
    with pytest.raises(kp.TierConflict):
        index.backed_up([third], [6])
    with pytest.raises(kp.TierConflict):
        index.backed_up([second, second], [6, 7])
    with pytest.raises(kp.PageAlreadyHeld):
        index.backed_up([second], [4])
    with pytest.raises(kp.UnequalPages):
        index.backed_up([second], [])


def range_of(nodes: list[int]) -> list[int]:
    return list(range(1, len(nodes) + 1))


def test_pages_in_flight_survive_a_demand_for_everything() -> None:
    """G19, G20: a load and a backup are under way while both tiers are asked for all their pages."""
    index = filled(host=True)
    index.evict_device(1)
    index.insert([5, 5, 5, 5], [7])
    backup = index.pending_backup(9)
    loading, load_lock = index.match_locked(list(range(8)))
    backup_lock = index.lock(backup)
    assert loading.device_tokens == 4
    assert index.evict_device(99).pages.tolist() == [3], "the other branch alone"
    assert index.evict_host(99).pages.tolist() == [3]
    index.loaded(loading.nodes[1:], [2])
    index.backed_up(backup, [3])
    assert index.evict_device(99).pages.size == 0, "loaded pages are protected too"
    index.unlock(load_lock)
    index.unlock(backup_lock)
    assert sorted(index.evict_device(99).pages.tolist()) == [1, 2, 7]
    assert sorted(index.evict_host(99).pages.tolist()) == [1, 2, 3]


def test_a_match_that_lost_its_pages_is_a_named_miss() -> None:
    """G34: looked up, evicted, then asked for."""
    index = filled(host=True)
    found = index.match(list(range(8)))
    index.evict_device(9)
    with pytest.raises(kp.StaleNode, match="match again"):
        index.lock(found)
    on_host = index.match(list(range(8)))
    index.evict_host(9)
    with pytest.raises(kp.StaleNode):
        index.lock(on_host)
    with pytest.raises(kp.StaleNode):
        index.loaded(on_host.nodes, [1, 2])
    index.insert(list(range(8)), [1, 2])
    with pytest.raises(kp.StaleNode):
        index.lock(on_host.nodes)


def test_write_through_selective_waits_for_the_second_use() -> None:
    index = filled()
    shared = index.match([0, 1, 2, 3]).nodes.tolist()
    assert index.pending_backup(9, min_uses=2).tolist() == shared
    assert len(index.pending_backup(9)) == 3
    assert len(kp.PrefixIndex(4, device_pages=8).pending_backup(9)) == 0


def test_without_a_host_tier_nothing_is_pending() -> None:
    index = kp.PrefixIndex(1, device_pages=8)
    index.insert([1], [1])
    assert index.pending_backup(9).size == 0
    with pytest.raises(kp.PageOutOfRange):
        index.insert_host([1], [1])


@pytest.mark.parametrize(
    "arguments",
    [
        {"page_size": 0, "device_pages": 8},
        {"page_size": 4, "device_pages": 0},
        {"page_size": 4, "device_pages": 2**40},
        {"page_size": 4, "device_pages": 8, "host_pages": 2**40},
    ],
)
def test_impossible_pools_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(kp.PlanError):
        kp.PrefixIndex(**arguments)


def test_results_are_values_with_arrays_that_own_their_storage() -> None:
    """G14: nothing that lives long shares the storage of something larger."""
    index = filled()
    tokens = np.arange(1000, dtype=np.int64)
    found, lock = index.match_locked(tokens[:8])
    for array in (found.nodes, found.device_pages, index.path(found.nodes[0])[0], index.evict_device(0).pages):
        assert not array.flags.writeable and array.dtype == np.int64
    assert "8 tokens" in repr(found) and repr(lock) == "PrefixLock(1)" and "page_size=4" in repr(index)
    assert (index.page_size, index.device_pages, index.host_pages) == (4, 8, 8)
    assert "device 3/7" in repr(index.counts()) and "protected=2" in repr(index.counts().device)
    assert "0 pages" in repr(index.evict_device(0)) and "0 taken" in repr(index.insert([], []))
    for one, same in zip(values(index), values(index), strict=True):
        assert one == same and hash(one) == hash(same) and one != 1


def values(index: kp.PrefixIndex) -> tuple[object, ...]:
    return index.counts(), index.counts().host, index.evict_device(0), index.insert([], [])


def test_threads_share_one_index() -> None:
    index = kp.PrefixIndex(2, device_pages=1 + 64 * 4)
    left: list[int] = []

    def work(thread: int) -> None:
        free = list(range(1 + 64 * thread, 1 + 64 * (thread + 1)))
        for turn in range(100):
            tokens = [1, 1, 2, 2, turn % 7, thread, turn % 3, 5]
            pages, free = free[:4], free[4:]
            free += index.insert(tokens, pages).duplicate.tolist()
            found, lock = index.match_locked(tokens)
            assert index.counts().device.protected >= len(found)
            index.unlock(lock)
            if len(free) < 8:
                free += index.evict_device(16).pages.tolist()
        left.append(len(free))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) == 4 and index.counts().device.held + sum(left) == 64 * 4


def test_a_host_copy_that_is_not_what_was_written_leaves_at_once() -> None:
    """Behind it nothing is found on the host; what is on the device stays, and is backed up again."""
    index = filled(host=True)
    found = index.match(list(range(8)))
    done = index.drop_host(found.nodes[1:])
    assert (done.pages.tolist(), done.removed.size, done.kept.tolist()) == ([2], 0, [found.nodes[1]])
    again = index.match(list(range(8)))
    assert (again.device_tokens, again.host_tokens) == (8, 4)
    assert index.pending_backup(9).tolist() == [found.nodes[1]]
    assert index.drop_host(found.nodes[1:]).pages.size == 0, "it has none any more"
    index.evict_device(9)
    done = index.drop_host(found.nodes[:1])
    assert (sorted(done.pages.tolist()), len(done.removed), index.counts().nodes) == ([1, 3], 2, 0)
    with pytest.raises(kp.StaleNode):
        index.drop_host(found.nodes[:1])


def test_a_dropped_page_under_a_lock_comes_back_when_the_lock_has_ended() -> None:
    index = filled(host=True)
    index.evict_device(9)
    found, lock = index.match_locked(list(range(8)))
    done = index.drop_host(found.nodes[:1])
    assert (done.pages.tolist(), done.shortfall, len(done.removed)) == ([3], 2, 3)
    assert index.match(list(range(8))).tokens == 0 and index.evict_host(9).pages.size == 0
    assert (index.counts().host.held, index.counts().host.protected, index.counts().locks) == (2, 2, 1)
    with pytest.raises(kp.PageAlreadyHeld, match="dropped under a lock"):
        index.insert_host([7, 7, 7, 7], [1])
    index.insert([7, 7, 7, 7], [4])  # takes the place of a node that is gone: the old lock is not over it
    assert index.counts().device.protected == 0
    index.unlock(lock)
    assert index.counts().device.evictable == 1 and index.counts().host.evictable == 2
    assert index.evict_host(1).pages.tolist() == [1] and index.clear()[1].tolist() == [2]


def test_a_load_that_is_given_up_leaves_the_index_as_it_was() -> None:
    index = filled(host=True)
    index.evict_device(9)
    found, lock = index.match_locked(list(range(8)))
    index.loaded(found.nodes, [6, 5])
    with pytest.raises(kp.TierOrder, match="children with device pages"):
        index.unloaded(found.nodes[:1])
    with pytest.raises(kp.TierConflict, match="named once"):
        index.unloaded([found.nodes[1], found.nodes[1]])
    assert index.unloaded(found.nodes).tolist() == [6, 5], "locked or not"
    assert index.match(list(range(8))) == found and index.statistics().loaded_pages == 0
    with pytest.raises(kp.TierConflict):
        index.unloaded(found.nodes)
    index.loaded(found.nodes, [6, 5])
    index.insert([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8], [6, 5, 4])
    with pytest.raises(kp.TierOrder):
        index.unloaded(found.nodes)
    index.unlock(lock)
    assert index.counts().device.held == 3
