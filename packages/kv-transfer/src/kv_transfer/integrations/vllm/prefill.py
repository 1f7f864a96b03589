"""The prefill worker's half of the connector: pushes blocks to whichever decode group asks for the room.

A thread of its own opens rooms as decode ranks offer pages, and hands chunks over as they come, so that transfers go on
between the engine's steps. Blocks are given back to the engine when nobody reads them any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import SessionStateError, TransferError
from kv_transfer.integrations.vllm.caches import PageGroup
from kv_transfer.integrations.vllm.words import Chunk, StepWords
from kv_transfer.prefill_end import PrefillEnd
from kv_transfer.ready import Ready
from kv_transfer.sender import Sender
from kv_transfer.sender_session import SenderSession

__all__ = ["PrefillWorker"]

_LOG = logging.getLogger(__name__)
_PAUSE = 0.001
_IDLE = 0.5


@dataclasses.dataclass(eq=False)
class _Piece:
    """Pages of groups, each from its index within the prompt on, and rows of states."""

    pages: Mapping[str, npt.NDArray[np.int64]]
    firsts: Mapping[str, int]
    rows: Mapping[str, int]
    ready: Ready | None


@dataclasses.dataclass(eq=False)
class _Reader:
    """One decode rank that reads a room."""

    session: SenderSession
    handed: int = 0
    finished: bool = False


@dataclasses.dataclass(eq=False)
class _Push:
    """One request on its way."""

    room: int
    deadline: float
    pieces: list[_Piece] = dataclasses.field(default_factory=list)
    last: bool = False
    group: int | None = None
    readers: dict[Sender, _Reader] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    problem: str = ""
    over: bool = False

    @property
    def progress(self) -> tuple[int, int, bool]:
        return len(self.readers), sum(reader.handed for reader in self.readers.values()), self.over


class PrefillWorker:
    """For one rank.

    Args:
        end: Finds the decode ranks.
        groups: How blocks become pages.
        offer: Seconds that a request waits for a decode group after its last chunk.
    """

    def __init__(self, end: PrefillEnd, groups: Sequence[PageGroup], offer: float) -> None:
        """Starts the thread."""
        self._end = end
        self._groups = tuple(groups)
        self._offer = offer
        self._pushes: dict[str, _Push] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._has_news = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer-vllm-prefill", daemon=True)
        self._thread.start()

    def take(self, words: StepWords, ready: Ready | None) -> None:
        """Takes the chunks of a step before it is computed; `ready` says when their layers are."""
        with self._changed:
            self._require_running()
            for name, reason in words.aborts:
                push = self._pushes.get(name)
                if push is not None:
                    self._give_up(push, reason)
            for chunk in words.chunks:
                self._add(chunk, ready)
            self._has_news = True
            self._changed.notify_all()
        for room, _, reason in words.rejects:
            self._reject(room, reason, self._end.senders)

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests whose blocks the engine takes away now.

        What is still read of them is of no room any more: it reaches pages that the decode side will not use.
        """
        with self._changed:
            for name in names:
                push = self._pushes.pop(name, None)
                if push is not None:
                    self._give_up(push, "the request was preempted at prefill")

    def finished(self, ended: Iterable[str]) -> set[str]:
        """Requests whose blocks may be freed: the engine has ended them, and nobody reads them any more."""
        with self._changed:
            self._require_running()
            self._ended.update(name for name in ended if name in self._pushes)
            done = {name for name in self._ended if self._pushes[name].over}
            for name in done:
                del self._pushes[name]
            self._ended -= done
            return done

    def close(self) -> None:
        """Ends the thread; rooms end with the senders."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _add(self, chunk: Chunk, ready: Ready | None) -> None:
        push = self._pushes.get(chunk.request)
        if push is None:
            push = self._pushes[chunk.request] = _Push(chunk.room, float("inf"))
        pages, firsts, rows = dict[str, npt.NDArray[np.int64]](), dict[str, int](), dict[str, int]()
        for group, own in zip(self._groups, chunk.stretches, strict=True):
            if group.kind == "states":
                rows |= dict.fromkeys(group.names, own.blocks[0]) if own.blocks else {}
                continue
            (name,) = group.names
            firsts[name] = own.first * group.kernel_blocks
            pages[name] = group.pages(own.blocks)
            if chunk.last:
                pages[name] = pages[name][: group.page_count(chunk.tokens) - firsts[name]]
        if chunk.last:
            push.last, push.deadline = True, time.monotonic() + self._offer
        push.pieces.append(_Piece(pages, firsts, rows, ready))

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Whatever it was, blocks would be held for ever: the engine's next call says so.
            with self._changed:
                self._crash = error
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                active = [push for push in self._pushes.values() if not push.over]
            moved = [self._advance(push) for push in active]
            if not any(moved):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_news, _PAUSE if active else _IDLE)
                    self._has_news = False

    def _require_running(self) -> None:
        if self._crash is not None:
            raise SessionStateError(
                f"the thread that pushes blocks ended by an error: {self._crash!r}",
                consequence="nothing is sent any more, and blocks would be held for ever",
                remedy="start the instance again",
            ) from self._crash

    def _advance(self, push: _Push) -> bool:
        """One look at a request; whether something changed."""
        with self._changed:
            before = push.progress
            try:
                if not push.problem:
                    self._open(push)
                    self._hand_over(push)
                self._look(push)
            except (TransferError, ValueError) as error:  # ValueError: pages that do not fit the offer
                self._give_up(push, str(error))
            return push.progress != before

    def _open(self, push: _Push) -> None:
        groups = self._end.groups if push.group is None else {push.group: self._end.group(push.group)}
        for group, senders in groups.items():
            for sender in senders:
                if sender not in push.readers and not sender.sends_nothing and push.room in sender.offered:
                    push.readers[sender] = _Reader(sender.open(push.room, timeout=0.0))
                    push.group = group
        if push.group is None and push.last and all(each.sends_nothing for own in groups.values() for each in own):
            push.over = bool(groups)  # nobody needs anything of this rank
        push.is_open = push.is_open or self._all_asked(push)
        if not push.is_open and time.monotonic() > push.deadline:
            self._give_up(push, f"no decode rank asked for the room within {self._offer:g} s")

    def _all_asked(self, push: _Push) -> bool:
        """Whether every rank of the group that needs something has asked."""
        senders = self._end.group(push.group) if push.group is not None else ()
        return bool(senders) and all(own in push.readers or own.sends_nothing for own in senders)

    def _hand_over(self, push: _Push) -> None:
        for reader in push.readers.values():
            while reader.handed < len(push.pieces):
                _send(reader.session, push.pieces[reader.handed])
                reader.handed += 1
            if push.last and not reader.finished:
                reader.finished = True
                reader.session.finish(wait=False)

    def _look(self, push: _Push) -> None:
        for reader in push.readers.values():
            if reader.session.error is not None and not push.problem:
                self._give_up(push, str(reader.session.error))
        released = all(reader.session.pages_released for reader in push.readers.values())
        complete = push.last and push.is_open and all(reader.finished for reader in push.readers.values())
        if released and (push.problem or complete):
            push.over = True

    def _give_up(self, push: _Push, reason: str) -> None:
        if push.problem or push.over:
            return
        push.problem = reason
        _LOG.warning("room %d is given up: %s", push.room, reason)
        for reader in push.readers.values():
            reader.session.abort(reason)
        if push.group is None:
            others: Iterable[Sender] = self._end.senders
        else:
            others = (own for own in self._end.group(push.group) if own not in push.readers)
        self._reject(push.room, reason, others)
        push.over = all(reader.session.pages_released for reader in push.readers.values())

    def _reject(self, room: int, reason: str, senders: Iterable[Sender]) -> None:
        for sender in senders:
            with contextlib.suppress(TransferError):  # a decode rank that is lost need not be told
                if not sender.sends_nothing:
                    sender.reject(room, reason)


def _send(session: SenderSession, piece: _Piece) -> None:
    """Hands over what the reader has not, and what its window holds."""
    pages, starts, spans = dict[str, npt.NDArray[np.int64]](), dict[str, int](), session.spans
    for name, own in piece.pages.items():
        skipped = min(max(0, spans[name].first - piece.firsts[name]), len(own))
        if skipped < len(own):
            pages[name], starts[name] = own[skipped:], piece.firsts[name] + skipped
    if pages:
        session.send(pages, start=starts, ready=piece.ready)
    if piece.rows:
        session.send_states(piece.rows, ready=piece.ready)
