"""`DecodeEnd`: one decode rank that finds the prefill side in a directory, and is found there by it.

It adds nothing to the conversations: there is a `Receiver` for each data-parallel group of the prefill side, and rooms
are opened there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import get_args

import kv_planner

from kv_transfer.arguments import check_period, check_seconds, check_text, check_whole, check_word
from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts
from kv_transfer.directory import Member, Place
from kv_transfer.end_arguments import EndArguments
from kv_transfer.engine import TransferEngine
from kv_transfer.errors import ArgumentError, PeerRefused, SessionStateError, TransferError, TransferTimeout
from kv_transfer.groups import Manifests
from kv_transfer.messages import Policy
from kv_transfer.ports import rank_port
from kv_transfer.receiver import Receiver
from kv_transfer.registration import Finder, Registration, check_directory
from kv_transfer.spans import Interleave
from kv_transfer.terms import ALL_PARTS

__all__ = ["DecodeEnd"]

_Sizes = tuple[int, int, int, int]


class DecodeEnd:
    """One decode rank, registered, with a receiver for every data-parallel group of the prefill side.

    Receivers come when the first prefill rank is in the directory, since it says how many there are. A prefill rank
    that was started again connects to the same receiver; a prefill side that comes back with other sizes gets new ones.
    While the directory is down, conversations go on.

    Args:
        manifest: As for `Receiver`.
        engine: As for `Receiver`.
        directory: The deployment's, such as a `DirectoryClient`.
        host: Address that receivers listen on, and that prefill ranks are told.
        port: First control port of the decode side: each rank and group has its own from there on, and a taken one is
            an error. 0: free ones.
        windows: As for `Receiver`.
        interleave: As for `Receiver`.
        on_failed_pages: As for `Receiver`.
        parts: As for `Receiver`.
        aux: As for `Receiver`.
        timeouts: As for `Receiver`.
        limits: As for `Receiver`.
        secret: As for `Receiver`; the directory has its own.
        every: Seconds between two looks into the directory.

    Raises:
        PeerLost: The directory does not answer.
        ArgumentError: The host is a wildcard, there are not so many ports, or as `Receiver`.
        ValueError, UnsupportedLayout, EngineError: As `Receiver`, but for the memory where no prefill rank is there.
    """

    def __init__(
        self,
        manifest: Manifests,
        engine: TransferEngine,
        directory: Finder,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        windows: Mapping[str, int] | None = None,
        interleave: Interleave = "page",
        on_failed_pages: Policy = "fail",
        parts: Iterable[kv_planner.Part] = ALL_PARTS,
        aux: Iterable[AuxField] = (),
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        secret: str | None = None,
        every: float = 1.0,
    ) -> None:
        """Looks into the directory; receivers come as prefill ranks are found."""
        if check_text("host", host) in ("*", "0.0.0.0", "::", "[::]"):
            raise ArgumentError(
                f"host: {host!r} is no address that another host can connect to",
                local=host,
                consequence="prefill ranks would be told it",
                remedy="give this machine's address on the network that both sides share",
            )
        self._every = check_period("every", every)
        own = EndArguments.of(manifest, engine, windows, parts, aux, timeouts, limits, secret)
        check_word("interleave", interleave, get_args(Interleave))
        check_word("on_failed_pages", on_failed_pages, get_args(Policy))
        place = own.groups.placement
        self._place = Place.of(place)
        self._first_port = rank_port(port, place) if check_whole("port", port, 65_535) else 0
        self._directory = check_directory(directory)
        self._host = host
        self._timeouts = own.timeouts
        self._make_receiver = partial(
            Receiver,
            manifest,
            engine,
            windows=windows,
            interleave=interleave,
            on_failed_pages=on_failed_pages,
            parts=own.parts,
            aux=own.aux,
            timeouts=own.timeouts,
            limits=own.limits,
            secret=secret,
        )
        self._lock = threading.Lock()
        self._sizes: _Sizes | None = None
        self._receivers: dict[int, tuple[Receiver, Registration]] = {}
        self._problem: Exception | None = None
        self._closed = threading.Event()
        try:
            self._look(directory.members("prefill"))
        except BaseException:
            self._drop_all()  # receivers of other groups
            raise
        self._thread = threading.Thread(target=self._run, name=f"kv-transfer-decode-{self._place.rank}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> Exception | None:
        """Why nobody new is found, or not told of this rank; None when all is well."""
        with self._lock:
            problems = [registration.problem for _, registration in self._receivers.values()]
        return next((error for error in (self._problem, *problems) if error is not None), None)

    @property
    def receivers(self) -> dict[int, Receiver]:
        """By data-parallel group of the prefill side; whether its ranks are there, each receiver knows."""
        with self._lock:
            return {group: receiver for group, (receiver, _) in sorted(self._receivers.items())}

    def wait_ready(self, timeout: float | None = None, *, dp_rank: int = 0) -> Receiver:
        """Waits for all prefill ranks of a group.

        Args:
            timeout: Seconds; `Timeouts.handshake` by default.
            dp_rank: Data-parallel group of the prefill side.

        Returns:
            Its receiver.

        Raises:
            PeerRefused: A rank does not fit; with every difference. Call again to wait on for others.
            TransferTimeout: A rank is missing; the text says who is there, and what went wrong last.
            SessionStateError: It is closed.
        """
        seconds = self._timeouts.handshake if timeout is None else check_seconds("timeout", timeout)
        dp_rank = check_whole("dp_rank", dp_rank)
        end = time.monotonic() + seconds
        while True:
            if self._closed.is_set():
                raise SessionStateError("the decode end is closed")
            receiver = self.receivers.get(dp_rank)
            why = "no prefill rank of it is in the directory"
            try:
                if receiver is not None:
                    receiver.wait_ready(min(0.2, max(0.0, end - time.monotonic())))
                    return receiver
            except TransferTimeout as error:
                why = str(error)
            except PeerRefused:
                raise
            except TransferError as error:  # closed meanwhile, since the prefill side came back with other sizes
                why = str(error)
            if time.monotonic() >= end:
                raise TransferTimeout(
                    f"prefill group {dp_rank}: {why}",
                    seconds=seconds,
                    consequence="no room can be opened",
                    remedy=f"start the missing ranks with this directory; last problem: {self.problem or 'none'}",
                )
            time.sleep(0.02)

    def close(self) -> None:
        """Takes the rank out of the directory and closes all receivers; may be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._drop_all()

    def __enter__(self) -> DecodeEnd:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            try:
                self._look(self._directory.members("prefill"))
                self._problem = None
            except Exception as error:  # a port is taken, or a directory that is no `DirectoryClient`
                self._problem = error

    def _look(self, members: Sequence[Member]) -> None:
        if not members:
            return
        place = members[0].place
        if self._sizes is not None and place.sizes != self._sizes:
            self._drop_all()
        self._sizes = place.sizes
        for group in sorted({member.place.dp_rank for member in members}):
            if group not in self._receivers:
                self._receive(group, place.group_size)

    def _receive(self, group: int, ranks: int) -> None:
        ranks_here = self._place.group_size * self._place.dp_size
        port = self._first_port + group * ranks_here if self._first_port else 0
        bind = f"tcp://{self._host}:{port}"
        receiver = self._make_receiver(bind=bind, prefill_ranks=ranks, prefill_dp_rank=group)
        try:
            member = Member(side="decode", place=self._place, endpoint=receiver.endpoint, serves=group)
            registration = Registration(self._directory, member, every=self._every)
        except BaseException:
            receiver.close()
            raise
        with self._lock:
            self._receivers[group] = (receiver, registration)

    def _drop_all(self) -> None:
        with self._lock:
            pairs, self._receivers = list(self._receivers.values()), {}
        for receiver, registration in pairs:
            registration.close()
            receiver.close()
