"""Numbers that callers pass in: whole numbers and seconds, refused by name before anything has happened.

Checks kinds and ranges; what a number means is its user's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from kv_transfer.errors import ArgumentError

__all__ = ["check_endpoint", "check_seconds", "check_whole", "check_word"]

_Word = TypeVar("_Word", bound=str)


def check_whole(name: str, value: object, most: int) -> int:
    """The whole number `value`, from 0 to `most`; NumPy integers are some, bools and floats are none.

    Raises:
        ArgumentError: It is none, or out of range.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise ArgumentError(
            f"{name}: expected a whole number from 0 to {most}, got {value!r}",
            local=value,
            consequence="nothing was done",
            remedy="pass an int in this range",
        )
    return number


def check_seconds(name: str, value: float) -> float:
    """The seconds `value`: a number that is finite and not negative.

    Raises:
        ArgumentError: It is none, NaN, infinite or negative.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ArgumentError(
            f"{name}: expected a finite number of seconds from 0 on, got {value!r}",
            local=value,
            consequence="what waits for it would never end, or end at once",
            remedy="pass a number of seconds, or None for the default",
        )
    return float(value)


def check_endpoint(value: str) -> str:
    """The endpoint `value`: a ZeroMQ address that can be connected to.

    Raises:
        ArgumentError: It has no transport that is known, or no address.
    """
    transport, _, address = value.partition("://") if isinstance(value, str) else ("", "", "")
    if transport not in ("tcp", "ipc", "inproc") or not address:
        raise ArgumentError(
            f"endpoint: expected an address such as tcp://10.0.0.1:5000, got {value!r}",
            local=value,
            consequence="nobody could be reached",
            remedy="pass Receiver.endpoint",
        )
    return value


def check_word(name: str, value: _Word, words: Sequence[str]) -> _Word:
    """The word `value`, one of `words`.

    Raises:
        ArgumentError: It is none of them.
    """
    if value not in words:
        raise ArgumentError(
            f"{name}: expected one of {list(words)}, got {value!r}", local=value, consequence="nothing was done"
        )
    return value
