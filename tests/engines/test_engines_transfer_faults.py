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
from engines_transfer import configured, free_port
from engines_transfer_fault_node import DELAY, Nodes
from engines_transfer_queue import queued, within
from engines_transfer_survivors import OPTIONS, Decode, Prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

MOMENTS = random.Random(9)
pytestmark = pytest.mark.timeout(300)  # the other process imports SGLang first


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
    before = set(CommonKVReceiver._socket_cache)
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
        assert set(CommonKVReceiver._socket_cache) <= before
    with start() as peer:
        here.serve(peer)
        assert len(here.manager.prefill_info_table) == 1


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
    manager = here.manager
    for _ in range(2):  # one killed in a request, the next one idle
        with start() as peer:
            here.serve(peer)
            within(5, lambda: len(manager.decode_kv_args_table) == 1, "the dead rank is forgotten")
        assert not manager.failed_sessions
        assert len(manager._peers) == len(manager._said) == 1
        assert len(manager._socket_cache) == len(manager._monitor_cache) == len(manager._socket_send_locks) == 1
