"""One prefill rank and all decode ranks that read a request: `SenderGroup`, and its rooms as one session.

The source pages are free when every reader has them or none can read any more. What one conversation does is decided in
`Sender`; this module adds nothing to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import kv_planner
import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from kv_transfer.arguments import check_items, check_kind, check_seconds, check_wait, check_whole
from kv_transfer.errors import ArgumentError, TransferError, TransferTimeout
from kv_transfer.ready import Ready
from kv_transfer.room_planner import PageLists, page_array
from kv_transfer.sender import Sender
from kv_transfer.sender_session import SenderSession

__all__ = ["GroupSession", "SenderGroup"]

_Result = TypeVar("_Result")


class SenderGroup:
    """The senders of one prefill rank to the decode ranks that share a request.

    Args:
        senders: One a decode rank, connected; they stay the caller's.

    Raises:
        ArgumentError: There are none, they are of several prefill ranks, or one is no sender.
    """

    def __init__(self, senders: Sequence[Sender]) -> None:
        """Takes the senders."""
        self._senders = tuple(check_kind("senders", sender, Sender) for sender in check_items("senders", senders))
        ranks = {sender.rank for sender in self._senders}
        if len(ranks) != 1:
            raise ArgumentError(
                f"senders: expected those of one prefill rank, got {sorted(map(str, ranks)) or 'none'}",
                local=", ".join(sorted(map(str, ranks))),
                consequence="their pages are of different pools",
                remedy="make one group a rank",
            )

    def open(self, room: int, *, timeout: float | None = None) -> GroupSession:
        """Waits for the pages of every decode rank; those that need nothing of this rank are not waited for.

        Args:
            room: As at `Sender.open`.
            timeout: Seconds over all of them; `Timeouts.offer` for each by default.

        Raises:
            TransferError: As `Sender.open`, for any of them; what was open already is aborted.
        """
        end = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        opened: list[SenderSession] = []
        try:
            for sender in self._senders:
                left = None if end is None else max(0.0, end - time.monotonic())
                opened.append(sender.open(room, timeout=left))
        except BaseException as error:
            for session in opened:
                session.abort(f"another decode rank cannot be served: {error}")
            raise
        return GroupSession(opened)


class GroupSession:
    """One room at one prefill rank, towards all its readers. Made by `SenderGroup.open`."""

    def __init__(self, sessions: Sequence[SenderSession]) -> None:
        """For `SenderGroup.open`."""
        self.sessions = tuple(sessions)

    @property
    def first_page(self) -> int:
        """Index within the request of the first page that any reader needs."""
        return min((own.first_page for own in self.sessions if own.pages), default=0)

    @property
    def error(self) -> TransferError | None:
        """Why the room ended badly for a reader, if it did; the first reader's."""
        return next((own.error for own in self.sessions if own.error is not None), None)

    @property
    def pages_released(self) -> bool:
        """Whether no engine reads the source pages for any reader any more, so that they may be reused."""
        return all(own.pages_released for own in self.sessions)

    def send(
        self,
        source_pages: PageLists,
        *,
        start: int | Mapping[str, int],
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> None:
        """As `SenderSession.send`, to every reader: pages that a reader has by a prefix hit are not sent to it.

        Either all readers are sent the chunk, or an error is raised and none is. A reader whose room has ended ends it
        for all of them.
        """
        ids = None if layer_ids is None else check_items("layer_ids", layer_ids)
        names = None if parts is None else check_items("parts", parts)
        planned = []
        for own in self.sessions:
            pages, begin = _behind_prefix(own, source_pages, start)
            planned.append(self._or_abort(own.plan, pages, start=begin, layer_ids=ids, parts=names, ready=ready))
        for own, chunks in zip(self.sessions, planned, strict=True):
            self._or_abort(own.take, chunks)

    def send_states(self, source_row: int | Mapping[str, int], *, ready: Ready | None = None) -> None:
        """As `SenderSession.send_states`, to every reader."""
        for own in self.sessions:
            self._or_abort(own.send_states, source_row, ready=ready)

    def finish(
        self,
        metadata: Mapping[str, JsonValue] | None = None,
        *,
        rows: Mapping[str, object] | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """As `SenderSession.finish`, to every reader; where it is refused, all rooms stay open."""
        check_wait("timeout", timeout)
        check_kind("wait", wait, bool)
        for own in self.sessions:
            self._or_abort(own.check_finish, metadata, rows=rows)
        for own in self.sessions:
            self._or_abort(own.finish, metadata, rows=rows, wait=False)
        if wait:
            self.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end at every reader; the first bad end aborts the others.

        Raises:
            TransferTimeout: Not within `timeout`; the room goes on.
            TransferError: A reader's room ended badly.
        """
        end = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        for own in self.sessions:
            try:
                own.wait(None if end is None else max(0.0, end - time.monotonic()))
            except TransferTimeout:
                if own.error is not None:
                    self.abort(str(own.error))
                raise
            except TransferError as error:
                self.abort(str(error))
                raise

    def abort(self, reason: str) -> None:
        """Gives the room up for every reader; does nothing where it has ended."""
        for own in self.sessions:
            own.abort(reason)

    def _or_abort(self, call: Callable[..., _Result], *arguments: object, **options: object) -> _Result:
        try:
            return call(*arguments, **options)
        except TransferError as error:
            if self.error is not None:
                self.abort(str(error))
            raise


def _behind_prefix(
    session: SenderSession, given: PageLists, start: int | Mapping[str, int]
) -> tuple[PageLists, int | Mapping[str, int]]:
    """Without the pages that a reader has by a prefix hit."""
    lists: dict[str, npt.NDArray[np.generic]] = {}
    begins: dict[str, int] = {}
    for name, pages in (given if isinstance(given, Mapping) else dict.fromkeys(session.spans, given)).items():
        lists[name], span = page_array("source_pages", pages), session.spans.get(name)
        begin = start.get(name) if isinstance(start, Mapping) else start
        if begin is None:
            continue
        begin = check_whole("start", begin, 2**63 - 1)
        skipped = max(0, span.first - begin) if span is not None else 0
        lists[name] = lists[name][skipped:]  # none are left of a chunk that lies before the reader's first page
        begins[name] = begin + skipped
    if isinstance(given, Mapping):
        return lists, begins
    return next(zip(lists.values(), begins.values(), strict=True)) if len(begins) == 1 else (given, start)
