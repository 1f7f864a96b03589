"""Sequences of inserts, matches, locks and evictions: SGLang 0.5.23's compiled radix tree beside our index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/prefixes.json").read_text(encoding="utf-8"))
PAGE: int = GOLDEN["page_size"]


class Index:
    """Our index, driven by the recorded steps."""

    def __init__(self) -> None:
        self.index = kp.PrefixIndex(PAGE, device_pages=4096)
        self.locks: list[kp.PrefixLock] = []

    def insert(self, tokens: list[int], name: str | None, pages: list[int]) -> dict[str, Any]:
        whole = len(tokens) // PAGE * PAGE
        held = self.index.match(tokens, namespace=name).device_tokens
        answer = self.index.insert(tokens[:whole], pages, namespace=name)
        return {"held_before": held, "duplicate": sorted(answer.duplicate.tolist())}

    def match(self, tokens: list[int], name: str | None) -> dict[str, Any]:
        return {"tokens": self.index.match(tokens, namespace=name).device_tokens}

    def lock(self, tokens: list[int], name: str | None) -> dict[str, Any]:
        found, lock = self.index.match_locked(tokens, namespace=name)
        self.locks.append(lock)
        return {"tokens": found.device_tokens}

    def unlock(self, number: int) -> dict[str, Any]:
        self.index.unlock(self.locks.pop(number))
        return {}

    def evict(self, pages: int) -> dict[str, Any]:
        return {"pages": sorted(self.index.evict_device(pages).pages.tolist())}

    def counts(self) -> dict[str, int]:
        counts = self.index.counts().device
        return {"evictable": counts.evictable * PAGE, "protected": counts.protected * PAGE}

    def play(self, steps: list[dict[str, Any]]) -> None:
        for number, step in enumerate(steps):
            arguments = {key: value for key, value in step.items() if key not in ("do", "answer", "counts")}
            assert getattr(self, step["do"])(**arguments) == step["answer"], (number, step["do"])
            assert self.counts() == step["counts"], (number, step["do"])


@pytest.mark.parametrize("sequence", [pytest.param(s, id=str(s["seed"])) for s in GOLDEN["shared"]])
def test_shared_prefixes(sequence: dict[str, Any]) -> None:
    """Match lengths, what an insert found, pages given back, and what is evictable or locked, after every step."""
    Index().play(sequence["steps"])


@pytest.mark.parametrize("sequence", [pytest.param(s, id=str(s["seed"])) for s in GOLDEN["evicted"]])
def test_eviction_order(sequence: dict[str, Any]) -> None:
    """Least recently used first on both sides; SGLang's tree gives up whole leaves, ours as many pages as asked for."""
    index, last = Index(), sequence["steps"][-1]
    index.play(sequence["steps"][:-1])
    evictable = index.counts()["evictable"] // PAGE
    texts = [step["pages"] for step in sequence["steps"] if step["do"] == "insert"]
    found, theirs = index.evict(last["pages"])["pages"], last["answer"]["pages"]
    assert len(found) == min(last["pages"], evictable) <= len(theirs)
    assert {*found} <= {*theirs}
    cut = [text for text in texts if {*text} & {*found} and not {*text} <= {*found}]
    assert {*theirs} - {*found} == {page for text in cut for page in text} - {*found}
    assert len(cut) <= 1 and all(
        text[: len(text) - len({*text} & {*found})] == sorted({*text} - {*found}) for text in cut
    )


def test_the_tail_of_a_split_text_keeps_its_age() -> None:
    """A match that ends inside a text counts as a use of its tail in SGLang's tree, but not in our index."""
    (sequence,) = GOLDEN["split"]
    index, last = Index(), sequence["steps"][-1]
    index.play(sequence["steps"][:-1])
    assert last["answer"] == {"pages": [3, 4]}
    assert index.evict(last["pages"]) == {"pages": [2]}
