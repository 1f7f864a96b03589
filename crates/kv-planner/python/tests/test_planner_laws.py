"""Laws of plans over simulated memory, through the Python face."""

from __future__ import annotations

from dataclasses import dataclass

import kv_planner as kp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner.testing import build_deployment, byte_map, expected_image, label_bytes, received_images

ITEMS = 6
AXES: list[tuple[kp.Axis, kp.Axis, kp.Axis]] = [
    ("token", "head", "dim"),
    ("head", "token", "dim"),
    ("token", "dim", "head"),
]


@dataclass(frozen=True)
class World:
    """Two deployments that agree, and the pages of one request."""

    local: kp.Deployment
    remote: kp.Deployment
    source_pages: list[int]
    destination_pages: list[int]

    @property
    def agreement(self) -> kp.Agreement:
        return kp.agree(self.local, self.remote)

    @property
    def runs(self) -> kp.Runs:
        return kp.Runs(np.array(self.source_pages, dtype=np.int32), np.array(self.destination_pages, dtype=np.int64))


def stages(draw: st.DrawFn, layer_ids: list[int]) -> list[list[int]]:
    """Deals layers to one to three stages, unevenly."""
    count = draw(st.integers(1, 3))
    owner = [draw(st.integers(0, count - 1)) for _ in layer_ids]
    return [[layer for layer, stage in zip(layer_ids, owner, strict=True) if stage == rank] for rank in range(count)]


@st.composite
def worlds(draw: st.DrawFn, tp_sizes: tuple[int, ...] = (1, 2, 4)) -> World:
    """Draws two deployments of one model with unequal widths, a partial component and perhaps a draft."""
    layers = list(range(draw(st.integers(1, 4))))
    drafts = list(range(len(layers), len(layers) + draw(st.integers(0, 2))))
    specs = [
        kp.ComponentSpec(
            "key",
            layer_ids=layers,
            dtype="float16",
            total_heads=draw(st.sampled_from([1, 2, 4])),
            dims=2,
            axes=draw(st.sampled_from(AXES)),
        ),
        kp.ComponentSpec(
            "value", layer_ids=layers, dtype="uint8", total_heads=draw(st.sampled_from([1, 2, 4])), dims=3
        ),
        kp.ComponentSpec("index_key", layer_ids=layers[::2], dtype="int8", total_heads=1, dims=1),
    ]
    page_size = draw(st.integers(1, 4))
    if page_size == 4:
        specs.append(
            kp.ComponentSpec(
                "latent_c4", layer_ids=layers[1:] or layers, dtype="int8", total_heads=1, dims=2, compression=4
            )
        )
    if drafts:
        specs.append(kp.ComponentSpec("key", "draft", layer_ids=drafts, dtype="uint8", total_heads=2, dims=1))
    layout = kp.ModelLayout(specs, page_size=page_size, fingerprint="model")
    sides = [
        build_deployment(
            layout,
            stages(draw, layers + drafts),
            draw(st.sampled_from(tp_sizes)),
            items=ITEMS,
            base=base,
            padding=draw(st.sampled_from([0, 0, 5])),
        )
        for base in (2**12, 2**44)
    ]
    count = draw(st.integers(0, ITEMS - 1))
    pages = [draw(st.permutations(range(1, ITEMS)))[:count] for _ in sides]
    return World(sides[0], sides[1], list(pages[0]), list(pages[1]))


LIMITS = st.builds(
    kp.Capabilities,
    max_entries_per_batch=st.none() | st.integers(1, 5),
    max_block_bytes=st.none() | st.integers(1, 17),
)


@settings(deadline=None, max_examples=60)
@given(worlds(), LIMITS)
def test_every_destination_byte_is_written_once_and_nothing_else(world: World, limits: kp.Capabilities) -> None:
    images = received_images(world.agreement, world.runs, limits)
    for manifest, image in zip(world.remote.manifests, images, strict=True):
        assert image == expected_image(manifest, world.source_pages, world.destination_pages)


@settings(deadline=None, max_examples=60)
@given(worlds(), LIMITS)
def test_limits_change_no_byte(world: World, limits: kp.Capabilities) -> None:
    for index in range(len(world.local)):
        plan = kp.Plan(world.agreement.route(index, 0), world.runs)
        free, bound = kp.lower(plan), kp.lower(plan, limits)
        assert byte_map(free) == byte_map(bound)
        assert free.block_count == plan.block_count == sum(len(batch) for batch in free.batches)
        assert bound.block_count == sum(len(batch) for batch in bound.batches)
        assert bound.total_bytes == plan.nbytes == sum(int(batch.nbytes.sum()) for batch in bound.batches)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), unique=True, max_size=20), st.data())
def test_runs_cover_every_pair_once_in_order(destination: list[int], data: st.DataObject) -> None:
    source = data.draw(st.lists(st.integers(1, 30), min_size=len(destination), max_size=len(destination)))
    runs = kp.Runs(source, destination)
    pairs = [(s + k, d + k) for s, d, n in zip(*(a.tolist() for a in runs.arrays()), strict=True) for k in range(n)]
    assert pairs == list(zip(source, destination, strict=True))
    assert runs.page_count == len(runs) == len(source)


@settings(deadline=None, max_examples=40)
@given(worlds())
def test_coalescing_never_changes_the_byte_map(world: World) -> None:
    route = world.agreement.route()
    single: dict[int, int] = {}
    for source, destination in zip(world.source_pages, world.destination_pages, strict=True):
        single |= byte_map(kp.lower(kp.Plan(route, kp.Runs([source], [destination]))))
    assert byte_map(kp.lower(kp.Plan(route, world.runs))) == single


@settings(deadline=None, max_examples=40)
@given(worlds(), st.integers(0, ITEMS))
def test_slices_partition_a_plan(world: World, cut: int) -> None:
    cut = min(cut, len(world.runs))
    plan = kp.Plan(world.agreement.route(), world.runs)
    layers = sorted({layer for spec in world.local.layout.components for layer in spec.layer_ids})
    joined: dict[int, int] = {}
    for layer in layers:
        for pages in ((0, cut), (cut, len(world.runs))):
            joined |= byte_map(kp.lower(plan.slice(layer_ids=[layer], pages=pages)))
    assert joined == byte_map(kp.lower(plan))
    assert plan.slice() == plan
    assert plan.slice(pages=(0, cut)).nbytes + plan.slice(pages=(cut, len(world.runs))).nbytes == plan.nbytes


@settings(deadline=None, max_examples=40)
@given(worlds(), st.data())
def test_slicing_commutes_with_joining_stages(world: World, data: st.DataObject) -> None:
    """Layers of a slice arrive alike from many stages and from one."""
    layers = sorted({layer for spec in world.local.layout.components for layer in spec.layer_ids})
    chosen = data.draw(st.lists(st.sampled_from(layers), unique=True))
    joined = kp.agree(build_deployment(world.local.layout, [layers], items=ITEMS), world.remote)

    def arrived(agreement: kp.Agreement) -> dict[int, object]:
        image: dict[int, object] = {}
        for index, manifest in enumerate(agreement.local):
            labels = label_bytes(manifest)
            plan = kp.Plan(agreement.route(index, 0), world.runs).slice(layer_ids=chosen)
            image |= {to: labels[from_] for to, from_ in byte_map(kp.lower(plan)).items()}
        return image

    assert arrived(world.agreement) == arrived(joined)


@settings(deadline=None, max_examples=40)
@given(worlds(tp_sizes=(1,)))
def test_reversing_plans_the_way_back(world: World) -> None:
    back = world.agreement.reversed()
    assert back.reversed() == world.agreement
    assert back == kp.agree(world.remote, world.local)
    runs_back = kp.Runs(world.destination_pages, world.source_pages)
    for source in range(len(world.local)):
        for destination in range(len(world.remote)):
            there = byte_map(kp.lower(kp.Plan(world.agreement.route(source, destination), world.runs)))
            again = byte_map(kp.lower(kp.Plan(back.route(destination, source), runs_back)))
            assert again == {from_: to for to, from_ in there.items()}


@settings(deadline=None, max_examples=40)
@given(worlds())
def test_two_ranks_agree_as_their_deployments_do(world: World) -> None:
    for i, local in enumerate(world.local.manifests):
        for j, remote in enumerate(world.remote.manifests):
            assert kp.agree(local, remote).route() == world.agreement.route(i, j)


@settings(deadline=None, max_examples=30)
@given(worlds())
def test_manifests_survive_json(world: World) -> None:
    for manifest in world.local.manifests:
        assert kp.RankManifest.from_json(manifest.to_json()) == manifest
    assert kp.ModelLayout.from_json(world.local.layout.to_json()) == world.local.layout


def test_the_worlds_are_not_empty() -> None:
    """The laws would hold of nothing; a fixed world shows that there is something to move."""
    layout = kp.ModelLayout(
        [kp.ComponentSpec("key", layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=2)],
        page_size=2,
        fingerprint="model",
    )
    local, remote = build_deployment(layout, [[0], [1]], 2), build_deployment(layout, [[0, 1]], 4, base=2**44)
    images = received_images(kp.agree(local, remote), kp.Runs([3, 1], [1, 2]))
    assert [len(image) for image in images] == [16, 16, 16, 16]
