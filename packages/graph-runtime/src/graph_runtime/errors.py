"""The errors of graph-runtime: one base, one class a rule, each also the nearest builtin exception.

Every error says what was checked, what was expected, what was there, what would have happened and what to do; the
same values are attributes. This module does not decide when an error is raised.
"""

from __future__ import annotations

__all__ = [
    "AddressChanged",
    "AliasedValue",
    "BatchShapeError",
    "BatchTooLarge",
    "BucketError",
    "CaptureFailed",
    "CaptureRefused",
    "DeviceMismatch",
    "EngineMissing",
    "FenceTimeout",
    "GraphBroken",
    "GraphClosed",
    "GraphError",
    "HostListError",
    "KeyNotPassed",
    "MissingUpdate",
    "OutputShapeError",
    "PeerRefused",
    "RanksDisagree",
    "ReentrantCall",
    "RowCountError",
    "RowDtypeError",
    "RowValueError",
    "RowWidthError",
    "RunnerPaused",
    "SlotBusy",
    "StepFailed",
    "StepKindError",
    "TensorValuedKey",
    "UncoveredKey",
    "UnknownDevice",
    "UnknownField",
    "UnknownUpdateKey",
    "UnwrittenRows",
    "UpdateCountMismatch",
    "UpdateFailed",
    "UpdateLengthMismatch",
    "UpdatePending",
    "UpdateSpecError",
    "UpdateTimeout",
    "ValueDevice",
]


class GraphError(Exception):
    """Base of every error raised by graph-runtime.

    Attributes:
        subject: What was checked (an argument, a field, a bucket, an op).
        expected: The value or rule that holds.
        got: The value that was there.
        consequence: What would have happened had it been accepted.
        remedy: What to do.
    """

    def __init__(self, subject: str, *, expected: object, got: object, consequence: str, remedy: str) -> None:
        self.subject = subject
        self.expected = expected
        self.got = got
        self.consequence = consequence
        self.remedy = remedy
        super().__init__(subject, expected, got, consequence, remedy)

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, got {self.got}. {self.consequence} {self.remedy}"


class UnknownDevice(GraphError, ValueError):
    """A device name that no device is registered for."""


class DeviceMismatch(GraphError, ValueError):
    """Parts that must be on one device are on two."""


class EngineMissing(GraphError, ImportError, RuntimeError):
    """A class for an engine was used, and the engine cannot be imported."""


class CaptureRefused(GraphError, RuntimeError):
    """The captured function ran an operation that cannot be replayed; `got` names it."""


class CaptureFailed(GraphError, RuntimeError):
    """No bucket could be captured; `got` is a dict from bucket to reason."""


class GraphClosed(GraphError, RuntimeError):
    """The graph, buffers or runner were closed before this call."""


class GraphBroken(GraphError, RuntimeError):
    """An earlier update or replay of this graph failed; it must be captured again."""


class UpdateSpecError(GraphError, ValueError):
    """What the update says does not fit what was captured."""


class UnknownUpdateKey(UpdateSpecError):
    """An update key that no captured op takes."""


class TensorValuedKey(UpdateSpecError):
    """An update key whose argument was a device tensor at capture and so cannot be rebound."""


class KeyNotPassed(UpdateSpecError):
    """An update key whose argument was not passed at capture: torch_npu would ignore the update silently."""


class UncoveredKey(UpdateSpecError):
    """A captured length argument that the update does not name: it would keep its value of capture time."""


class UpdateCountMismatch(UpdateSpecError):
    """The number of per-op updates differs from the number of captured ops."""


class UpdateLengthMismatch(UpdateSpecError):
    """An update list whose length differs from the list seen at capture."""


class MissingUpdate(GraphError, RuntimeError):
    """A replay was asked for without an update since the last one."""


class UpdatePending(GraphError, RuntimeError):
    """A second update was given before a replay consumed the first."""


class UpdateFailed(GraphError, RuntimeError):
    """The device raised during an update; nothing was replayed. The cause is chained."""


class UpdateTimeout(GraphError, TimeoutError):
    """An update did not end in time; the message says where it stands. Nothing was replayed."""


class FenceTimeout(GraphError, TimeoutError):
    """The previous step, or another thread's call, did not end in time; nothing was rewritten."""


class ReentrantCall(GraphError, RuntimeError):
    """A runner was called from inside its own call, or from inside a capture, where it would wait for itself."""


class RunnerPaused(GraphError, RuntimeError):
    """A step or capture was asked for while the memory of the graphs is taken away."""


class PeerRefused(GraphError, RuntimeError):
    """Another rank refused the step, so that it runs nowhere; nothing was written."""


class RanksDisagree(GraphError, RuntimeError):
    """The reduction between ranks gave an unequal answer; nothing was written."""


class SlotBusy(GraphError, RuntimeError):
    """A host copy of a step would overwrite one that nobody has read."""


class StepKindError(GraphError, ValueError):
    """A kind of runner that nobody offers for a device, or steps and layers that do not fit."""


class StepFailed(GraphError, RuntimeError):
    """The device raised while the previous step ran; the cause is chained."""


class BucketError(GraphError, ValueError):
    """Bucket sizes that are not a strictly positive set, or do not fit the buffers."""


class BatchTooLarge(GraphError, ValueError):
    """More live rows than the static buffers hold."""


class BatchShapeError(GraphError, ValueError):
    """Lengths of a batch that do not belong together."""


class HostListError(GraphError, ValueError):
    """A host list of the step is missing, unknown, of wrong length, or holds something else than lengths."""


class OutputShapeError(GraphError, ValueError):
    """An output of the forward whose first dimension is not rows of the batch."""


class RowValueError(GraphError, ValueError):
    """Base of what can be wrong with a value given for a field of the static buffers."""


class UnknownField(RowValueError, KeyError):
    """A name that is not a field of the layout, or a field that was not given."""

    __str__ = GraphError.__str__


class RowCountError(RowValueError):
    """A value with another number of rows than was announced, or more than the field has."""


class RowWidthError(RowValueError):
    """A value whose rows are not as wide as the field's."""


class RowDtypeError(RowValueError, TypeError):
    """A value of another dtype than the field, or a number that the dtype cannot hold."""


class AliasedValue(RowValueError):
    """A value that lies in the buffers themselves and would be overwritten while it is read."""


class ValueDevice(RowValueError):
    """A value on a device that a load cannot copy from, or without ordinary memory."""


class AddressChanged(GraphError, RuntimeError):
    """A static view no longer lies where it lay at capture."""


class UnwrittenRows(GraphError, RuntimeError):
    """Rows of a device-written field still hold poison; `got` is a dict from field to row numbers."""
