"""Accesses of a replay: those of a graph's nodes, each with its place in the graph, and each region once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["located", "merged", "place_of"]

_WRITTEN, _PLACE, _DIMENSIONS, _HEAD = (
    3,
    6,
    7,
    8,
)  # positions in the words of a tensor, and how many come before its sizes


def place_of(graph: int, node: int) -> int:
    """The word that names a node of a graph."""
    return graph << 32 | node + 1


def _tensors(words: array[int]) -> Iterable[array[int]]:
    at = 0
    while at < len(words):
        end = at + _HEAD + 2 * words[at + _DIMENSIONS]
        yield words[at:end]
        at = end


def located(words: array[int], place: int) -> array[int]:
    """The same accesses, made by a node of a graph."""
    out = array("q")
    for one in _tensors(words):
        one[_PLACE] = place
        out += one
    return out


def merged(parts: Iterable[tuple[int, array[int]]]) -> array[int]:
    """Accesses of nodes that run one behind the other: of equal ones the first, of a read and a write the write.

    Args:
        parts: place of each node, and its words.
    """
    out, seen = array("q"), set()
    writes: list[array[int]] = []
    reads: list[array[int]] = []
    for place, words in parts:
        for one in _tensors(words):
            one[_PLACE] = place
            (writes if one[_WRITTEN] else reads).append(one)
    for one in [*writes, *reads]:  # a write says more
        region = (*one[_WRITTEN + 1 : _PLACE], *one[_DIMENSIONS:])
        if region not in seen:
            seen.add(region)
            out += one
    return out
