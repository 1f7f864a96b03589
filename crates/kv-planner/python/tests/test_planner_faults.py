"""Cases of the field's fault reports whose right answers the planner must give; the number is the report's."""

from __future__ import annotations

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing import build_deployment, build_rank, expected_image, received_images

GROUPS: tuple[kp.Component, ...] = ("latent", "rope", "index_key")


def spec(
    component: kp.Component,
    layer_ids: list[int],
    *,
    part: kp.Part = "target",
    dtype: kp.DType = "uint8",
    total_heads: int = 1,
    dims: int = 2,
    axes: tuple[kp.Axis, kp.Axis, kp.Axis] = ("token", "head", "dim"),
    item_kind: kp.ItemKind = "page",
) -> kp.ComponentSpec:
    return kp.ComponentSpec(
        component,
        part,
        layer_ids=layer_ids,
        dtype=dtype,
        total_heads=total_heads,
        dims=dims,
        axes=axes,
        item_kind=item_kind,
    )


def layout(*components: kp.ComponentSpec, page_size: int = 2, kernel_block_size: int | None = None) -> kp.ModelLayout:
    return kp.ModelLayout(components, page_size=page_size, fingerprint="model", kernel_block_size=kernel_block_size)


def names(route: kp.Route) -> list[tuple[str, str, int]]:
    """Names of the destination entries, in the source's order; each must be the source's own name."""
    found: list[tuple[str, str, int]] = []
    for pair in route.pairs:
        source = route.source.entries[pair.source_entry]
        destination = route.destination.entries[pair.destination_entry]
        name = (source.component, source.part, source.layer_id)
        assert name == (destination.component, destination.part, destination.layer_id)
        found.append(name)
    return found


def prompt_heads(total: int, source_tp: int, destination_tp: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Global head ranges by (source rank, destination rank), idle pairs left out."""
    geometry = layout(spec("key", [0], total_heads=total))
    sides = [
        build_deployment(geometry, [[0]], tp, base=2**12 << 30 * k) for k, tp in enumerate((source_tp, destination_tp))
    ]
    agreement = kp.agree(*sides)
    sent = {}
    for i, source in enumerate(agreement.local):
        for j in range(destination_tp):
            first = source.entries[0].head_range[0]
            ranges = [(first + a, first + b) for a, b in (pair.source_heads for pair in agreement.route(i, j).pairs)]
            if ranges:
                sent[i, j] = ranges
    return sent


class TestDraftOnTheLastStageA02:
    """61 layers over 31 + 30, three groups, one draft layer."""

    target = tuple(spec(group, list(range(61))) for group in GROUPS)
    draft = tuple(spec(group, [61], part="draft") for group in GROUPS)
    decode = build_rank(layout(*target, *draft), list(range(62)), base=2**40)

    def test_with_a_draft_all_93_pairs_are_right(self) -> None:
        stage = build_rank(layout(*self.target, *self.draft), list(range(31, 62)), kp.Placement(pp_rank=1, pp_size=2))
        wanted = [(group, "target", layer) for group in GROUPS for layer in range(31, 61)]
        wanted += [(group, "draft", 61) for group in GROUPS]
        route = kp.agree(stage, self.decode).route()
        assert len(route) == 93
        assert names(route) == wanted
        assert [pair.destination_entry for pair in route.pairs][:31] == [*range(31, 61), 61 + 31]

    def test_without_one_the_target_alone_is_asked_for(self) -> None:
        stage = build_rank(layout(*self.target), list(range(31, 61)), kp.Placement(pp_rank=1, pp_size=2))
        with pytest.raises(kp.LayoutMismatch) as caught:
            kp.agree(stage, self.decode)
        assert [d.field for d in caught.value.differences] == ["latent/draft", "rope/draft", "index_key/draft"]
        route = kp.agree(stage, self.decode, parts=["target"]).route()
        assert names(route) == [(group, "target", layer) for group in GROUPS for layer in range(31, 61)]

    def test_groups_may_cover_other_layers(self) -> None:
        """78 + 78 + 21 entries are no 59 layers of three groups."""
        geometry = layout(*(spec(g, list(range(78))) for g in GROUPS[:2]), spec("index_key", [*range(0, 77, 4), 77]))
        decode = build_rank(geometry, list(range(78)), base=2**40)
        assert len(decode.entries) == 177
        stages = [
            build_rank(geometry, list(r), kp.Placement(pp_rank=k, pp_size=2))
            for k, r in enumerate((range(39), range(39, 78)))
        ]
        routes = [kp.agree(stage, decode).route() for stage in stages]
        assert sorted(pair.destination_entry for route in routes for pair in route.pairs) == list(range(177))
        assert all(names(route) for route in routes)


def test_hybrid_layers_are_paired_by_id_a03() -> None:
    full = list(range(3, 60, 4))
    geometry = layout(spec("key", full), spec("value", full))
    decode = build_deployment(geometry, [list(range(60))], base=2**40)
    prefill = build_deployment(geometry, [list(range(30)), list(range(30, 60))])
    agreement = kp.agree(prefill, decode)
    destinations = [[pair.destination_entry for pair in agreement.route(stage).pairs] for stage in range(2)]
    assert destinations == [[*range(7), *range(15, 22)], [*range(7, 15), *range(22, 30)]]


def test_repeated_ids_pair_by_occurrence_a04() -> None:
    geometry = layout(spec("latent", [3, 7, 11, 3, 7, 11]))
    source = build_rank(geometry, [7, 11], kp.Placement(pp_rank=1, pp_size=2))
    destination = build_rank(geometry, [3, 7, 11], base=2**40)
    assert [entry.layer_id for entry in source.entries] == [7, 11, 7, 11]
    pairs = [(pair.source_entry, pair.destination_entry) for pair in kp.agree(source, destination).route().pairs]
    assert pairs == [(0, 1), (1, 2), (2, 4), (3, 5)]


@pytest.mark.parametrize(("ids", "words"), [([3, 11], "only local: 7"), ([3, 7, 11, 11], "only remote: 11")])
def test_ids_that_one_side_lacks_are_named_a04(ids: list[int], words: str) -> None:
    local, remote = (
        build_rank(layout(spec("latent", own)), own, base=2**k) for own, k in (([3, 7, 11], 12), (ids, 40))
    )
    with pytest.raises(kp.LayoutMismatch, match=words):
        kp.agree(local, remote)


def test_state_windows_must_match_a05() -> None:
    """A convolution window of 3 against 3 + 7 draft tokens."""
    sides = [
        build_rank(
            layout(spec("state", [0], dims=4 * window, item_kind="request_row", dtype="float32")), [0], base=base
        )
        for window, base in ((3, 2**12), (10, 2**40))
    ]
    with pytest.raises(kp.LayoutMismatch, match="48 bytes locally and 160 remotely"):
        kp.agree(*sides)


def test_draft_ids_follow_the_whole_model_a07() -> None:
    assert kp.first_draft_id(48) == 48
    with pytest.raises(kp.LayoutError, match="layer id 24") as caught:
        layout(spec("key", list(range(48))), spec("key", [24], part="draft"))
    assert (caught.value.local, caught.value.remote) == (24, 48)
    draft = layout(spec("key", list(range(48))), spec("key", [kp.first_draft_id(48)], part="draft")).spec(
        "key", "draft"
    )
    assert draft.layer_ids == (48,)


def test_kind_is_named_and_never_inferred_from_the_id_a08() -> None:
    geometry = layout(spec("key", list(range(61))), spec("index_key", [5]), spec("key", [61], part="draft"))
    prefill = build_deployment(geometry, [list(range(31)), list(range(31, 62))])
    agreement = kp.agree(prefill, build_deployment(geometry, [list(range(62))], base=2**40))
    assert ("index_key", "target", 5) in names(agreement.route(0))
    assert ("key", "draft", 61) in names(agreement.route(1))
    assert not any(part == "draft" for _, part, _ in names(agreement.route(0)))


def test_other_grouping_of_equal_bytes_a12() -> None:
    """Each layer's bytes carry its name; after the copy every destination layer reads back its own."""
    geometry = layout(spec("key", [0, 1, 2, 3], dims=2), spec("value", [3, 1, 0, 2], dims=2))
    prefill = build_deployment(geometry, [[2, 0], [3, 1]])
    decode = build_deployment(geometry, [[1, 2, 3], [0]], base=2**44)
    images = received_images(kp.agree(prefill, decode), kp.Runs([4, 2], [1, 5]))
    assert images == [expected_image(manifest, [4, 2], [1, 5]) for manifest in decode.manifests]


class TestHeads:
    def test_replicas_are_grouped_b01(self) -> None:
        assert prompt_heads(2, 1, 4) == {(0, 0): [(0, 1)], (0, 1): [(0, 1)], (0, 2): [(1, 2)], (0, 3): [(1, 2)]}

    def test_one_replica_sends_b01(self) -> None:
        assert prompt_heads(2, 4, 1) == {(0, 0): [(0, 1)], (2, 0): [(1, 2)]}

    def test_all_receivers_are_served_once_b08(self) -> None:
        sent = prompt_heads(2, 1, 8)
        assert [rank for _, rank in sent] == list(range(8))
        assert [ranges for ranges in sent.values()] == [[(0, 1)]] * 4 + [[(1, 2)]] * 4

    def test_one_copy_is_sent_b05(self) -> None:
        sent = prompt_heads(4, 8, 4)
        assert sent == {(2 * head, head): [(head, head + 1)] for head in range(4)}

    @pytest.mark.parametrize(
        ("total", "source", "destination", "ratio"), [(8, 8, 16, 1), (4, 4, 8, 1), (2, 4, 8, 1), (8, 2, 8, 4)]
    )
    def test_byte_ratio_follows_heads_and_not_ranks_b03(
        self, total: int, source: int, destination: int, ratio: int
    ) -> None:
        geometry = layout(spec("key", [0], total_heads=total))
        sides = [
            build_deployment(geometry, [[0]], tp, base=2**12 << 30 * k) for k, tp in enumerate((source, destination))
        ]
        agreement = kp.agree(*sides)
        lengths = [side.manifests[0].entries[0].item_bytes for side in sides]
        assert lengths[0] == ratio * lengths[1]
        images = received_images(agreement, kp.Runs([1], [2]))
        assert images == [expected_image(manifest, [1], [2]) for manifest in sides[1].manifests]

    def test_an_item_that_is_not_a_quarter_is_refused_b03(self) -> None:
        geometry = layout(spec("key", [0], total_heads=8))
        right = geometry.item_bytes("key", heads=1)
        assert right * 4 == geometry.item_bytes("key", heads=4)
        with pytest.raises(kp.ManifestError, match="item_bytes") as caught:
            entry = kp.BufferEntry(
                "key", "target", 0, device="cpu", address=64, nbytes=right + 1, item_stride=right + 1,
                item_bytes=right + 1, head_range=(0, 1),
            )  # fmt: skip
            kp.RankManifest(geometry, kp.Placement(tp_size=8), [entry])
        assert (caught.value.local, caught.value.remote) == (right + 1, right)

    @pytest.mark.parametrize("total", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("source", [1, 2, 4, 8])
    @pytest.mark.parametrize("destination", [1, 2, 4, 8])
    def test_every_combination_writes_each_head_once_b10(self, total: int, source: int, destination: int) -> None:
        sent = prompt_heads(total, source, destination)
        share = max(1, total // destination)
        for rank in range(destination):
            first = rank * share if destination <= total else rank * total // destination
            heads = [head for (_, to), ranges in sent.items() if to == rank for a, b in ranges for head in range(a, b)]
            assert sorted(heads) == list(range(first, first + share))

    def test_descriptors_are_counted_beforehand_b11(self) -> None:
        pages = np.arange(1, 1001)
        geometry = layout(spec("key", [0], total_heads=2), page_size=64)
        whole = kp.agree(build_rank(geometry, [0], items=1001), build_rank(geometry, [0], items=1001, base=2**40))
        assert kp.Plan(whole.route(), kp.Runs(pages, pages)).block_count == 1
        two = build_deployment(geometry, [[0]], 2, items=1001)
        one = build_deployment(geometry, [[0]], 1, items=1001, base=2**44)
        plan = kp.Plan(kp.agree(two, one).route(), kp.Runs(pages, pages))
        assert plan.block_count == 64_000
        with pytest.raises(kp.BlockLimitExceeded) as caught:
            kp.lower(plan, kp.Capabilities(max_blocks=63_999))
        assert (caught.value.local, caught.value.remote) == (64_000, 63_999)
        head_first = layout(spec("key", [0], total_heads=2, axes=("head", "token", "dim")), page_size=64)
        two = build_deployment(head_first, [[0]], 2, items=1001)
        one = build_deployment(head_first, [[0]], 1, items=1001, base=2**44)
        assert kp.Plan(kp.agree(two, one).route(), kp.Runs(pages, pages)).block_count == 1000

    def test_axis_orders_b12(self) -> None:
        def side(axes: tuple[kp.Axis, kp.Axis, kp.Axis], tp: int, base: int) -> kp.Deployment:
            return build_deployment(layout(spec("key", [0], total_heads=2, axes=axes)), [[0]], tp, base=base)

        tokens: tuple[kp.Axis, kp.Axis, kp.Axis] = ("token", "head", "dim")
        heads: tuple[kp.Axis, kp.Axis, kp.Axis] = ("head", "token", "dim")
        for local_tp, remote_tp in ((1, 2), (2, 1), (1, 1)):
            with pytest.raises(kp.LayoutMismatch) as caught:
                kp.agree(side(tokens, local_tp, 2**12), side(heads, remote_tp, 2**44))
            (difference,) = caught.value.differences
            assert (difference.field, difference.local, difference.remote) == (
                "key/target.axes",
                "token,head,dim",
                "head,token,dim",
            )
        for axes in (tokens, heads):
            route = kp.agree(side(axes, 2, 2**12), side(axes, 2, 2**44)).route()
            assert [pair.rows for pair in route.pairs] == [1]
        same_bytes = kp.agree(side(tokens, 2, 2**12), side(heads, 2, 2**44)).route()
        assert [pair.rows for pair in same_bytes.pairs] == [1]


def test_only_what_must_agree_is_compared_b13() -> None:
    geometry = layout(spec("key", [0, 1], total_heads=4))
    kp.agree(build_deployment(geometry, [[0], [1]], 2), build_deployment(geometry, [[0, 1]], 4, base=2**44))
    other = layout(spec("key", [0, 1], total_heads=4), page_size=4)
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(build_deployment(geometry, [[0], [1]], 2), build_deployment(other, [[0, 1]], 4, base=2**44))
    assert [difference.field for difference in caught.value.differences] == ["page_size", "kernel_block_size"]


def test_unequal_page_lists_are_refused_c01() -> None:
    prompt, sampled = 128, 1
    assert [kp.page_count(min(n + sampled, n), 64) for n in (128, 129, 192, 193)] == [2, 3, 3, 4]
    assert kp.page_count(prompt + sampled, 64) == 3
    for source, destination in (([1], []), ([1, 2], [1, 2, 3])):
        with pytest.raises(kp.UnequalPages) as caught:
            kp.Runs(source, destination)
        assert (caught.value.local, caught.value.remote) == (len(source), len(destination))
    empty = kp.Runs([], np.array([], dtype=np.int32))
    geometry = layout(spec("key", [0]))
    plan = kp.Plan(kp.agree(build_rank(geometry, [0]), build_rank(geometry, [0], base=2**40)).route(), empty)
    assert (plan.nbytes, plan.block_count, kp.lower(plan).batches) == (0, 0, ())


@pytest.mark.parametrize(("prompt", "pages"), [(256, 2), (255, 2), (257, 3)])
def test_both_sides_trim_to_the_prompt_c03(prompt: int, pages: int) -> None:
    held = np.array([4, 5, 6]), np.array([9, 8, 7])
    count = kp.page_count(prompt, 128)
    assert kp.Runs(held[0][:count], held[1][:count]).page_count == pages


def test_page_sizes_are_compared_c06() -> None:
    sides = [build_rank(layout(spec("key", [0]), page_size=size), [0], base=2**20 * size) for size in (64, 128)]
    with pytest.raises(kp.LayoutMismatch, match="page_size: local 64, remote 128"):
        kp.agree(*sides)


def test_kernel_blocks_are_compared_c07() -> None:
    def side(page_size: int, block: int | None, base: int) -> kp.RankManifest:
        return build_rank(layout(spec("key", [0]), page_size=page_size, kernel_block_size=block), [0], base=base)

    with pytest.raises(kp.LayoutMismatch, match="page_size: local 16, remote 32"):
        kp.agree(side(16, None, 2**12), side(32, None, 2**40))
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(side(32, 16, 2**12), side(32, 32, 2**40))
    assert [(d.field, d.local, d.remote) for d in caught.value.differences] == [("kernel_block_size", 16, 32)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_are_exact_beyond_32_bits_d01_d02_d03(dtype: type[np.signedinteger]) -> None:
    for page, page_size, dims, offset in (
        (14340, 256, 585, 2147558400),
        (57359, 64, 585, 2147520960),
        (7768, 480, 576, 2147696640),
    ):
        geometry = layout(spec("latent", [0], dims=dims), page_size=page_size)
        assert geometry.item_bytes("latent") * page == offset
        ranks = [build_rank(geometry, [0], items=60000, base=base) for base in (4096, 2**47)]
        index = np.array([page], dtype=dtype)
        (batch,) = kp.lower(kp.Plan(kp.agree(*ranks).route(), kp.Runs(index, index))).batches
        assert (batch.source[0], batch.destination[0]) == (4096 + offset, 2**47 + offset)
        assert batch.source.dtype == batch.destination.dtype == batch.nbytes.dtype == np.uint64


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32, 2**32 + 1])
def test_sizes_survive_every_boundary_d07(size: int) -> None:
    geometry = layout(spec("latent", [0], dims=size), page_size=1)
    rank = build_rank(geometry, [0], items=3)
    assert geometry.item_bytes("latent") == rank.entries[0].item_bytes == rank.entries[0].item_stride == size
    assert rank.entries[0].nbytes == 3 * size
    assert kp.RankManifest.from_json(rank.to_json()) == rank
    route = kp.agree(rank, build_rank(geometry, [0], items=3, base=2**48)).route()
    plan = kp.Plan(route, kp.Runs([2], [1]))
    lowered = kp.lower(plan)
    assert route.item_bytes == route.pairs[0].row_bytes == plan.nbytes == lowered.total_bytes == size
    assert lowered.batches[0].nbytes.tolist() == [size]
    assert lowered.batches[0].source.tolist() == [4096 + 2 * size]
    halves = kp.lower(plan, kp.Capabilities(max_block_bytes=2**31)).batches[0].nbytes.tolist()
    assert sum(halves) == size and max(halves) <= 2**31
    field = kp.RowField("a", "uint8", rows=size)
    assert kp.RowLayout([field]).field("a").nbytes == size


def test_batches_are_bounded_d10() -> None:
    geometry = layout(spec("key", [0]))
    agreement = kp.agree(build_rank(geometry, [0], items=8400), build_rank(geometry, [0], items=8400, base=2**40))
    limits = kp.Capabilities(max_entries_per_batch=4096)
    for count, batches in ((0, []), (4096, [4096]), (4097, [4096, 1])):
        pages = np.arange(1, 2 * count + 1, 2)
        lowered = kp.lower(kp.Plan(agreement.route(), kp.Runs(pages, pages)), limits)
        assert [len(batch) for batch in lowered.batches] == batches


def test_nothing_makes_no_descriptor_d19() -> None:
    geometry = layout(spec("key", [0], total_heads=2))
    empty = kp.BufferEntry(
        "key", "target", 0, device="cpu", address=0, nbytes=0, item_stride=0, item_bytes=0, head_range=(1, 1)
    )
    idle = kp.RankManifest(geometry, kp.Placement(tp_size=2), [empty])
    full = build_rank(geometry, [0], base=2**40)
    for source, destination in ((idle, full), (full, idle)):
        route = kp.agree(source, destination).route()
        assert len(route) == 0 and not route
        lowered = kp.lower(kp.Plan(route, kp.Runs([1, 2], [3, 4])))
        assert (lowered.batches, lowered.block_count, lowered.total_bytes) == ((), 0, 0)


def test_the_window_is_counted_once_e12() -> None:
    prefix = np.array([100, 7], dtype=np.int32)
    before = prefix.copy()
    for _ in range(2):
        assert kp.kv_lengths("eagle", prefix, window=16).tolist() == [116, 23]
        assert kp.kv_lengths("dflash", np.array([116, 23]), window=16).tolist() == [116, 23]
    assert (prefix == before).all()


def test_dtypes_are_named_with_both_lengths_h12() -> None:
    dtypes: tuple[kp.DType, kp.DType] = ("bfloat16", "float8_e4m3fn")
    sides = [build_rank(layout(spec("key", [0], dtype=dtype, dims=128), page_size=128), [0]) for dtype in dtypes]
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(*sides)
    (difference,) = caught.value.differences
    assert (difference.field, difference.local, difference.remote) == ("key/target.dtype", "bfloat16", "float8_e4m3fn")
    assert "32768 bytes locally and 16384 remotely" in difference.consequence
