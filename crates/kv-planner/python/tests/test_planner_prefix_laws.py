"""The prefix index beside a plain dictionary of prefixes, through any interleaving of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import kv_planner as kp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PAGE = 2
POOLS = (8, 6)
SPACES: list[str | tuple[str | None, str | None] | None] = [None, "", (None, "tenant")]
NAMES = [None, ("", None), (None, "tenant")]
TOKENS = st.lists(st.integers(0, 1), max_size=9)
SPACE = st.integers(0, len(SPACES) - 1)
Key = tuple[int, tuple[int, ...]]


@dataclass
class Entry:
    """What the dictionary knows of one whole page."""

    node: int
    pages: list[int] = field(default_factory=lambda: [-1, -1])
    used: int = 0
    uses: int = 0


def keys(space: int, tokens: list[int]) -> list[Key]:
    return [(space, tuple(tokens[:stop])) for stop in range(PAGE, len(tokens) + 1, PAGE)]


def parent(key: Key) -> Key:
    return key[0], key[1][:-PAGE]


class PrefixMachine(RuleBasedStateMachine):
    """Drives both."""

    def __init__(self) -> None:
        super().__init__()
        self.index = kp.PrefixIndex(PAGE, device_pages=POOLS[0], host_pages=POOLS[1])
        self.entries: dict[Key, Entry] = {}
        self.free = [list(range(1, pages)) for pages in POOLS]
        self.locks: list[tuple[kp.PrefixLock, list[Key]]] = []
        self.lingering: dict[int, list[kp.PrefixLock]] = {}  # host pages dropped under locks
        self.clock = 0

    def locked(self, key: Key) -> bool:
        return any(key in held for _, held in self.locks)

    def key_of(self, node: int) -> Key:
        return next(key for key, entry in self.entries.items() if entry.node == node)

    def take(self, tier: int, count: int) -> list[int] | None:
        if count > len(self.free[tier]):
            return None
        pages, self.free[tier] = self.free[tier][:count], self.free[tier][count:]
        return pages

    def evictable(self, tier: int) -> int:
        ended = sum(not locks for locks in self.lingering.values()) if tier else 0
        return ended + sum(entry.pages[tier] >= 0 and not self.locked(key) for key, entry in self.entries.items())

    def next_to_leave(self, tier: int) -> Key:
        inner = {parent(key) for key, entry in self.entries.items() if entry.pages[tier] >= 0}
        leaves = [
            key
            for key, entry in self.entries.items()
            if entry.pages[tier] >= 0 and key not in inner and not self.locked(key)
        ]
        return min(leaves, key=lambda key: (self.entries[key].used, -len(key[1])))

    @rule(space=SPACE, tokens=TOKENS, tier=st.integers(0, 1))
    def insert(self, space: int, tokens: list[int], tier: int) -> None:
        wanted = keys(space, tokens)
        pages = self.take(tier, len(wanted))
        if pages is None:
            return
        put = self.index.insert_host if tier else self.index.insert
        done = put(tokens, np.array(pages, np.int64), namespace=SPACES[space])
        self.clock += 1
        taken, duplicate = [], []
        for position, (key, page) in enumerate(zip(wanted, pages, strict=True)):
            entry = self.entries.setdefault(key, Entry(int(done.nodes[position])))
            entry.used, entry.uses = self.clock, entry.uses + 1
            if entry.pages[tier] < 0:
                entry.pages[tier] = page
                taken.append(position)
            else:
                duplicate.append(page)
            assert done.nodes[position] == entry.node and done.pages[position] == entry.pages[tier]
        assert (done.taken.tolist(), done.duplicate.tolist(), done.shared.tolist()) == (taken, duplicate, [])
        assert done.tokens == len(wanted) * PAGE
        self.free[tier] += duplicate

    @rule(space=SPACE, tokens=TOKENS, limit=st.none() | st.integers(0, 9), lock=st.booleans())
    def find(self, space: int, tokens: list[int], limit: int | None, lock: bool) -> None:
        wanted = keys(space, tokens[:limit])
        known = [key for key in wanted if key in self.entries]
        found = self.index.match(tokens, namespace=SPACES[space], max_tokens=limit)
        self.clock += 1
        if lock:
            again, held = self.index.match_locked(tokens, namespace=SPACES[space], max_tokens=limit)
            assert again == found and hash(again) == hash(found)
            self.locks += [(held, [*known]), (self.index.lock(found), [*known])]
            self.clock += 1
        assert found.tokens == len(known) * PAGE and len(found) == len(known)
        for position, key in enumerate(known):
            entry = self.entries[key]
            entry.used = self.clock
            pages = [found.device_pages[position], found.host_pages[position]]
            assert (found.nodes[position], pages) == (entry.node, entry.pages)
            path, names = self.index.path(found.nodes[position])
            assert (path.tolist(), names) == (list(key[1]), NAMES[space])
            whole = kp.page_hashes(tokens, PAGE, namespace=SPACES[space])
            assert kp.page_hashes(path, PAGE, namespace=names) == whole[: position + 1]
        for tier, tokens_held in enumerate((found.device_tokens, found.host_tokens)):
            assert tokens_held == PAGE * sum(self.entries[key].pages[tier] >= 0 for key in known)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        lock, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.index.unlock(lock)
        for locks in self.lingering.values():
            locks[:] = [held for held in locks if held is not lock]
        try:
            self.index.unlock(lock)
        except kp.LockError as error:
            assert "each lock once" in error.remedy
        else:
            raise AssertionError("a lock was released twice")

    @rule(tier=st.integers(0, 1), wanted=st.integers(0, 5))
    def evict(self, tier: int, wanted: int) -> None:
        count = min(wanted, self.evictable(tier))
        done = self.index.evict_host(wanted) if tier else self.index.evict_device(wanted)
        assert (len(done.pages), done.shortfall, len(done.needs_backup)) == (count, wanted - count, 0)
        removed, kept = [], []
        ended = [page for page, locks in sorted(self.lingering.items()) if not locks and tier][:wanted]
        assert done.pages[: len(ended)].tolist() == ended
        for page in ended:
            del self.lingering[page]
        self.free[tier] += ended
        for page in done.pages[len(ended) :].tolist():
            key = self.next_to_leave(tier)
            entry = self.entries[key]
            assert entry.pages[tier] == page
            entry.pages[tier] = -1
            if max(entry.pages) < 0:
                removed.append(self.entries.pop(key).node)
            else:
                kept.append(entry.node)
            self.free[tier].append(page)
        assert (done.removed.tolist(), done.kept.tolist()) == (removed, kept)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def drop_host(self, data: st.DataObject) -> None:
        """Two nodes and all below them lose their host page; what is locked comes back from an eviction later."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.entries)), max_size=2))
        below = {
            key for key in self.entries for space, text in chosen if (space, text) == (key[0], key[1][: len(text)])
        }
        leaving = [key for key in below if self.entries[key].pages[1] >= 0]
        done = self.index.drop_host([self.entries[key].node for key in chosen])
        free, gone, stay = set(), set(), set()
        held_by = {key: [lock for lock, held in self.locks if key in held] for key in leaving}
        for key in leaving:
            entry = self.entries[key]
            page, entry.pages[1] = entry.pages[1], -1
            if entry.pages[0] >= 0:
                stay.add(entry.node)
            else:
                gone.add(self.entries.pop(key).node)
                for _, held in self.locks:
                    held[:] = [other for other in held if other != key]
            if held_by[key]:
                self.lingering[page] = held_by[key]
            else:
                free.add(page)
        assert (set(done.pages.tolist()), set(done.removed.tolist()), set(done.kept.tolist())) == (free, gone, stay)
        assert done.shortfall == len(leaving) - len(free)
        self.free[1] += sorted(free)

    @rule(wanted=st.integers(0, 5))
    def write_back(self, wanted: int) -> None:
        """Evicts what has a copy, backs up what it names, evicts the rest; nothing is lost."""
        before, wanted = len(self.entries), min(wanted, self.evictable(0))
        done = self.index.evict_device(wanted, keep_unbacked=True)
        self.leave(done)
        assert len(done.pages) + done.shortfall == wanted
        pages = self.take(1, len(done.needs_backup))
        if pages is not None:
            self.index.backed_up(done.needs_backup, pages)
            for node, page in zip(done.needs_backup.tolist(), pages, strict=True):
                self.entries[self.key_of(node)].pages[1] = page
            rest = self.index.evict_device(done.shortfall, keep_unbacked=True)
            self.leave(rest)
            assert rest.shortfall == 0 and not len(rest.needs_backup)
        assert len(self.entries) == before

    def leave(self, done: kp.Eviction) -> None:
        assert not len(done.removed)
        for page, node in zip(done.pages.tolist(), done.kept.tolist(), strict=True):
            entry = self.entries[self.key_of(node)]
            assert entry.pages[0] == page and entry.pages[1] >= 0 and not self.locked(self.key_of(node))
            entry.pages[0] = -1
            self.free[0].append(page)

    @rule(limit=st.integers(0, 4), min_uses=st.integers(1, 2), data=st.data())
    def backup(self, limit: int, min_uses: int, data: st.DataObject) -> None:
        nodes = self.index.pending_backup(limit, min_uses=min_uses).tolist()
        eligible = {
            entry.node
            for entry in self.entries.values()
            if entry.pages[0] >= 0 > entry.pages[1] and entry.uses >= min_uses
        }
        assert set(nodes) <= eligible and len(nodes) == min(limit, len(eligible))
        begun = nodes[: data.draw(st.integers(0, len(nodes)))]
        rest = self.index.pending_backup(99, min_uses=min_uses, in_flight=begun)
        assert set(rest.tolist()) == eligible - set(begun)
        pages = self.take(1, len(begun))
        if pages is not None:
            self.index.backed_up(begun, pages)
            for node, page in zip(begun, pages, strict=True):
                self.entries[self.key_of(node)].pages[1] = page

    @rule(space=SPACE, tokens=TOKENS, given_up=st.booleans())
    def load(self, space: int, tokens: list[int], given_up: bool) -> None:
        found, lock = self.index.match_locked(tokens, namespace=SPACES[space])
        self.clock += 1
        for node in found.nodes.tolist():
            self.entries[self.key_of(node)].used = self.clock
        nodes = found.nodes[found.device_tokens // PAGE :]
        pages = self.take(0, len(nodes))
        if pages is not None:
            self.index.loaded(nodes, pages)
            if given_up:
                assert self.index.unloaded(nodes[::-1]).tolist() == pages[::-1]
                self.free[0] += pages
            for node, page in zip(nodes.tolist(), pages, strict=True):
                self.entries[self.key_of(node)].pages[0] = -1 if given_up else page
        self.index.unlock(lock)

    @invariant()
    def counts_balance(self) -> None:
        counts = self.index.counts()
        for tier, books in enumerate((counts.device, counts.host)):
            held = [entry.pages[tier] for entry in self.entries.values() if entry.pages[tier] >= 0]
            assert len(held) == len(set(held))
            assert len(held) + tier * len(self.lingering) == books.held == books.evictable + books.protected
            assert books.evictable == self.evictable(tier)
            assert books.outside == len(self.free[tier]) and books.capacity == POOLS[tier] - 1
        assert (counts.nodes, counts.locks) == (len(self.entries), len(self.locks))
        assert counts.namespaces == len({space for space, _ in self.entries})

    @invariant()
    def no_page_outlives_its_parent(self) -> None:
        for key, entry in self.entries.items():
            if len(key[1]) > PAGE:
                above = self.entries[parent(key)]
                assert all(above.pages[tier] >= 0 for tier in range(2) if entry.pages[tier] >= 0)

    def teardown(self) -> None:
        for lock, _ in self.locks:
            self.index.unlock(lock)
        for tier, pages in enumerate(self.index.clear()):
            assert sorted([*self.free[tier], *pages.tolist()]) == list(range(1, POOLS[tier]))
        assert self.index.counts().nodes == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
