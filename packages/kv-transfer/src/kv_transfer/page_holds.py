"""Which room holds which destination page or row: each is offered to the writers of one room at a time.

Counts no references and knows no pool: allocating pages is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.errors import PageHeld

__all__ = ["PageHolds"]


class PageHolds:
    """The pages and rows of all rooms of one receiver.

    Invariant: a page or row has one room, from `take` until `give`.
    """

    def __init__(self) -> None:
        """Nothing is held."""
        self._rooms: dict[tuple[str, int], str] = {}

    def take(self, room: str, pages: Iterable[int], rows: Iterable[int] = ()) -> None:
        """Gives all pages and rows to `room`, or none.

        Raises:
            PageHeld: A room holds one of them; the first is named.
        """
        wanted = _things(pages, rows)
        for kind, number in wanted:
            holder = self._rooms.get((kind, number))
            if holder is not None:
                raise PageHeld(
                    f"destination_{kind}{'s' * (kind == 'page')}: {kind} {number} is held by {holder}",
                    page=number,
                    holder=holder,
                    consequence=f"writers of both rooms could write into it; {room} was not opened",
                    remedy="offer it again when the session that holds it says pages_released",
                )
        self._rooms.update(dict.fromkeys(wanted, room))

    def give(self, pages: Iterable[int], rows: Iterable[int] = ()) -> None:
        """Frees what a room held that has ended."""
        for thing in _things(pages, rows):
            del self._rooms[thing]


def _things(pages: Iterable[int], rows: Iterable[int]) -> tuple[tuple[str, int], ...]:
    return (*(("page", page) for page in pages), *(("row", row) for row in rows))
