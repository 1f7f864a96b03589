"""Ranks find each other in a directory by themselves, again after deaths, and live on while it is down."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import FAST, eventually
from transfer_scenarios import PAGES, SOURCES, Process

import kv_transfer as kt
from kv_transfer.directory import Side


class End(Process):
    node = Path(__file__).with_name("transfer_end_node.py")


class Service:
    """`python -m kv_transfer directory` in a process of its own, at an address that it keeps over a restart."""

    def __init__(self) -> None:
        self.endpoint = "tcp://127.0.0.1:*"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kv_transfer", "directory", "--bind", self.endpoint, "--lifetime", "3"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        found = re.fullmatch(r"directory at (\S+)\n", self.popen.stdout.readline())
        assert found is not None
        self.endpoint = found[1]

    def stop(self, *, kill: bool = False) -> int:
        if kill:
            self.popen.kill()
        else:
            self.popen.terminate()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return self.popen.wait(60)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.stop(kill=True)


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(**options: object) -> Process:
        made.append(End(**options))
        return made[-1]

    try:
        yield start
    finally:
        for process in made:
            process.kill()
            for pipe in (process.popen.stdin, process.popen.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _send(prefill: list[Process], decode: Process, room: int) -> None:
    decode.ok("wipe", pages=PAGES)
    decode.ok("open", room=room, pages=PAGES)
    for stage, process in enumerate(prefill):
        process.ok("open", room=room)
        process.ok("send", room=room, pages=SOURCES[stage])
    assert decode.ok("wait", room=room)["nbytes"] > 0
    for stage in SOURCES:
        moved = list(zip(PAGES, SOURCES[stage], strict=True))
        faults = decode.ok("faults", moved=moved, stages=[stage])["faults"]
        assert [fault for fault in faults if re.search(rf", ({2 * stage}|{2 * stage + 1})\)|outside", fault)] == []


def _eventually_ok(process: Process, do: str, **arguments: object) -> None:
    """After a restart the old conversation is noticed within moments."""
    deadline = time.monotonic() + 60
    while "error" in (answer := process.call(do, **arguments)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)


def test_processes_find_each_other_and_do_so_again(service: Service) -> None:
    with processes() as start:
        decode = start(role="decode", directory=service.endpoint)
        prefill = [start(role="prefill", directory=service.endpoint, stage=stage) for stage in SOURCES]
        for process in (decode, *prefill):
            process.up()
            process.ok("ready", seconds=60)
        _send(prefill, decode, 1)

        # The decode rank dies; another life of it has another endpoint and is found there.
        old = decode.ok("ready", seconds=5)["endpoint"]
        decode.kill()
        decode = start(role="decode", directory=service.endpoint).up()
        assert decode.ok("ready", seconds=60)["endpoint"] != old
        for process in prefill:
            _eventually_ok(process, "ready", seconds=10)
        _send(prefill, decode, 2)

        # A prefill rank dies; the receiver takes its new life in.
        prefill[1].kill()
        prefill[1] = start(role="prefill", directory=service.endpoint, stage=1).up()
        prefill[1].ok("ready", seconds=60)
        decode.ok("ready", seconds=60)
        prefill[0].ok("ready", seconds=60)
        _send(prefill, decode, 3)

        # The directory is stopped: what runs goes on, and who comes new is told so in time.
        assert service.stop() == 0
        assert eventually(lambda: "did not answer" in prefill[0].ok("problem")["problem"], 60)
        _send(prefill, decode, 4)
        late = start(role="decode", directory=service.endpoint)
        assert late.popen.wait(90) == 1, "its client gives up after a second"
        _send(prefill, decode, 5)

        # It comes back empty: everybody registers again by itself, nobody is connected anew.
        service.start()
        client = kt.DirectoryClient(service.endpoint)
        assert eventually(lambda: client.is_whole("prefill") and client.is_whole("decode"), 60)
        for process in (*prefill, decode):
            assert eventually(lambda own=process: own.ok("problem")["problem"] == "", 60)  # type: ignore[misc]
        _send(prefill, decode, 6)
        for process in (*prefill, decode):
            assert process.leave() == 0
        assert client.members("prefill") == () and client.members("decode") == ()


class Ends:
    """Both sides in this process, over a directory without sockets."""

    def __init__(self, keep: contextlib.ExitStack) -> None:
        self.keep = keep
        self.directory = kt.Directory()
        self.layout = make_layout()
        self.memory: list[RankMemory] = []

    def prefill(self, memory: RankMemory) -> kt.PrefillEnd:
        self.memory.append(memory)
        engine = kt.create_engine("loopback")
        end = kt.PrefillEnd(memory.manifest, engine, self.directory, timeouts=FAST, every=0.02)
        self.keep.callback(end.close)
        return end

    def decode(self, memory: RankMemory, **options: Any) -> kt.DecodeEnd:
        self.memory.append(memory)
        engine = kt.create_engine("loopback")
        end = kt.DecodeEnd(memory.manifest, engine, self.directory, timeouts=FAST, every=0.02, **options)
        self.keep.callback(end.close)
        return end


@pytest.fixture
def ends() -> Iterator[Ends]:
    with contextlib.ExitStack() as keep:
        yield Ends(keep)


def _told(end: kt.PrefillEnd | kt.DecodeEnd, words: str) -> bool:
    """Whether who waits for a moment is told these words; it takes the ends a while to look."""

    def told() -> bool:
        with pytest.raises(kt.TransferTimeout) as caught:
            end.wait_ready(0.1)
        return re.search(words, str(caught.value), re.DOTALL) is not None

    return eventually(told, 60)


def test_who_is_missing_is_named_in_time(ends: Ends) -> None:
    prefill = ends.prefill(stages(ends.layout, 2)[0])
    assert _told(prefill, "decode group 0: no decode rank of it is in the directory")
    decode = ends.decode(whole(ends.layout))
    assert _told(decode, r"prefill group 0: .*1 of 2 prefill ranks are there")
    assert _told(prefill, "1 of 1 decode ranks are in the directory, ready: none")
    with pytest.raises(kt.TransferTimeout, match="prefill group 1: no prefill rank"):
        decode.wait_ready(0.1, dp_rank=1)
    assert prefill.group() == () and prefill.groups == {} and prefill.senders == ()
    ends.prefill(stages(ends.layout, 2)[1])
    assert decode.wait_ready(60) is decode.receivers[0]
    assert prefill.wait_ready(60) == prefill.senders == prefill.groups[0]


def test_a_side_with_other_sizes_gets_a_new_receiver(ends: Ends) -> None:
    decode = ends.decode(whole(ends.layout))
    first = [ends.prefill(memory) for memory in stages(ends.layout, 2)]
    old = decode.wait_ready(60)
    with pytest.raises(kt.ArgumentError, match="start all ranks of a side with the same sizes"):
        ends.prefill(whole(ends.layout))
    for end in first:
        end.close()
    memory = whole(ends.layout)
    alone = ends.prefill(memory)
    assert eventually(lambda: decode.receivers.get(0) not in (None, old), 60)
    new = decode.wait_ready(60)
    (sender,) = alone.wait_ready(60)
    session = new.open(4, [3])
    sending = sender.open(4)
    sending.send(np.array([5]), start=0)
    sending.finish()
    assert session.wait(60).room == 4


def test_a_misfit_is_refused_and_seen_on_both_sides(ends: Ends) -> None:
    decode = ends.decode(whole(ends.layout))
    other = ends.prefill(whole(make_layout(page_size=8)))
    with pytest.raises(kt.PeerRefused, match="page_size"):
        decode.wait_ready(60)
    assert eventually(lambda: isinstance(other.problem, kt.PeerRefused), 60)
    assert _told(other, "last problem: .*page_size")


def _free_ports(count: int) -> int:
    """The first of some ports in a row that nobody has."""
    for base in range(20_000, 60_000, count):
        with contextlib.ExitStack() as keep, contextlib.suppress(OSError):
            for port in range(base, base + count):
                keep.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError("no free ports")


def test_data_parallel_groups_of_both_sides_find_each_other(ends: Ends) -> None:
    """Two groups on each side: every decode rank has a receiver and a port for each prefill group, and each its own."""
    layout = make_layout(layers=1)
    ids: dict[tuple[kp.Component, kp.Part], list[int]] = {("key", "target"): [0], ("value", "target"): [0]}
    places = [kp.Placement(dp_rank=group, dp_size=2) for group in range(2)]
    base = _free_ports(4)
    decodes = [RankMemory(layout, ids, placement=place) for place in places]
    sources = [RankMemory(layout, ids, placement=place).fill() for place in places]
    receiving = [ends.decode(memory, port=base) for memory in decodes]
    sending = [ends.prefill(memory) for memory in sources]
    found = [[end.wait_ready(60, dp_rank=group).endpoint for group in range(2)] for end in receiving]
    assert found == [[f"tcp://127.0.0.1:{base + 2 * group + rank}" for group in range(2)] for rank in range(2)]
    for number, prefill in enumerate(sending):
        for group, decode in enumerate(receiving):
            (sender,) = prefill.wait_ready(60, dp_rank=group)
            room, page = 10 + 2 * number + group, 3 + number
            session = decode.receivers[number].open(room, [page])
            leaving = sender.open(room)
            leaving.send(np.array([5]), start=0)
            leaving.finish()
            assert session.wait(60).pages == 1
    for memory in decodes:
        assert memory.faults({3: 5, 4: 5}) == []
    assert [sorted(prefill.groups) for prefill in sending] == [[0, 1], [0, 1]]
    assert [len(prefill.senders) for prefill in sending] == [2, 2]


def test_each_group_has_its_port_and_a_taken_one_is_a_problem(ends: Ends) -> None:
    with pytest.raises(kt.ArgumentError, match="no address that another host can connect to"):
        ends.decode(whole(ends.layout), host="0.0.0.0")
    with kt.DirectoryServer() as taken:  # any listener
        port = int(taken.endpoint.rpartition(":")[2])
        decode = ends.decode(whole(ends.layout), port=port)
        prefill = ends.prefill(whole(ends.layout))
        assert eventually(lambda: "cannot be bound" in str(decode.problem), 60)
        assert _told(decode, "cannot be bound")
    assert decode.wait_ready(60).endpoint == f"tcp://127.0.0.1:{port}"
    assert len(prefill.wait_ready(60)) == 1 and eventually(lambda: decode.problem is None)
    decode.close()
    with pytest.raises(kt.SessionStateError, match="closed"):
        decode.wait_ready(1)
    prefill.close()
    with pytest.raises(kt.SessionStateError, match="closed"):
        prefill.wait_ready(1)


def test_a_directory_that_raises_whatever_it_likes_is_a_problem_and_no_end(ends: Ends) -> None:
    class Moody(kt.Directory):
        mood: Exception | None = None

        def members(self, side: Side) -> tuple[kt.Member, ...]:
            if self.mood is not None:
                raise self.mood
            return super().members(side)

        def renew(self, generation: int) -> bool:
            if self.mood is not None:
                raise self.mood
            return super().renew(generation)

    moody = Moody()
    ends.directory = moody
    prefill = ends.prefill(whole(ends.layout))
    for mood in (OSError("too many open files"), RuntimeError("broken"), KeyError("absent")):
        moody.mood = mood
        assert eventually(lambda mood=mood: prefill.problem is mood)  # type: ignore[misc]
    registered = prefill._registration
    assert eventually(lambda: registered.problem is moody.mood)
    moody.mood = None
    decode = ends.decode(whole(ends.layout))
    assert len(prefill.wait_ready(60)) == 1 and decode.wait_ready(60).is_ready
    assert eventually(lambda: registered.problem is None and prefill.problem is None)
    moody.mood = OSError("again")
    assert eventually(lambda: decode.problem is moody.mood)


def test_an_end_that_cannot_begin_leaves_no_receiver_behind() -> None:
    layout, directory, engine = make_layout(), kt.Directory(), kt.create_engine("loopback")
    for group in (0, 1):
        directory.register(kt.Member(side="prefill", place=kt.Place(dp_rank=group, dp_size=2)))
    before = set(threading.enumerate())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
        with pytest.raises(ValueError, match=f"bind: .*({port - 1}|{port}).* cannot be bound"):  # another's, perhaps
            kt.DecodeEnd(whole(layout).manifest, engine, directory, port=port - 1)
    assert directory.members("decode") == () and set(threading.enumerate()) <= before
    engine.close()


@pytest.mark.parametrize("every", [0, -1, "1", math.inf])
def test_a_thread_that_looks_again_pauses(every: float) -> None:
    directory, engine = kt.Directory(), kt.create_engine("loopback")
    for kind in (kt.PrefillEnd, kt.DecodeEnd):
        with pytest.raises(kt.ArgumentError, match="every: expected "):
            kind(whole(make_layout()).manifest, engine, directory, every=every)
    with pytest.raises(kt.ArgumentError, match="every: expected "):
        kt.Registration(directory, kt.Member(side="prefill", place=kt.Place()), every=every)
    assert directory.members("prefill") == ()
    engine.close()


def test_a_registration_comes_back_after_it_was_forgotten() -> None:
    directory = kt.Directory()
    member = kt.Member(side="prefill", place=kt.Place())
    registration = kt.Registration(directory, member, every=0.01)
    first = registration.generation
    assert directory.remove(first)
    assert eventually(lambda: registration.generation > first and len(directory.members("prefill")) == 1, 60)
    assert registration.problem is None
    registration.close()
    registration.close()
    assert directory.members("prefill") == ()
    with pytest.raises(kt.PeerLost, match="did not answer"):
        kt.Registration(kt.DirectoryClient("tcp://127.0.0.1:9", timeout=0.1), member)


def test_the_service_says_why_it_does_not_start(tmp_path: Path) -> None:
    def start(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kv_transfer", "directory", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    short = tmp_path / "secret"
    short.write_text("short\n")
    with kt.DirectoryServer() as server:
        taken = start("--bind", server.endpoint)
    assert taken.returncode == 2 and "cannot be bound" in taken.stderr
    assert start("--secret-file", str(tmp_path / "none")).returncode == 2
    weak = start("--secret-file", str(short))
    assert weak.returncode == 2 and "secret" in weak.stderr
