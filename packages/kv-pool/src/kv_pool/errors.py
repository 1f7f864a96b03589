"""Owns the errors of kv_pool: one class a rule, each with the values that broke it.

Every error derives from `KvPoolError` and from the nearest builtin, so that callers may catch either. It does not own
the checks themselves; those live beside what they protect.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = [
    "AgreementError",
    "AliasedRows",
    "BudgetError",
    "CacheError",
    "CanaryMismatch",
    "DeviceMismatch",
    "DeviceUnavailable",
    "DoubleFree",
    "DtypeMismatch",
    "ForeignPage",
    "HeadRangeError",
    "HitError",
    "HostPoolError",
    "IntegrityError",
    "KvPoolError",
    "LayoutError",
    "LibraryUnavailable",
    "MoveRefused",
    "OutOfPages",
    "PageError",
    "PoolSizeError",
    "RowMismatch",
    "SharedTail",
    "SlotOutOfRange",
    "StorageDamaged",
    "StorageError",
    "TableError",
    "UnheldComponent",
    "UnknownForm",
    "UnknownLayer",
    "UnknownWriter",
    "UnmirroredComponent",
    "UnrepeatableKeys",
    "UnsupportedMover",
    "WidthMismatch",
    "WriteError",
]

_Error = TypeVar("_Error", bound="KvPoolError")


class KvPoolError(Exception):
    """Base of every error that kv_pool raises.

    Attributes:
        argument: Name of the argument or fact that broke the rule.
        given: The value that was found there.
        expected: What the rule asks for.
        consequence: What would go wrong if it were let through.
        remedy: What to do about it.
    """

    def __init__(self, argument: str, *, given: Any, expected: Any, consequence: str, remedy: str) -> None:
        self.argument = argument
        self.given = given
        self.expected = expected
        self.consequence = consequence
        self.remedy = remedy
        super().__init__(f"{argument}: expected {expected}, got {_text(given)}; {consequence}; {remedy}")

    def named(self: _Error, argument: str) -> _Error:
        """The same error under another name: that of the caller's argument which was passed on."""
        return type(self)(
            argument, given=self.given, expected=self.expected, consequence=self.consequence, remedy=self.remedy
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the keyword values, so that an error survives a process boundary."""
        values = (self.argument, _text(self.given), str(self.expected), self.consequence, self.remedy)
        return _rebuild, (type(self), *values)


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of too many digits"


def _rebuild(cls: type[KvPoolError], argument: str, given: str, expected: str, consequence: str, remedy: str) -> Any:
    return cls(argument, given=given, expected=expected, consequence=consequence, remedy=remedy)


class LayoutError(KvPoolError, ValueError):
    """The layout asks for something that this pool cannot represent."""


class UnheldComponent(LayoutError):
    """The layout declares a component, part or layer that the pool would silently not hold."""


class HeadRangeError(LayoutError):
    """The local head range does not fit the layout or the placement."""


class PoolSizeError(KvPoolError, ValueError):
    """The pool's size does not fit its page size or its writer's index width."""


class DeviceUnavailable(KvPoolError, RuntimeError):
    """A device text that names no device, or a device that this process cannot reach."""


class LibraryUnavailable(KvPoolError, ImportError):
    """An optional library, or an engine that is integrated with, is not installed, or is another release."""


class UnknownForm(KvPoolError, ValueError):
    """A form of view that does not exist, or that the width of the component does not allow."""


class BudgetError(KvPoolError, ValueError):
    """A memory budget that cannot be kept, or that would differ between ranks."""


class UnknownLayer(KvPoolError, LookupError):
    """A layer id (or part) that this pool does not hold."""


class UnknownWriter(KvPoolError, ValueError):
    """A writer name that does not exist, or that cannot serve this device."""


class WriteError(KvPoolError, ValueError):
    """A write was refused; nothing was written."""


class WidthMismatch(WriteError):
    """Heads or head dims of the data differ from those of the pool."""


class RowMismatch(WriteError):
    """The number of rows of key, value and slots differ, or an argument has the wrong rank."""


class DtypeMismatch(WriteError, TypeError):
    """The dtype of key, value or slots is not the one declared."""


class DeviceMismatch(WriteError):
    """An argument lives on another device than the pool."""


class AliasedRows(WriteError):
    """Rows to store lie in the pool's own memory, where the write would change them while it reads."""


class SlotOutOfRange(WriteError, IndexError):
    """A slot lies outside the pool, or does not fit the integer width that was asked for."""


class PageError(KvPoolError, ValueError):
    """A page id or page list was refused; the allocator is unchanged."""


class OutOfPages(KvPoolError, RuntimeError):
    """Fewer free pages than were asked for; none was taken."""


class SharedTail(KvPoolError, ValueError):
    """A request would write into a page that somebody else reads or writes."""


class DoubleFree(PageError):
    """A page was released more often than it is held."""


class ForeignPage(PageError):
    """A page id that this allocator does not own: outside its range, reserved, or not held."""


class IntegrityError(KvPoolError, RuntimeError):
    """The allocator's books contradict each other; a page may have two owners."""


class TableError(KvPoolError, ValueError):
    """A position, page list or block table does not cover what was asked of it."""


class HostPoolError(KvPoolError, ValueError):
    """The host pool cannot be built for this device pool."""


class UnmirroredComponent(HostPoolError):
    """The device pool has a component, part or layer of which the host would hold no copy."""


class UnsupportedMover(KvPoolError, ValueError):
    """No mover serves this host layout on this device, or the operator it needs is not there."""


class MoveRefused(KvPoolError, ValueError):
    """A copy between device and host was refused; nothing was moved."""


class StorageError(KvPoolError, OSError):
    """A store beyond the host that cannot be used, or a page that it could not keep."""


class UnrepeatableKeys(StorageError):
    """Keys that no other process can compute: what is stored under them would never be found again."""


class StorageDamaged(StorageError):
    """A stored page that is not what was written under its key; it is not served.

    Attributes:
        pages_read: Leading pages of the call that are whole.
    """

    pages_read: int = 0


class CanaryMismatch(KvPoolError, RuntimeError):
    """A host page holds other bytes than were backed up; it is not loaded.

    Attributes:
        position: Which page of the call; those before it are as they were.
        tokens: Which tokens of that page differ.
    """

    position: int = 0
    tokens: tuple[int, ...] = ()


class AgreementError(KvPoolError, RuntimeError):
    """Ranks of one model that do not agree, or would not."""


class CacheError(KvPoolError, RuntimeError):
    """A call that the state of an acquired prompt does not allow; nothing was changed."""


class HitError(KvPoolError, ValueError):
    """A hit length that is not a number of whole pages within what was found."""
