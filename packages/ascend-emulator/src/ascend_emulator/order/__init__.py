"""The order of accesses between streams is checked: two streams that touch the same bytes, one of them writing, must be
ordered by an event, or it is a `RaceError`.

Every operator, copy and replay tells the C runtime (`runtime/order.c`) which bytes it reads and writes, when its stream
reaches it. What a stream knows of the others comes from events, external events, waits of the host and host functions.
`on` is the switch that hot paths look at; this package does not decide when work runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ascend_emulator._runtime import runtime
from ascend_emulator.errors import NotInstalledError

from ._info import AccessInfo
from ._race import race_error, touch
from ._replay import located, merged, place_of
from ._words import (
    Accesses,
    Refined,
    accesses_of,
    bytes_accesses,
    plain_accesses,
    results_of,
    touches_rows,
    with_results,
    words_of,
)

__all__ = [
    "AccessInfo",
    "Accesses",
    "Refined",
    "accesses_of",
    "bytes_accesses",
    "enable",
    "located",
    "merged",
    "on",
    "place_of",
    "plain_accesses",
    "race_error",
    "results_of",
    "touch",
    "touches_rows",
    "unchecked",
    "with_results",
    "words_of",
]

on = False


def enable(check: bool) -> None:
    """Switch the check on or off for the process. Switching forgets all accesses so far.

    Raises:
        NotInstalledError: before `install()`.
    """
    global on
    if not runtime.loaded:
        raise NotInstalledError("order.enable()")
    if check != on:
        runtime.order_enable(int(check))
        on = check


@contextmanager
def unchecked() -> Iterator[None]:
    """Nothing inside is checked, and nothing outside is compared with it.

    Wait for the device before and after it: work that is pending at its ends is checked on one side only.
    """
    before = on
    enable(False)
    try:
        yield
    finally:
        enable(before)
