"""The prefill side: `Sender`, one per prefill rank and receiver; its rooms are in `sender_session.py`.

Thin and thread-safe: what happens is decided in `SenderCore` and `SenderRoom`; sockets belong to the thread of
`Endpoint`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

import kv_planner
import zmq

from kv_transfer.arguments import check_endpoint, check_seconds, check_whole
from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts
from kv_transfer.end_arguments import EndArguments
from kv_transfer.engine import TransferEngine, forget_peer
from kv_transfer.errors import SessionStateError, TransferError, TransferTimeout
from kv_transfer.groups import Manifests
from kv_transfer.handshake import Rank
from kv_transfer.loop import POLL_SECONDS, Endpoint
from kv_transfer.regions import register_manifests
from kv_transfer.secret import seal_sender
from kv_transfer.sender_core import SenderCore
from kv_transfer.sender_session import SenderSession
from kv_transfer.states import SenderPhase
from kv_transfer.terms import ALL_PARTS

__all__ = ["Sender"]


class Sender(Endpoint):
    """Sends what one prefill rank owns to one receiver.

    Args:
        manifest: What this rank owns, one manifest or one for each group of pages; its memory is registered with the
            engine until `close`.
        engine: Moves the bytes; it stays the caller's and is not closed here.
        endpoint: The receiver's `endpoint`.
        windows: Tokens of the window of each group that has one; the receiver must say the same.
        parts: Parts of the model to send; the receiver must say the same. ["target"] lets a prefill side without a
            draft serve a decode side with one.
        aux: Auxiliary rows of a request (first token, log-probabilities, hidden states); as at the receiver.
        timeouts: Time limits.
        limits: Size limits.
        secret: As at the receiver.

    Raises:
        ArgumentError: The secret is too short, the endpoint is no ZeroMQ address, two auxiliary rows have one name, or
            the groups and windows do not fit together.
        ValueError: The parts are none.
        UnsupportedLayout: A component is organised neither in pages nor in request rows.
        EngineError: The engine refused the memory, or is none of this version.
    """

    def __init__(
        self,
        manifest: Manifests,
        engine: TransferEngine,
        *,
        endpoint: str,
        windows: Mapping[str, int] | None = None,
        parts: Iterable[kv_planner.Part] = ALL_PARTS,
        aux: Iterable[AuxField] = (),
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        secret: str | None = None,
    ) -> None:
        """Registers the memory; `connect` starts the conversation."""
        own = EndArguments.of(manifest, engine, windows, parts, aux, timeouts, limits, secret)
        check_endpoint(endpoint)
        self._parts, self._aux, self._secret = own.parts, own.aux, secret
        super().__init__(f"kv-transfer-sender-{Rank.at(own.groups.placement)}", own.timeouts, own.limits)
        try:
            regions = register_manifests(engine, [each.manifest for each in own.groups], own.parts)
        except BaseException:
            self._close_wakers()
            raise
        self._groups = own.groups
        self._engine = engine
        self._endpoint = endpoint
        self._core: SenderCore | None = None
        self._closed = False
        self._regions = regions

    @property
    def rank(self) -> Rank:
        """Who this is on the prefill side."""
        return Rank.at(self._groups.placement)

    @property
    def is_ready(self) -> bool:
        """Whether all prefill ranks are there now and the receiver agreed with the whole."""
        with self.lock:
            return self.is_connected and self._core is not None and self._core.phase is SenderPhase.READY

    @property
    def is_connected(self) -> bool:
        """Whether a conversation goes on; False before `connect`, and after the loss of the receiver."""
        with self.lock:
            return self._core is not None and not self._core.is_over and self._crash is None

    @property
    def error(self) -> TransferError | None:
        """Why the last conversation ended; None while it goes on."""
        with self.lock:
            return self._crash or (self._core.error if self._core is not None else None)

    @property
    def offered(self) -> frozenset[int]:
        """Rooms that `open` answers at once: the receiver offered pages for them, or gave them up; empty when lost."""
        with self.lock:
            return self._core.offered if self._core is not None and self.is_connected else frozenset()

    @property
    def sends_nothing(self) -> bool:
        """Whether the receiver needs nothing of this rank; its sessions take no offer then. Known once ready."""
        with self.lock:
            return self._core is not None and self._core.sends_nothing

    @property
    def routes(self) -> Mapping[str, kv_planner.Route]:
        """What goes from this rank to the receiver, by group; known after `connect`."""
        with self.lock:
            return dict(self._alive().routes)

    def connect(self, timeout: float | None = None) -> None:
        """Shakes hands: versions, engines, manifests and layouts agree on both sides when it returns.

        May be called again after the receiver was lost: it starts anew, as a new peer.

        Args:
            timeout: Seconds; `Timeouts.handshake` by default.

        Raises:
            PeerRefused: One side refused the other; with every difference.
            PeerLost: The connection closed during the handshake.
            TransferTimeout: No answer in time.
        """
        seconds = self._timeouts.handshake if timeout is None else check_seconds("timeout", timeout)
        with self.lock:
            if self._closed:
                raise SessionStateError("the sender is closed")
            if self._core is not None and not self._core.is_over:
                raise SessionStateError("the sender is connected", local=self._core.phase.value)
        self._stop()
        now = time.monotonic()
        core = SenderCore(
            self._groups, self._engine, self._timeouts, self._limits, now, self._parts, self._aux, self.wake
        )
        try:
            with self.lock:
                self._launch(zmq.DEALER, self._attach)
                self._core = core
                self._await_phase(core, (SenderPhase.AGREED, SenderPhase.READY), seconds, "the receiver did not answer")
        except zmq.ZMQError as error:
            raise ValueError(f"endpoint: {self._endpoint!r} cannot be connected to: {error}") from error
        except TransferTimeout:
            with self.lock:
                core.close("nobody answered")
            self._stop()
            raise

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until all prefill ranks are there and the receiver agreed with the whole.

        Args:
            timeout: Seconds; `Timeouts.handshake` by default.

        Raises:
            PeerRefused: The whole does not fit.
            PeerLost: The receiver is gone.
            TransferTimeout: A rank did not come in time.
        """
        seconds = self._timeouts.handshake if timeout is None else timeout
        with self.lock:
            self._await_phase(self._alive(), (SenderPhase.READY,), seconds, "not all prefill ranks were there")

    def open(self, room: int, *, timeout: float | None = None) -> SenderSession:
        """Waits for the receiver's pages of a room.

        Args:
            room: As at `Receiver.open`; 0 is a room like any other.
            timeout: Seconds; `Timeouts.offer` by default.

        Raises:
            TransferTimeout: No offer in time.
            TransferAborted: The receiver gave the room up before.
            PeerRefused, PeerLost: The conversation has ended.
            SessionStateError: The room is open here.
            ArgumentError: No number of a room, or no time.
        """
        room = check_whole("room", room, 2**63 - 1)
        seconds = self._timeouts.offer if timeout is None else timeout
        with self.lock:
            core = self._alive()
            opened = self.wait_for(lambda: core.open_room(room, time.monotonic()), seconds)
            if opened is None:
                raise TransferTimeout(
                    f"room {room}: the receiver offered no pages",
                    seconds=seconds,
                    consequence="nothing was sent",
                    remedy="open the room at the receiver first, with the same number",
                )
        return SenderSession(self, opened)

    def reject(self, room: int, reason: str) -> None:
        """Aborts a room that is not open here, also when its offer is still to come.

        Raises:
            ArgumentError: `room` is no number of its kind.
            SessionStateError: The room is open; abort its session.
            PeerRefused, PeerLost: The conversation has ended.
        """
        room = check_whole("room", room, 2**63 - 1)
        with self.lock:
            self._alive().reject(room, str(reason))
            self.wake()

    def close(self) -> None:
        """Aborts open rooms, waits until the engine let go of them, says good-bye, and unregisters the memory.

        Takes as long as batches that run need, at most the engine's own time-out.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if self._core is not None:
                self._core.close("closed by its owner")
        self._stop()
        self._close_wakers()
        for address in self._regions:
            self._engine.unregister(address)

    def __enter__(self) -> Sender:
        """Itself; `connect` is the caller's."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _attach(self, control: zmq.Socket[bytes]) -> None:
        seal_sender(control, self._secret)
        control.connect(self._endpoint)

    def _alive(self) -> SenderCore:
        if self._core is None:
            raise SessionStateError("the sender is not connected", remedy="call connect() first")
        self._core.require_alive()
        return self._core

    def _await_phase(self, core: SenderCore, phases: tuple[SenderPhase, ...], seconds: float, what: str) -> None:
        def reached() -> bool | None:
            core.require_alive()
            return True if core.phase in phases else None

        if self.wait_for(reached, seconds) is None:
            raise TransferTimeout(
                f"{self._endpoint}: {what}",
                seconds=seconds,
                consequence="nothing can be sent",
                remedy="see that all ranks are started, and that all ends have the same secret, or none",
            )

    def _watches_connection(self) -> bool:
        return True

    def _receive(self, parts: list[bytes], now: float) -> None:
        if self._core is not None:
            self._core.receive(parts[-1] if len(parts) == 1 else b"", now)

    def _disconnected(self, why: str) -> None:
        if self._core is not None:
            self._core.disconnected(why)

    def _advance(self, now: float) -> float:
        if self._core is None:
            return math.inf
        self._core.tick(now)
        self._core.step(now)
        capabilities = self._engine.capabilities
        if self._core.moves_bytes and not capabilities.settles_itself:
            return 0.0 if capabilities.progress_on_poll else POLL_SECONDS
        return POLL_SECONDS if self._core.must_ask else math.inf

    def _flush(self, control: zmq.Socket[bytes], now: float) -> None:
        outbox = self._core.outbox if self._core is not None else None
        while outbox:
            try:
                control.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            outbox.popleft()

    def _is_drained(self, late: bool) -> bool:
        # Never earlier: a closed connection tells the receiver that this process writes no more.
        return self._core is None or not self._core.rooms

    def _last_words(self) -> None:
        if self._core is not None:
            self._core.say_bye()

    def _let_go(self, now: float) -> bool:
        return self._core is None or self._core.let_go(now)

    def _ended(self) -> None:
        if self._core is not None:
            forget_peer(self._engine, self._core.peer_session)

    def _crashed(self, error: TransferError) -> None:
        if self._core is not None:
            self._core.crashed(error)
