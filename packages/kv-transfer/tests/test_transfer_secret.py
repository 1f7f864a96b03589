"""A shared secret: who has it is heard, who has none or another one is not, and neither learns it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from transfer_memory import RankMemory, make_layout, stages, whole

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

SECRET = "a secret of the deployment"
LAYOUT = make_layout(fingerprint="a-model-that-nobody-should-see")
PATIENT = kt.Timeouts(handshake=60.0)
SOON = 2.0  # seconds after which whoever is not heard gives up


@pytest.fixture
def memory() -> RankMemory:
    return whole(LAYOUT)


@pytest.fixture
def receiver(memory: RankMemory) -> Iterator[kt.Receiver]:
    with kt.Receiver(memory.manifest, LoopbackEngine(), prefill_ranks=1, timeouts=PATIENT, secret=SECRET) as receiver:
        yield receiver


def sender(receiver: kt.Receiver, secret: str | None) -> kt.Sender:
    (memory,) = stages(LAYOUT, 1)
    return kt.Sender(memory.manifest, LoopbackEngine(), endpoint=receiver.endpoint, timeouts=PATIENT, secret=secret)


def test_those_with_the_secret_agree(receiver: kt.Receiver) -> None:
    with sender(receiver, SECRET) as right:
        right.connect()
        receiver.wait_ready()
        assert receiver.members == (kt.Rank(),)


@pytest.mark.parametrize("secret", [None, "another secret of somebody"])
def test_others_are_not_heard_and_hold_nobody_up(receiver: kt.Receiver, secret: str | None) -> None:
    with sender(receiver, secret) as wrong:
        with pytest.raises((kt.PeerLost, kt.TransferTimeout)) as caught:
            wrong.connect(SOON)
        assert "secret" in str(caught.value) and SECRET not in str(caught.value)
        assert receiver.members == () and receiver.take_refusals() == ()
        with pytest.raises(kt.TransferTimeout, match="the same secret"):
            receiver.wait_ready(0.0)
        with sender(receiver, SECRET) as right:
            right.connect()
            receiver.wait_ready()


def test_a_receiver_without_a_secret_is_not_talked_to() -> None:
    with (
        kt.Receiver(whole(LAYOUT).manifest, LoopbackEngine(), prefill_ranks=1, timeouts=PATIENT) as receiver,
        sender(receiver, SECRET) as cautious,
        pytest.raises((kt.PeerLost, kt.TransferTimeout), match="secret"),
    ):
        cautious.connect(SOON)


def test_nothing_travels_in_the_clear(memory: RankMemory) -> None:
    """A relay between the two sees neither the secret nor the fingerprint that the manifest carries."""
    seen: list[bytes] = []
    with kt.Receiver(memory.manifest, LoopbackEngine(), prefill_ranks=1, timeouts=PATIENT, secret=SECRET) as receiver:
        host, port = receiver.endpoint.removeprefix("tcp://").split(":")
        relay = socket.create_server(("127.0.0.1", 0))

        def carry(source: socket.socket, target: socket.socket) -> None:
            """Until either side has gone; one that closes with bytes unread is seen as a reset."""
            with contextlib.suppress(ConnectionError):
                while data := source.recv(65536):
                    seen.append(data)
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            near, _ = relay.accept()
            with near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=carry, args=(far, near), daemon=True)
                back.start()
                carry(near, far)
                back.join(60)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        (own,) = stages(LAYOUT, 1)
        endpoint = f"tcp://127.0.0.1:{relay.getsockname()[1]}"
        with kt.Sender(own.manifest, LoopbackEngine(), endpoint=endpoint, timeouts=PATIENT, secret=SECRET) as right:
            right.connect()
            receiver.wait_ready()
        thread.join(60)
        relay.close()
    assert not thread.is_alive()
    everything = b"".join(seen)
    assert len(everything) > 500
    fingerprint = memory.manifest.layout.fingerprint.encode()
    assert fingerprint in memory.manifest.to_json().encode()
    assert SECRET.encode() not in everything and fingerprint not in everything and b"manifest" not in everything


def test_a_short_secret_and_a_wrong_endpoint_are_refused(memory: RankMemory) -> None:
    with pytest.raises(kt.ArgumentError, match="at least 16 characters, got 5") as caught:
        kt.Receiver(memory.manifest, LoopbackEngine(), prefill_ranks=1, secret="12345")
    assert "12345" not in str(caught.value)
    for endpoint in ("nonsense", "tcp://", "http://127.0.0.1:1", ""):
        with pytest.raises(kt.ArgumentError, match="endpoint"):
            kt.Sender(memory.manifest, LoopbackEngine(), endpoint=endpoint)
