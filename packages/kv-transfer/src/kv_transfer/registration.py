"""One member of a directory, kept there: registered, renewed, and registered again when the directory lost it.

A directory that is down is an error where somebody waits for it, and a `problem` afterwards: what runs goes on. Knows
neither sockets nor transfers.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol, runtime_checkable

from kv_transfer.arguments import check_kind, check_period
from kv_transfer.directory import Member, Side

__all__ = ["Finder", "Registration", "check_directory"]


@runtime_checkable
class Finder(Protocol):
    """What ends need of a directory; `Directory` and `DirectoryClient` are ones."""

    def register(self, member: Member) -> int:
        """See `Directory.register`."""

    def renew(self, generation: int) -> bool:
        """See `Directory.renew`."""

    def remove(self, generation: int) -> bool:
        """See `Directory.remove`."""

    def members(self, side: Side) -> tuple[Member, ...]:
        """See `Directory.members`."""


def check_directory(directory: Finder) -> Finder:
    """The directory itself.

    Raises:
        ArgumentError: It has not the calls of one.
    """
    return check_kind("directory", directory, Finder)  # type: ignore[type-abstract]


class Registration:
    """Keeps a member in a directory until `close`.

    Args:
        directory: Where.
        member: Who; its generation is the directory's.
        every: Seconds between two renewals, well below the directory's lifetime.

    Raises:
        PeerLost: The directory does not answer.
        ArgumentError: It refused the member, it or the member is none, or `every` is no number of seconds above 0.
    """

    def __init__(self, directory: Finder, member: Member, *, every: float = 5.0) -> None:
        """Registers, and starts to renew."""
        self._every = check_period("every", every)
        self._directory = check_directory(directory)
        self._member = check_kind("member", member, Member)
        self._generation = directory.register(member)
        self._problem: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-transfer-registration", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """The current one; a higher one after the directory was started again or the member was silent for too long."""
        return self._generation

    @property
    def problem(self) -> Exception | None:
        """Why the last renewal failed; None when it did not."""
        return self._problem

    def close(self) -> None:
        """Takes the member out, if the directory answers; may be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        if self._problem is None:
            with contextlib.suppress(Exception):
                self._directory.remove(self._generation)

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            try:
                if not self._directory.renew(self._generation):
                    self._generation = self._directory.register(self._member)
                self._problem = None
            except Exception as error:
                self._problem = error
