"""Accesses of a replay: those of a graph's nodes, named after node and graph, each region once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ._words import text

__all__ = ["merged", "renamed"]

_HEAD = 7  # words of a tensor before its sizes and strides; the last of them is the number of dimensions


def renamed(words: array[int], name: str) -> array[int]:
    """The same accesses under another operator name."""
    out, at, operator = words[:], 0, text(name)
    while at < len(out):
        out[at] = operator
        at += _HEAD + 2 * out[at + _HEAD - 1]
    return out


def merged(parts: Iterable[tuple[str, array[int]]]) -> array[int]:
    """Accesses of nodes that run one behind the other: of equal ones the first, of a read and a write the write.

    Args:
        parts: name of each node, and its words.
    """
    out, seen = array("q"), set()
    writes: list[array[int]] = []
    reads: list[array[int]] = []
    for name, words in parts:
        operator, at = text(name), 0
        while at < len(words):
            end = at + _HEAD + 2 * words[at + _HEAD - 1]
            one = words[at:end]
            one[0] = operator
            (writes if one[3] else reads).append(one)
            at = end
    for one in [*writes, *reads]:  # a write says more
        region = tuple(one[4:])
        if region not in seen:
            seen.add(region)
            out += one
    return out
