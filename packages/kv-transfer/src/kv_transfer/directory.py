"""Who is there: ranks of a deployment by side, each with a generation, for those who have to find each other.

In memory and thread-safe, without sockets; `directory_service` serves it to other processes. A rank counts once however
often it registers, and a word of an older generation changes nothing.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import ClassVar, Final, Literal, get_args

import kv_planner
from pydantic import ConfigDict

from kv_transfer.arguments import check_items, check_kind, check_period, check_text, check_whole, check_word
from kv_transfer.errors import ArgumentError
from kv_transfer.handshake import Rank

__all__ = ["Directory", "Member", "Place", "Side", "check_member", "check_side", "is_whole"]

_WIRE: Final = ConfigDict(extra="forbid", strict=True)  # as part of a message of `directory_service`
_MOST_RANKS: Final = 1 << 20
_LONGEST_ENDPOINT: Final = 1024

Side = Literal["prefill", "decode"]
"""Which side of the transfer a rank is on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A rank and the sizes of its side; the fields of `kv_planner.Placement`.

    Raises:
        ArgumentError: A rank or size is no whole number, or above 2**20.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _WIRE

    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        """Checks."""
        for field in dataclasses.fields(self):
            least = int(field.name.endswith("size"))
            number = check_whole(field.name, getattr(self, field.name), _MOST_RANKS, least=least)
            object.__setattr__(self, field.name, number)

    @classmethod
    def of(cls, placement: kv_planner.Placement) -> Place:
        """A planner's placement."""
        check_kind("placement", placement, kv_planner.Placement)
        return cls(**{field.name: getattr(placement, field.name) for field in dataclasses.fields(cls)})

    @property
    def rank(self) -> Rank:
        """Who it is on its side."""
        return Rank(self.pp_rank, self.tp_rank, self.dcp_rank, self.dp_rank)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of its side: data, pipeline, context, tensor."""
        return self.dp_size, self.pp_size, self.dcp_size, self.tp_size

    @property
    def group_size(self) -> int:
        """Ranks of one data-parallel group."""
        return self.pp_size * self.dcp_size * self.tp_size

    @property
    def is_possible(self) -> bool:
        """Whether every rank is below its size."""
        ranks = (self.dp_rank, self.pp_rank, self.dcp_rank, self.tp_rank)
        return all(rank < size for rank, size in zip(ranks, self.sizes, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One rank that is there.

    Attributes:
        side: Prefill or decode.
        place: Which rank.
        endpoint: Where it listens; empty for a rank that only connects, as prefill ranks do.
        serves: Data-parallel group of the other side that it serves, as `Receiver(prefill_dp_rank=...)`.
        generation: Counts registrations of the whole directory: a restarted rank has a higher one, also after a restart
            of the directory.

    Raises:
        ArgumentError: One of them is of another kind, or out of range.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _WIRE

    side: Side
    place: Place
    endpoint: str = ""
    serves: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        """Checks."""
        check_side(self.side)
        check_kind("place", self.place, Place)
        if check_kind("endpoint", self.endpoint, str):
            check_text("endpoint", self.endpoint, _LONGEST_ENDPOINT)
        object.__setattr__(self, "serves", check_whole("serves", self.serves, _MOST_RANKS))
        object.__setattr__(self, "generation", check_whole("generation", self.generation))


def check_side(side: Side) -> Side:
    """The side itself.

    Raises:
        ArgumentError: It is none.
    """
    return check_word("side", side, get_args(Side))


def check_member(member: Member) -> Member:
    """The member itself.

    Raises:
        ArgumentError: It is none, or its rank is impossible.
    """
    if not check_kind("member", member, Member).place.is_possible:
        raise ArgumentError(
            f"place: {member.place} has a rank that its sizes do not hold",
            local=str(member.place),
            consequence="nobody would know when all ranks are there",
            remedy="give ranks below their sizes",
        )
    return member


def is_whole(members: Iterable[Member], dp_rank: int) -> bool:
    """Whether all distinct ranks of a data-parallel group are among the members of one side.

    Raises:
        ArgumentError: No members, or no rank.
    """
    dp_rank = check_whole("dp_rank", dp_rank)
    places = [check_kind("members", member, Member).place for member in check_items("members", members)]
    group = [place for place in places if place.dp_rank == dp_rank]
    return bool(group) and len({place.rank for place in group}) == group[0].group_size


class Directory:
    """Members of both sides.

    Args:
        lifetime: Seconds after which a member that was not renewed is gone.
        clock: Monotonic seconds.

    Raises:
        ArgumentError: The lifetime is no number of seconds above 0.
    """

    def __init__(self, *, lifetime: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody is there."""
        self._lifetime = check_period("lifetime", lifetime)
        self._clock = check_kind("clock", clock, Callable)  # type: ignore[arg-type]
        self._lock = threading.Lock()
        self._members: dict[tuple[Side, Rank, int], tuple[Member, float]] = {}
        # From the time on: a number of an earlier life of the directory is nobody's in this one.
        self._generation = time.time_ns()

    def register(self, member: Member) -> int:
        """Adds a rank, in place of an earlier life of the same rank.

        Returns:
            Its generation, for `renew` and `remove`.

        Raises:
            ArgumentError: It is no member, its rank is impossible, or its side is there with other sizes.
        """
        check_member(member)
        with self._lock:
            self._expire()
            others = [own for own, _ in self._members.values() if own.side == member.side]
            unlike = next((own for own in others if own.place.sizes != member.place.sizes), None)
            if unlike is not None:
                raise ArgumentError(
                    f"place: {member.side} rank {member.place.rank} says its side is dp, pp, dcp, tp "
                    f"{member.place.sizes}; rank {unlike.place.rank} said {unlike.place.sizes}",
                    local=unlike.place.sizes,
                    remote=member.place.sizes,
                    consequence="nobody would know when all ranks are there",
                    remedy="start all ranks of a side with the same sizes, after the old ones have gone",
                )
            self._generation += 1
            key = (member.side, member.place.rank, member.serves)
            known = dataclasses.replace(member, generation=self._generation)
            self._members[key] = (known, self._clock() + self._lifetime)
            return self._generation

    def renew(self, generation: int) -> bool:
        """Says that a member lives.

        Returns:
            Whether it is there; False for one that was replaced, removed or is gone: it must register again.

        Raises:
            ArgumentError: No generation.
        """
        generation = check_whole("generation", generation)
        with self._lock:
            self._expire()
            for key, (member, _) in self._members.items():
                if member.generation == generation:
                    self._members[key] = (member, self._clock() + self._lifetime)
                    return True
            return False

    def remove(self, generation: int) -> bool:
        """Takes a member out; a later life of the same rank stays.

        Returns:
            Whether it was there.

        Raises:
            ArgumentError: No generation.
        """
        generation = check_whole("generation", generation)
        with self._lock:
            key = next((key for key, (member, _) in self._members.items() if member.generation == generation), None)
            if key is not None:
                del self._members[key]
            return key is not None

    def members(self, side: Side) -> tuple[Member, ...]:
        """Those of a side that live, by rank.

        Raises:
            ArgumentError: No side.
        """
        check_side(side)
        with self._lock:
            self._expire()
            return tuple(self._members[key][0] for key in sorted(self._members) if key[0] == side)

    def is_whole(self, side: Side, dp_rank: int = 0) -> bool:
        """Whether all distinct ranks of a data-parallel group are there."""
        return is_whole(self.members(side), dp_rank)

    def _expire(self) -> None:
        now = self._clock()
        self._members = {key: own for key, own in self._members.items() if own[1] > now}
