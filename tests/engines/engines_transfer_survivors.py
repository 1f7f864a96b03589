"""A decode or a prefill rank here that outlives its peer, and what must be true of it after each fault of the peer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engines_transfer import Cluster, Request, decode_rank
from engines_transfer_fault_node import DELAY, FROM, TO, check, make_side, stamp
from engines_transfer_queue import Gate, Queue, within
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_sglang import SENTINEL

__all__ = ["OPTIONS", "Decode", "Prefill"]

OPTIONS = {"mooncake": {"transfer_timeout": 2}, "nixl": {}}
ROOMS = itertools.count(101)


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
        self.wipe()

    def wipe(self) -> None:
        for memory in self.side.memory:
            memory[:] = SENTINEL


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
