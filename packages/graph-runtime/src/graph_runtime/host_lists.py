"""Checking and padding the host lists of a step.

It owns the rule that a step brings exactly the lists of the update, one length a live row, and that padded rows have
length 0. It never changes what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .device import HostLengths
from .errors import HostListError
from .ledger import int_list

__all__ = ["live_host_lists", "pad_host_lists"]


def live_host_lists(
    wanted: Sequence[str], host_lists: Mapping[str, HostLengths], raw_bs: int, rows_per_request: Mapping[str, int]
) -> dict[str, list[int]]:
    """New lists of the live rows.

    Args:
        wanted: Names of the update's host lists.
        host_lists: Name to lengths of the live rows.
        raw_bs: Live requests.
        rows_per_request: Rows a request where that is not 1.

    Raises:
        HostListError: A list is missing, unknown, too short or long, or holds something else than lengths.
    """
    if set(host_lists) != set(wanted):
        raise HostListError(
            "host_lists",
            expected=f"exactly {list(wanted)}, the lists of the update",
            got=sorted(host_lists),
            consequence="A missing list would leave old lengths in the graph; any other would be baked into it.",
            remedy="Pass these lists, or name the list in the UpdateSpec.",
        )
    live: dict[str, list[int]] = {}
    for name in wanted:
        rows = raw_bs * rows_per_request.get(name, 1)
        lengths = int_list(name, host_lists[name])
        if len(lengths) != rows:
            raise HostListError(
                f"host list {name!r}",
                expected=f"{rows} lengths for {raw_bs} live requests",
                got=len(lengths),
                consequence="Requests would use each other's lengths.",
                remedy="Pass the live rows only; padding is done here.",
            )
        live[name] = lengths
    return live


def pad_host_lists(live: Mapping[str, list[int]], bs: int, rows_per_request: Mapping[str, int]) -> dict[str, list[int]]:
    """The lists of the live rows, padded with 0 to the bucket.

    Args:
        live: What `live_host_lists` gave.
        bs: Requests of the bucket.
        rows_per_request: Rows a request where that is not 1.
    """
    return {name: lengths + [0] * (bs * rows_per_request.get(name, 1) - len(lengths)) for name, lengths in live.items()}
