"""Models of several groups: compressed latents, hybrid layers, drafts of their own, data-parallel attention."""

from __future__ import annotations

import itertools

import kv_planner as kp
import pytest
from kv_planner.testing import build_deployment, build_rank, byte_map, expected_image, received_images


def spec(name: kp.Component, ids: list[int], part: kp.Part = "target", **changes: int) -> kp.ComponentSpec:
    total, dims = changes.get("total_heads", 1), changes.get("dims", 2)
    ratio = changes.get("compression", 1)
    return kp.ComponentSpec(name, part, layer_ids=ids, dtype="uint8", total_heads=total, dims=dims, compression=ratio)


def layout(*specs: kp.ComponentSpec, page_size: int = 4) -> kp.ModelLayout:
    return kp.ModelLayout(specs, page_size=page_size, fingerprint="model")


def check(local: kp.Deployment, remote: kp.Deployment) -> None:
    """Every byte of every receiving rank arrives, once, and nothing else does."""
    images = received_images(kp.agree(local, remote), kp.Runs([4, 2, 3], [1, 5, 2]))
    assert images == [expected_image(manifest, [4, 2, 3], [1, 5, 2]) for manifest in remote.manifests]


COMPRESSED = layout(
    spec("latent", [0, 1], dims=3),
    spec("latent_c4", [2, 4], dims=3, compression=4),
    spec("index_key", [2, 4], dims=1, compression=4),
    spec("latent_c128", [3, 5], dims=3, compression=128),
    spec("latent", [6], "draft", dims=3),
    page_size=128,
)


def test_compressed_groups_move_their_own_number_of_bytes() -> None:
    """A page of 128 tokens: 128 entries, 32 or 1, by the layer's group."""
    sizes = [COMPRESSED.item_bytes(own.component, own.part) for own in COMPRESSED.components]
    assert sizes == [384, 96, 32, 3, 384]
    check(
        build_deployment(COMPRESSED, [[0, 2, 3], [1, 4, 5, 6]], items=6),
        build_deployment(COMPRESSED, [[0, 1, 2, 3, 4, 5, 6]], 2, items=6, base=2**44),
    )


def test_an_unlike_ratio_is_a_difference() -> None:
    other = layout(spec("index_key", [2], dims=1, compression=2), page_size=128)
    mine = layout(spec("index_key", [2], dims=1, compression=4), page_size=128)
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(build_rank(mine, [2]), build_rank(other, [2]))
    assert [(d.field, d.local, d.remote) for d in caught.value.differences] == [("index_key/target.compression", 4, 2)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: spec("latent_c4", [0]), "1 against 4"),
        (lambda: spec("latent_c128", [0], compression=4), "4 against 128"),
        (lambda: spec("key", [0], compression=0), "compression"),
        (lambda: layout(spec("latent_c4", [0], compression=4), page_size=6), "4 against 6"),
        (
            lambda: kp.ComponentSpec(
                "state", layer_ids=[0], dtype="int8", total_heads=1, dims=1, item_kind="request_row", compression=2
            ),
            "only pages",
        ),
    ],
)
def test_impossible_ratios_are_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(kp.LayoutError, match=words):
        make()


def test_json_of_before_compression_is_read() -> None:
    """A layout without compression is written as it always was."""
    plain = layout(spec("key", [0]))
    assert "compression" not in plain.to_json() and kp.ModelLayout.from_json(plain.to_json()) == plain
    assert '"compression":4' in COMPRESSED.to_json()
    assert kp.ModelLayout.from_json(COMPRESSED.to_json()) == COMPRESSED


def test_each_group_takes_the_blocks_of_its_manager_a11() -> None:
    """Three transfer groups over two block managers: the third group has the second manager's blocks."""
    model = layout(spec("key", [0]), spec("value", [0]), spec("index_key", [0]))
    local, remote = build_rank(model, [0], items=12), build_rank(model, [0], items=12, base=2**40)
    managers = {"key": 0, "value": 0, "index_key": 1}
    blocks = ([1, 2], [9])
    route = kp.agree(local, remote).route()
    for entry in local.entries:
        own = blocks[managers[entry.component]]
        plan = kp.Plan(route.slice(components=[entry.component]), kp.Runs(own, own))
        read = {(address - entry.address) // entry.item_stride for address in byte_map(kp.lower(plan)).values()}
        assert read == set(own)


@pytest.mark.parametrize(("local_drafts", "remote_drafts"), list(itertools.product((0, 1, 3), repeat=2)))
def test_drafts_on_one_side_or_both(local_drafts: int, remote_drafts: int) -> None:
    """0, 1 or 3 draft layers: alike they move; unlike they are a difference, and the target is served by itself."""

    def model(drafts: int) -> kp.ModelLayout:
        own = [spec("key", list(range(4, 4 + drafts)), "draft", total_heads=1)] if drafts else []
        return layout(
            spec("key", [0, 1, 2, 3], total_heads=2), spec("value", [0, 1, 2, 3], total_heads=2, dims=1), *own
        )

    local = build_deployment(model(local_drafts), [[0], [1, 2, 3, *range(4, 4 + local_drafts)]])
    remote = build_deployment(model(remote_drafts), [list(range(4 + remote_drafts))], 2, base=2**44)
    if local_drafts == remote_drafts:
        check(local, remote)
        return
    with pytest.raises(kp.LayoutMismatch, match="key/draft"):
        kp.agree(local, remote)
    target = kp.agree(local, remote, parts=["target"])
    assert {pair.part for s in range(2) for pair in target.route(s, 0).pairs} == {"target"}


@pytest.mark.parametrize(("source", "destination"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_target_and_draft_with_heads_of_their_own(source: int, destination: int) -> None:
    """8 target heads, 2 draft heads: divided in one part, replicated in the other."""
    model = layout(spec("key", [0, 1], total_heads=8), spec("key", [2], "draft", total_heads=2), page_size=2)
    check(
        build_deployment(model, [[0], [1, 2]], source),
        build_deployment(model, [[0, 1, 2]], destination, base=2**44),
    )


def test_attention_without_tensor_parallelism_under_data_parallel_attention() -> None:
    """Prefill over 4 ranks; decode in 4 groups that each hold every head: any group is served whole."""
    model = layout(spec("key", [0, 1], total_heads=4))
    prefill = build_deployment(model, [[0], [1]], 4)
    groups = [
        build_rank(model, [0, 1], kp.Placement(dp_rank=rank, dp_size=4), base=2**44 + rank * 2**32) for rank in range(4)
    ]
    check(prefill, kp.Deployment(groups))
    for group in groups:
        check(prefill, kp.Deployment([group]))


def test_idle_replicas_have_empty_routes() -> None:
    model = layout(spec("key", [0], total_heads=2))
    agreement = kp.agree(build_deployment(model, [[0]], 8), build_deployment(model, [[0]], base=2**44))
    senders = [index for index in range(8) if agreement.route(index, 0)]
    assert senders == [0, 4]
    idle = agreement.route(1, 0)
    assert len(idle) == 0 and not idle and kp.lower(kp.Plan(idle, kp.Runs([1], [1]))).block_count == 0
