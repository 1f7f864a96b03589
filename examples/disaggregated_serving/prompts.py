"""The prompts of the demo: short questions, and questions over long texts that come with this repository.

Long texts stand before their question, so that later questions share a long prefix with earlier ones. Plain text only;
`tokenizer.py` turns it into ids. For a random model a prompt is a number: how many random ids.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from .config import MIMO

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"

SHORT = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List five things to check before a long bicycle trip, with a reason for each.",
    "What is the difference between a compiler and an interpreter? Give an example of each.",
)


def long_texts() -> tuple[str, str]:
    """The two halves of the licence."""
    text = LICENSE.read_text()
    borders = [text.index(mark) for mark in ("1. Definitions.", "4. Redistribution.", "END OF TERMS AND CONDITIONS")]
    first, second = (" ".join(text[begin:end].split()) for begin, end in pairwise(borders))
    return first, second


def ask(text: str, question: str) -> str:
    """A question over a long text."""
    return f"{text}\n\n{question}"


def first_round() -> list[str]:
    """Short ones first: they are decoding while the long ones are still in prefill."""
    first, second = long_texts()
    return [
        *SHORT,
        ask(first, "Explain in your own words what this licence text says."),
        ask(second, "Summarise the duties and limits that this licence text states."),
    ]


def later_rounds() -> tuple[list[str], list[str]]:
    """Two rounds of other questions over the same long texts."""
    first, second = long_texts()
    return (
        [
            ask(first, "Which rights does a contributor grant?"),
            ask(second, "What must be kept in copies that are passed on?"),
        ],
        [
            ask(first, "What counts as a derivative work here?"),
            ask(second, "Which warranties are given?"),
        ],
    )


def random_ids(count: str) -> list[int]:
    """So many ids, the same for the same number."""
    generator = torch.Generator().manual_seed(int(count))
    drawn: list[int] = torch.randint(0, MIMO.vocabulary, (int(count),), generator=generator).tolist()
    return drawn
