"""Which pages of a request a group sends to one decode rank: behind the prefix, within the window, the rank's share.

Pure arithmetic over page and token counts; it knows no page ids.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import kv_planner

__all__ = ["Interleave", "Span", "request_span"]

Interleave: TypeAlias = Literal["page", "token"]
"""How context-parallel decode ranks share a request: whole pages in turn, or tokens in turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Pages of one group of a request.

    Attributes:
        first: Index within the request of the first page that is sent.
        pages: Pages that are sent, over all ranks that share the request.
        places: Pages of one rank that they go into.
        tokens: Tokens of these pages, over all ranks.
        own_pages: Those of `pages` that are this rank's share, when whole pages are dealt out.
        own_tokens: Those of `tokens`, when tokens are.
    """

    first: int
    pages: int
    places: int
    tokens: int
    own_pages: int
    own_tokens: int


def request_span(tokens: int, first_page: int, page_size: int, window: int | None, place: kv_planner.Placement) -> Span:
    """The pages of a request that a decode rank at `place` is sent.

    First trimmed to the prompt, then clipped to the window: pages from the one that holds the first of the last
    `window` tokens on. Where ranks share the request, the first page is rounded down to a multiple of their number.

    Args:
        tokens: Of the whole prompt.
        first_page: Pages before this one are at decode already.
        page_size: Tokens of a page.
        window: Tokens; None for all.
        place: Of the decode rank.
    """
    size = place.dcp_size
    first = first_page
    if window is not None:
        first = max(first, max(0, tokens - window) // page_size // size * size)
    pages = max(0, kv_planner.page_count(tokens, page_size) - first)
    left = max(0, tokens - first * page_size)
    return Span(
        first,
        pages,
        -(-pages // size),
        left,
        len(range(place.dcp_rank, pages, size)),
        len(range(place.dcp_rank, left, size)),
    )
