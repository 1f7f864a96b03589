"""Ranks agree on graph or eager, on the bucket, and on whether the step runs at all.

It owns the rule that every rank reduces the same number of times in every call, whatever happens on it. It does not own
communication: the reduction is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .buckets import Buckets
from .errors import PeerRefused, RanksDisagree

__all__ = ["RankAgreement", "ReduceMin"]

ReduceMin = Callable[[Sequence[int]], Sequence[int]]
"""Element-wise minimum over all ranks of equally long lists of ints; called by every rank."""

_REFUSED = -1
_EAGER = 0


class RankAgreement:
    """The common choice of one step.

    First round: one flag that the step is valid here, then one a bucket that it can be replayed here; the smallest
    bucket that no rank excludes is taken. Second round: the choice and its negative, whose minima show whether all
    ranks chose alike.

    Args:
        reduce_min: The reduction, over a group of host processes (device collectives would wait for the device).
        buckets: The stated buckets, the same on all ranks.

    Attributes:
        rounds: Calls of the reduction so far, `ROUNDS` a step.
    """

    ROUNDS = 2

    def __init__(self, reduce_min: ReduceMin, buckets: Buckets) -> None:
        self._reduce_min = reduce_min
        self._buckets = buckets
        self.rounds = 0

    def choose(self, usable: Collection[int]) -> int | None:
        """The bucket that every rank replays, or None where all run eagerly.

        Args:
            usable: Buckets that this rank can replay and that hold its rows; none to force eager.

        Raises:
            PeerRefused: The step was refused on another rank, so it runs on none.
            RanksDisagree: The reduction gave ranks different answers, or a list of another length.
        """
        choice = self._round([1, *(int(bucket in usable) for bucket in self._buckets)])
        if choice == _REFUSED:
            raise PeerRefused(
                "step",
                expected="a step that every rank accepts",
                got="a refusal on another rank",
                consequence="Its collectives would wait for that rank for ever; nothing was written.",
                remedy="Read the error of that rank and give all ranks their next step.",
            )
        return None if choice == _EAGER else choice

    def refuse(self) -> None:
        """Takes this rank's part in the rounds of a step that was refused here."""
        self._round([0] * (1 + len(self._buckets)))

    def _round(self, flags: list[int]) -> int:
        common = self._reduce(flags)
        both = [bucket for bucket, flag in zip(self._buckets, common[1:], strict=True) if flag == 1]
        choice = _REFUSED if common[0] != 1 else both[0] if both else _EAGER
        low, negative_high = self._reduce([choice, -choice])
        if low != choice or -negative_high != choice:
            raise RanksDisagree(
                "choice of graph or eager",
                expected=f"{choice} on every rank, as here",
                got=f"{low} to {-negative_high}",
                consequence="Collectives inside the step would pair different work, or wait for ever.",
                remedy="Give all ranks one reduction, in one order, and the same buckets.",
            )
        return choice

    def _reduce(self, values: list[int]) -> list[int]:
        self.rounds += 1
        answer = [int(value) for value in self._reduce_min(values)]
        if len(answer) != len(values):
            raise RanksDisagree(
                "reduction",
                expected=f"{len(values)} numbers",
                got=len(answer),
                consequence="Numbers would belong to other buckets.",
                remedy="Give all ranks the same buckets, and reduce element by element.",
            )
        return answer
