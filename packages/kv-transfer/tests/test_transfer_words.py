"""The cores by themselves: late words, dead writers, and words in any order."""

from __future__ import annotations

import kv_planner as kp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_memory import RankMemory, make_layout, stages, whole

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.groups import Groups
from kv_transfer.messages import (
    Abort,
    Aborted,
    Accepted,
    Agreed,
    Bye,
    Done,
    GroupDone,
    GroupManifest,
    GroupOffer,
    GroupSummary,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Ready,
    Refusal,
    RefusalCode,
    Welcome,
    encode,
)
from kv_transfer.process import process_name
from kv_transfer.receiver_core import ReceiverCore
from kv_transfer.sender_core import SenderCore
from kv_transfer.sender_offers import Offers
from kv_transfer.states import SenderPhase
from kv_transfer.terms import Terms

LAYERS: tuple[tuple[kp.Part, int], ...] = tuple(("target", layer) for layer in range(4))


def manifests(memory: RankMemory) -> dict[str, GroupManifest]:
    return {"main": GroupManifest(manifest=memory.manifest.to_json())}


def offered(*pages: int) -> dict[str, GroupOffer]:
    return {"main": GroupOffer(pages=pages)}


def done(
    pages: int, layers: tuple[tuple[kp.Part, int], ...], failed: tuple[tuple[int, int], ...] = ()
) -> dict[str, GroupDone]:
    return {"main": GroupDone(pages=pages, layers=layers, failed=failed)}


FAST = kt.Timeouts(handshake=5, heartbeat_interval=0.05, peer_lost_after=1.0, dead_writer_grace=0.2, drain=1)


def test_late_words_of_an_old_generation_are_dropped() -> None:
    layout = make_layout()
    memory = whole(layout)
    core = ReceiverCore(Groups.of(memory.manifest), Terms("loopback", "x"), 1, FAST, kt.Limits())
    hello = Hello(engine="loopback", session="y", groups=manifests(stages(layout, 1)[0]))
    core.receive(b"peer", encode(hello), 0.0)
    core.receive(b"peer", encode(Agreed()), 0.0)
    old = core.open_room(0, offered(1), 4, 0.0, 9.0)
    core.receive(b"peer", encode(Aborted(room=0, generation=1, reason="first")), 0.0)
    assert old.is_terminal
    new = core.open_room(0, offered(1), 4, 0.0, 9.0)
    for message in (
        Aborted(room=0, generation=1, reason="again"),
        Done(room=0, generation=1, nbytes=0, blocks=0, groups=done(0, ()), metadata={}),
        Aborted(room=5, generation=1, reason="unknown room"),
    ):
        core.receive(b"peer", encode(message), 0.0)
    assert core.late_messages == 3
    assert new.state is kt.ReceiverState.OPEN
    core.receive(b"peer", encode(Done(room=0, generation=2, nbytes=1, blocks=1, groups=done(1, ()), metadata={})), 0.0)
    assert isinstance(new.error, kt.ProtocolError)
    assert "layers" in str(new.error)


def test_late_words_to_a_sender_are_dropped() -> None:
    """An open room hears words of its own generation only: neither an older abort nor an older acceptance ends it."""
    memory = stages(make_layout(), 1)[0]
    engine = LoopbackEngine()
    for entry in memory.manifest.entries:
        engine.register(entry.address, entry.nbytes)
    core = SenderCore(Groups.of(memory.manifest), engine, FAST, kt.Limits(), 0.0)
    greeting = Welcome(
        engine="loopback", session="y", groups=manifests(whole(make_layout())), incarnation=1, process=process_name()
    )
    ready = Ready(ranks=1, sends=True, groups={"main": GroupSummary(layers=LAYERS, bytes_per_page=832)})
    begin: list[Message] = [greeting, ready, Offer(room=0, generation=4, groups=offered(1), tokens=4)]
    late: list[Message] = [Abort(room=0, generation=3, reason="an earlier use"), Accepted(room=0, generation=3)]
    for word in begin:
        core.receive(encode(word), 0.0)
    room = core.open_room(0, 0.0)
    assert room is not None and room.generation == 4
    for state in (kt.SenderState.SENDING, kt.SenderState.DRAINING, kt.SenderState.DONE_SENT):
        if state is not room.state:
            room._machine.to(state)
        for word in late:
            core.receive(encode(word), 0.0)
        assert room.state is state and room.error is None
    assert core.late_messages == 5  # the first abort is news: the end of a room that was not offered
    core.receive(encode(Accepted(room=0, generation=4)), 0.0)
    assert room.state.value == "finished"
    engine.close()


def test_a_generation_that_is_forgotten_is_late() -> None:
    """A sender that remembers two generations takes none for new that is as old as one that it forgot."""
    offers = Offers(remembered=2)
    assert [offers.is_news(generation) for generation in (1, 2, 3, 4)] == [True] * 4
    assert [offers.is_news(generation) for generation in (4, 3, 2, 1)] == [False] * 4
    assert offers.is_news(5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nbytes": 1}, "it sent 1 bytes, its route holds 1664"),
        ({"groups": done(1, LAYERS)}, "it sent 1 pages, 2 were offered"),
        ({"groups": done(2, (*LAYERS[:3], LAYERS[2]))}, "it sent layers"),
        ({"groups": done(2, LAYERS) | {"other": GroupDone(pages=0, layers=())}}, "it sent groups"),
        ({"groups": done(2, LAYERS, failed=((0, 1),))}, "could not send all pages, and this receiver does not compute"),
        ({"groups": done(2, LAYERS, failed=((1, 3),))}, "could not send pages [1, 3), which were not offered"),
    ],
)
def test_a_done_that_covers_something_else_is_not_believed(change: dict[str, object], text: str) -> None:
    layout = make_layout()
    core = ReceiverCore(Groups.of(whole(layout).manifest), Terms("loopback", "x"), 1, FAST, kt.Limits())
    hello = Hello(engine="loopback", session="y", groups=manifests(stages(layout, 1)[0]))
    core.receive(b"peer", encode(hello), 0.0)
    core.receive(b"peer", encode(Agreed()), 0.0)
    right = Done(room=0, generation=1, nbytes=1664, blocks=1, groups=done(2, LAYERS), metadata={})
    wrong = core.open_room(0, offered(1, 2), 8, 0.0, 9.0)
    core.receive(b"peer", encode(right.model_copy(update=change)), 0.0)
    assert isinstance(wrong.error, kt.ProtocolError)
    assert text in str(wrong.error)
    assert wrong.pages_released
    good = core.open_room(0, offered(1, 2), 8, 0.0, 9.0)
    core.receive(b"peer", encode(right.model_copy(update={"generation": 2})), 0.0)
    assert good.result is not None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"token": "AAAA"}, "auxiliary row 'token' has 3 bytes, not 8"),
        ({"token": "AAAAAAAAAAA"}, "auxiliary row 'token' is not base64"),
        ({"tokens": "AAAAAAAAAAA="}, "auxiliary rows ['tokens'] came, ['token'] are declared"),
        ({}, "none brought token"),
    ],
)
def test_rows_that_were_not_declared_so_end_the_room(rows: dict[str, str], text: str) -> None:
    layout, aux = make_layout(), (kt.AuxField("token", "int64"),)
    core = ReceiverCore(Groups.of(whole(layout).manifest), Terms("loopback", "x", aux=aux), 1, FAST, kt.Limits())
    hello = Hello(engine="loopback", session="y", groups=manifests(stages(layout, 1)[0]), aux=(("token", "int64", 1),))
    core.receive(b"peer", encode(hello), 0.0)
    core.receive(b"peer", encode(Agreed()), 0.0)
    right = Done(
        room=0, generation=1, nbytes=832, blocks=1, groups=done(1, LAYERS), metadata={}, rows={"token": "AAAAAAAAAAA="}
    )
    wrong = core.open_room(0, offered(1), 4, 0.0, 9.0)
    core.receive(b"peer", encode(right.model_copy(update={"rows": rows})), 0.0)
    assert isinstance(wrong.error, kt.ProtocolError) and text in str(wrong.error)
    good = core.open_room(0, offered(1), 4, 0.0, 9.0)
    core.receive(b"peer", encode(right.model_copy(update={"generation": 2})), 0.0)
    assert good.result is not None and good.result.rows == {"token": bytes(8)}


def test_a_dead_writer_holds_its_pages_for_the_grace() -> None:
    layout = make_layout()
    core = ReceiverCore(Groups.of(whole(layout).manifest), Terms("loopback", "x"), 1, FAST, kt.Limits())
    hello = Hello(engine="loopback", session="y", groups=manifests(stages(layout, 1)[0]))
    core.receive(b"peer", encode(hello), 0.0)
    core.receive(b"peer", encode(Agreed()), 0.0)
    room = core.open_room(0, offered(1), 4, 0.0, 9.0)
    core.unreachable(b"peer", 0.1)
    assert isinstance(room.error, kt.PeerLost)
    core.tick(0.29)
    assert not room.pages_released
    core.tick(0.31)
    assert room.pages_released


_WORDS: list[Message] = [
    Hello(engine="loopback", session="y", groups=manifests(stages(make_layout(), 1)[0])),
    Welcome(
        engine="loopback",
        session="y",
        groups=manifests(whole(make_layout())),
        incarnation=1,
        process=process_name(),
    ),
    Agreed(),
    Ready(ranks=1, sends=True, groups={"main": GroupSummary(layers=LAYERS, bytes_per_page=832)}),
    Ready(ranks=1, sends=True, groups={"main": GroupSummary(layers=LAYERS[:1], bytes_per_page=208)}),
    Ready(ranks=1, sends=True, groups={}),
    Offer(room=0, generation=1, groups=offered(1), tokens=4),
    Offer(room=0, generation=2, groups=offered(2**40, 0), tokens=8),
    Offer(room=0, generation=3, groups=offered(1, 2), tokens=4),
    Offer(room=0, generation=4, groups={"other": GroupOffer(pages=(1,))}, tokens=4),
    Done(room=0, generation=1, nbytes=0, blocks=0, groups=done(1, ()), metadata={}),
    Aborted(room=0, generation=1, reason=""),
    Accepted(room=0, generation=1),
    Abort(room=0, generation=1, reason=""),
    Heartbeat(),
    Refusal(code=RefusalCode.LAYOUT, reason="no"),
    Bye(reason=""),
]
_FRAMES = [*map(encode, _WORDS), b"", b"{}", b"\xff"]
_SCRIPT = st.lists(st.integers(0, len(_FRAMES) - 1), max_size=12)


@settings(deadline=None)
@given(script=_SCRIPT, second=_SCRIPT)
def test_no_order_of_words_breaks_a_receiver(script: list[int], second: list[int]) -> None:
    core = ReceiverCore(Groups.of(whole(make_layout()).manifest), Terms("loopback", "x"), 1, FAST, kt.Limits())
    for index, word in enumerate(script):
        core.receive(b"first", _FRAMES[word], index * 0.01)
        if core.is_ready and 0 not in core.rooms:
            core.open_room(0, offered(1), 4, index * 0.01, 1.0)
        for other in second[index : index + 1]:
            core.receive(b"second", _FRAMES[other], index * 0.01)
        core.tick(index * 0.01)
        core.outbox.clear()
    core.unreachable(b"first", 1.0)
    core.unreachable(b"second", 1.0)
    for now in (1.0, 2.0, 3.0):
        core.tick(now)
    assert not core.rooms
    assert core.members == ()


@settings(deadline=None)
@given(script=_SCRIPT)
def test_no_order_of_words_breaks_a_sender(script: list[int]) -> None:
    memory = stages(make_layout(), 1)[0]
    engine = LoopbackEngine()
    for entry in memory.manifest.entries:
        engine.register(entry.address, entry.nbytes)
    core = SenderCore(Groups.of(memory.manifest), engine, FAST, kt.Limits(), 0.0)
    for index, word in enumerate(script):
        core.receive(_FRAMES[word], index * 0.01)
        core.tick(index * 0.01)
        if core.phase is SenderPhase.READY and 0 not in core.rooms:
            try:
                core.open_room(0, index * 0.01)
            except kt.TransferError as error:
                assert str(error)
        core.step(index * 0.01)
    core.disconnected("the script ends")
    core.step(1.0)
    assert not core.rooms
    engine.close()
