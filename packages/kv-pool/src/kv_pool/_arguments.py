"""Owns the refusal of arguments of another kind, by name and before anything is taken or written.

What an object of the right kind means is its user's; numbers and lists of ids are `tables`'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeVar

from kv_pool.errors import KvPoolError
from kv_pool.tables import shown, whole_number

__all__ = [
    "check_all",
    "check_call",
    "check_kind",
    "check_list",
    "check_mapping",
    "check_numbers",
    "check_optional",
    "check_word",
]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_NOTHING = "nothing was made or written"


def check_kind(
    name: str, value: object, kind: type[_Value], error: type[KvPoolError], *, consequence: str = _NOTHING
) -> _Value:
    """The object `value`, a `kind`; also where that is a protocol that can be asked at run time.

    Raises:
        KvPoolError: It is none, or a class where an object of it is meant; of the class that was asked for.
    """
    if not isinstance(value, kind) or isinstance(value, type):
        raise error(
            name,
            given=shown(value),
            expected=f"a {getattr(kind, '__name__', kind)}",  # a union has no name
            consequence=consequence,
            remedy=f"pass a {getattr(kind, '__name__', kind)}",
        )
    return value


def check_optional(name: str, value: _Value | None, kind: type[_Value], error: type[KvPoolError]) -> _Value | None:
    """The object `value`, a `kind` or None.

    Raises:
        KvPoolError: It is neither; of the class that was asked for.
    """
    return None if value is None else check_kind(name, value, kind, error)


def check_word(name: str, value: object, words: Sequence[str], error: type[KvPoolError]) -> None:
    """Refuses what is none of `words`.

    Raises:
        KvPoolError: It is none; of the class that was asked for.
    """
    if not isinstance(value, str) or value not in words:
        raise error(
            name,
            given=shown(value),
            expected=f"one of {list(words)}",
            consequence=_NOTHING,
            remedy="pass one of these words",
        )


def check_mapping(name: str, value: Mapping[_Key, _Value], error: type[KvPoolError]) -> Mapping[_Key, _Value]:
    """The mapping `value`.

    Raises:
        KvPoolError: It is none; of the class that was asked for.
    """
    return check_kind(name, value, Mapping, error)  # type: ignore[type-abstract]


def check_call(name: str, value: object, error: type[KvPoolError]) -> None:
    """Refuses what is neither None nor something that can be called.

    Raises:
        KvPoolError: It is neither; of the class that was asked for.
    """
    if value is not None and not callable(value):
        raise error(
            name,
            given=shown(value),
            expected="a function, or None",
            consequence=_NOTHING,
            remedy="pass the function itself",
        )


def check_list(name: str, values: object, error: type[KvPoolError]) -> tuple[object, ...]:
    """The items of `values`, which is no text, and no set, as that has no order.

    Raises:
        KvPoolError: It cannot be iterated over; of the class that was asked for.
    """
    try:
        if not isinstance(values, str | bytes | Set | Mapping) and isinstance(values, Iterable):
            return tuple(values)
    except TypeError:  # an array or tensor without a first axis
        pass
    raise error(name, given=shown(values), expected="a list", consequence=_NOTHING, remedy="pass a list of them")


def check_all(name: str, values: object, kind: type[_Value], error: type[KvPoolError]) -> tuple[_Value, ...]:
    """The items of `values`, each a `kind`.

    Raises:
        KvPoolError: It is no list, or one of them is none; of the class that was asked for.
    """
    items = check_list(name, values, error)
    return tuple(check_kind(f"{name}[{place}]", item, kind, error) for place, item in enumerate(items))


def check_numbers(name: str, values: object, error: type[KvPoolError], *, least: int = 0) -> tuple[int, ...]:
    """The whole numbers `values`, from `least` on.

    Raises:
        KvPoolError: It is no list, or one of them is no such number; of the class that was asked for.
    """
    return tuple(
        whole_number(f"{name}[{place}]", value, least=least, error=error, consequence=_NOTHING)
        for place, value in enumerate(check_list(name, values, error))
    )
