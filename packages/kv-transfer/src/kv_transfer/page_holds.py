"""Which room holds which destination page: a page is offered to the writers of one room at a time.

Counts no references and knows no pool: allocating pages is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.errors import PageHeld

__all__ = ["PageHolds"]


class PageHolds:
    """The pages of all rooms of one receiver.

    Invariant: a page has one room, from `take` until `give`.
    """

    def __init__(self) -> None:
        """No page is held."""
        self._rooms: dict[int, str] = {}

    def take(self, room: str, pages: Iterable[int]) -> None:
        """Gives all pages to `room`, or none.

        Raises:
            PageHeld: A room holds one of them; the first is named.
        """
        wanted = tuple(pages)
        for page in wanted:
            holder = self._rooms.get(page)
            if holder is not None:
                raise PageHeld(
                    f"destination_pages: page {page} is held by {holder}",
                    page=page,
                    holder=holder,
                    consequence=f"writers of both rooms could write into it; {room} was not opened",
                    remedy="offer it again when the session that holds it says pages_released",
                )
        self._rooms.update(dict.fromkeys(wanted, room))

    def give(self, pages: Iterable[int]) -> None:
        """Frees the pages of a room that has ended."""
        for page in pages:
            del self._rooms[page]
