"""A page has two holders: SGLang's queue frees the pages of a failed request when no prefill rank can write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from engines_transfer import Cluster, Request, configured, free_port
from engines_transfer_queue import Gate, queued, within
from kv_transfer.errors import ArgumentError, EngineError
from kv_transfer.integrations.sglang import sender_class
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode
from transfer_sglang import MHA, SENTINEL, Manager, Side

FROM, TO = [3, 7, 8, 2, 9], [4, 5, 10, 1, 6]
OTHERS = [9, 2, 11, 5, 1]
"""Pages of another request: some of them are reused."""
HELD = [5, 1]


class World:
    """One prefill rank behind a gate, decode ranks, and SGLang's queue of the first of them."""

    def __init__(self, arguments: Any, port: int, make: Any, tp: int = 1) -> None:
        self.source = Side(MHA, range(2), heads=2)
        self.targets = [Side(MHA, range(2), heads=2, tp=(rank, tp)) for rank in range(tp)]
        self.target = self.targets[0]
        self.cluster = Cluster(arguments, port, [self.source], self.targets, mla=False)
        self.prefill, self.decode = self.cluster.prefill[0], self.cluster.decode[0]
        self.prefill.dead_writer_grace = self.decode.dead_writer_grace = 0.2
        self.gate = Gate(self.prefill)
        self.queue = make()
        self.source.fill(FROM)

    def start(self, room: int = 5) -> Request:
        """A request whose first chunk is at the gate."""
        request = Request(self.cluster, room)
        request.offer(TO)
        self.queue.follow(request, TO)
        request.send(FROM, chunks=[2])
        within(5, lambda: self.gate.batches == 1, "the writer stands at the gate")
        return request

    def fail(self) -> None:
        """Until the queue has answered the request, whose pages it holds."""
        within(5, lambda: bool(self.queue.answers), "the request is answered", self.queue.step)
        assert not self.queue.queue and self.queue.num_pending_deferred_releases() == 1

    def holds(self, seconds: float = 1.6) -> None:
        """Nothing is freed: the abort is said twice meanwhile."""
        with pytest.raises(AssertionError, match="freed: not in"):
            within(seconds, lambda: bool(self.queue.free), "freed", self.queue.step)

    def frees(self) -> None:
        within(8, lambda: bool(self.queue.free), "the pages are freed", self.queue.step)
        assert self.queue.free == TO
        assert not self.decode._rooms and not self.decode._deferred_abort_ack_tracker
        assert not self.decode.request_status

    def reuse(self, room: int = 6) -> None:
        """Another request gets the pages, and every byte of it is its own."""
        self.gate.opened.set()
        for side in self.targets:
            for memory in side.memory:
                memory[:] = SENTINEL
        request = Request(self.cluster, room)
        request.offer(OTHERS)
        request.send(FROM)
        assert request.end() == ([KVPoll.Success], [KVPoll.Success] * len(self.targets)), self.decode.failure_records
        for side in self.targets:
            side.check(OTHERS)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    port, made = free_port(), []
    with queued(monkeypatch) as make, configured(monkeypatch, port, "loopback") as arguments:

        def build(tp: int = 1) -> World:
            made.append(World(arguments, port, make, tp))
            return made[-1]

        yield build
        for one in made:
            one.gate.opened.set()
            one.cluster.close()


def test_a_late_writer_after_an_abort_keeps_the_pages(world: Any) -> None:
    here = world()
    here.gate.capabilities = dataclasses.replace(here.gate.capabilities, max_entries_per_batch=1)
    request = here.start()
    request.receivers[0].abort()
    here.fail()
    assert "Aborted by AbortReq" in here.queue.reasons()[0]
    here.holds()
    here.gate.opened.set()
    here.frees()
    assert here.gate.batches == 1, "no batch begins behind an abort"
    arrived = [memory[TO[:2]] for memory in here.target.memory]
    assert any((part != SENTINEL).any() for part in arrived), "the writer was late, and wrote"
    assert all((memory[TO[2:]] == SENTINEL).all() for memory in here.target.memory)
    assert request.senders[0].poll() == KVPoll.Failed
    with pytest.raises(Exception, match="decode gave the request up"):
        request.senders[0].failure_exception()
    assert not here.prefill._writing and not here.prefill._told and not here.prefill.transfer_infos
    here.reuse()


def test_a_late_writer_after_decodes_time_out_keeps_the_pages(world: Any) -> None:
    here = world()
    here.decode.waiting_timeout = 0.3
    here.start()
    here.fail()
    assert "timed out" in here.queue.reasons()[0]
    here.holds()
    here.gate.opened.set()
    here.frees()
    here.decode.waiting_timeout = 300
    here.reuse()


def test_an_engine_that_writes_on_behind_its_time_out_keeps_the_pages(world: Any) -> None:
    """SGLang gives such a room no answer at all, and frees its pages after 30 s."""
    here = world()
    here.prefill.engine._timeout = 0.2
    here.start()
    here.fail()
    assert "did not end in 0.2 s" in here.queue.reasons()[0]
    here.holds()
    here.gate.opened.set()
    here.frees()
    here.prefill.engine._timeout = 60
    here.reuse()


def test_pages_of_a_failed_write_are_held_until_its_last_bytes_have_landed(world: Any) -> None:
    here = world()
    here.prefill.dead_writer_grace = 2.0
    here.gate.error = EngineError("the link is down")
    request = Request(here.cluster, 5)
    request.offer(TO)
    here.queue.follow(request, TO)
    request.send(FROM)
    here.fail()
    assert "the link is down" in here.queue.reasons()[0]
    here.holds()
    here.frees()
    here.gate.error = None
    here.reuse()


def test_a_room_that_some_decode_ranks_gave_up_before_the_others_came_is_not_written(world: Any) -> None:
    here = world(tp=2)
    here.gate.opened.set()
    early = Request(here.cluster, 5)
    here.cluster.decode, both = here.cluster.decode[:1], here.cluster.decode
    early.offer(TO)
    within(5, lambda: bool(here.prefill.transfer_infos.get(5)), "the first rank's pages are known")
    here.queue.follow(early, TO)
    early.receivers[0].abort()
    here.fail()
    here.frees()
    here.cluster.decode = both[1:]
    late = Request(here.cluster, 5)
    late.offer(TO)
    within(5, lambda: len(here.prefill.transfer_infos[5]) == 2, "the other rank's pages are known")
    late.send(FROM)
    assert late.senders[0].poll() == KVPoll.Failed
    late.senders[0].clear()
    assert late.end() == ([KVPoll.Failed], [KVPoll.Failed])
    assert here.gate.batches == 0 and not here.prefill.transfer_infos
    here.cluster.decode = both
    here.reuse()


def test_decode_is_told_when_prefill_gives_up(world: Any) -> None:
    """SGLang's sender ends without a word: decode would wait for its own time-out."""
    here = world()
    request = here.start()
    request.senders[0].abort()
    request.senders[0].clear()
    here.fail()
    assert "Aborted by AbortReq" in here.queue.reasons()[0]
    here.holds()
    here.gate.opened.set()
    here.frees()
    late = Request(here.cluster, 7)
    sender = sender_class()(here.prefill, "", 7)
    sender.init(5, 0)
    sender.abort()
    sender.clear()
    late.offer(TO)
    within(5, lambda: late.receivers[0].poll() == KVPoll.Failed, "decode hears of a room that failed before it came")
    assert here.decode.failure_records.pop(7) == "Aborted by AbortReq."
    late.receivers[0].clear()
    assert not here.prefill.request_status and not here.prefill.transfer_infos
    here.reuse(8)


def test_sglang_must_hold_pages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    manager = Manager(Side(MHA, range(1)), mla=False)
    manager.disaggregation_mode = DisaggregationMode.DECODE
    with caplog.at_level("WARNING"):
        monkeypatch.setenv(f"{name}_TIMEOUT", "inf")
        manager._check_holding()
        assert not caplog.records
        monkeypatch.setenv(f"{name}_TIMEOUT", "30")
        manager._check_holding()
    assert f"{name}_TIMEOUT is 30" in caplog.text
    monkeypatch.setenv(name, "0")
    with pytest.raises(ArgumentError, match=f"{name} is '0'; .*unset it"):
        manager._check_holding()
    manager.disaggregation_mode = DisaggregationMode.PREFILL
    manager._check_holding()
    assert manager.enable_deferred_decode_kv_release, "a prefill rank answers, whatever is set there"
    manager.engine.close()
