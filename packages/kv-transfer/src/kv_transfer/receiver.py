"""The decode side: `Receiver`, one per decode rank; its rooms are in `receiver_session.py`.

Thin and thread-safe: what happens is decided in `ReceiverCore` and `ReceiverRoom`; sockets belong to the thread of
`Endpoint`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import get_args

import kv_planner
import zmq

from kv_transfer.arguments import check_listening, check_seconds, check_whole, check_word
from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts
from kv_transfer.end_arguments import EndArguments
from kv_transfer.engine import TransferEngine
from kv_transfer.errors import (
    ArgumentError,
    PeerRefused,
    SessionStateError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from kv_transfer.groups import Manifests
from kv_transfer.handshake import Rank
from kv_transfer.loop import Endpoint
from kv_transfer.messages import Policy
from kv_transfer.offers import Rows, make_offers, request_spans
from kv_transfer.receiver_core import ReceiverCore
from kv_transfer.receiver_room import ReceiverRoom
from kv_transfer.receiver_session import ReceiverSession
from kv_transfer.regions import register_manifests
from kv_transfer.room_planner import PageLists
from kv_transfer.secret import seal_receiver
from kv_transfer.spans import Interleave, Span
from kv_transfer.terms import ALL_PARTS, Terms

__all__ = ["Receiver"]


class Receiver(Endpoint):
    """Takes what the prefill ranks send to one decode rank.

    Args:
        manifest: What this rank owns, one manifest or one for each group of pages (full attention, sliding window,
            compressed pools, kinds of states); its memory is registered with the engine until `close`.
        engine: Through which the ranks write; it stays the caller's and is not closed here.
        bind: ZeroMQ address; loopback and a free port by default. A taken port is an error.
        prefill_ranks: How many distinct prefill ranks there are, in one data-parallel group.
        prefill_dp_rank: Which data-parallel group of the prefill side sends; each has receivers of its own.
        windows: Tokens of the window of each group that has one: of its pages, only those of the prompt's last tokens
            are sent. The senders must say the same.
        interleave: How context-parallel ranks of this side share a request: whole pages in turn, or tokens in turn.
        on_failed_pages: What follows when an engine could not move a batch: "fail" ends the room; "retry" lets the
            sender try again up to its `Limits.batch_retries` times, and ends the room then; "recompute" completes it
            and reports pages and tokens in `TransferResult.failed_pages` and `recompute`.
        parts: Parts of the model to receive; the senders must say the same. Memory of other parts is not registered.
        aux: Auxiliary rows of a request (first token, log-probabilities, hidden states) that a sender brings with its
            last message; the senders must say the same.
        timeouts: Time limits.
        limits: Size limits.
        secret: Known to all ends of the deployment: control messages are sealed with it, and nobody without it is
            heard. None: in the clear, for networks where everybody is trusted.

    Raises:
        ArgumentError: The secret is too short, two auxiliary rows have one name, the groups and windows do not fit
            together, or `interleave` or `on_failed_pages` is none of its words.
        ValueError: The address cannot be bound, or there are no prefill ranks or parts.
        UnsupportedLayout: A component is organised neither in pages nor in request rows.
        EngineError: The engine refused the memory, or is none of this version.
    """

    def __init__(
        self,
        manifest: Manifests,
        engine: TransferEngine,
        *,
        bind: str = "tcp://127.0.0.1:0",
        prefill_ranks: int,
        prefill_dp_rank: int = 0,
        windows: Mapping[str, int] | None = None,
        interleave: Interleave = "page",
        on_failed_pages: Policy = "fail",
        parts: Iterable[kv_planner.Part] = ALL_PARTS,
        aux: Iterable[AuxField] = (),
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        secret: str | None = None,
    ) -> None:
        """Registers the memory and listens."""
        own = EndArguments.of(manifest, engine, windows, parts, aux, timeouts, limits, secret)
        prefill_ranks = check_whole("prefill_ranks", prefill_ranks, 2**31 - 1, least=1)
        group = check_whole("prefill_dp_rank", prefill_dp_rank, 2**31 - 1)
        check_word("interleave", interleave, get_args(Interleave))
        self._policy = check_word("on_failed_pages", on_failed_pages, get_args(Policy))
        self._bind, self._secret, self._parts = check_listening(bind), secret, own.parts
        self._groups, self._engine = own.groups, engine
        self._regions: tuple[int, ...] = ()
        self._endpoint = ""
        self._unreachable: set[bytes] = set()
        self._closed = False
        super().__init__(f"kv-transfer-receiver-{Rank.at(own.groups.placement)}", own.timeouts, own.limits)
        try:
            self._regions = register_manifests(engine, [each.manifest for each in own.groups], own.parts)
            terms = Terms.of(engine, own.parts, own.aux, own.limits)  # after the memory, which a session may name
            self._core = ReceiverCore(own.groups, terms, prefill_ranks, own.timeouts, own.limits, group, interleave)
            self._launch(zmq.ROUTER, self._attach)
        except BaseException as error:
            self._close_wakers()
            for address in self._regions:
                with contextlib.suppress(Exception):
                    engine.unregister(address)
            if not isinstance(error, zmq.ZMQError):
                raise
            raise ArgumentError(
                f"bind: {bind!r} cannot be bound: {error}",
                local=bind,
                consequence="no peer could connect",
                remedy="use an address of this machine, and a free port, or 0 for any",
            ) from error

    @property
    def endpoint(self) -> str:
        """Where senders connect to."""
        return self._endpoint

    @property
    def is_ready(self) -> bool:
        """Whether all prefill ranks are there now.

        Raises:
            SessionStateError: The receiver's thread ended by an error.
        """
        with self.lock:
            self._require_running()
            return self._core.is_ready

    @property
    def members(self) -> tuple[Rank, ...]:
        """Prefill ranks that agreed and live."""
        with self.lock:
            return self._core.members

    @property
    def late_messages(self) -> int:
        """Messages of rooms or generations that had ended, which were dropped."""
        with self.lock:
            return self._core.late_messages

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until all prefill ranks are there and fit together.

        Args:
            timeout: Seconds; `Timeouts.handshake` by default.

        Raises:
            PeerRefused: A rank does not fit; with every difference. Call again to wait on for others.
            TransferTimeout: A rank is missing; the text says who is there.
        """
        seconds = self._timeouts.handshake if timeout is None else timeout

        def ready() -> bool | None:
            if self._core.closed is not None:
                raise self._core.closed
            if self._core.is_ready:
                return True
            if self._core.refusals:
                raise self._core.refusals.popleft()
            return None

        with self.lock:
            if self.wait_for(ready, seconds) is None:
                raise TransferTimeout(
                    f"{self._endpoint}: {self._core.missing()}",
                    seconds=seconds,
                    consequence="no room can be opened",
                    remedy="start the missing ranks with this endpoint, and with the same secret, or none",
                )

    def take_refusals(self) -> tuple[PeerRefused, ...]:
        """Refusals since the last call, oldest first, at most 64."""
        with self.lock:
            refusals = tuple(self._core.refusals)
            self._core.refusals.clear()
            return refusals

    def open(
        self,
        room: int,
        destination_pages: PageLists,
        *,
        tokens: int | None = None,
        first_page: int | Mapping[str, int] = 0,
        row: Rows = None,
        timeout: float | None = None,
    ) -> ReceiverSession:
        """Offers pages for a request to all prefill ranks that have something to send.

        Args:
            room: Number of the request, 0 included; free again when the session's pages are released.
            destination_pages: Page ids of this rank's pool, in the order of the request; a list for each group, by
                name, where several have pages: `spans` says how many, and from which page on. Shape: [n]; dtype int32
                or int64.
            tokens: Tokens of the whole prompt; when given, its pages from `first_page` on must be exactly these. Needed
                with several groups, windows or context-parallel ranks.
            first_page: Index of the first of these pages within the request: the pages before it are here already, by a
                prefix hit. It travels in the offer; the sender's `start` counts from the prompt's first page. A number,
                or one for each group; a group with a window begins later when the window does.
            row: Row of this rank's pool for the states of the request, or one for each group; needed where a layout has
                components with a row a request, and only there.
            timeout: Seconds until the room is given up; `Timeouts.transfer` by default.

        Raises:
            ArgumentError: `room`, `tokens`, `first_page`, `row` or `timeout` is no number of its kind or out of range;
                a group is unknown; or one list or number cannot stand for all groups.
            PageHeld: Another room holds one of the pages, or a writer of a room that has ended.
            kv_planner.PlanError: Reserved, negative or doubled pages.
            ValueError: Pages outside the pool, or not as many as the tokens need.
            PeerLost: A prefill rank is gone.
            SessionStateError: Not ready, or the room is in use.
        """
        room = check_whole("room", room, 2**63 - 1)
        given = None if tokens is None else check_whole("tokens", tokens, 2**63 - 1)
        seconds = self._timeouts.transfer if timeout is None else check_seconds("timeout", timeout)
        count, offers = make_offers(self._groups, self._parts, destination_pages, given, first_page, row)
        with self.lock:
            self._require_running()
            opened = self._core.open_room(room, offers, count, time.monotonic(), seconds, self._policy)
            self.wake()
        return ReceiverSession(self, opened, self._abort)

    def spans(self, tokens: int, first_page: int | Mapping[str, int] = 0) -> Mapping[str, Span]:
        """Which pages of a request each group is sent, for `open`: `Span.places` of them from page `Span.first` on.

        Args:
            tokens: Of the whole prompt.
            first_page: As for `open`.

        Raises:
            ArgumentError: No such number or group.
        """
        return request_spans(self._groups, check_whole("tokens", tokens, 2**63 - 1), first_page)

    def reject(self, room: int, reason: str) -> None:
        """Refuses a room that is not open here: `Sender.open` then raises at once instead of waiting for an offer.

        The number is free for `open` again at once.

        Args:
            room: As at `open`.
            reason: What the senders are told.

        Raises:
            ArgumentError: `room` is no number of its kind.
            PeerLost: A prefill rank is gone.
            SessionStateError: Not ready, or the room is open here; abort its session then.
        """
        room = check_whole("room", room, 2**63 - 1)
        with self.lock:
            self._require_running()
            self._core.reject(room, str(reason))
            self.wake()

    def close(self) -> None:
        """Aborts open rooms, waits up to `Timeouts.drain` for writers to stop, says good-bye, unregisters the memory.

        A session whose `pages_released` is still False afterwards has a writer that did not answer: the engine refuses
        its writes from now on, but the pages must not go to another engine that registers the same memory.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._core.fail_all(
                TransferAborted("the receiver was closed", reason="the receiver was closed", by="local")
            )
        self._stop()
        self._close_wakers()
        for address in self._regions:
            self._engine.unregister(address)

    def __enter__(self) -> Receiver:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _abort(self, room: ReceiverRoom, reason: str) -> None:
        with self.lock:
            error = TransferAborted(f"{room.name} was aborted here: {reason}", reason=reason, by="local")
            self._core.fail_room(room, error)
            self.wake()

    def _attach(self, control: zmq.Socket[bytes]) -> None:
        control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        seal_receiver(control, self._secret)
        control.bind(self._bind)
        self._endpoint = control.getsockopt_string(zmq.LAST_ENDPOINT)

    def _watches_connection(self) -> bool:
        return False

    def _receive(self, parts: list[bytes], now: float) -> None:
        if len(parts) >= 2:
            self._core.receive(parts[0], parts[1] if len(parts) == 2 else b"", now)

    def _disconnected(self, why: str) -> None:
        raise SessionStateError(f"a bound socket has no single connection: {why}")

    def _advance(self, now: float) -> float:
        # What a dead peer said last has been read by now: its words count before its death.
        for identity in self._unreachable:
            self._core.unreachable(identity, now)
        self._unreachable.clear()
        self._core.tick(now)
        return math.inf

    def _flush(self, control: zmq.Socket[bytes], now: float) -> None:
        blocked: set[bytes] = set()
        for _ in range(len(self._core.outbox)):
            identity, data = self._core.outbox.popleft()
            if identity in blocked:
                self._core.outbox.append((identity, data))
                continue
            try:
                control.send_multipart((identity, data), zmq.NOBLOCK)
            except zmq.Again:
                blocked.add(identity)
                self._core.outbox.append((identity, data))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._unreachable.add(identity)

    def _is_drained(self, late: bool) -> bool:
        return late or not self._core.rooms

    def _last_words(self) -> None:
        self._core.say_bye()

    def _let_go(self, now: float) -> bool:
        return True

    def _ended(self) -> None:
        """Writers come to the engine of a receiver; it holds nothing for them."""

    def _crashed(self, error: TransferError) -> None:
        self._core.fail_all(error)
