"""What a sender knows about rooms that are not open here: offers, rooms that the receiver ended, rooms rejected here.

Tables only; what is answered is decided in the core.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from kv_transfer.messages import Abort, Offer

__all__ = ["Offers"]

_Value = TypeVar("_Value")


class Offers:
    """Rooms before they are opened.

    A generation counts once: an offer that comes again, however late, would let this rank write into pages that the
    receiver has given away since. An abort of a generation that was never seen belongs to a room that was not offered.

    Args:
        remembered: Most ended rooms, rejected rooms, and generations that are kept in mind; older generations are late.
    """

    def __init__(self, remembered: int) -> None:
        """Nothing was offered yet."""
        self._remembered = remembered
        self._offers: dict[int, Offer] = {}
        self._ended: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._rejected: OrderedDict[int, str] = OrderedDict()
        self._seen: OrderedDict[int, bool] = OrderedDict()  # generations: whether the offer itself came
        self._late = 0  # generations up to here

    @property
    def known(self) -> frozenset[int]:
        """Rooms that are offered or ended."""
        return frozenset(self._offers) | frozenset(self._ended)

    def add(self, offer: Offer) -> str | None:
        """Takes an offer; or returns why its room is not wanted: rejected here before, or aborted there already."""
        ended = self._ended.get(offer.room)
        if ended is not None and ended[0] == offer.generation:
            return ended[1]
        self._ended.pop(offer.room, None)
        reason = self._rejected.pop(offer.room, None)
        if reason is None:
            self._offers[offer.room] = offer
        return reason

    def is_news(self, generation: int) -> bool:
        """Whether a generation is offered for the first time; it counts as offered now."""
        return self._note(generation, offered=True)

    def _note(self, generation: int, *, offered: bool) -> bool:
        known = self._seen.get(generation)
        if generation <= self._late or known or known is offered:
            return False
        self._seen[generation] = offered
        while len(self._seen) > self._remembered:
            self._late = max(self._late, self._seen.popitem(last=False)[0])
        return True

    def pop(self, room: int) -> Offer | None:
        """Takes the offer of a room out."""
        return self._offers.pop(room, None)

    def pop_all(self) -> list[Offer]:
        """Takes all offers out."""
        offers = list(self._offers.values())
        self._offers.clear()
        return offers

    def pop_ended(self, room: int) -> tuple[int, str] | None:
        """Takes out the generation of a room that the receiver ended before it was opened here, and the reason."""
        return self._ended.pop(room, None)

    def aborted(self, message: Abort) -> tuple[bool, Offer | None]:
        """Takes the end of a room that is not open here.

        Returns:
            Whether that was news, and the offer that it ends, if there was one.
        """
        offer = self._offers.get(message.room)
        fits = offer is not None and offer.generation == message.generation
        if not fits and not self._note(message.generation, offered=False):
            return False, None
        _remember(self._ended, message.room, (message.generation, message.reason), self._remembered)
        return True, self._offers.pop(message.room, None)

    def reject(self, room: int, reason: str) -> None:
        """Keeps in mind that a room is not wanted when its offer comes."""
        _remember(self._rejected, room, reason, self._remembered)


def _remember(table: OrderedDict[int, _Value], room: int, value: _Value, most: int) -> None:
    table[room] = value
    while len(table) > most:
        table.popitem(last=False)
