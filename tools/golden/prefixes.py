"""What SGLang's compiled radix tree answers to sequences of inserts, matches, locks and evictions.

A page's slots are numbered from its page, so that freed slots name pages. Every request has pages of its own, as an
engine allocates them; those of a prefix that the tree holds already come back as duplicates.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.rust_tree_core.extension import bindings

__all__ = ["record"]

FULL = 0  # the component of plain attention
PAGE = 4
NAMES = (None, "adapter")


class _Tree:
    """The compiled tree, and the locks taken on it."""

    def __init__(self) -> None:
        settings = bindings.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=PAGE, device="cpu")
        self.tree = bindings.RustUnifiedTreeCoreBinding(settings, [FULL])
        self.locks: list[Any] = []

    def insert(self, tokens: list[int], pages: list[int], name: str | None) -> dict[str, Any]:
        slots = [page * PAGE + offset for page in pages for offset in range(PAGE)]
        value = torch.tensor(slots, dtype=torch.int64)
        answer = self.tree.insert(bindings.InsertParamsBinding(array("q", tokens), value, name))
        self.tree.end_insert()
        return {"held_before": answer.prefix_len, "duplicate": _pages(answer.cache_actions)}

    def match(self, tokens: list[int], name: str | None) -> dict[str, Any]:
        return {"tokens": self._match(tokens, name).device_prefix_len}

    def lock(self, tokens: list[int], name: str | None) -> dict[str, Any]:
        found = self._match(tokens, name)
        self.locks.append(self.tree.inc_lock_ref(found.last_device_node_id, []))
        return {"tokens": found.device_prefix_len}

    def unlock(self, number: int) -> dict[str, Any]:
        held = self.locks.pop(number)
        receipt = bindings.DecLockRefParamsBinding(
            held.node_id, held.skipped_lock_components, component_lock_uuids=held.component_lock_uuids,
            component_host_lock_uuids=held.component_host_lock_uuids,
        )  # fmt: skip
        self.tree.dec_lock_ref(held.node_id, receipt)
        return {}

    def evict(self, pages: int) -> dict[str, Any]:
        freed: list[int] = []
        self.tree.evict_device_start(FULL, pages * PAGE)
        while True:
            step = self.tree.evict_device_next_node(FULL, {FULL: len(freed)})
            freed += _frees(step)
            if step.node_id is None and not step.made_progress:
                break
            if step.node_id is not None:
                freed += _frees(self.tree.evict_device_leaf(step.node_id))
        self.tree.evict_device_end(FULL)
        return {"pages": sorted({slot // PAGE for slot in freed})}

    def counts(self) -> dict[str, int]:
        return {"evictable": self.tree.evictable_size(), "protected": self.tree.protected_size()}

    def _match(self, tokens: list[int], name: str | None) -> Any:
        return self.tree.match_prefix(bindings.MatchParamsBinding(array("q", tokens), name))


def _pages(actions: list[tuple[str, Any]]) -> list[int]:
    slots = [int(slot) for kind, tensors in actions if kind == "free_device_kv" for part in tensors for slot in part]
    return sorted({slot // PAGE for slot in slots})


def _frees(step: Any) -> list[int]:
    return [int(slot) for tensors in step.new_device_frees.values() for tensor in tensors for slot in tensor]


def _do(tree: _Tree, kind: str, **arguments: Any) -> dict[str, Any]:
    answer = getattr(tree, kind)(**arguments)
    return {"do": kind, **arguments, "answer": answer, "counts": tree.counts()}


def _shared(seed: int) -> dict[str, Any]:
    """Texts that share prefixes, under two names; nothing is evicted."""
    draw, tree, steps = random.Random(seed), _Tree(), []
    texts = [[draw.randrange(3) for _ in range(draw.randint(PAGE, 6 * PAGE + 2))] for _ in range(6)]
    texts += [text[: draw.randint(1, len(text))] + [draw.randrange(3) for _ in range(PAGE)] for text in texts]
    used, locks = 1, 0
    for _ in range(40):
        tokens, name = draw.choice(texts), draw.choice(NAMES)
        kind = draw.choice(["insert"] * 3 + ["match"] * 3 + ["lock", "unlock"])
        if kind == "insert":
            count = len(tokens) // PAGE
            steps.append(_do(tree, kind, tokens=tokens, name=name, pages=list(range(used, used + count))))
            used += count
        elif kind == "unlock" and locks:
            steps.append(_do(tree, kind, number=draw.randrange(locks)))
            locks -= 1
        else:
            kind = "lock" if kind == "lock" else "match"
            locks += kind == "lock"
            steps.append(_do(tree, kind, tokens=tokens, name=name))
    return {"seed": seed, "steps": steps}


def _apart(seed: int) -> dict[str, Any]:
    """Texts that share nothing, used whole and in random order; the last step evicts."""
    draw, tree, used = random.Random(seed), _Tree(), 1
    texts = [[number] * PAGE * draw.randint(1, 4) for number in range(6)]
    steps = []
    for tokens in texts:
        count = len(tokens) // PAGE
        steps.append(_do(tree, "insert", tokens=tokens, name=None, pages=list(range(used, used + count))))
        used += count
    for _ in range(6):
        steps.append(_do(tree, draw.choice(["match", "match", "lock"]), tokens=draw.choice(texts), name=None))
    steps.append(_do(tree, "evict", pages=draw.randint(1, used)))
    return {"seed": seed, "steps": steps}


def _split() -> dict[str, Any]:
    """A match that ends inside the older of two texts, then an eviction of one page."""
    tree, older, newer = _Tree(), [0] * 2 * PAGE, [1] * 2 * PAGE
    steps = [
        _do(tree, "insert", tokens=older, name=None, pages=[1, 2]),
        _do(tree, "insert", tokens=newer, name=None, pages=[3, 4]),
        _do(tree, "match", tokens=older[:PAGE], name=None),
        _do(tree, "evict", pages=1),
    ]
    return {"seed": 0, "steps": steps}


def record() -> dict[str, Any]:
    """Sequences of steps with answers; lengths and counts are in tokens."""
    return {
        "page_size": PAGE,
        "shared": [_shared(seed) for seed in range(8)],
        "evicted": [_apart(seed) for seed in range(16)],
        "split": [_split()],
    }
