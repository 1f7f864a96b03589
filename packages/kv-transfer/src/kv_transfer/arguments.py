"""What callers pass in: numbers, seconds, addresses, words and kinds, refused by name before anything has happened.

Checks kinds and ranges; what a number means is its user's.
"""

from __future__ import annotations

import math
import numbers
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Final, TypeGuard, TypeVar

from kv_transfer.errors import ArgumentError

__all__ = [
    "check_endpoint",
    "check_items",
    "check_kind",
    "check_limit",
    "check_listening",
    "check_period",
    "check_seconds",
    "check_text",
    "check_wait",
    "check_whole",
    "check_word",
    "is_whole",
    "told",
]

_Value = TypeVar("_Value")
_Word = TypeVar("_Word", bound=str)
_LAST_PORT: Final = 65_535
_LONGEST: Final = math.floor(threading.TIMEOUT_MAX)  # seconds; a thread cannot sleep longer
_MOST: Final = 2**63 - 1
_LONGEST_TEXT: Final = 65_536
_SHOWN: Final = 200  # characters of a value in an error


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int, of Python or of NumPy; bools, floats, arrays and tensors are none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def check_whole(name: str, value: object, most: int = _MOST, *, least: int = 0) -> int:
    """The whole number `value`, from `least` to `most`; NumPy integers are some, bools, floats and tensors are none.

    Raises:
        ArgumentError: It is none, or out of range.
    """
    number = operator.index(value) if is_whole(value) else least - 1
    if not least <= number <= most:
        raise ArgumentError(
            f"{name}: expected a whole number from {least} to {most}, got {told(value)}",
            local=_shown(value),
            consequence="nothing was done",
            remedy="pass an int in this range",
        )
    return number


def check_limit(name: str, value: object) -> None:
    """Refuses what is neither None, for no limit, nor a whole number above 0.

    Raises:
        ArgumentError: It is neither.
    """
    if value is not None:
        check_whole(name, value, least=1)


def check_seconds(name: str, value: float) -> float:
    """The seconds `value`: a number that is finite, not negative, and no longer than a thread can sleep.

    Raises:
        ArgumentError: It is none, NaN, infinite, negative or longer.
    """
    given: object = value  # mypy takes a float for no Real
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not is_number or not 0 <= value <= _LONGEST:
        raise ArgumentError(
            f"{name}: expected a finite number of seconds from 0 on, at most {_LONGEST}, got {told(value)}",
            local=_shown(value),
            consequence="what waits for it would never end, or end at once",
            remedy="pass a number of seconds, or None for the default",
        )
    return float(value)


def check_wait(name: str, value: float | None) -> float | None:
    """The seconds `value`, or None for a wait without end.

    Raises:
        ArgumentError: As `check_seconds`.
    """
    return None if value is None else check_seconds(name, value)


def check_endpoint(value: str) -> str:
    """The endpoint `value`: a ZeroMQ address that can be connected to.

    Raises:
        ArgumentError: It has no transport that is known, no address, or no port that there is.
    """
    transport, _, address = value.partition("://") if _is_plain(value) else ("", "", "")
    port = address.rpartition(":")[2]
    reachable = transport != "tcp" or (port.isdecimal() and 0 < int(port) <= _LAST_PORT)
    if transport not in ("tcp", "ipc", "inproc") or not address or not reachable:
        raise ArgumentError(
            f"endpoint: expected an address such as tcp://10.0.0.1:5000, with a port from 1 to {_LAST_PORT}, "
            f"got {told(value)}",
            local=_shown(value),
            consequence="nobody could be reached",
            remedy="pass Receiver.endpoint",
        )
    return value


def check_period(name: str, value: float) -> float:
    """The seconds `value` between two turns of a thread.

    Raises:
        ArgumentError: As `check_seconds`, or 0.
    """
    if check_seconds(name, value) == 0:
        raise ArgumentError(
            f"{name}: expected seconds above 0, got {told(value)}",
            local=value,
            consequence="it would be over at once, or a thread would run without a pause",
            remedy="pass a second or so",
        )
    return float(value)


def check_listening(value: str) -> str:
    """The address `value` to listen on; whether it can be had is known when it is bound.

    Raises:
        ArgumentError: It is no text, or its port is above the last one, of which ZeroMQ would take another.
    """
    port = value.rpartition(":")[2] if _is_plain(value) else ""
    if not _is_plain(value) or (value.startswith("tcp://") and port.isdecimal() and int(port) > _LAST_PORT):
        raise ArgumentError(
            f"bind: expected an address such as tcp://127.0.0.1:0 with a port up to {_LAST_PORT}, got {told(value)}",
            local=_shown(value),
            consequence="no peer could connect",
            remedy="use another port, or 0 for a free one",
        )
    return value


def check_kind(name: str, value: _Value, kind: type[_Value]) -> _Value:
    """The object `value`, a `kind`; also where that is a protocol that can be asked at run time.

    Raises:
        ArgumentError: It is none, or a class where an object of it is meant.
    """
    if not isinstance(value, kind) or isinstance(value, type):
        raise ArgumentError(
            f"{name}: expected {kind.__name__}, got {told(value)}",
            local=type(value).__name__,
            consequence="nothing was done",
            remedy=f"pass a {kind.__name__}",
        )
    return value


def check_items(name: str, value: Iterable[_Value]) -> tuple[_Value, ...]:
    """The items of `value`.

    Raises:
        ArgumentError: It cannot be iterated over, or is one text.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise ArgumentError(
            f"{name}: expected a list, got {told(value)}",
            local=type(value).__name__,
            consequence="nothing was done",
            remedy="pass a list, also for one item",
        ) from None


def check_text(name: str, value: object, longest: int = _LONGEST_TEXT) -> str:
    """The text `value`: printable characters, from 1 to `longest`.

    Raises:
        ArgumentError: It is no text, empty, too long, or holds what no address, name or message can hold.
    """
    if not _is_plain(value) or len(str(value)) > longest:
        raise ArgumentError(
            f"{name}: expected a text of 1 to {longest} printable characters, got {told(value)}",
            local=_shown(value),
            consequence="nothing was done",
            remedy="pass a str of this length",
        )
    return str(value)


def check_word(name: str, value: _Word, words: Sequence[str]) -> _Word:
    """The word `value`, one of `words`.

    Raises:
        ArgumentError: It is none of them.
    """
    if not isinstance(value, str) or value not in words:
        raise ArgumentError(
            f"{name}: expected one of {list(words)}, got {told(value)}",
            local=_shown(value),
            consequence="nothing was done",
            remedy="pass one of these words",
        )
    return value


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value)


def _shown(value: object) -> object:
    """What an error keeps of a value: numbers and the beginning of texts, of everything else the kind."""
    if isinstance(value, str):
        return value[:_SHOWN]
    is_short = isinstance(value, float | None) or (isinstance(value, int) and abs(value) <= 2**128)
    return value if is_short else type(value).__name__


def told(value: object) -> str:
    """A value as a text for an error that is never long."""
    try:
        return f"{value!r:.{_SHOWN}}"
    except ValueError:  # Python prints no int of thousands of digits
        return f"{type(value).__name__} of too many digits"
