"""Decode context parallelism: every token on the rank that owns it, once, over labelled bytes."""

from __future__ import annotations

import kv_planner as kp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner.testing import build_rank, byte_map, label_bytes

PAGE = 2
LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("latent", layer_ids=[0, 1], dtype="uint8", total_heads=1, dims=3),
        kp.ComponentSpec("index_key", layer_ids=[1], dtype="uint8", total_heads=1, dims=2),
        kp.ComponentSpec("latent", "draft", layer_ids=[2], dtype="uint8", total_heads=1, dims=1),
    ],
    page_size=PAGE,
    fingerprint="model",
)
ITEMS = 24
SOURCE = build_rank(LAYOUT, range(3), items=ITEMS)


def group(size: int) -> kp.Deployment:
    ranks = []
    for rank in range(size):
        place = kp.Placement(dcp_rank=rank, dcp_size=size)
        ranks.append(build_rank(LAYOUT, range(3), place, items=ITEMS, base=2**40 + rank * 2**32))
    return kp.Deployment(ranks)


def arrived(route: kp.Route, runs: kp.Runs) -> dict[int, object]:
    labels = label_bytes(SOURCE)
    return {to: labels[from_] for to, from_ in byte_map(kp.lower(kp.Plan(route, runs))).items()}


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, list[int], list[int], int, int]:
    """Size of the group, source pages, destination pages, tokens, pages of the chunk before."""
    size = draw(st.integers(2, 4))
    tokens = draw(st.integers(1, PAGE * 10))
    pages = -(-tokens // PAGE)
    source = draw(st.permutations(range(1, ITEMS)))[:pages]
    destination = draw(st.permutations(range(1, ITEMS // size)))[: -(-pages // size)]
    return size, list(source), list(destination), tokens, draw(st.integers(0, pages))


@settings(deadline=None, max_examples=60)
@given(requests())
def test_whole_pages_go_to_the_ranks_in_turn(request_: tuple[int, list[int], list[int], int, int]) -> None:
    size, source, destination, tokens, cut = request_
    decode = group(size)
    agreement = kp.agree(SOURCE, decode)
    for rank, manifest in enumerate(decode.manifests):
        received: dict[int, object] = {}
        for first, last in ((0, cut), (cut, len(source))):  # two chunks
            for slots, part in (("local", False), ("global", True)):
                runs = kp.page_interleaved(
                    source[first:last],
                    destination,
                    page_size=PAGE,
                    dcp_rank=rank,
                    dcp_size=size,
                    tokens=tokens,
                    prefix_tokens=3 * PAGE * size,
                    page_offset=first,
                    slots=slots,  # type: ignore[arg-type]
                )
                route = agreement.route(0, rank)
                wanted = (
                    route.slice(components=["index_key"])
                    if part
                    else route.slice(parts=["target"], components=["latent"])
                )
                moved = arrived(wanted, runs)
                assert not moved.keys() & received.keys()
                received |= moved
        expected = {}
        for address, label in label_bytes(manifest).items():
            if label.part == "draft":
                continue
            if label.component == "index_key":
                super_page, owner = divmod(label.item, size)
            else:
                super_page, owner = label.item, rank
            if super_page in destination:
                page = destination.index(super_page) * size + owner
                if page < len(source):
                    expected[address] = label._replace(item=source[page])
        assert received == expected


@settings(deadline=None, max_examples=60)
@given(requests())
def test_tokens_go_to_the_ranks_in_turn(request_: tuple[int, list[int], list[int], int, int]) -> None:
    size, source, destination, tokens, cut = request_
    decode = group(size)
    agreement = kp.agree(SOURCE, decode)
    for rank, manifest in enumerate(decode.manifests):
        route = agreement.route(0, rank).slice(parts=["target"]).by_token()
        received: dict[int, object] = {}
        for first, last in ((0, cut), (cut, len(source))):
            runs = kp.token_interleaved(
                source[first:last],
                destination,
                page_size=PAGE,
                dcp_rank=rank,
                dcp_size=size,
                tokens=tokens,
                page_offset=first,
            )
            assert runs.context == (rank, size) and runs.item_kind == "token"
            moved = arrived(route, runs)
            assert not moved.keys() & received.keys()
            received |= moved
        expected = {}
        for address, label in label_bytes(manifest).items():
            if label.part == "draft" or label.item not in destination:
                continue
            token = (destination.index(label.item) * PAGE + label.token) * size + rank
            if token < tokens:
                expected[address] = label._replace(item=source[token // PAGE], token=token % PAGE)
        assert received == expected


def test_draft_pages_stand_whole_in_the_virtual_page() -> None:
    runs = kp.page_interleaved([5, 6, 7], [4, 9], page_size=PAGE, dcp_rank=1, dcp_size=2, tokens=5, slots="global")
    assert [column.tolist() for column in runs.arrays()] == [[5, 7], [8, 18], [2, 1]]


def test_a_route_takes_the_share_of_its_own_rank_only() -> None:
    decode = group(2)
    route = kp.agree(SOURCE, decode).route(0, 1).slice(components=["index_key"])
    other = kp.page_interleaved([1, 2], [3], page_size=PAGE, dcp_rank=0, dcp_size=2, tokens=4)
    for runs in (kp.Runs([1], [1]), other, other.slice(0, 1)):
        with pytest.raises(kp.ContextMismatch, match="dcp 1/2"):
            kp.Plan(route, runs)
    plain = kp.agree(SOURCE, build_rank(LAYOUT, range(3), base=2**50)).route().slice(components=["index_key"])
    with pytest.raises(kp.ContextMismatch, match="all tokens of a request"):
        kp.Plan(plain, other)


def test_only_one_to_many_is_planned() -> None:
    decode = group(2)
    for local in (decode, decode.manifests[1]):
        with pytest.raises(kp.UnsupportedPlacement, match="local dcp_size: 2 against 1"):
            kp.agree(local, SOURCE)
    with pytest.raises(kp.UnsupportedPlacement):
        kp.agree(SOURCE, decode).reversed().route()
    with pytest.raises(kp.IncompleteDeployment):
        kp.Deployment(decode.manifests[:1])


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"prefix_tokens": 2}, kp.LengthError, "prefix_tokens: 2 against 4"),
        ({"tokens": 3, "page_offset": 1}, kp.LengthError, "3 against 2"),
        ({"destination_pages": []}, kp.UnequalPages, "destination_pages: 0 against 1"),
        ({"dcp_rank": 2}, kp.PlacementError, "dcp_rank: 2 against 2"),
        ({"page_size": 0}, kp.LengthError, "page_size"),
        ({"source_pages": [0, 1]}, kp.ReservedPage, r"source_pages\[0\]"),
        ({"destination_pages": [0]}, kp.ReservedPage, r"destination_pages\[0\]"),
        ({"destination_pages": [-1]}, kp.PageOutOfRange, r"destination_pages\[0\]"),
    ],
)
@pytest.mark.parametrize("tokenwise", [False, True])
def test_impossible_shares_are_refused(
    changes: dict[str, object], kind: type[kp.PlanError], words: str, tokenwise: bool
) -> None:
    arguments: dict[str, object] = {
        "source_pages": [1, 2], "destination_pages": [3], "page_size": PAGE, "dcp_rank": 0, "dcp_size": 2, "tokens": 4,
    }  # fmt: skip
    call = kp.token_interleaved if tokenwise else kp.page_interleaved
    call(**arguments)  # type: ignore[arg-type]
    with pytest.raises(kind, match=words):
        call(**{**arguments, **changes})  # type: ignore[arg-type]


def test_pages_far_out_keep_their_numbers() -> None:
    far = 2**62
    runs = kp.page_interleaved([far], [far // 2 - 1], page_size=1, dcp_rank=1, dcp_size=4, tokens=1, slots="global")
    assert runs.arrays()[1].tolist() == [2 * far - 4]
    with pytest.raises(kp.PageOutOfRange):
        kp.page_interleaved([1], [2 * far - 1], page_size=1, dcp_rank=0, dcp_size=2, tokens=1, slots="global")
    with pytest.raises(kp.PlanError):
        kp.token_interleaved([2 * far - 1], [1], page_size=2, dcp_rank=0, dcp_size=2, tokens=2)
    assert np.array_equal(runs.arrays()[0], [far])
    with pytest.raises(kp.ArgumentError, match=r"local \| global"):
        kp.page_interleaved([1], [1], page_size=1, dcp_rank=0, dcp_size=1, tokens=1, slots="other")  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["padding", "axes", "compression", "kind"])
def test_tokens_that_are_not_evenly_spaced_are_refused(reason: str) -> None:
    spec = kp.ComponentSpec(
        "latent",
        layer_ids=[0],
        dtype="uint8",
        total_heads=2,
        dims=3,
        axes=("head", "token", "dim") if reason == "axes" else ("token", "head", "dim"),
        item_kind="request_row" if reason == "kind" else "page",
        compression=2 if reason == "compression" else 1,
    )
    model = kp.ModelLayout([spec], page_size=2, fingerprint="m")
    padding = 1 if reason == "padding" else 0
    route = kp.agree(build_rank(model, [0], padding=padding), build_rank(model, [0], base=2**40)).route()
    with pytest.raises(kp.ItemKindMismatch, match="evenly spaced"):
        route.by_token()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from(["float16", "uint8"]), st.integers(1, 4))
def test_a_page_by_tokens_is_the_page(source: int, destination: int, dtype: kp.DType, page_size: int) -> None:
    """Counting tokens instead of pages changes no byte, whatever the head slices are."""
    axes: list[tuple[kp.Axis, kp.Axis, kp.Axis]] = [("token", "head", "dim"), ("token", "dim", "head")]
    for order in axes:
        spec = kp.ComponentSpec("key", layer_ids=[0], dtype=dtype, total_heads=4, dims=3, axes=order)
        model = kp.ModelLayout([spec], page_size=page_size, fingerprint="m")
        for rank in range(destination):
            local = build_rank(model, [0], kp.Placement(tp_size=source))
            remote = build_rank(model, [0], kp.Placement(tp_rank=rank, tp_size=destination), base=2**40)
            route = kp.agree(local, remote).route()
            pages = kp.Runs([3, 1], [1, 4])
            tokens = kp.Runs(
                [page * page_size + t for page in (3, 1) for t in range(page_size)],
                [page * page_size + t for page in (1, 4) for t in range(page_size)],
                item_kind="token",
            )
            by_page, by_token = kp.Plan(route, pages), kp.Plan(route.by_token(), tokens)
            assert byte_map(kp.lower(by_page)) == byte_map(kp.lower(by_token))
            assert by_page.nbytes == by_token.nbytes
            if route:
                with pytest.raises(kp.PageOutOfRange):
                    kp.Plan(route.by_token(), kp.Runs([6 * page_size], [1], item_kind="token"))
