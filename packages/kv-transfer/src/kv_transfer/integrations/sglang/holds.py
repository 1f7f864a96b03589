"""Owns when decode may use the pages of an ended room again: each prefill rank has let go of them, or is dead.

SGLang keeps the pages of a failed request until every rank acknowledges its abort, or a time-out. `plugin` takes the
time-out away, and this finds out who cannot answer any more. A thread asks the ranks that are silent: nobody listens at
the address of a process that is gone, while a stopped one still has its socket. A rank that lives and says nothing
keeps the pages, as in this package's sessions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import zmq

from kv_transfer.errors import ArgumentError
from kv_transfer.gone import is_gone
from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.drain import FAILED, SUCCESS, Drains
from kv_transfer.integrations.sglang.rank import RELEASE, endpoint_of

__all__ = ["HOLD", "HOLD_SECONDS", "Holds"]

HOLD: Final = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
HOLD_SECONDS: Final = f"{HOLD}_TIMEOUT"
_PASS = 0.25
_FIRST = 1.0
_LONGEST = 5.0
_TRUSTED = 2.0  # how long one look at an address serves all rooms
_SAID = 30.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Writer:
    """A prefill rank that was told the pages of a room."""

    number: int
    info: dict[str, Any]
    dead_at: float | None = None

    @property
    def address(self) -> tuple[str, int]:
        return str(self.info["rank_ip"]), int(self.info["rank_port"])

    def __str__(self) -> str:
        return f"prefill rank {self.number} at {self.address[0]}:{self.address[1]}"


class _Room:
    """A room whose pages prefill ranks know. It is held from its end on."""

    def __init__(self, receiver: Any) -> None:
        self.receiver = receiver
        self.writers = [_Writer(number, info) for number, info in _ranks(receiver)]
        self.said = False
        self._restart(held=False)

    def hold(self) -> None:
        self._restart(held=True)

    def _restart(self, *, held: bool) -> None:
        self.held, self.since = held, time.monotonic()
        self._pause = _FIRST
        self._due = self.since + _FIRST

    def is_due(self, now: float) -> bool:
        """Whether to ask; the pauses grow."""
        if now < self._due:
            return False
        self._pause = min(2 * self._pause, _LONGEST)
        self._due = now + self._pause
        return True


class Holds(Drains):
    """The manager's part that says when pages are free."""

    def _begin(self) -> None:
        super()._begin()
        self._rooms: dict[int, _Room] = {}
        self._lives: dict[tuple[str, int], float] = {}
        self._met: dict[str, set[tuple[str, int]]] = {}
        self._watcher: threading.Thread | None = None
        self._watcher_lock = threading.Lock()

    def _check_holding(self) -> None:
        """See that SGLang holds pages.

        Raises:
            ArgumentError: It is told not to.
        """
        if self._is_prefill():
            self.enable_deferred_decode_kv_release = True  # decode needs the answers, whatever is set here
            return
        envs = engine_module("sglang.srt.environ", RELEASE).envs
        if not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get():
            raise ArgumentError(
                f"{HOLD} is {os.environ.get(HOLD)!r}",
                consequence="pages would be used again while prefill writes them", remedy="unset it",
            )  # fmt: skip
        seconds = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        if math.isfinite(seconds):
            logger.warning(
                "%s is %g: after so many seconds pages are used again though a stopped prefill rank may still write "
                "them; set it to inf, as the plugin does", HOLD_SECONDS, seconds,
            )  # fmt: skip

    def watch(self, receiver: Any) -> None:
        """A receiver is about to tell prefill ranks its pages."""
        room = self._rooms[receiver.bootstrap_room] = _Room(receiver)
        self._met.setdefault(receiver.bootstrap_addr, set()).update(one.address for one in room.writers)
        with self._watcher_lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._look_after, name="kv-transfer-sglang-holds", daemon=True)
                self._watcher.start()
                self._worker_threads.append(self._watcher)  # which SGLang's teardown waits for

    def hold(self, receiver: Any) -> None:
        """A receiver has told prefill ranks that its room is over."""
        room = self._rooms.get(receiver.bootstrap_room)
        if room is None or room.receiver is not receiver:
            self.watch(receiver)
        self._rooms[receiver.bootstrap_room].hold()

    def unwatch(self, receiver: Any) -> None:
        """A receiver is done with its room; a held one is kept."""
        room = self._rooms.get(receiver.bootstrap_room)
        if room is not None and room.receiver is receiver and not room.held:
            del self._rooms[receiver.bootstrap_room]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """SGLang's question: every rank that could still write has acknowledged, or has been dead for long enough."""
        if super().is_abort_release_safe(bootstrap_room, required_acks):
            return True
        room = self._rooms.get(bootstrap_room)
        if room is None:
            return False
        answered = self._answered(bootstrap_room, room)
        since = time.monotonic() - self.dead_writer_grace
        return answered <= {one.number for one in room.writers} and all(
            one.number in answered or (one.dead_at is not None and one.dead_at <= since) for one in room.writers
        )

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang's call when it frees the pages."""
        super().clear_deferred_abort_state(bootstrap_room)
        room = self._rooms.pop(bootstrap_room, None)
        if room is not None:
            _disconnect(one.address for one in room.writers if one.dead_at is not None)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """SGLang's call when an instance answers no heartbeat; it knows no sockets of ranks that a room failed with."""
        super()._handle_node_failure(failed_bootstrap_addr)
        _disconnect(self._met.pop(failed_bootstrap_addr, ()))

    def _answered(self, number: int, room: _Room) -> set[int]:
        """Ranks that are done with the room: by their acknowledgement, or before its end by their success."""
        if room.held:
            state = self._deferred_abort_ack_tracker.get(number)
            return set() if state is None else set(state.prefill_ranks)
        return set(self.prefill_response_tracker.get(number, ()))

    def _look_after(self) -> None:
        while not self._heartbeat_shutdown.wait(_PASS):
            try:
                self._ask(time.monotonic())
            except Exception:  # whatever it was, the next pass asks again
                logger.exception("rooms of silent prefill ranks could not be looked after")

    def _ask(self, now: float) -> None:
        self._lives = {address: until for address, until in self._lives.items() if until > now}
        gone: set[tuple[str, int]] = set()
        for number, room in list(self._rooms.items()):
            if not room.is_due(now):
                continue
            answered = self._answered(number, room)
            silent = [one for one in room.writers if one.number not in answered and one.dead_at is None]
            for writer in silent:
                if writer.address not in gone and writer.address not in self._lives:
                    if is_gone(writer.address):
                        gone.add(writer.address)
                    else:
                        self._lives[writer.address] = now + _TRUSTED
                if writer.address in gone:
                    writer.dead_at = now
                    self._lose(number, room, writer)
                elif room.held:
                    self._ask_again(number, room, writer)
            if room.held and silent and not room.said and now - room.since > _SAID:
                room.said = True
                logger.warning(
                    "room %d ended %.0f s ago, and its pages stay out of use until each of these answers or ends: %s",
                    number, now - room.since, ", ".join(map(str, silent)),
                )  # fmt: skip

    def _lose(self, number: int, room: _Room, writer: _Writer) -> None:
        logger.warning("%s is gone, in the middle of room %d", writer, number)
        if room.held or writer.info.get("is_dummy") or number not in self.request_status:
            return
        if self.check_status(number) not in (FAILED, SUCCESS):
            self.record_failure(number, f"{writer} is gone: nobody listens there any more")
            self.update_status(number, FAILED)

    def _ask_again(self, number: int, room: _Room, writer: _Writer) -> None:
        """The abort once more: the first may be lost, or have come before the rank had let go."""
        words = engine_module("sglang.srt.disaggregation.common.conn", RELEASE).AbortNotification(
            room=number, decode_ip=self.local_ip, decode_port=self.rank_port,
            generation=room.receiver._abort_generation,
        )  # fmt: skip
        with contextlib.suppress(zmq.ZMQError):  # the next time, then
            port, lock = room.receiver._connect_to_bootstrap_server(writer.info)
            with lock:
                port.send_multipart(words.to_zmq(), zmq.NOBLOCK)


def _disconnect(ranks: Iterable[tuple[str, int]]) -> None:
    """Closes decode's sockets to prefill ranks; to one that lives, the next message opens one."""
    links = engine_module("sglang.srt.disaggregation.common.conn", RELEASE).CommonKVReceiver
    for address in ranks:
        links.disconnect_endpoint(endpoint_of(address))


def _ranks(receiver: Any) -> list[tuple[int, dict[str, Any]]]:
    """Prefill ranks by the numbers that they answer with, in the order in which SGLang's receivers look them up.

    Where that is another one, numbers that nobody answers with: then only the count of answers says something.
    """
    there = receiver.prefill_info
    numbers = [
        (tp * there.pp_size + pp) * there.attn_cp_size + cp
        for cp in receiver.target_cp_ranks
        for tp in receiver.target_tp_ranks
        for pp in reversed(receiver.target_pp_ranks)
    ]
    infos = receiver.bootstrap_infos
    if len(numbers) != len(infos):
        numbers = [-1 - place for place in range(len(infos))]
    return list(zip(numbers, infos, strict=True))
