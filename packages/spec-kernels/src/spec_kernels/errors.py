"""Owns the errors of spec_kernels: one class a rule, each with the values that broke it.

Every error derives from `SpecKernelsError` and from the nearest builtin. It does not own the checks; they live beside
the op whose contract they keep.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AliasError",
    "BackendError",
    "BucketError",
    "CaptureError",
    "DeviceError",
    "DtypeError",
    "IndexWidthError",
    "LengthError",
    "MetadataError",
    "ShapeError",
    "SpecKernelsError",
    "TableCapacityError",
    "TokenCountError",
    "UnknownOp",
    "UnsupportedByOp",
]


class SpecKernelsError(Exception):
    """Base of every error that spec_kernels raises.

    Attributes:
        argument: Name of the argument or fact that broke the rule.
        given: The value that was found there.
        expected: What the contract asks for.
        consequence: What would go wrong if it were let through.
        remedy: What to do about it.
    """

    def __init__(self, argument: str, *, given: Any, expected: Any, consequence: str, remedy: str) -> None:
        self.argument = argument
        self.given = given
        self.expected = expected
        self.consequence = consequence
        self.remedy = remedy
        super().__init__(f"{argument}: expected {expected}, got {given}; {consequence}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the keyword values, so that an error survives a process boundary."""
        values = (self.argument, str(self.given), str(self.expected), self.consequence, self.remedy)
        return _rebuild, (type(self), *values)


def _rebuild(
    cls: type[SpecKernelsError], argument: str, given: str, expected: str, consequence: str, remedy: str
) -> Any:
    return cls(argument, given=given, expected=expected, consequence=consequence, remedy=remedy)


class UnknownOp(SpecKernelsError, ValueError):
    """An op name that this package does not have."""


class BackendError(SpecKernelsError, RuntimeError):
    """The backend that was asked for cannot serve the op on this device."""


class ShapeError(SpecKernelsError, ValueError):
    """Ranks or sizes of the arguments do not fit together."""


class DtypeError(SpecKernelsError, TypeError):
    """A dtype that the contract, or the device's operator, does not take."""


class DeviceError(SpecKernelsError, ValueError):
    """Arguments lie on different devices."""


class LengthError(SpecKernelsError, ValueError):
    """A query or KV length is negative, too long, or does not fit the query."""


class MetadataError(SpecKernelsError, ValueError):
    """Page lists, table rows and lengths do not describe one batch."""


class TableCapacityError(MetadataError):
    """A KV length reaches beyond the pages in the block table."""


class IndexWidthError(SpecKernelsError, ValueError):
    """An integer does not fit the width of its destination."""


class BucketError(SpecKernelsError, ValueError):
    """Live rows, padded rows and buffer rows do not nest."""


class TokenCountError(SpecKernelsError, ValueError):
    """The number of token rows is not rows times width, or does not fit the buffers."""


class AliasError(SpecKernelsError, ValueError):
    """Two destinations share memory, so that no order of writes is right."""


class UnsupportedByOp(SpecKernelsError, ValueError):
    """The device's operator documents that it refuses these sizes."""


class CaptureError(SpecKernelsError, RuntimeError):
    """Something that must exist before graph capture does not."""
