"""Bench of the prefix index beside SGLang's compiled radix tree, each given tokens in the form that it reads.

`nox -s bench_tree` makes an environment in which that tree can be imported. Both hold the same texts under pages of the
same size; a page's slots stand in the tree as one tensor a text, as an engine hands them over.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kv_planner as kp
import numpy as np
import numpy.typing as npt
import torch
from benching import Bench

PAGE = 128
LENGTH = 1024  # pages of a text
TEXTS = 256
FULL = 0  # the component of plain attention
Tokens = npt.NDArray[np.int64]
_T = TypeVar("_T")


def bindings() -> Any:
    """The compiled tree's module; what SGLang imports besides stands in and cannot be used."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "tests/engines"))
    importlib.import_module("engines_absent").install({"sgl_kernel", "torch_npu"})
    return importlib.import_module("sglang.srt.mem_cache.rust_tree_core.extension").bindings


class Tree:
    """The compiled tree, with the calls that its Python owner makes."""

    def __init__(self) -> None:
        self.types = bindings()
        settings = self.types.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=PAGE, device="cpu")
        self.core = self.types.RustUnifiedTreeCoreBinding(settings, [FULL])

    def insert(self, tokens: array[int], slots: torch.Tensor) -> int:
        """Tokens that were held before."""
        answer = self.core.insert(self.types.InsertParamsBinding(tokens, slots, None))
        self.core.end_insert()
        held: int = answer.prefix_len
        return held

    def match(self, tokens: array[int]) -> int:
        """Tokens of the longest prefix."""
        found: int = self.core.match_prefix(self.types.MatchParamsBinding(tokens, None)).device_prefix_len
        return found

    def evict(self, pages: int) -> int:
        """Slots that were freed, at least as many pages' worth where there are so many."""
        freed = 0
        self.core.evict_device_start(FULL, pages * PAGE)
        while True:
            step = self.core.evict_device_next_node(FULL, {FULL: freed})
            freed += self._frees(step)
            if step.node_id is None and not step.made_progress:
                break
            if step.node_id is not None:
                freed += self._frees(self.core.evict_device_leaf(step.node_id))
        self.core.evict_device_end(FULL)
        return freed

    @staticmethod
    def _frees(step: Any) -> int:
        return sum(tensor.numel() for tensors in step.new_device_frees.values() for tensor in tensors)


def text(number: int, pages: int = LENGTH) -> Tokens:
    """Random tokens; half of the texts begin as the one before, so that prefixes are shared."""
    own = np.random.default_rng(number).integers(0, 50_000, pages * PAGE)
    if number % 2:
        shared = pages * PAGE // 2
        own[:shared] = text(number - 1, pages)[:shared]
    return own


def slots(first: int, pages: int) -> torch.Tensor:
    """The slots of consecutive pages."""
    return torch.arange(first * PAGE, (first + pages) * PAGE)


def in_turn(call: Callable[[_T], object], arguments: Sequence[_T]) -> Callable[[], object]:
    """A call with the next of the arguments each time."""
    turns = itertools.cycle(arguments)
    return lambda: call(next(turns))


def matching(bench: Bench) -> None:
    """Long prompts, whole and up to half of a text."""
    index, tree = kp.PrefixIndex(PAGE, device_pages=(TEXTS + 1) * LENGTH), Tree()
    for number in range(TEXTS):
        tokens, first = text(number), 1 + number * LENGTH
        new = len(index.insert(tokens, np.arange(first, first + LENGTH)).taken)
        assert tree.insert(array("q", tokens.tobytes()), slots(first, LENGTH)) == (LENGTH - new) * PAGE
    halves = [
        np.concatenate([text(number)[: LENGTH * PAGE // 2], text(number + 999_999)]) for number in range(0, 40, 8)
    ]
    cases = {"whole": [text(number) for number in range(1, TEXTS, 31)], "half of it held": halves}
    for name, asked in cases.items():
        raw = [array("q", tokens.tobytes()) for tokens in asked]
        for tokens, same in zip(asked, raw, strict=True):
            assert index.match(tokens).device_tokens == tree.match(same)
        bench.faster(
            f"match {len(asked[0]):,} tokens, {name}, in {index.counts().nodes:,} pages, beside SGLang's compiled tree",
            in_turn(index.match, asked),
            in_turn(tree.match, raw),
            at_least=1,
            unit="µs",
        )


def refilling(bench: Bench) -> None:
    """10,000 pages in texts of 100, filled and emptied."""
    pages, texts = 100, 100
    index, tree = kp.PrefixIndex(PAGE, device_pages=pages * texts + 1), Tree()
    asked = [np.random.default_rng(number).integers(0, 50_000, pages * PAGE) for number in range(texts)]
    raw = [array("q", tokens.tobytes()) for tokens in asked]
    firsts = [1 + pages * number for number in range(texts)]
    numbers = [np.arange(first, first + pages) for first in firsts]
    values = [slots(first, pages) for first in firsts]

    def ours() -> None:
        for tokens, own in zip(asked, numbers, strict=True):
            index.insert(tokens, own)
        assert len(index.evict_device(pages * texts).pages) == pages * texts

    def theirs() -> None:
        for tokens, own in zip(raw, values, strict=True):
            tree.insert(tokens, own)
        assert tree.evict(pages * texts) == pages * texts * PAGE

    metric = f"insert and evict {pages * texts:,} pages in {texts} texts, beside SGLang's compiled tree"
    bench.faster(metric, ours, theirs, at_least=1)


def main() -> None:
    """Measure and report."""
    bench = Bench("planner_tree")
    assert kp.BUILD_PROFILE == "release", f"this planner was built as {kp.BUILD_PROFILE}"
    matching(bench)
    refilling(bench)
    bench.finish()


if __name__ == "__main__":
    main()
