"""`PrefillEnd`: one prefill rank that finds its decode ranks in a directory, connects to them, and again when they die.

It adds nothing to the conversations: those are `Sender`s, and rooms are opened there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType

import kv_planner

from kv_transfer.arguments import check_period, check_seconds, check_whole
from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts
from kv_transfer.directory import Member, Place
from kv_transfer.end_arguments import EndArguments
from kv_transfer.engine import TransferEngine
from kv_transfer.errors import SessionStateError, TransferTimeout
from kv_transfer.groups import Manifests
from kv_transfer.handshake import Rank
from kv_transfer.registration import Finder, Registration, check_directory
from kv_transfer.sender import Sender
from kv_transfer.terms import ALL_PARTS

__all__ = ["PrefillEnd"]

_TURN = 0.1


class _Link:
    """A sender to one decode rank, with a thread that connects it as long as the rank is there."""

    def __init__(self, member: Member, sender: Sender, pause: float) -> None:
        self.member = member
        self.sender = sender
        self.problem: Exception | None = None
        self._pause = pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kv-transfer-link-{member.endpoint}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self.sender.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.sender.connect()
                while self.sender.is_connected:
                    self.problem = None
                    if self._closed.wait(_TURN):
                        return
                self.problem = self.sender.error
            except Exception as error:
                self.problem = error
            self._closed.wait(self._pause)


class PrefillEnd:
    """One prefill rank, registered, with a sender to every decode rank that serves its data-parallel group.

    A decode rank that was started again is connected to anew. While the directory is down, senders that are connected
    go on, and nobody new is found.

    Args:
        manifest: As for `Sender`.
        engine: As for `Sender`.
        directory: The deployment's, such as a `DirectoryClient`.
        windows: As for `Sender`.
        parts: As for `Sender`.
        aux: As for `Sender`.
        timeouts: As for `Sender`.
        limits: As for `Sender`.
        secret: As for `Sender`; the directory has its own.
        every: Seconds between two looks into the directory, and between two attempts to connect.

    Raises:
        PeerLost: The directory does not answer.
        ArgumentError: It refused the rank: its sizes are others than those of the ranks that are there. Or as `Sender`.
        ValueError, UnsupportedLayout, EngineError: As `Sender`, but for the memory, which is registered later.
    """

    def __init__(
        self,
        manifest: Manifests,
        engine: TransferEngine,
        directory: Finder,
        *,
        windows: Mapping[str, int] | None = None,
        parts: Iterable[kv_planner.Part] = ALL_PARTS,
        aux: Iterable[AuxField] = (),
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        secret: str | None = None,
        every: float = 1.0,
    ) -> None:
        """Registers; senders come as decode ranks are found."""
        self._every = check_period("every", every)
        self._directory = check_directory(directory)
        own = EndArguments.of(manifest, engine, windows, parts, aux, timeouts, limits, secret)
        self._timeouts = own.timeouts
        self._make_sender = partial(
            Sender,
            manifest,
            engine,
            windows=windows,
            parts=own.parts,
            aux=own.aux,
            timeouts=own.timeouts,
            limits=own.limits,
            secret=secret,
        )
        place = Place.of(own.groups.placement)
        self._dp_rank = place.dp_rank
        self._links: dict[Rank, _Link] = {}
        self._lock = threading.Lock()
        self._problem: Exception | None = None
        self._closed = threading.Event()
        self._registration = Registration(directory, Member(side="prefill", place=place), every=every)
        self._thread = threading.Thread(target=self._run, name=f"kv-transfer-prefill-{place.rank}", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """Its number in the directory."""
        return self._registration.generation

    @property
    def problem(self) -> Exception | None:
        """Why nobody new is found, or why a decode rank is not connected; None when all is well."""
        with self._lock:
            links = [link.problem for link in self._links.values()]
        return next((error for error in (self._problem, *links) if error is not None), None)

    @property
    def senders(self) -> tuple[Sender, ...]:
        """Those whose handshake is over, by rank of the decode side."""
        with self._lock:
            return tuple(link.sender for _, link in sorted(self._links.items()) if link.sender.is_ready)

    def group(self, dp_rank: int = 0) -> tuple[Sender, ...]:
        """Senders to all decode ranks of a data-parallel group, for `SenderGroup`; empty while one is missing.

        Raises:
            ArgumentError: No group.
        """
        dp_rank = check_whole("dp_rank", dp_rank)
        with self._lock:
            links = [link for rank, link in sorted(self._links.items()) if rank.dp == dp_rank]
        whole = bool(links) and len(links) == links[0].member.place.group_size
        return tuple(link.sender for link in links) if whole and all(link.sender.is_ready for link in links) else ()

    @property
    def groups(self) -> dict[int, tuple[Sender, ...]]:
        """The groups of the decode side that are whole and ready."""
        with self._lock:
            ranks = sorted({rank.dp for rank in self._links})
        return {dp_rank: senders for dp_rank in ranks if (senders := self.group(dp_rank))}

    def wait_ready(self, timeout: float | None = None, *, dp_rank: int = 0) -> tuple[Sender, ...]:
        """Waits for all decode ranks of a group.

        Args:
            timeout: Seconds; `Timeouts.handshake` by default.
            dp_rank: Data-parallel group of the decode side.

        Returns:
            Its senders.

        Raises:
            TransferTimeout: A rank is missing; the text says who is there, and what went wrong last.
            SessionStateError: It is closed.
        """
        seconds = self._timeouts.handshake if timeout is None else check_seconds("timeout", timeout)
        end = time.monotonic() + seconds
        while not (senders := self.group(dp_rank)):
            if self._closed.is_set():
                raise SessionStateError("the prefill end is closed")
            if time.monotonic() >= end:
                raise TransferTimeout(
                    f"decode group {dp_rank}: {self._missing(dp_rank)}",
                    seconds=seconds,
                    consequence="nothing can be sent there",
                    remedy=f"start the missing ranks with this directory; last problem: {self.problem or 'none'}",
                )
            time.sleep(min(0.02, seconds))
        return senders

    def close(self) -> None:
        """Takes the rank out of the directory and closes all senders; may be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._registration.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
        _close(links)

    def __enter__(self) -> PrefillEnd:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _missing(self, dp_rank: int) -> str:
        with self._lock:
            links = {rank: link for rank, link in sorted(self._links.items()) if rank.dp == dp_rank}
        if not links:
            return "no decode rank of it is in the directory"
        size = next(iter(links.values())).member.place.group_size
        ready = ", ".join(str(rank) for rank, link in links.items() if link.sender.is_ready) or "none"
        return f"{len(links)} of {size} decode ranks are in the directory, ready: {ready}"

    def _run(self) -> None:
        while True:
            try:
                problem = self._look(self._directory.members("decode"))
                self._problem = problem or self._registration.problem
            except Exception as error:  # also of a directory that is no `DirectoryClient`
                self._problem = error
            if self._closed.wait(self._every):
                return

    def _look(self, members: Sequence[Member]) -> Exception | None:
        """New ranks get a link, moved ones another; those that are gone lose theirs when the connection is over too.

        Returns:
            Why a rank got none, if one did not.
        """
        found = {member.place.rank: member for member in members if member.serves == self._dp_rank and member.endpoint}
        with self._lock:
            old = [
                self._links.pop(rank)
                for rank, link in list(self._links.items())
                if (found[rank].endpoint != link.member.endpoint if rank in found else not link.sender.is_connected)
            ]
            new = [member for rank, member in found.items() if rank not in self._links]
        _close(old)
        problem: Exception | None = None
        for member in new:
            try:
                sender = self._make_sender(endpoint=member.endpoint)
            except Exception as error:  # whatever an engine makes of the memory
                problem = error
                continue
            with self._lock:
                self._links[member.place.rank] = _Link(member, sender, self._every)
        return problem


def _close(links: Sequence[_Link]) -> None:
    """All at once: each may take as long as its peer does not answer."""
    threads = [threading.Thread(target=link.close, daemon=True) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
