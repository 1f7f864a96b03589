"""Context-parallel decode ranks: one prefill rank sends each of them its pages of a request."""

from __future__ import annotations

from typing import Literal

import kv_planner as kp
import pytest
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


@pytest.mark.parametrize("interleave", ["page", "token"])
@pytest.mark.parametrize(("size", "tokens", "first"), [(1, 5, 1), (2, 9, 0), (3, 8, 0), (2, 13, 2), (4, 13, 4)])
def test_each_rank_gets_its_share_and_nothing_else(
    size: int, tokens: int, first: int, interleave: Literal["page", "token"]
) -> None:
    by_token = interleave == "token" and size > 1
    prefill = Image(LAYOUT, range(3), items=16).fill()
    places = [kp.Placement(dcp_rank=rank, dcp_size=size) for rank in range(size)]
    decode = [Image(LAYOUT, range(3), place, items=30, padding=0 if by_token else 2) for place in places]
    engines = [LoopbackEngine() for _ in range(size + 1)]
    receivers = [
        kt.Receiver(own.manifest, engine, prefill_ranks=1, timeouts=FAST, interleave=interleave)
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
    for session, own in zip(sessions, decode, strict=True):
        shared = tokens - first * LAYOUT.page_size if by_token else None
        expected = own.expected_share(source, destination, shared)
        assert session.wait(60).nbytes == len(expected)
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


def test_tokens_of_pages_that_do_not_hold_them_evenly_are_not_dealt_out() -> None:
    """Padding between pages, or entries that stand for several tokens: a named refusal on both sides."""
    compressed = kp.ModelLayout(
        [kp.ComponentSpec("latent_c4", layer_ids=[0], dtype="uint8", total_heads=1, dims=3, compression=4)],
        page_size=8,
        fingerprint="compressed",
    )
    for layout, layers, padding in ((LAYOUT, range(3), 2), (compressed, range(1), 0)):
        engines = LoopbackEngine(), LoopbackEngine()
        decode = Image(layout, layers, kp.Placement(dcp_rank=0, dcp_size=2), padding=padding)
        with (
            kt.Receiver(decode.manifest, engines[0], prefill_ranks=1, timeouts=FAST, interleave="token") as receiver,
            kt.Sender(Image(layout, layers).manifest, engines[1], endpoint=receiver.endpoint, timeouts=FAST) as sender,
            pytest.raises(kt.PeerRefused, match="tokens cannot be dealt out to context-parallel ranks") as caught,
        ):
            sender.connect()
        assert caught.value.code == "unsupported"
        for engine in engines:
            engine.close()


def test_a_window_of_shares_begins_at_a_whole_group_of_pages() -> None:
    """13 tokens in pages of 2, the last 3 from page 5 on: rounded down to page 4, so that ranks take whole turns."""
    prefill = Image(LAYOUT, range(3), items=16).fill()
    decode = [Image(LAYOUT, range(3), kp.Placement(dcp_rank=rank, dcp_size=2), items=24) for rank in range(2)]
    engines = [LoopbackEngine() for _ in range(3)]
    windows = {"main": 3}
    source = [9, 3, 5, 12, 7, 1, 14]
    receivers = [
        kt.Receiver(own.manifest, engine, prefill_ranks=1, timeouts=FAST, windows=windows)
        for own, engine in zip(decode, engines, strict=False)
    ]
    for own, receiver in zip(decode, receivers, strict=True):
        with kt.Sender(
            prefill.manifest, engines[-1], endpoint=receiver.endpoint, timeouts=FAST, windows=windows
        ) as sender:
            sender.connect()
            receiver.wait_ready()
            session = receiver.open(3, [4, 2], tokens=13)
            sending = sender.open(3)
            sending.send(source, start=0)
            sending.finish()
            session.wait(60)
        assert own.faults(own.expected_share(source[4:], [4, 2])) == []
        receiver.close()
    for engine in engines:
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
