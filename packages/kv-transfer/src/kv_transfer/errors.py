"""The errors of kv_transfer, one class a kind of failure.

Every error carries, where they apply, the local and the remote value, the consequence and the remedy, in its text and
as attributes. Planning errors are kv_planner's own and pass through unchanged; this module does not wrap them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_transfer.messages import DifferenceRecord

__all__ = [
    "ArgumentError",
    "CoverageError",
    "EngineError",
    "EngineUnavailable",
    "MessageTooLarge",
    "PageHeld",
    "PeerLost",
    "PeerRefused",
    "ProtocolError",
    "ProtocolVersionError",
    "RegionError",
    "SessionStateError",
    "TransferAborted",
    "TransferError",
    "TransferFailed",
    "TransferTimeout",
    "UnsupportedLayout",
]


class TransferError(Exception):
    """Base of all errors of this package.

    Attributes:
        local: The value on this side, or None where the error has none.
        remote: The value on the other side, or None.
        consequence: What happens, or what would have happened.
        remedy: What to do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        local: object = None,
        remote: object = None,
        consequence: str = "",
        remedy: str = "",
    ) -> None:
        """Builds the text out of the parts that are present."""
        parts = [message]
        if local is not None or remote is not None:
            parts.append(f"local {_repr(local)}" + ("" if remote is None else f", remote {_repr(remote)}"))
        parts.extend(part for part in (consequence, remedy) if part)
        super().__init__("; ".join(parts))
        self.local = local
        self.remote = remote
        self.consequence = consequence
        self.remedy = remedy


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python prints no int of thousands of digits
        return f"{type(value).__name__} of too many digits"


class ArgumentError(TransferError, ValueError):
    """An argument that is no number of its kind, or out of range."""


class ProtocolError(TransferError, ValueError):
    """A message that is malformed, or that does not fit the state of the conversation."""


class ProtocolVersionError(ProtocolError):
    """A message of another protocol version."""


class MessageTooLarge(ProtocolError):
    """A control message over the size limit, in bytes."""


class PeerRefused(TransferError, ConnectionError):
    """The handshake ended in a refusal, by either side.

    Attributes:
        code: Kind of refusal, as in `messages.RefusalCode`.
        differences: All differences of the two layouts, seen from this side; empty unless the code is "layout".
    """

    def __init__(
        self, message: str, *, code: str, differences: Sequence[DifferenceRecord] = (), remedy: str = ""
    ) -> None:
        """Lists every difference in the text."""
        lines = [f"{d.field}: local {d.local}, remote {d.remote}; {d.consequence}; {d.remedy}" for d in differences]
        super().__init__("\n  - ".join([message, *lines]), remedy=remedy)
        self.code = code
        self.differences = tuple(differences)


class PeerLost(TransferError, ConnectionError):
    """The peer died, closed its connection or fell silent."""


class TransferAborted(TransferError, RuntimeError):
    """A room was given up.

    Attributes:
        reason: The text given by who aborted.
        by: "local" or the name of the rank (or "receiver") that aborted.
    """

    def __init__(self, message: str, *, reason: str, by: str) -> None:
        """Keeps the reason and who gave it."""
        super().__init__(message)
        self.reason = reason
        self.by = by


class TransferFailed(TransferError, RuntimeError):
    """An engine could not move bytes of a room; its destination pages are undefined."""


class TransferTimeout(TransferError, TimeoutError):
    """Something did not happen in time.

    Attributes:
        seconds: The limit that ran out.
    """

    def __init__(self, message: str, *, seconds: float, consequence: str = "", remedy: str = "") -> None:
        """Keeps the limit."""
        super().__init__(f"{message} within {seconds:g} s", consequence=consequence, remedy=remedy)
        self.seconds = seconds


class CoverageError(TransferError, ValueError):
    """A (layer, page) of a room was sent twice, or not at all.

    Attributes:
        cells: The (part, layer id, page index) that are concerned, at most the first 16.
    """

    def __init__(self, message: str, *, cells: Sequence[tuple[str, int, int]] = (), remedy: str = "") -> None:
        """Keeps the cells."""
        super().__init__(message, remedy=remedy)
        self.cells = tuple(cells[:16])


class SessionStateError(TransferError, RuntimeError):
    """A call that the state of a session or an endpoint does not allow."""


class PageHeld(SessionStateError):
    """A destination page that a room holds, or a writer of an ended one.

    Attributes:
        page: The page id.
        holder: The room that holds it.
    """

    def __init__(self, message: str, *, page: int, holder: str, consequence: str, remedy: str) -> None:
        """Keeps the page and its room."""
        super().__init__(message, consequence=consequence, remedy=remedy)
        self.page = page
        self.holder = holder


class UnsupportedLayout(TransferError, ValueError):
    """A layout that this version does not move."""


class EngineError(TransferError, RuntimeError):
    """An engine refused a call.

    Attributes:
        code: The library's own code, or None.
    """

    def __init__(
        self, message: str, *, code: int | None = None, local: object = None, consequence: str = "", remedy: str = ""
    ) -> None:
        """Keeps the library's code."""
        super().__init__(message, local=local, consequence=consequence, remedy=remedy)
        self.code = code


class RegionError(EngineError, ValueError):
    """Memory that is not registered, registered twice over, or out of range."""


class EngineUnavailable(EngineError, ImportError):
    """An engine whose library is not installed or cannot be loaded here."""
