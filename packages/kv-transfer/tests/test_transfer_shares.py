"""Context-parallel decode ranks: one prefill rank sends each of them its pages of a request."""

from __future__ import annotations

import kv_planner as kp
import pytest
from kv_planner.testing import Label, label_bytes
from transfer_image import Image
from transfer_pair import FAST

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("latent", layer_ids=[0, 1], dtype="uint8", total_heads=1, dims=3),
        kp.ComponentSpec("index_key", layer_ids=[1], dtype="uint8", total_heads=1, dims=2),
        kp.ComponentSpec("latent", "draft", layer_ids=[2], dtype="uint8", total_heads=1, dims=1),
    ],
    page_size=2,
    fingerprint="shared",
)


def _expected(own: Image, size: int, rank: int, source: list[int], destination: list[int]) -> dict[int, Label]:
    """Page k of the request lies on rank k % size, in page destination[k // size], or on all in the group's page."""
    found = {}
    for address, label in label_bytes(own.manifest).items():
        for k, page in enumerate(source):
            local, owner = destination[k // size], k % size
            for_all = label.part == "draft" or label.component == "index_key"
            if label.item == local * size + owner if for_all else owner == rank and label.item == local:
                found[address] = label._replace(item=page)
    return found


@pytest.mark.parametrize(("size", "tokens", "first"), [(2, 9, 0), (3, 8, 0), (2, 13, 2)])
def test_each_rank_gets_its_pages_and_nothing_else(size: int, tokens: int, first: int) -> None:
    prefill = Image(LAYOUT, range(3), items=16).fill()
    decode = [
        Image(LAYOUT, range(3), kp.Placement(dcp_rank=rank, dcp_size=size), items=24, padding=2) for rank in range(size)
    ]
    engines = [LoopbackEngine() for _ in range(size + 1)]
    receivers = [
        kt.Receiver(own.manifest, engine, prefill_ranks=1, timeouts=FAST)
        for own, engine in zip(decode, engines, strict=False)
    ]
    senders = [kt.Sender(prefill.manifest, engines[-1], endpoint=own.endpoint, timeouts=FAST) for own in receivers]
    count = -(-tokens // 2) - first
    source, destination = [9, 3, 5, 12, 7, 1, 14][:count], [4, 2, 6, 3][: -(-count // size)]
    sessions = []
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.connect()
        receiver.wait_ready()
        sessions.append(receiver.open(3, destination, tokens=tokens, first_page=first))
    for sender in senders:
        sending = sender.open(3)
        assert sending.pages == count
        sending.send(source[:2], start=first)
        sending.send(source[2:], start=first + 2)
        sending.finish()
    for rank, (session, own) in enumerate(zip(sessions, decode, strict=True)):
        expected = _expected(own, size, rank, source, destination)
        assert session.wait(5).nbytes == len(expected)
        assert own.faults(expected) == []
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.close()
        receiver.close()
    for engine in engines:
        engine.close()


def test_shares_need_tokens_whole_groups_and_enough_pages() -> None:
    engine = LoopbackEngine()
    own = Image(LAYOUT, range(3), kp.Placement(dcp_rank=1, dcp_size=2))
    with kt.Receiver(own.manifest, engine, prefill_ranks=1, timeouts=FAST) as receiver:
        for tokens, first in ((None, 0), (8, 1)):
            with pytest.raises(kt.ArgumentError, match="2 context-parallel ranks share a request"):
                receiver.open(0, [1], tokens=tokens, first_page=first)
        with pytest.raises(ValueError, match="need 2 pages on each of 2 context-parallel ranks, got 3"):
            receiver.open(0, [1, 2, 3], tokens=8)
    engine.close()


def test_a_prefill_side_with_shares_is_refused() -> None:
    engines = LoopbackEngine(), LoopbackEngine()
    shared = Image(LAYOUT, range(3), kp.Placement(dcp_rank=0, dcp_size=2))
    with (
        kt.Receiver(Image(LAYOUT, range(3)).manifest, engines[0], prefill_ranks=2, timeouts=FAST) as receiver,
        kt.Sender(shared.manifest, engines[1], endpoint=receiver.endpoint, timeouts=FAST) as sender,
        pytest.raises(kt.PeerRefused, match="dcp_size: prefill rank pp0 tp0 holds one of 2 shares") as caught,
    ):
        sender.connect()
    assert caught.value.code == "unsupported"
    for engine in engines:
        engine.close()
