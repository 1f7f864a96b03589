"""The prompts of the demo: six questions, two of them over long texts that come with this repository.

Plain text only; `tokenizer.py` turns it into ids.
"""

from __future__ import annotations

from pathlib import Path

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def _license_part(first: str, last: str) -> str:
    text = LICENSE.read_text()
    begin, end = text.index(first), text.index(last)
    return " ".join(text[begin:end].split())


def demo_prompts() -> list[str]:
    """Short ones first: they are decoding while the long ones are still in prefill."""
    return [
        "Explain in a few sentences why the sky is blue.",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "List five things to check before a long bicycle trip, with a reason for each.",
        "What is the difference between a compiler and an interpreter? Give an example of each.",
        "Explain in your own words what this licence text says:\n\n"
        + _license_part("1. Definitions.", "4. Redistribution."),
        "Summarise the duties and limits that this licence text states:\n\n"
        + _license_part("4. Redistribution.", "END OF TERMS AND CONDITIONS"),
    ]
