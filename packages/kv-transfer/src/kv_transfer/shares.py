"""What of a request one decode rank is sent: pages and bytes of each group, and what failed pages mean for it.

Pure counting over an offer; how a room goes on is decided in `receiver_room`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kv_transfer.groups import Groups
from kv_transfer.messages import Offer
from kv_transfer.spans import Interleave, request_span
from kv_transfer.summaries import Summaries

__all__ = ["Shares"]


class Shares:
    """What of a request is sent to this rank, by group.

    Args:
        groups: Of this rank.
        offer: Of the room.
        interleave: How context-parallel ranks share a request.
    """

    def __init__(self, groups: Groups, offer: Offer, interleave: Interleave) -> None:
        """Counts pages and tokens."""
        self.interleave: Interleave = interleave
        self.spans = {
            own.name: request_span(
                offer.tokens,
                offer.groups[own.name].first_page,
                own.manifest.layout.page_size,
                own.window,
                groups.placement,
            )
            for own in groups
        }
        self._offer = offer
        self._size = groups.placement.dcp_size
        self._page_sizes = {own.name: own.manifest.layout.page_size for own in groups}
        self._whole = any(
            own.window is not None or any(spec.item_kind != "page" for spec in own.manifest.layout.components)
            for own in groups
        )

    def nbytes(self, summaries: Summaries) -> int:
        """Bytes that a rank has to send."""
        return sum(summary.nbytes(self.spans[name], self.interleave) for name, summary in summaries.items())

    def failed_pages(self, failed: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
        """Page ids of this rank for pages of the request, by group."""
        found = {}
        for name, pages in failed.items():
            own, first = self._offer.groups[name].pages, self.spans[name].first
            places = sorted({(page - first) // self._size for page in pages})
            if places:
                found[name] = tuple(own[place] for place in places)
        return found

    def recompute(self, failed: Mapping[str, Iterable[int]], states_failed: bool) -> tuple[tuple[int, int], ...]:
        """Tokens to compute again, as ranges."""
        tokens = self._offer.tokens
        ranges: list[tuple[int, int]] = []
        for name, pages in failed.items():
            size = self._page_sizes[name]
            ranges += [(page * size, min((page + 1) * size, tokens)) for page in pages]
        if not ranges and not states_failed:
            return ()
        if self._whole:
            return ((0, tokens),)
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return tuple(joined)
