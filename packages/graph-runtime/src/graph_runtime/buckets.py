"""The captured batch sizes, and which of them serves a live batch.

It does not know whether a bucket's capture succeeded: that is the runner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .errors import BucketError

__all__ = ["Buckets"]


class Buckets:
    """A set of batch sizes.

    Invariants: 1. at least one size; 2. every size is an int of 1 or more; 3. no size occurs twice.

    Args:
        sizes: The sizes in any order.

    Raises:
        BucketError: An invariant does not hold.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        given = list(sizes)
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in given)
        if not given or not whole or len(set(given)) != len(given):
            raise BucketError(
                "sizes",
                expected="one or more different ints, each at least 1",
                got=given,
                consequence="A bucket could not be captured or never be picked.",
                remedy="Give for instance [1, 2, 4].",
            )
        self._sizes = tuple(sorted(given))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, ascending."""
        return self._sizes

    @property
    def largest(self) -> int:
        """The largest size."""
        return self._sizes[-1]

    @property
    def smallest(self) -> int:
        """The smallest size: an idle step replays it."""
        return self._sizes[0]

    def pick(self, raw_bs: int) -> int | None:
        """The smallest bucket that holds `raw_bs` rows; the smallest of all for 0 rows; None when none is large enough.

        Raises:
            BucketError: `raw_bs` is negative.
        """
        if raw_bs < 0:
            raise BucketError(
                "raw_bs",
                expected="0 or more",
                got=raw_bs,
                consequence="No batch has a negative number of rows.",
                remedy="Pass the number of live requests.",
            )
        return next((size for size in self._sizes if size >= raw_bs), None)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, size: object) -> bool:
        return size in self._sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buckets) and self._sizes == other._sizes

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        return f"Buckets({list(self._sizes)})"
