"""The decode process: receives KV, and generates for several requests at once.

Requests enter the running batch when their KV is complete and leave it when they have all their tokens. Every step
verifies a window for every row: the last known token and up to `drafts` guesses. With overlap the next step is launched
before this one's tokens are read: the host then knows bounds of the lengths, the device the lengths themselves, and a
row may run one step more than it needs. Tokens go to the front as they are read.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kv_planner
import kv_transfer
import numpy as np
from kv_pool import MhaPool, PageAllocator

from .config import (
    Abort,
    Arrived,
    Connect,
    Connected,
    Counters,
    Emitted,
    Ended,
    Mode,
    Ready,
    Request,
    Shutdown,
    Span,
    Tally,
)
from .mtp_stepper import MtpStepper
from .prefill import STAGES
from .request_table import RequestTable
from .stage import Stage
from .stepper import Launched, Row, Stepper

if TYPE_CHECKING:
    from .setup import Link, Setup


@dataclass(eq=False)
class _Running:
    """One request, from the offer of its pages to its last token."""

    request: Request
    pages: np.ndarray[tuple[int], np.dtype[np.int64]]
    session: kv_transfer.ReceiverSession
    tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    table_row: int = 0

    @property
    def committed(self) -> int:
        """Tokens that the host knows to have KV in the pool: all but the last one known."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def has_all(self) -> bool:
        """Whether all its tokens are known."""
        return len(self.tokens) >= self.request.new_tokens


@dataclass(frozen=True)
class _Flight:
    """A step in flight, and the requests in it."""

    began: float
    batch: list[_Running]
    launched: Launched


class Decoder:
    """Model, pool, receiver and graphs of the decode process."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self.setup, self.config = setup, config
        self.mode = Mode(drafts=config.drafts)
        # Not zeroed: the emulated device then reports attention over a slot that nobody wrote.
        self.pool = MhaPool(setup.layout, size=config.decode_pool, device=setup.device, zero=False)
        self.pages = PageAllocator(self.pool.num_pages, config.page_size)
        weights = setup.weights(list(range(setup.shape.layers)))  # and the draft layers
        model = Stage(weights, self.pool, device=setup.device, kv_dtype=setup.kv_dtype)
        self.context = min(setup.shape.context, config.decode_pool)
        columns = kv_planner.page_count(self.context, config.page_size)
        # Twice the batch: requests that have ended keep their rows while a step with them is in flight.
        self.table = RequestTable(
            requests=2 * max(config.buckets),
            capacity=columns * config.page_size + config.drafts + 2,
            device=setup.device,
            draft_layers=setup.shape.draft_layers,
        )
        stepper_class = MtpStepper if setup.shape.draft_layers else Stepper
        self.steppers: dict[int, Stepper] = {
            window: stepper_class(setup, model, self.table, window=window, columns=columns)
            for window in sorted({1, config.drafts + 1})
        }
        self.receiver = kv_transfer.Receiver(
            self.pool.manifest(),
            kv_transfer.create_engine(config.engine),
            bind=config.decode_bind,
            prefill_ranks=STAGES,
            timeouts=kv_transfer.Timeouts(peer_lost_after=config.peer_lost_after),
        )
        self.arriving: dict[int, _Running] = {}
        self.queued: deque[Request] = deque()
        self.leaving: list[_Running] = []
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.flying: _Flight | None = None
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.steps: Counter[int] = Counter()
        self.most_in_flight = self.row_steps = self.row_tokens = 0
        self.replays_before, self.eager_before = self._runner_counts()
        self.drafts_before = self._draft_replays()

    def _draft_replays(self) -> int:
        return sum(stepper.draft_replays for stepper in self.steppers.values())

    def _runner_counts(self) -> tuple[int, Counter[str]]:
        replays, eager = 0, Counter[str]()
        for stepper in self.steppers.values():
            replays += stepper.runner.counters.graph_replays
            eager.update({str(reason): n for reason, n in stepper.runner.counters.eager_steps.items()})
        return replays, eager

    def capture(self) -> None:
        """Capture the graphs of every window width."""
        for stepper in self.steppers.values():
            stepper.capture()

    def take(self, request: Request) -> None:
        """Put a request at the end of the line for pages."""
        self.queued.append(request)

    def offer(self, link: Link) -> None:
        """Reserve pages for whole requests, in turn, and tell the prefill stages where their prompts go."""
        page_size = self.config.page_size
        while self.queued:
            request = self.queued[0]
            # The last window, and with overlap the one after it, may reach past the end.
            most = len(request.prompt) + request.new_tokens + 2 * self.config.drafts
            wanted = kv_planner.page_count(most, page_size)
            if wanted > self.pages.total or most > self.context:
                self.queued.popleft()
                reason = f"{most} tokens on {wanted} pages wanted, decode takes {self.context} on {self.pages.total}"
                self.receiver.reject(request.room, reason)
                link.send(Ended(room=request.room, reason=reason))
                continue
            if wanted > self.pages.available:
                return
            self.queued.popleft()
            pages = self.pages.alloc(wanted)
            prompt_pages = pages[: kv_planner.page_count(len(request.prompt), page_size)]
            session = self.receiver.open(request.room, prompt_pages, tokens=len(request.prompt))
            self.arriving[request.room] = _Running(request, pages, session)

    def collect(self, link: Link) -> None:
        """Move requests whose KV has arrived to the waiting line, and fill the batch from there."""
        self._release()
        self.offer(link)
        for room, entry in list(self.arriving.items()):
            try:
                result = entry.session.poll()
            except kv_transfer.TransferAborted as error:
                self._give_up(link, entry, str(error))
                continue
            if result is None:
                continue
            del self.arriving[room]
            last_stage = next(item for item in result.metadata.values() if "first_token" in item)
            first = last_stage["first_token"]
            assert isinstance(first, int), first
            drafts = last_stage["drafts"]
            assert isinstance(drafts, list), drafts
            entry.drafts = [token for token in drafts if isinstance(token, int)]
            link.send(Arrived(room=room, nbytes=result.nbytes, blocks=result.blocks, pages=result.pages))
            self._emit(link, entry, first)
            self.waiting.append(entry)
        while self.waiting and len(self.running) < max(self.config.buckets) and self.table.free:
            self._admit(self.waiting.popleft())
        self._retire()
        self.most_in_flight = max(self.most_in_flight, len(self.running))

    def _admit(self, entry: _Running) -> None:
        """Put a request into the batch."""
        if self.mode.overlap:
            self._clear_tail(entry)
        entry.table_row = self.table.admit([*entry.request.prompt, *entry.tokens], entry.drafts)
        self.running.append(entry)

    def _clear_tail(self, entry: _Running) -> None:
        """Zero what follows the prompt: under a bound instead of a length, attention also reads what nobody wrote.

        It is hidden there, but zero times NaN is NaN.
        """
        size = self.config.page_size
        page, offset = divmod(len(entry.request.prompt), size)
        for storage in (self.pool.key_storage, self.pool.value_storage):
            for at, number in enumerate(entry.pages[page:].tolist()):
                storage[:, number, offset if at == 0 else 0 :] = 0

    def _release(self) -> None:
        """Free what ended requests hold once nobody writes there: neither a prefill stage nor a step in flight."""
        flying = self.flying.batch if self.flying is not None else []
        for entry in [entry for entry in self.leaving if entry.session.pages_released and entry not in flying]:
            self.leaving.remove(entry)
            self.pages.release(entry.pages)
            if entry.table_row:
                self.table.release(entry.table_row)

    def _give_up(self, link: Link, entry: _Running, reason: str) -> None:
        """End a request; its pages are free when no prefill stage can write to them any more."""
        self.arriving.pop(entry.request.room, None)
        for line in (self.waiting, self.running):
            if entry in line:
                line.remove(entry)
        self.leaving.append(entry)
        link.send(Ended(room=entry.request.room, reason=reason))

    def abort(self, link: Link, room: int) -> None:
        """What the front asked for; nothing happens when the request has ended already."""
        reason = "the front gave the request up"
        for request in [request for request in self.queued if request.room == room]:
            self.queued.remove(request)
            self.receiver.reject(room, reason)
            link.send(Ended(room=room, reason=reason))
        if room in self.arriving:
            self.arriving[room].session.abort(reason)
        for entry in [*self.arriving.values(), *self.waiting, *self.running]:
            if entry.request.room == room:
                self._give_up(link, entry, reason)

    def _retire(self) -> None:
        for entry in [entry for entry in self.running if entry.has_all]:
            self.running.remove(entry)
            self.leaving.append(entry)
        self._release()

    @staticmethod
    def _emit(link: Link, entry: _Running, token: int) -> None:
        entry.tokens.append(token)
        link.send(Emitted(room=entry.request.room, token=token, clock=time.monotonic()))

    def _kv_lens(self, window: int) -> list[int]:
        """Bounds of the KV lengths of the next step, its window included, by the rule of the mode.

        A step in flight may commit a whole window; without one the bounds are the lengths.
        """
        kind = self.mode.length_rule
        flying = self.flying.batch if self.flying is not None else []
        committed = np.array([entry.committed + window * (entry in flying) for entry in self.running], np.int64)
        published = committed + window if kind == "dflash" else committed
        return [int(n) for n in kv_planner.kv_lengths(kind, published, window=window)]

    def step(self, link: Link) -> None:
        """Launch the next step of the running requests, then read the one before it (without overlap: itself)."""
        before, self.flying = self.flying, self._launch()
        if before is not None:
            self._read(link, before)
        if not self.mode.overlap and self.flying is not None:
            flight, self.flying = self.flying, None
            self._read(link, flight)
        self._retire()

    def _launch(self) -> _Flight | None:
        if not self.running:
            return None
        began, stepper = time.monotonic(), self.steppers[self.mode.drafts + 1]
        rows = [Row(entry.table_row, entry.pages) for entry in self.running]
        launched = stepper.launch(rows, kv_lens=self._kv_lens(stepper.window), graphs=self.mode.graphs)
        self.steps[launched.size] += 1
        self.row_steps += len(rows)
        return _Flight(began, list(self.running), launched)

    def _read(self, link: Link, flight: _Flight) -> None:
        """Take the tokens of a step; those of requests that have ended meanwhile are dropped."""
        for entry, committed in zip(flight.batch, flight.launched.committed(), strict=True):
            if entry in self.running:
                for token in committed[: entry.request.new_tokens - len(entry.tokens)]:
                    self.row_tokens += 1
                    self._emit(link, entry, token)
        link.send(Span(lane="decode", name=f"{len(flight.batch)} rows", begin=flight.began, end=time.monotonic()))

    def tally(self) -> Counters:
        """What was counted since the last tally."""
        replays, eager = self._runner_counts()
        counters = Counters(
            graph_replays=replays - self.replays_before,
            eager_steps=dict(eager - self.eager_before),
            steps_by_bucket=dict(self.steps),
            most_in_flight=self.most_in_flight,
            row_steps=self.row_steps,
            row_tokens=self.row_tokens,
            draft_replays=self._draft_replays() - self.drafts_before,
        )
        self._reset_counts()
        return counters

    def close(self) -> None:
        """Release graphs and transfer."""
        for stepper in self.steppers.values():
            stepper.close()
        self.receiver.close()


def run_decode(link: Link, setup: Setup) -> None:
    """Serve as the decode process until the front says Shutdown."""
    decoder = Decoder(setup)
    link.send(Ready(endpoint=decoder.receiver.endpoint, device=setup.device_text))
    link.expect(Connect)
    decoder.capture()
    decoder.receiver.wait_ready()
    link.send(Connected())
    try:
        while True:
            busy = bool(decoder.running or decoder.flying)
            message = link.receive(wait=0 if busy else 0.002)
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Mode):
                decoder.mode = message
            elif isinstance(message, Abort):
                decoder.abort(link, message.room)
            elif isinstance(message, Tally):
                link.send(decoder.tally())
            elif isinstance(message, Request):
                decoder.take(message)
            else:
                decoder.collect(link)
                if decoder.running or decoder.flying:
                    decoder.step(link)
    finally:
        decoder.close()
