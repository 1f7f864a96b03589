"""Owns what a prefill rank still writes for a room, and so when it may tell decode that it has let go of the pages.

SGLang counts the chunks that its worker took. An engine may write on behind a time-out, and its last bytes may land
behind an error; both are counted here, where SGLang gives such a room no acknowledgement at all. After an abort no
further batch of the room starts.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kv_transfer.config import Timeouts
from kv_transfer.engine import Blocks, TransferEngine, TransferHandle
from kv_transfer.errors import EngineError, TransferFailed
from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.engine import SessionEngine, StillWriting
from kv_transfer.integrations.sglang.rank import RELEASE, Rank

__all__ = ["FAILED", "SUCCESS", "Drains"]

FAILED: Final = 0
SUCCESS: Final = 4
"""Of SGLang's `KVPoll`."""
_MOST_FAILED = 4096
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Unsettled:
    """A failed write of a room (None: of a room that is not known): until when, and by which batch, bytes may land."""

    room: int | None
    until: float
    handle: TransferHandle | None

    def is_over(self, engine: TransferEngine, now: float) -> bool:
        if now < self.until:
            return False
        try:
            return self.handle is None or engine.poll(self.handle).is_terminal
        except EngineError:
            return True  # the engine let go of it


class Drains(Rank):
    """The manager's part that writes, and acknowledges aborts when it has let go.

    Attributes:
        dead_writer_grace: Seconds after a failed write, or a writer's death, in which bytes may still land.
    """

    engine: SessionEngine
    dead_writer_grace: float = Timeouts().dead_writer_grace
    kv_status_msg_carries_reason = True
    """SGLang reads the reason where it is sent; its own Mooncake manager leaves it out."""

    def _begin(self) -> None:
        super()._begin()
        self._worker = threading.local()
        self._drain_lock = threading.Lock()
        self._writing: collections.Counter[int | None] = collections.Counter()
        self._unsettled: list[_Unsettled] = []
        self._told: set[int] = set()
        self._failed_rooms: collections.OrderedDict[int, tuple[float, str | None]] = collections.OrderedDict()

    def poison_deferred_ack_room(self, room: int) -> None:
        """Nothing: SGLang's mark for a room whose end it cannot prove; here the end is waited for."""

    def conclude_transfer(
        self, *, bootstrap_room: int, status: Any, targets: Any = None, failure_reason: str | None = None
    ) -> Any:
        """SGLang's call; remembers that decode was told."""
        self._told.add(bootstrap_room)
        said = super().conclude_transfer(
            bootstrap_room=bootstrap_room, status=status, targets=targets, failure_reason=failure_reason
        )
        if said is None:
            self._told.discard(bootstrap_room)
        return said

    def leave(self, room: int) -> None:
        """A sender is done with its room: a failure that decode was not told yet, it is told now.

        SGLang's senders end by an abort or a time-out without a word, and decode waits for its own time-out.
        """
        told = room in self._told
        self._told.discard(room)
        if told or not self._is_failed(room):
            return
        with self.failure_lock:
            reason = self.failure_records.get(room)
        self._failed_rooms[room] = (time.monotonic() + self.bootstrap_timeout, reason)
        if len(self._failed_rooms) > _MOST_FAILED:
            self._failed_rooms.popitem(last=False)
        self.send_kv_status_message(
            targets=self._room_notify_targets(room), bootstrap_room=room, status=FAILED, failure_reason=reason
        )

    def answer_late(self, info: Any) -> bool:
        """Whether decode offers pages to a room whose sender has failed and left; then it is told so.

        Args:
            info: SGLang's `TransferInfo`.
        """
        until, reason = self._failed_rooms.get(info.room, (0.0, None))
        if info.room in self.request_status or time.monotonic() > until:
            return False
        if not info.is_dummy:
            self.send_kv_status_message(
                targets=[(info.endpoint, info.dst_port)], bootstrap_room=info.room, status=FAILED, failure_reason=reason
            )
        return True

    def _write(self, session: str, batches: Iterable[Blocks]) -> int:
        room = self._room()
        with self._drain_lock:
            self._writing[room] += 1
        try:
            self.engine.move(session, batches if room is None else self._wanted(room, batches))
        except (EngineError, TransferFailed) as error:
            logger.error("transfer to %s failed: %s", session[:80], error)
            handle = error.handle if isinstance(error, StillWriting) else None
            with self._drain_lock:
                self._unsettled.append(_Unsettled(room, time.monotonic() + self.dead_writer_grace, handle))
            if room is not None:
                self.record_failure(room, str(error))
            return -1
        finally:
            with self._drain_lock:
                self._writing[room] -= 1
                if not self._writing[room]:
                    del self._writing[room]
        return 0

    def _room(self) -> int | None:
        """The room that this thread serves, if it is a worker."""
        watched = getattr(self._worker, "queue", None)
        return None if watched is None or watched.chunk is None else int(watched.chunk.room)

    def _wanted(self, room: int, batches: Iterable[Blocks]) -> Iterator[Blocks]:
        """Batches until the room is given up; that is no failure of the peer's, whose other rooms go on."""
        for batch in batches:
            if room not in self.request_status or self._is_failed(room):
                return
            yield batch

    def _is_failed(self, room: int) -> bool:
        return room in self.request_status and self.check_status(room) == FAILED

    def _is_drained(self, room: int) -> bool:
        now = time.monotonic()
        with self._drain_lock:
            self._unsettled = [one for one in self._unsettled if not one.is_over(self.engine.engine, now)]
            left = {one.room for one in self._unsettled} | set(self._writing)
        return not left & {room, None}

    def _maybe_ack_drained_abort(self, room: int) -> None:
        """Acknowledge an abort if the room is drained; decode asks again where it is not."""
        if self._is_drained(room):
            super()._maybe_ack_drained_abort(room)

    def _handle_deferred_abort_notification(self, notification: Any, room_active: bool) -> None:
        """SGLang's call; a room of which only some decode ranks have come is given up too.

        SGLang acknowledges such an abort, and writes when the others have come.
        """
        room = notification.room
        if room_active:
            self._told.add(room)
        elif room not in self.request_status and self.transfer_infos.get(room):
            words = engine_module("sglang.srt.disaggregation.base.conn", RELEASE)
            self.update_status(room, words.KVPoll.Bootstrapping)
            room_active = True
        if room_active:
            with self.failure_lock:
                self.failure_records.setdefault(room, "decode gave the request up")
        super()._handle_deferred_abort_notification(notification, room_active)
