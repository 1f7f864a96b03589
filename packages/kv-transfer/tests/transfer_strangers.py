"""Peers that do not fit, words that are none, a taken port, a directory that is down: all are told why, in time.

Every kind comes while a pair serves requests, which go on byte for byte.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import kv_planner as kp
import pytest
import zmq
from test_transfer_messages import EXAMPLES
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import Pair

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.messages import Hello, Refusal, RefusalCode, decode, encode

QUICK = kt.Timeouts(
    handshake=20, offer=20, transfer=20, heartbeat_interval=0.1, peer_lost_after=20, dead_writer_grace=0.2, drain=1
)
LIMITS = kt.Limits(message_bytes=1 << 20)
BOUND = 15.0
UNHEARD = 1.5  # seconds that whoever has another secret waits for an answer


class Named(LoopbackEngine):
    """Another library."""

    @property
    def name(self) -> str:
        return "another"


def _rank(layout: kp.ModelLayout, stage: int = 0, count: int = 2) -> RankMemory:
    return stages(layout, count)[stage]


def _of_group(dp_rank: int) -> RankMemory:
    place = kp.Placement(pp_rank=0, pp_size=2, dp_rank=dp_rank, dp_size=2)
    return RankMemory(make_layout(), {("key", "target"): [0, 1], ("value", "target"): [0, 1]}, placement=place)


LAYOUTS: dict[str, kp.ModelLayout] = {
    "page_size": make_layout(page_size=8),
    "total_heads": make_layout(heads=4),
    "dims": make_layout(key_dims=16),
    "layer": make_layout(layers=6),
    "fingerprint": make_layout(fingerprint="model-b"),
    "draft": make_layout(draft=1),
}
MISFITS: dict[str, tuple[Callable[[str], kt.Sender], str]] = {
    "ranks": (
        lambda endpoint: kt.Sender(
            _rank(make_layout(), 2, 4).manifest, LoopbackEngine(), endpoint=endpoint, timeouts=QUICK
        ),
        "rank",
    ),
    "data-parallel group": (
        lambda endpoint: kt.Sender(_of_group(1).manifest, LoopbackEngine(), endpoint=endpoint, timeouts=QUICK),
        "dp",
    ),
    "engine": (
        lambda endpoint: kt.Sender(_rank(make_layout()).manifest, Named(), endpoint=endpoint, timeouts=QUICK),
        "another",
    ),
    "parts": (
        lambda endpoint: kt.Sender(
            _rank(make_layout()).manifest, LoopbackEngine(), endpoint=endpoint, parts=["target"], timeouts=QUICK
        ),
        "parts",
    ),
    "auxiliary rows": (
        lambda endpoint: kt.Sender(
            _rank(make_layout()).manifest,
            LoopbackEngine(),
            endpoint=endpoint,
            aux=[kt.AuxField("first_token", "int64")],
            timeouts=QUICK,
        ),
        "first_token",
    ),
    "secret": (
        lambda endpoint: kt.Sender(
            _rank(make_layout()).manifest, LoopbackEngine(), endpoint=endpoint, secret="s" * 40, timeouts=QUICK
        ),
        "secret",
    ),
    "rank taken": (
        lambda endpoint: kt.Sender(_rank(make_layout()).manifest, LoopbackEngine(), endpoint=endpoint, timeouts=QUICK),
        "connected already",
    ),
}


@contextlib.contextmanager
def serving(dice: random.Random) -> Iterator[Pair]:
    """A pair that serves rooms all the time; every byte is checked, and at least one room arrives meanwhile."""
    pair = Pair(stages(make_layout(), 2), whole(make_layout()), limits=LIMITS)
    stop, served = threading.Event(), 0
    failures: list[BaseException] = []

    def serve() -> None:
        nonlocal served
        try:
            while not stop.is_set() or not served:
                pages = dice.sample(range(1, 16), 3)
                session = pair.receiver.open(served, pages)
                moved = {page: dice.randrange(1, 16) for page in pages}
                for sender in pair.senders:
                    sending = sender.open(served)
                    sending.send([moved[page] for page in pages], start=0)
                    sending.finish()
                session.wait(60)
                assert pair.decode.faults(moved) == []
                pair.decode.wipe(pages)
                served += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield pair
    finally:
        stop.set()
        thread.join()
        pair.close()
    if failures:
        raise failures[0]
    assert served


def misfits(pair: Pair) -> int:
    """Each kind of a peer that does not fit, at a receiver that serves others."""
    for kind, (make, words) in MISFITS.items():
        _refused(make(pair.receiver.endpoint), kind, words)
    later_version(pair)
    return len(MISFITS) + 1


def later_version(pair: Pair) -> None:
    """A peer of the next protocol is answered with both versions."""
    hello = next(encode(message) for message in EXAMPLES if isinstance(message, Hello))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(pair.receiver.endpoint)
        socket.send(hello.replace(b'"v":1', b'"v":2', 1))
        assert socket.poll(int(1000 * BOUND))
        answer = decode(socket.recv())
    assert isinstance(answer, Refusal) and answer.code is RefusalCode.VERSION, answer
    assert re.search(r"\b1\b.*\b2\b|\b2\b.*\b1\b", answer.reason), answer


def other_layouts() -> int:
    """Both sides are told what differs, as often as it comes; the right ranks are served after all of them."""
    engine = LoopbackEngine()
    memory, sources = whole(make_layout()), stages(make_layout(), 2)
    with (
        kt.Receiver(memory.manifest, engine, prefill_ranks=2, timeouts=QUICK) as receiver,
        contextlib.ExitStack() as keep,
    ):
        for words, layout in LAYOUTS.items():
            other = LoopbackEngine()
            _refused(kt.Sender(_rank(layout).manifest, other, endpoint=receiver.endpoint, timeouts=QUICK), words, words)
            with pytest.raises(kt.PeerRefused, match=words):
                receiver.wait_ready()
            other.close()
        senders = [
            keep.enter_context(kt.Sender(own.manifest, LoopbackEngine(), endpoint=receiver.endpoint, timeouts=QUICK))
            for own in sources
        ]
        for sender in senders:
            sender.connect()
        receiver.wait_ready()
        session = receiver.open(0, [4])
        for sender in senders:
            sending = sender.open(0)
            sending.send([7], start=0)
            sending.finish()
        session.wait(60)
        assert memory.faults({4: 7}) == []
    engine.close()
    return len(LAYOUTS)


def _refused(sender: kt.Sender, kind: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises((kt.PeerRefused, kt.TransferTimeout, kt.PeerLost)) as caught:
        sender.connect(UNHEARD if kind == "secret" else None)
    assert re.search(words, str(caught.value)), (kind, str(caught.value))
    assert time.monotonic() - began < BOUND, kind
    sender.close()


def noise(pair: Pair, count: int, seed: int) -> int:
    """Words of any bytes and length, right words at the wrong time, and words that are longer than allowed."""
    dice = random.Random(seed)
    right = [encode(message) for message in EXAMPLES]
    context = zmq.Context()
    sent = 0
    while sent < count:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(pair.receiver.endpoint)
        for _ in range(min(200, count - sent)):
            data = bytearray(dice.choice(right))
            kind = dice.randrange(5)
            if kind == 0:
                data = bytearray(dice.randbytes(dice.randrange(2000)))
            elif kind == 1:
                del data[dice.randrange(len(data)) :]
            elif kind == 2:
                data[dice.randrange(len(data))] = dice.randrange(256)
            with contextlib.suppress(zmq.Again):  # once it was sent too much, nobody listens
                if kind == 3 and dice.random() < 0.02:
                    data = bytearray(LIMITS.message_bytes + 1)
                parts = [bytes(data)] * (2 if kind == 4 else 1)
                socket.send_multipart(parts, zmq.NOBLOCK)
            sent += 1
        socket.close()
    context.term()
    return sent


def taken_port(pair: Pair) -> None:
    """The second receiver on a port, and the second directory, are told at once."""
    layout, engine = make_layout(), LoopbackEngine()
    with pytest.raises(ValueError, match="cannot be bound"):
        kt.Receiver(whole(layout).manifest, engine, bind=pair.receiver.endpoint, prefill_ranks=1, timeouts=QUICK)
    with pytest.raises(ValueError, match="cannot be bound"):
        kt.DirectoryServer(bind=pair.receiver.endpoint)
    engine.close()


def directory_down() -> None:
    """Whoever asks a directory that is gone is told so in time, and is served again when it is back."""
    member = kt.Member(side="prefill", place=kt.Place(), endpoint="tcp://127.0.0.1:1")
    server = kt.DirectoryServer()
    endpoint = server.endpoint
    client, hasty = kt.DirectoryClient(endpoint, timeout=60.0), kt.DirectoryClient(endpoint, timeout=1.0)
    client.register(member)
    server.close()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(kt.PeerLost, match="directory"):
            hasty.register(member)
        assert time.monotonic() - began < BOUND
    with kt.DirectoryServer(bind=endpoint):
        generation = client.register(member)
        assert [found.generation for found in client.members("prefill")] == [generation]
