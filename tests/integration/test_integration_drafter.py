"""The drafter on the device gives what a plain loop over the tokens gives."""

from __future__ import annotations

import torch
from disaggregated_serving.drafter import LONGEST, propose
from hypothesis import given
from hypothesis import strategies as st


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The meaning of prompt lookup, said once more."""
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        ending = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == ending:
                return tokens[start + length : start + length + count]
    return []


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_drafts_are_those_of_a_plain_loop(requests: list[list[int]], count: int, stale: int) -> None:
    """Short alphabets make endings occur often; what lies past a request's size must not matter."""
    history = torch.full((len(requests), 14), stale)
    for row, tokens in enumerate(requests):
        history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    drafts, numbers = propose(history, torch.tensor([len(tokens) for tokens in requests]), count)
    assert drafts.shape == (len(requests), count)
    for row, tokens in enumerate(requests):
        assert drafts[row, : int(numbers[row])].tolist() == looked_up(tokens, count), tokens
