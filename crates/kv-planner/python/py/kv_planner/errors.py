"""Owns the exceptions of the package, one class a rule. It does not own any check: the Rust core decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_planner._native import Difference

__all__ = [
    "AccountingError",
    "AddressOverflow",
    "ArgumentError",
    "BlockLimitExceeded",
    "ContextMismatch",
    "DuplicateDestination",
    "FormatError",
    "HeadsDoNotSplit",
    "IncompleteDeployment",
    "InconsistentDeployment",
    "InternalError",
    "ItemKindMismatch",
    "LayoutError",
    "LayoutMismatch",
    "LengthError",
    "LockError",
    "ManifestError",
    "PageAlreadyHeld",
    "PageOutOfRange",
    "PlacementError",
    "PlanError",
    "PrefixError",
    "RegionLimitExceeded",
    "ReservedPage",
    "RowLayoutError",
    "RunsError",
    "SliceError",
    "StaleNode",
    "TierConflict",
    "TierOrder",
    "TokenOutOfRange",
    "UnequalPages",
    "UnnamedPointers",
    "UnregisteredMemory",
    "UnsupportedPlacement",
]


class PlanError(ValueError):
    """A refusal: which values, with what consequence, and the remedy.

    Attributes:
        local: Value of the local side, a number where it is one.
        remote: Value that it contradicts, or ``None`` where there is no second value.
        consequence: What would happen otherwise.
        remedy: What to change.
    """

    local: int | str | None
    remote: int | str | None
    consequence: str
    remedy: str

    def __init__(
        self,
        message: str,
        *,
        local: int | str | None = None,
        remote: int | str | None = None,
        consequence: str = "",
        remedy: str = "",
    ) -> None:
        """Keeps the message and the values."""
        super().__init__(message)
        self.local = local
        self.remote = remote
        self.consequence = consequence
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with its attributes."""
        return (type(self), self.args, self.__dict__)


class ArgumentError(PlanError):
    """An argument has a type, shape or range that no use has."""


class LayoutError(PlanError):
    """A component or a model layout is not valid by itself."""


class PlacementError(PlanError):
    """Ranks and sizes contradict each other."""


class ManifestError(PlanError):
    """A rank's manifest breaks one of its invariants."""


class FormatError(PlanError):
    """A text is not the JSON of the type that was asked for."""


class InconsistentDeployment(PlanError):
    """Manifests of one side do not belong to one deployment."""


class IncompleteDeployment(PlanError):
    """A layer or a head range of one side is missing or doubly owned."""


class LayoutMismatch(PlanError):
    """Two sides differ in fields that the transfer depends on.

    Attributes:
        differences: All of them; the inherited attributes repeat the first.
    """

    differences: tuple[Difference, ...]

    def __init__(self, message: str, *, differences: Sequence[Difference] = (), **values: Any) -> None:
        """Keeps the differences."""
        super().__init__(message, **values)
        self.differences = tuple(differences)


class UnnamedPointers(PlanError):
    """A bare list of pointers can be named in no way, or in several."""


class UnsupportedPlacement(PlanError):
    """No plan exists for this placement."""


class HeadsDoNotSplit(PlanError):
    """Heads neither divide over the ranks nor replicate evenly."""


class RunsError(PlanError):
    """Pages cannot be paired."""


class UnequalPages(RunsError):
    """Two lists of pages, or pages and tokens, are not equally many."""


class ReservedPage(RunsError):
    """Page 0 was named; it is reserved for padding."""


class PageOutOfRange(RunsError):
    """A page is negative or beyond a buffer."""


class DuplicateDestination(RunsError):
    """A destination page is named twice."""


class ItemKindMismatch(PlanError):
    """Runs count another kind of item than the route."""


class ContextMismatch(PlanError):
    """Runs are not the share of the route's context-parallel rank."""


class SliceError(PlanError):
    """A slice names what the layout or the runs do not have."""


class BlockLimitExceeded(PlanError):
    """A plan would lower to more blocks than the engine takes."""


class RegionLimitExceeded(PlanError):
    """Buffers need more regions than the engine registers."""


class UnregisteredMemory(PlanError):
    """A block lies outside the registered regions."""


class AddressOverflow(PlanError):
    """An address sum leaves the 64-bit range."""


class RowLayoutError(PlanError):
    """Fields of a row layout contradict each other."""


class LengthError(PlanError):
    """Lengths, draft counts or widths of a step are impossible."""


class TokenOutOfRange(PlanError):
    """A token id is negative."""


class PrefixError(PlanError):
    """The prefix index cannot do what was asked."""


class PageAlreadyHeld(PrefixError):
    """A page is held by another node, or stands twice."""


class StaleNode(PrefixError):
    """A node, or a page of a match, is no longer in the index."""


class TierOrder(PrefixError):
    """A page would enter a tier before its parent."""


class TierConflict(PrefixError):
    """A node has a page in the tier already."""


class LockError(PrefixError):
    """A lock is released twice, is foreign, or stands in the way."""


class AccountingError(PrefixError):
    """Counts of a tier do not add up."""


class InternalError(PlanError, RuntimeError):
    """The planner itself failed (a panic of its Rust core); no argument is to blame."""
