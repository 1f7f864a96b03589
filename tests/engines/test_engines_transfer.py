"""SGLang's disaggregation, unchanged, over our manager: bootstrap, registration, rooms and `KVPoll`; bytes compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq
from engines_transfer import Cluster, Request, configured, free_port
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_sglang import MHA, MLA, SENTINEL, Side

FROM, TO = [3, 7, 8, 2, 9], [4, 5, 10, 1, 6]


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a cluster over an engine; its ports and threads end with the test."""
    made: list[Cluster] = []
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        engine, options = "loopback", "{}"

        def make(prefill: Sequence[Side], decode: Sequence[Side], *, mla: bool) -> Cluster:
            made.append(Cluster(arguments, port, prefill, decode, mla=mla))
            return made[-1]

        with configured(patch, port, engine, options) as arguments:
            yield make
            for cluster in made:
                cluster.close()


def stages_of(kinds: Any, cuts: Sequence[int], drafts: int = 0) -> list[Side]:
    sides = []
    for stage, layers in enumerate(cuts):
        start, last = sum(cuts[:stage]), stage == len(cuts) - 1
        side = Side(
            kinds, range(start, start + layers), hidden=sum(cuts), drafts=drafts if last else 0, pp=(stage, len(cuts))
        )
        side.args.draft_kv_layers = drafts
        sides.append(side)
    return sides


@pytest.mark.parametrize("kinds", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("cuts", [(3,), (2, 1)])
@pytest.mark.parametrize("drafts", [0, 1])
def test_a_request_goes_through(clusters: Any, kinds: Any, cuts: tuple[int, ...], drafts: int) -> None:
    """Stages, drafts and chunks; K, V, latents and index keys each where they belong; the first token's row."""
    sources, decode = stages_of(kinds, cuts, drafts), Side(kinds, range(3), drafts=drafts)
    cluster = clusters(sources, [decode], mla=kinds is MLA)
    for side in sources:
        side.fill(FROM)
        for number, rows in enumerate(side.aux):
            rows[1] = 40 + number
    request = Request(cluster, 17)
    request.offer(TO, aux=3)
    request.send(FROM, aux=1, chunks=[2])
    assert request.end() == ([KVPoll.Success] * len(cuts), [KVPoll.Success])
    decode.check(TO)
    for number, rows in enumerate(decode.aux):
        assert (rows[3] == 40 + number).all() and (rows[[0, 1, 2, 4]] == SENTINEL).all()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_tensor_parallel_ranks(clusters: Any, prefill: int, decode: int) -> None:
    sources = [Side(MHA, range(2), heads=4, tp=(rank, prefill)) for rank in range(prefill)]
    targets = [Side(MHA, range(2), heads=4, tp=(rank, decode)) for rank in range(decode)]
    cluster = clusters(sources, targets, mla=False)
    for side in sources:
        side.fill(FROM)
    request = Request(cluster, 3)
    request.offer(TO)
    request.send(FROM)
    assert request.end() == ([KVPoll.Success] * prefill, [KVPoll.Success] * decode)
    for side in targets:
        side.check(TO)


def test_many_requests_share_a_registration(clusters: Any) -> None:
    source, target = Side(MHA, range(2)), Side(MHA, range(2))
    cluster = clusters([source], [target], mla=False)
    for room in range(1, 9):
        source.fill(FROM)
        request = Request(cluster, room)
        request.offer(TO)
        request.send(FROM, chunks=[1, 2])
        assert request.end() == ([KVPoll.Success], [KVPoll.Success])
        target.check(TO)
        for memory in target.memory:
            memory[:] = SENTINEL
    assert len(cluster.prefill[0]._peers) == 1


def test_a_peer_that_does_not_fit_fails_its_rooms_with_the_reason(clusters: Any) -> None:
    """V of another width: SGLang registers it and writes V with its own length; here no byte moves."""
    source, target = Side(MHA, range(2)), Side((MHA[0], MHA[0].__class__("value", 8)), range(2))
    cluster = clusters([source], [target], mla=False)
    request = Request(cluster, 5)
    request.offer(TO)
    request.send(FROM)
    assert request.end() == ([KVPoll.Failed], [KVPoll.Failed])
    assert any("value/target.dims" in reason for reason in cluster.prefill[0].state_layout_rejections.values())
    target.check([])


def test_an_error_in_a_room_fails_that_room_alone(clusters: Any) -> None:
    """A-36: SGLang's worker ends at the first error, and its queue is served no more."""
    source, target = Side(MHA, range(2)), Side(MHA, range(2))
    cluster = clusters([source], [target], mla=False)
    source.fill(FROM)
    bad = Request(cluster, 8)
    bad.offer([4, 4, 4, 4, 4])  # every page onto one
    bad.send(FROM)
    assert bad.end() == ([KVPoll.Failed], [KVPoll.Failed])
    target.check([])
    good = Request(cluster, 9)
    good.offer(TO)
    good.send(FROM)
    assert good.end() == ([KVPoll.Success], [KVPoll.Success])
    target.check(TO)


def test_messages_that_are_none_are_dropped(clusters: Any) -> None:
    source, target = Side(MHA, range(2)), Side(MHA, range(2))
    cluster = clusters([source], [target], mla=False)
    manager = cluster.prefill[0]
    draw = np.random.default_rng(4)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = context.socket(zmq.PUSH)
    port.connect(f"tcp://127.0.0.1:{manager.rank_port}")
    for first in (b"None", b"7", b"what", b"\xff", b""):
        for frames in (0, 3, 9, 19, 20, 21):
            port.send_multipart([first, *(draw.bytes(int(draw.integers(0, 24))) for _ in range(frames))])
    source.fill(FROM)
    request = Request(cluster, 21)
    request.offer(TO)
    request.send(FROM)
    assert request.end() == ([KVPoll.Success], [KVPoll.Success])
    target.check(TO)
    port.close(linger=0)
    context.term()
