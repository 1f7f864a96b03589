"""Whatever arrives on the wire is a message or a named error."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_schedules import run_words

from kv_transfer.config import Limits
from kv_transfer.errors import MessageTooLarge, ProtocolError, ProtocolVersionError
from kv_transfer.messages import (
    Abort,
    Aborted,
    Accepted,
    Agreed,
    Bye,
    DifferenceRecord,
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
    decode,
    encode,
)

MANIFESTS = {"full": GroupManifest(manifest="{}"), "window": GroupManifest(manifest="{}", window=4096)}
EXAMPLES: list[Message] = [
    Hello(engine="loopback", session="loopback:1", groups=MANIFESTS, process="7:a", parts=("target",)),
    Welcome(engine="mooncake", session="127.0.0.1:15000", groups=MANIFESTS, incarnation=1),
    Agreed(),
    Refusal(
        code=RefusalCode.LAYOUT,
        reason="differs",
        differences=(
            DifferenceRecord(field="page_size", local="64", remote="128", consequence="wrong slots", remedy="same"),
        ),
    ),
    Ready(
        ranks=2,
        sends=True,
        groups={"main": GroupSummary(layers=(("target", 0), ("draft", 61)), bytes_per_page=4096)},
    ),
    Offer(
        room=0,
        generation=1,
        groups={"full": GroupOffer(pages=(3, 1, 2), first_page=4), "conv": GroupOffer(pages=(), row=3)},
        tokens=300,
        on_failed_pages="recompute",
    ),
    Done(
        room=0,
        generation=1,
        nbytes=10,
        blocks=2,
        groups={"main": GroupDone(pages=3, layers=(("target", 0),), failed=((4, 6),))},
        metadata={"token": [1, None]},
    ),
    Aborted(room=2**63 - 1, generation=3, reason="too long"),
    Accepted(room=0, generation=1),
    Abort(room=0, generation=1, reason=""),
    Heartbeat(),
    Bye(reason="closed"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.type)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_examples_cover_every_message() -> None:
    from kv_transfer import messages

    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and "type" in getattr(kind, "model_fields", {})
    }
    assert {type(message) for message in EXAMPLES} == kinds


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_named_error(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError as error:
        assert str(error)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(message=st.sampled_from(EXAMPLES), key=st.integers(0, 7), value=_JSON, drop=st.booleans())
def test_a_message_with_one_field_changed_is_a_message_or_a_named_error(
    message: Message, key: int, value: object, drop: bool
) -> None:
    fields = json.loads(encode(message))
    name = sorted(fields)[key % len(fields)]
    if drop:
        del fields[name]
    else:
        fields[name] = value
    try:
        decode(json.dumps(fields).encode())
    except ProtocolError as error:
        assert str(error)


def test_words_with_faults_are_messages_or_named_errors() -> None:
    """A slice; a million run in `nox -s soak -- kv-transfer`."""
    ends = run_words(EXAMPLES, 20_000, 1)
    assert ends["named errors"] > 10_000 and ends["messages"] > 100


@pytest.mark.parametrize(
    "data",
    [
        b'{"v":1,"type":"heartbeat","extra":1}',
        b'{"v":1,"type":"offer","room":-1,"generation":1,"groups":{},"tokens":0}',
        b'{"v":1,"type":"offer","room":"0","generation":1,"groups":{},"tokens":0}',
        b'{"v":1,"type":"offer","room":0,"generation":0,"groups":{},"tokens":0}',
        b'{"v":1,"type":"offer","room":0,"generation":1,"groups":{"main":{"pages":[1.5]}},"tokens":0}',
        b'{"v":1,"type":"ready","ranks":true,"sends":true,"groups":{}}',
        b"[" * 100_000,
        b'{"v":1,"type":"bye","reason":"' + b"x" * 70_000 + b'"}',
        b"\xff\xfe",
        b"",
    ],
)
def test_malformed_messages_are_named(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed control message"):
        decode(data)


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolVersionError, match="local 1, remote 2"):
        decode(b'{"v":2,"type":"a word of the future","more":[]}')


def test_size_limit_holds_both_ways() -> None:
    limits = Limits(message_bytes=1 << 16)
    long = Done(room=0, generation=1, nbytes=0, blocks=0, groups={}, metadata={"text": "x" * (1 << 16)})
    with pytest.raises(MessageTooLarge, match="limit is 65536"):
        encode(long, limits)
    with pytest.raises(MessageTooLarge, match="limit is 65536"):
        decode(encode(long), limits)


def test_every_reason_fits_into_the_shortest_limit() -> None:
    worst = "\x01" * 4096
    for message in (Abort(room=0, generation=1, reason=worst), Aborted(room=0, generation=1, reason=worst)):
        encode(message, Limits(message_bytes=1 << 16))


def test_metadata_that_json_cannot_carry_is_refused() -> None:
    for value in (math.nan, math.inf, {1: 2}, b"bytes", object()):
        with pytest.raises(ValueError):
            encode(Done(room=0, generation=1, nbytes=0, blocks=0, groups={}, metadata={"a": value}))  # type: ignore[dict-item]
