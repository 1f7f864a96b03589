"""Either process of SGLang's disaggregation is stopped or killed in the middle of a request; the other one serves on.

The survivor's request fails with its reason in bounded time, its pages are free when the writer is dead or has let go,
nothing of the room is left, and the next request, to the same peer or to one in its place, has every byte.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines_transfer import Cluster, Request, configured, decode_rank, free_port
from engines_transfer_fault_node import DELAY, FROM, TO, Nodes, check, make_side, stamp
from engines_transfer_queue import Gate, Queue, queued, within
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_sglang import SENTINEL

OPTIONS = {"mooncake": {"transfer_timeout": 2}, "nixl": {}}
ROOMS = iter(range(101, 10_000))
MOMENTS = random.Random(9)
pytestmark = pytest.mark.timeout(300)  # the other process imports SGLang first


class Decode:
    """The survivor: a decode rank with SGLang's queue."""

    def __init__(self, arguments: Any, port: int, queue: Queue) -> None:
        self.side, self.queue = make_side(), queue
        self.cluster = decode_rank(arguments, port, self.side, mla=False)
        self.manager = self.cluster.decode[0]
        self.manager.dead_writer_grace = 0.3

    def ask(self, peer: Any) -> int:
        """A request of which the peer begins to send pages."""
        room = next(ROOMS)
        request = Request(self.cluster, room)
        request.offer(TO)
        self.queue.follow(request, TO)
        peer.tell(room)
        return room

    def serve(self, peer: Any) -> None:
        room = next(ROOMS)
        request = Request(self.cluster, room, alive=peer.lives)
        request.offer(TO)
        peer.tell(room)
        assert request.end()[1] == [KVPoll.Success], self.manager.failure_records
        check(self.side, room)
        peer.heard(f"{room} ended {KVPoll.Success}")

    def fails(self, seconds: float) -> str:
        self.queue.answers.clear()
        self.queue.free.clear()
        within(seconds, lambda: bool(self.queue.answers), "the request fails", self.queue.step)
        return self.queue.reasons()[0]

    def frees(self, seconds: float) -> None:
        within(seconds, lambda: bool(self.queue.free), "the pages are free", self.queue.step)
        assert self.queue.free == TO
        manager = self.manager
        assert not (manager._rooms or manager._deferred_abort_ack_tracker or manager.request_status)
        assert not (manager.prefill_response_tracker or manager.failure_records)
        for memory in self.side.memory:
            memory[:] = SENTINEL


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"))
    yield made
    made.close()


@pytest.fixture(params=["mooncake", "nixl"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> Iterator[Any]:
    """(makes a prefill process, makes the decode rank here)."""
    engine, port, made = request.param, free_port(), []
    with queued(monkeypatch) as make, configured(monkeypatch, port, engine) as arguments:

        def rank() -> Decode:
            made.append(Decode(arguments, port, make()))
            return made[-1]

        yield (lambda: nodes.start("prefill", engine, OPTIONS[engine], port)), rank
        for one in made:
            one.cluster.close()


def test_prefill_is_stopped_and_writes_late_and_is_killed(decode: Any) -> None:
    """SGLang frees the pages after 30 s; a writer that wakes later writes into another request."""
    start, rank = decode
    with start() as peer:
        here = rank()
        here.serve(peer)
        here.manager.waiting_timeout = 1.0
        here.ask(peer)
        time.sleep(MOMENTS.uniform(0, 4 * DELAY))
        peer.signal(signal.SIGSTOP)
        assert "timed out" in here.fails(4)
        with pytest.raises(AssertionError, match="free: not in"):
            here.frees(2.0)
        peer.signal(signal.SIGCONT)
        here.frees(10)
        here.manager.waiting_timeout = 300
        here.serve(peer)
        here.ask(peer)
        time.sleep(MOMENTS.uniform(0, 4 * DELAY))
        peer.signal(signal.SIGKILL)
        assert "prefill rank 0 at 127.0.0.1" in (reason := here.fails(6)) and "gone" in reason
        here.frees(6)
    with start() as peer:
        here.serve(peer)
        assert len(here.manager.prefill_info_table) == 1


class Prefill:
    """The survivor: a prefill rank."""

    def __init__(self, arguments: Any, port: int) -> None:
        self.side = make_side()
        self.cluster = Cluster(arguments, port, [self.side], [], mla=False)
        self.manager = self.cluster.prefill[0]
        self.manager.dead_writer_grace = 0.3
        self.manager.engine._timeout = 4.0
        Gate(self.manager, is_open=True, delay=DELAY)

    def send(self, peer: Any) -> tuple[int, Request]:
        room = next(ROOMS)
        peer.tell(room)
        stamp(self.side, room)
        request = Request(self.cluster, room, alive=peer.lives)
        request.send(FROM, chunks=[1] * 4)
        return room, request

    def serve(self, peer: Any, attempts: int = 1) -> None:
        """A request that arrives whole; of a peer that was stopped, connections break once more when it wakes."""
        for _ in range(attempts):
            room, request = self.send(peer)
            (status,) = request.end()[0]
            peer.heard(f"{room} ended {status}")
            if status == KVPoll.Success:
                self.is_empty()
                return
            print(self.manager.failure_records.pop(room))
        raise AssertionError(f"no request of {attempts} arrived")

    def fails(self, request: Request, seconds: float) -> str:
        (sender,) = request.senders
        within(seconds, lambda: sender.poll() in (KVPoll.Failed, KVPoll.Success), "the request ends")
        assert sender.poll() == KVPoll.Failed
        with pytest.raises(Exception, match="KVTransferError") as caught:
            sender.failure_exception()
        self.is_empty()
        return str(caught.value)

    def is_empty(self) -> None:
        manager = self.manager
        within(5, lambda: not (manager._writing or manager.transfer_infos), "the worker leaves the room")
        assert not (manager.request_status or manager._told or manager._deferred_ack_targets)
        assert not manager.failure_records


@pytest.fixture(params=["mooncake", "nixl"])
def prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> Iterator[Any]:
    """(makes a decode process, the prefill rank here)."""
    engine, port = request.param, free_port()
    with configured(monkeypatch, port, engine, json.dumps(OPTIONS[engine])) as arguments:
        here = Prefill(arguments, port)
        yield (lambda: nodes.start("decode", engine, {}, port)), here
        here.cluster.close()


def test_decode_is_stopped_and_killed(prefill: Any) -> None:
    start, here = prefill
    with start() as peer:
        here.serve(peer)
        room, request = here.send(peer)
        time.sleep(MOMENTS.uniform(0, 4 * DELAY))
        peer.signal(signal.SIGSTOP)
        if here.manager.engine.engine.name == "nixl":  # over shared memory it writes without the peer's help
            assert request.end()[0] == [KVPoll.Success]
            peer.signal(signal.SIGCONT)
            peer.heard(f"{room} ended {KVPoll.Success}")
        else:
            assert "did not answer in time" in here.fails(request, 20)
            peer.signal(signal.SIGCONT)
            peer.heard(f"{room} ended {KVPoll.Failed}")
        here.serve(peer, attempts=3)
        _, request = here.send(peer)
        time.sleep(MOMENTS.uniform(0, 4 * DELAY))
        peer.signal(signal.SIGKILL)
        assert "write of" in here.fails(request, 20)
    with start() as peer:
        here.serve(peer)
