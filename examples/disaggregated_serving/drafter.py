"""Prompt-lookup drafts: what followed the last few tokens the last time they occurred.

An example-level drafter without a model. Whether a draft is right is for the verify step to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 3


def propose(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest matching ending.

    Args:
        tokens: prompt and output so far.
        count: most drafts wanted.

    Returns:
        The drafts; empty when no ending of one to three tokens occurred before.
    """
    size = len(tokens)
    for length in range(min(LONGEST, size - 1), 0, -1):
        ending = list(tokens[size - length :])
        for start in range(size - length - 1, -1, -1):
            if list(tokens[start : start + length]) == ending:
                return list(tokens[start + length : start + length + count])
    return []
