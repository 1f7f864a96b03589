"""Groups of pages in one end: full attention beside a sliding window, compressed pools, kinds of states.

Long because all of them go through one pair of ends, which is made here once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import kv_planner as kp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_image import Image, side
from transfer_pair import FAST

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.groups import Groups
from kv_transfer.spans import request_span

PAGE, WINDOW = 4, 6
Rank = dict[str, Image]


def spec(name: kp.Component, ids: list[int], dims: int, part: kp.Part = "target", **more: object) -> kp.ComponentSpec:
    known: dict[str, object] = {"total_heads": 1, **more}
    return kp.ComponentSpec(name, part, layer_ids=ids, dtype="uint8", dims=dims, **known)  # type: ignore[arg-type]


def layout(*specs: kp.ComponentSpec, page_size: int = PAGE) -> kp.ModelLayout:
    return kp.ModelLayout(specs, page_size=page_size, fingerprint="groups")


FULL = layout(spec("key", [0, 2], 3, total_heads=2), spec("value", [0, 2], 2, total_heads=2))
WINDOWED = layout(
    spec("key", [1, 3], 2, total_heads=4),
    spec("value", [1, 3], 1, total_heads=4),
    spec("key", [4], 2, "draft", total_heads=4),
)
HYBRID = {"full": FULL, "window": WINDOWED}


def ranks(
    layouts: Mapping[str, kp.ModelLayout], layers: int, pp: int, tp: int, draft: int = 0, padding: int = 0
) -> list[Rank]:
    """All ranks of a side, each with an image for every group."""
    ids = range(layers, layers + draft)
    sides = {name: side(own, layers, pp, tp, draft=ids, items=14, padding=padding) for name, own in layouts.items()}
    return [{name: images[index] for name, images in sides.items()} for index in range(pp * tp)]


def manifests(rank: Rank) -> dict[str, kp.RankManifest]:
    return {name: own.manifest for name, own in rank.items()}


class Sides:
    """Ranks with groups, every prefill rank connected to every decode rank."""

    def __init__(self, prefill: list[Rank], decode: list[Rank], windows: Mapping[str, int] | None = None) -> None:
        self.prefill, self.decode = prefill, decode
        for rank in prefill:
            for image in rank.values():
                image.fill()
        self.engines = [LoopbackEngine(blocks_per_poll=9, max_entries_per_batch=4) for _ in (*prefill, *decode)]
        engines = iter(self.engines)
        self.receivers = [
            kt.Receiver(manifests(own), next(engines), prefill_ranks=len(prefill), timeouts=FAST, windows=windows)
            for own in decode
        ]
        self.senders = []
        for own in prefill:
            engine = next(engines)
            for receiver in self.receivers:
                sender = kt.Sender(manifests(own), engine, endpoint=receiver.endpoint, timeouts=FAST, windows=windows)
                self.senders.append(sender)
                sender.connect()
        for receiver in self.receivers:
            receiver.wait_ready()

    def close(self) -> None:
        ends: list[kt.Sender | kt.Receiver | LoopbackEngine] = [*self.senders, *self.receivers, *self.engines]
        for own in ends:
            own.close()

    def faults(
        self, pages: Mapping[str, Mapping[int, int]], rows: Mapping[str, Mapping[int, int]] | None = None
    ) -> list[str]:
        return [
            f"{name}: {fault}"
            for rank in self.decode
            for name, own in rank.items()
            for fault in own.faults(own.expected(pages.get(name, {}), (rows or {}).get(name)))
        ]


@pytest.fixture
def keep() -> Iterator[Callable[[Sides], Sides]]:
    made: list[Sides] = []

    def take(own: Sides) -> Sides:
        made.append(own)
        return own

    yield take
    for own in made:
        own.close()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(("first", "pp", "tp", "tp_decode"), [(0, 1, 1, 1), (1, 2, 2, 1), (0, 1, 1, 2), (4, 2, 1, 4)])
def test_a_window_sends_only_the_pages_of_the_prompts_end(
    keep: Callable[[Sides], Sides], first: int, pp: int, tp: int, tp_decode: int, layerwise: bool
) -> None:
    """17 tokens in 5 pages of 4: the last 6 begin in page 2. Window pages that left prefill have the id 0."""
    prefill, decode = ranks(HYBRID, 4, pp, tp, draft=1), ranks(HYBRID, 4, 1, tp_decode, draft=1, padding=3)
    sides = keep(Sides(prefill, decode, {"window": WINDOW}))
    source = {"full": [7, 3, 12, 5, 9], "window": [0, 8, 2, 11, 4]}
    places = {"full": [1, 2, 3, 4, 5][first:], "window": [9, 6, 13][max(0, first - 2) :]}
    sessions = []
    for receiver in sides.receivers:
        spans = receiver.spans(17, first)
        assert (spans["full"].first, spans["window"].first) == (first, max(first, 2))
        assert {name: own.places for name, own in spans.items()} == {name: len(own) for name, own in places.items()}
        sessions.append(receiver.open(0, places, tokens=17, first_page=first))
    for sender in sides.senders:
        sending = sender.open(0)
        if sending.generation == 0:  # nothing is awaited of this rank
            sending.finish()
            continue
        assert (sending.first_page, sending.pages) == (first, 5 - first)
        marks = kt.LayerMarks()
        for start, stop in ((first, 3), (max(first, 3), 5)):
            chunk = {name: own[start:stop] for name, own in source.items()}
            sending.send(chunk, start=start, ready=marks if layerwise else None)
        marks.mark(range(4))
        marks.mark(4, "draft")
        sending.finish()
    moved = {name: dict(zip(own, source[name][-len(own) :], strict=True)) for name, own in places.items()}
    results = [session.wait(60) for session in sessions]
    assert sides.faults(moved) == []
    assert {own.pages for own in results} == {len(places["full"]) + len(places["window"])}


def test_a_window_is_trimmed_to_the_prompt_before_it_is_clipped_c04(keep: Callable[[Sides], Sides]) -> None:
    """129 tokens in pages of 128, 4 pages at prefill: the first 2 hold the window's tokens, the others nothing."""
    wide = {"window": layout(spec("latent", [0], 1), page_size=128)}
    sides = keep(Sides(ranks(wide, 1, 1, 1), ranks(wide, 1, 1, 1), {"window": 256}))
    session = sides.receivers[0].open(0, {"window": [3, 4]}, tokens=129)
    sending = sides.senders[0].open(0)
    with pytest.raises(kt.CoverageError, match=r"pages \[0, 4\) of the request, .* offers pages \[0, 2\)"):
        sending.send({"window": [10, 11, 12, 13]}, start=0)
    sending.send({"window": [10, 11]}, start=0)
    sending.finish()
    session.wait(60)
    assert sides.faults({"window": {3: 10, 4: 11}}) == []


def test_prefix_pages_of_one_group_do_not_stand_for_another(keep: Callable[[Sides], Sides]) -> None:
    """Decode has 2 full pages of the prefix, and none of the window's: the groups begin at pages of their own."""
    sides = keep(Sides(ranks(HYBRID, 4, 1, 1, draft=1), ranks(HYBRID, 4, 1, 1, draft=1), {"window": 2 * PAGE}))
    source = {"full": [5, 6, 7], "window": [2, 3, 4]}
    session = sides.receivers[0].open(0, {"full": [9], "window": [1, 8]}, tokens=12, first_page={"full": 2})
    sending = sides.senders[0].open(0)
    assert {name: (own.first, own.pages) for name, own in sending.spans.items()} == {"full": (2, 1), "window": (1, 2)}
    sending.send({"window": source["window"]}, start=0)
    sending.send({"full": source["full"][2:]}, start={"full": 2})
    sending.finish()
    session.wait(60)
    assert sides.faults({"full": {9: 7}, "window": {1: 3, 8: 4}}) == []


def test_what_was_not_sent_of_a_group_is_named(keep: Callable[[Sides], Sides]) -> None:
    sides = keep(Sides(ranks(HYBRID, 4, 1, 1, draft=1), ranks(HYBRID, 4, 1, 1, draft=1), {"window": WINDOW}))
    session = sides.receivers[0].open(0, {"full": [9, 8], "window": [1, 8]}, tokens=8)
    sending = sides.senders[0].open(0)
    sending.send({"full": [3, 4]}, start=0)
    with pytest.raises(kt.CoverageError, match="group 'window': target layer 1, page 0 of the request was never sent"):
        sending.finish()
    with pytest.raises(kt.CoverageError, match="group 'full': target layer 0, page 0 of the request was sent already"):
        sending.send({"window": [5, 6], "full": [3, 4]}, start=0)
    sending.send({"window": [5, 6]}, start=0)  # the refused call took nothing
    sending.finish()
    session.wait(60)
    assert sides.faults({"full": {9: 3, 8: 4}, "window": {1: 5, 8: 6}}) == []


def test_a_page_of_one_group_is_not_held_in_another(keep: Callable[[Sides], Sides]) -> None:
    sides = keep(Sides(ranks(HYBRID, 4, 1, 1, draft=1), ranks(HYBRID, 4, 1, 1, draft=1), {"window": WINDOW}))
    receiver = sides.receivers[0]
    first = receiver.open(0, {"full": [1], "window": [2]}, tokens=4)
    receiver.open(1, {"full": [2], "window": [1]}, tokens=4)
    with pytest.raises(kt.PageHeld, match=r"page 2 of group 'window' is held by room 0"):
        receiver.open(2, {"full": [3], "window": [2]}, tokens=4)
    assert receiver.open(3, {"full": [3], "window": [3]}, tokens=4).room == 3  # the refused call took nothing
    first.abort("changed its mind")
    assert first.failed_pages == {"full": (1,), "window": (2,)}


def test_impossible_offers_are_refused_by_name(keep: Callable[[Sides], Sides]) -> None:
    sides = keep(Sides(ranks(HYBRID, 4, 1, 1, draft=1), ranks(HYBRID, 4, 1, 1, draft=1), {"window": WINDOW}))
    receiver = sides.receivers[0]
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (kt.ArgumentError, r"the groups \['full', 'window'\] have page ids of their own, got one list",
         lambda: receiver.open(0, [1, 2], tokens=8)),
        (kt.ArgumentError, r"\['c4'\] are none of the groups", lambda: receiver.open(0, {"c4": [1]}, tokens=4)),
        (kt.ArgumentError, "tokens: needed", lambda: receiver.open(0, {"full": [1], "window": [1]})),
        (kt.ArgumentError, r"first_page: \['c4'\] are none of the groups", lambda: receiver.spans(4, {"c4": 1})),
        (ValueError, "group 'window': 17 tokens need 5 pages of 4, of which 3 hold the last 6 tokens, got 5",
         lambda: receiver.open(0, {"full": [1, 2, 3, 4, 5], "window": [1, 2, 3, 4, 5]}, tokens=17)),
        (ValueError, "group 'full': 4 tokens need 1 pages of 4, got 0",
         lambda: receiver.open(0, {"window": [1]}, tokens=4)),
        (ValueError, "group 'window': page 14 is outside",
         lambda: receiver.open(0, {"full": [1], "window": [14]}, tokens=4)),
    ]  # fmt: skip
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    receiver.open(0, {"full": [1], "window": [2]}, tokens=4)
    sending = sides.senders[0].open(0)
    with pytest.raises(kt.ArgumentError, match="have page ids of their own, got one list"):
        sending.send([1], start=0)
    with pytest.raises(kt.ArgumentError, match=r"start: nothing for groups \['full'\]"):
        sending.send({"full": [1], "window": [1]}, start={"window": 0})
    with pytest.raises(kt.CoverageError, match=r"pages \[0, 2\) of the request"):
        sending.send({"window": [1, 2]}, start=0)
    with pytest.raises(ValueError, match=r"layer_ids: \[1\] are not on this rank's route, which has \[0, 2\]"):
        sending.send({"full": [1]}, start=0, layer_ids=[1])


def _ends(prefill: kt.Manifests, decode: kt.Manifests, there: dict[str, int], here: dict[str, int]) -> kt.PeerRefused:
    """How the sender is refused; the receiver must say the same with sides turned."""
    engines = LoopbackEngine(), LoopbackEngine()
    try:
        with (
            kt.Receiver(decode, engines[0], prefill_ranks=1, timeouts=FAST, windows=here) as receiver,
            kt.Sender(prefill, engines[1], endpoint=receiver.endpoint, timeouts=FAST, windows=there) as sender,
        ):
            with pytest.raises(kt.PeerRefused) as at_sender:
                sender.connect()
            with pytest.raises(kt.PeerRefused) as at_receiver:
                receiver.wait_ready()
            assert [own.swapped() for own in at_sender.value.differences] == list(at_receiver.value.differences)
            return at_sender.value
    finally:
        for engine in engines:
            engine.close()


def test_other_groups_and_windows_are_differences() -> None:
    whole = {name: Image(own, range(5)).manifest for name, own in HYBRID.items()}
    error = _ends(whole, whole, {"window": 6}, {"window": 8, "full": 9})
    assert [(own.field, own.local, own.remote) for own in error.differences] == [
        ("group 'full'.window", "none", "9 tokens"),
        ("group 'window'.window", "6 tokens", "8 tokens"),
    ]
    error = _ends(whole, {"full": whole["full"]}, {}, {})
    assert [(own.field, own.local, own.remote) for own in error.differences] == [
        ("group 'window'", "present", "absent")
    ]
    error = _ends(whole["full"], whole, {}, {})
    assert {(own.field, own.local) for own in error.differences} == {
        ("group 'main'", "present"), ("group 'full'", "absent"), ("group 'window'", "absent"),
    }  # fmt: skip
    thin = layout(spec("key", [1, 3], 2, total_heads=4), spec("value", [1, 3], 2, total_heads=4))
    other = {"full": whole["full"], "window": Image(thin, range(5)).manifest}
    error = _ends(whole, other, {}, {})
    assert [own.field for own in error.differences] == [
        "group 'window': value/target.dims",
        "group 'window': key/draft",
    ]


def test_groups_are_checked_when_an_end_is_made() -> None:
    own = Image(FULL, [0, 2]).manifest
    elsewhere = Image(FULL, [0, 2], kp.Placement(tp_rank=1, tp_size=2)).manifest
    wrong: list[tuple[kt.Manifests, dict[str, int], str]] = [
        ({}, {}, "expected 1 to 64 groups"),
        ({"": own}, {}, "expected 1 to 64 groups"),
        ({"a": own, "b": elsewhere}, {}, "groups of several placements"),
        (own, {"window": 4}, r"windows: \['window'\] are none of the groups \['main'\]"),
        (own, {"main": 0}, r"windows\['main'\]: 0 tokens"),
        (own, {"main": -1}, r"windows\['main'\]: expected a whole number"),
    ]
    for given_, windows, text in wrong:
        with pytest.raises(kt.ArgumentError, match=text):
            Groups.of(given_, windows)


C4, C128 = 4, 128
COMPRESSED: dict[str, kp.ModelLayout] = {
    "window": layout(spec("latent", [0, 1, 2, 3], 3), spec("latent", [4], 3, "draft"), page_size=C128),
    "c4": layout(
        spec("latent_c4", [0, 2], 5, compression=C4),
        spec("index_key", [0, 2], 2, compression=C4),
        spec("index_scale", [0, 2], 1, compression=C4),
        page_size=C128,
    ),
    "c128": layout(spec("latent_c128", [1, 3], 5, compression=C128), page_size=C128),
    "c4_state": layout(spec("state", [0, 2], 3, item_kind="request_row", rows=8), page_size=C128),
    "c128_state": layout(spec("state", [1, 3], 2, item_kind="request_row", rows=4), page_size=C128),
}


@pytest.mark.parametrize(("pp", "pp_decode", "tp", "tp_decode"), [(1, 1, 1, 1), (2, 1, 2, 1), (3, 2, 1, 2)])
def test_compressed_pools_of_their_own(
    keep: Callable[[Sides], Sides], pp: int, pp_decode: int, tp: int, tp_decode: int
) -> None:
    """Every layer has a window and a pool compressed by 4 or by 128, and a ring of states for entries to come."""
    prefill, decode = (ranks(COMPRESSED, 4, p, t, draft=1) for p, t in ((pp, tp), (pp_decode, tp_decode)))
    sides = keep(Sides(prefill, decode, {"window": C128}))
    tokens = 3 * C128 + 5
    source = {"window": [0, 0, 5, 6], "c4": [1, 3, 5, 7], "c128": [4, 3, 2, 1]}
    places = {"window": [8, 9], "c4": [9, 7, 5, 3], "c128": [1, 2, 3, 4]}
    rows = {"c4_state": 3, "c128_state": 6}
    sessions = [receiver.open(0, places, tokens=tokens, row=_held(rank, rows))
                for receiver, rank in zip(sides.receivers, decode, strict=True)]  # fmt: skip
    for sender in sides.senders:
        sending = sender.open(0)
        sending.send({name: own[:2] for name, own in source.items()}, start=0)
        sending.send({name: own[2:] for name, own in source.items()}, start=2)
        sending.send_states({"c4_state": 2, "c128_state": 5})
        sending.finish()
    for session in sessions:
        session.wait(60)
    moved = {name: dict(zip(own, source[name][-len(own) :], strict=True)) for name, own in places.items()}
    assert sides.faults(moved, {"c4_state": {3: 2}, "c128_state": {6: 5}}) == []


def _held(rank: Rank, rows: dict[str, int]) -> dict[str, int]:
    """Rows of the groups that a stage has layers of."""
    return {name: row for name, row in rows.items() if rank[name].manifest.entries}


def test_pages_of_several_sizes_take_a_first_page_each(keep: Callable[[Sides], Sides]) -> None:
    """8 and 4 tokens a page: a prefix of 8 tokens is 1 page of one group and 2 of the other."""
    layouts = {
        "wide": layout(spec("latent", [0], 2), page_size=8),
        "narrow": layout(spec("latent", [1], 3), page_size=4),
    }
    sides = keep(Sides(ranks(layouts, 2, 1, 1), ranks(layouts, 2, 1, 1)))
    receiver = sides.receivers[0]
    with pytest.raises(kt.ArgumentError, match=r"the groups have pages of \[4, 8\] tokens, got one number"):
        receiver.open(0, {"wide": [3], "narrow": [5]}, tokens=13, first_page=1)
    firsts = {"wide": 1, "narrow": 2}
    session = receiver.open(0, {"wide": [3], "narrow": [5, 4]}, tokens=13, first_page=firsts)
    sending = sides.senders[0].open(0)
    sending.send({"wide": [8], "narrow": [9, 6]}, start=firsts)
    sending.finish()
    session.wait(60)
    assert sides.faults({"wide": {3: 8}, "narrow": {5: 9, 4: 6}}) == []


def test_ends_that_find_each_other_carry_groups() -> None:
    """`PrefillEnd` and `DecodeEnd` pass groups, windows and shares on to the conversations."""
    directory, windows = kt.Directory(), {"window": WINDOW}
    prefill = ranks(HYBRID, 4, 1, 1, draft=1)[0]
    places = [kp.Placement(dcp_rank=rank, dcp_size=2) for rank in range(2)]
    decode = [{name: Image(own, range(5), place, items=14) for name, own in HYBRID.items()} for place in places]
    for own in prefill.values():
        own.fill()
    engines = [LoopbackEngine() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        ends = [
            stack.enter_context(
                kt.DecodeEnd(
                    manifests(rank),
                    engine,
                    directory,
                    timeouts=FAST,
                    every=0.02,
                    windows=windows,
                    interleave="token",
                    on_failed_pages="retry",
                )
            )
            for rank, engine in zip(decode, engines, strict=False)
        ]
        there = kt.PrefillEnd(manifests(prefill), engines[2], directory, timeouts=FAST, every=0.02, windows=windows)
        stack.enter_context(there)
        there.wait_ready(60)
        sessions = [end.wait_ready(60).open(0, {"full": [1, 2], "window": [3]}, tokens=15) for end in ends]
        for sender in there.senders:
            sending = sender.open(0)
            sending.send({"full": [9, 8, 7, 6], "window": [0, 0, 5, 4]}, start=0)
            sending.finish()
        for session in sessions:
            session.wait(60)
    for rank in decode:
        full, window = rank["full"], rank["window"]
        assert full.faults(full.expected_share([9, 8, 7, 6], [1, 2], 15)) == []
        assert window.faults(window.expected_share([5, 4], [3], 15 - 2 * PAGE)) == []
    for engine in engines:
        engine.close()


def test_readers_of_one_request_have_windows_too(keep: Callable[[Sides], Sides]) -> None:
    """Two decode ranks, one with a prefix: the group of senders skips for each what it has."""
    sides = keep(Sides(ranks(HYBRID, 4, 1, 1, draft=1), ranks(HYBRID, 4, 1, 2, draft=1), {"window": WINDOW}))
    places = [{"full": [1, 2, 3], "window": [4, 5]}, {"full": [7], "window": [6]}]
    sessions = [receiver.open(0, own, tokens=12, first_page=first)
                for receiver, own, first in zip(sides.receivers, places, (0, 2), strict=True)]  # fmt: skip
    group = kt.SenderGroup(sides.senders).open(0)
    assert group.first_page == 0
    with pytest.raises(kt.ArgumentError, match=r"start: nothing for groups \['window'\]"):
        group.send({"full": [9], "window": [0]}, start={"full": 0})
    group.send({"full": [9, 8, 7], "window": [0, 5, 6]}, start=0)
    group.finish()
    for session in sessions:
        session.wait(60)
    moved = [{"full": {1: 9, 2: 8, 3: 7}, "window": {4: 5, 5: 6}}, {"full": {7: 7}, "window": {6: 6}}]
    for rank, pages in zip(sides.decode, moved, strict=True):
        for name, own in rank.items():
            assert own.faults(own.expected(pages[name])) == []


@given(
    tokens=st.integers(0, 90), first=st.integers(0, 9), size=st.sampled_from([1, 4, 7]), dcp=st.integers(1, 4),
    window=st.none() | st.integers(1, 50),
)  # fmt: skip
def test_a_span_is_the_pages_of_the_tokens_that_decode_reads(
    tokens: int, first: int, size: int, dcp: int, window: int | None
) -> None:
    """Every token behind the prefix and in the window lies in it, by its plain loop; ranks share it without rest."""
    first = first * dcp
    spans = [
        request_span(tokens, first, size, window, kp.Placement(dcp_rank=rank, dcp_size=dcp)) for rank in range(dcp)
    ]
    wanted = {t // size for t in range(tokens) if t >= first * size and (window is None or t >= tokens - window)}
    begin = min(wanted, default=None)
    if begin is not None:
        begin -= begin % dcp
    pages = {t // size for t in range(tokens) if begin is not None and t >= begin * size}
    own = spans[0]
    assert set(range(own.first, own.first + own.pages)) == pages
    assert sum(span.own_pages for span in spans) == own.pages
    assert sum(span.own_tokens for span in spans) == own.tokens == sum(t // size in pages for t in range(tokens))
    assert own.places == -(-own.pages // dcp)
