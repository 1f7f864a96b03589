"""Which room holds which destination page or row: each is offered to the writers of one room at a time.

Counts no references and knows no pool: allocating pages is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from kv_transfer.errors import PageHeld
from kv_transfer.groups import MAIN
from kv_transfer.messages import Offer

__all__ = ["PageHolds", "Thing", "things_of"]

Thing: TypeAlias = tuple[str, Literal["page", "row"], int]
"""A page or row of a group."""


class PageHolds:
    """The pages and rows of all rooms of one receiver.

    Invariant: a page or row has one room, from `take` until `give`.
    """

    def __init__(self) -> None:
        """Nothing is held."""
        self._rooms: dict[Thing, str] = {}

    def take(self, room: str, things: Iterable[Thing]) -> None:
        """Gives all pages and rows to `room`, or none.

        Raises:
            PageHeld: A room holds one of them; the first is named.
        """
        wanted = tuple(things)
        for thing in wanted:
            group, kind, number = thing
            holder = self._rooms.get(thing)
            if holder is not None:
                of = f" of group {group!r}" if group != MAIN else ""
                raise PageHeld(
                    f"destination_{kind}{'s' * (kind == 'page')}: {kind} {number}{of} is held by {holder}",
                    page=number,
                    holder=holder,
                    consequence=f"writers of both rooms could write into it; {room} was not opened",
                    remedy="offer it again when the session that holds it says pages_released",
                )
        self._rooms.update(dict.fromkeys(wanted, room))

    def give(self, things: Iterable[Thing]) -> None:
        """Frees what a room held that has ended."""
        for thing in things:
            del self._rooms[thing]


def things_of(offer: Offer) -> tuple[Thing, ...]:
    """All pages and rows of an offer."""
    found: list[Thing] = []
    for name, own in offer.groups.items():
        found += [(name, "page", page) for page in own.pages]
        found += [(name, "row", own.row)] if own.row is not None else []
    return tuple(found)
