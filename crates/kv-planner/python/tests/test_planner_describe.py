"""Every type says in plain words what it is, with its numbers."""

from __future__ import annotations

import inspect

import kv_planner as kp
import pytest
from kv_planner import _native
from kv_planner.testing import build_deployment

LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=range(4), dtype="float16", total_heads=2, dims=64),
        kp.ComponentSpec("latent_c4", layer_ids=[1, 3], dtype="int8", total_heads=1, dims=512, compression=4),
        kp.ComponentSpec("key", "draft", layer_ids=[4], dtype="float16", total_heads=2, dims=64),
    ],
    page_size=128,
    fingerprint="model-7",
)
LOCAL = build_deployment(LAYOUT, [[0, 1], [2, 3, 4]])
REMOTE = build_deployment(LAYOUT, [list(range(5))], 2, base=2**44)
AGREEMENT = kp.agree(LOCAL, REMOTE)
ROUTE = AGREEMENT.route(1, 0)
RUNS = kp.Runs([1, 2, 5], [3, 4, 1])
PLAN = kp.Plan(ROUTE, RUNS)
LOWERED = kp.lower(PLAN)
INDEX = kp.PrefixIndex(2, device_pages=8, host_pages=8)
INSERTED = INDEX.insert([1, 2, 3, 4], [1, 2])
MATCH, LOCK = INDEX.match_locked([1, 2, 3])
INDEX.unlock(LOCK)
EVICTED = INDEX.evict_device(1)
FIELD = kp.RowField("positions", "int64", rows=8, width=4, fill=-1)

VALUES: dict[str, tuple[object, list[str]]] = {
    "ComponentSpec": (LAYOUT.components[1], ["latent_c4/target", "layers 1, 3", "1 head of 512 int8", "4 tokens"]),
    "ModelLayout": (LAYOUT, ["model-7", "pages of 128 tokens", "key/draft on layers 4", "32 KiB"]),
    "Placement": (
        kp.Placement(pp_size=2, dcp_size=2, dp_size=2),
        ["stage 0 of 2", "context-parallel", "data-parallel"],
    ),
    "BufferEntry": (
        LOCAL.manifests[0].entries[0],
        ["key/target layer 0", "heads 0..2", "6 items of 32 KiB", "0x1000", "cpu"],
    ),
    "RankManifest": (LOCAL.manifests[1], ["stage 1 of 2", "4 buffers", "key/draft layer 4"]),
    "Deployment": (LOCAL, ["2 ranks", "0: pipeline stage 0 of 2", "layers 2..4"]),
    "Difference": (
        kp.Difference("page_size", 64, 128, "tokens would land wrong", "use one"),
        ["local: 64", "remote: 128"],
    ),
    "Agreement": (AGREEMENT, ["target and draft", "sends:", "receives:", "tensor-parallel rank 1 of 2"]),
    "Route": (ROUTE, ["from pipeline stage 1 of 2", "4 pairs", "an item"]),
    "RoutePair": (ROUTE.pairs[0], ["layer 2", "heads 0..1", "128 pieces of 128 bytes a page"]),
    "Runs": (RUNS, ["3 pages in 2 runs", "2 from 1 to 3", "1 from 5 to 1"]),
    "Plan": (PLAN, ["plan:", "blocks", "3 pages in 2 runs", "4 pairs"]),
    "Capabilities": (kp.Capabilities(max_block_bytes=4096), ["any number of blocks a batch", "at most 4 KiB"]),
    "Batch": (LOWERED.batches[0], ["batch of", "128 bytes from 0x", "…"]),
    "LoweredPlan": (LOWERED, [f"{LOWERED.block_count} blocks", "1 batches", "batch of"]),
    "Regions": (kp.Regions([(0, 1)]), ["1 region of 2 MiB", "0x0..0x200000"]),
    "StateRoute": (
        kp.StateRoute([(8, 2), (4, 1)], rows=3, source=(0, 1), destination=(0, 2)),
        ["60 bytes on the source"],
    ),
    "RowField": (FIELD, ["positions: 8 × 4 int64", "256 bytes", "not placed yet", "padded with -1"]),
    "RowLayout": (kp.RowLayout([FIELD]), ["arena of 256 bytes", "at byte 0"]),
    "PrefixIndex": (INDEX, ["pages of 2 tokens", "1 node in 1 namespace", "0 locks"]),
    "PrefixMatch": (MATCH, ["2 tokens", "2 on the device", "0 on the host"]),
    "PrefixLock": (LOCK, ["lock 1"]),
    "InsertResult": (INSERTED, ["2 pages", "2 taken over", "0 duplicate"]),
    "Eviction": (EVICTED, ["1 page freed", "1 left the index", "0 wanted and not freed"]),
    "TierCounts": (INDEX.counts().device, ["1 of 7 pages held", "1 evictable", "0 protected"]),
    "PrefixCounts": (INDEX.counts(), ["device: 1 of 7", "host: 0 of 7"]),
    "PrefixStatistics": (INDEX.statistics(), ["1 match: 2 of 3 tokens found (66.7 %)", "evicted: 1 device, 0 host"]),
}


def test_every_type_describes_itself() -> None:
    classes = {name for name in kp.__all__ if inspect.isclass(getattr(_native, name, None))}
    assert classes == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_a_description_holds_the_numbers(name: str) -> None:
    value, parts = VALUES[name]
    assert type(value).__name__ == name
    text = value.describe()  # type: ignore[attr-defined]
    assert all(part in text for part in parts), text
    assert text == text.strip() and "\t" not in text and text != repr(value)


def test_an_empty_route_says_so() -> None:
    alone = kp.agree(LOCAL, build_deployment(LAYOUT, [[2, 3, 4], [0, 1]], base=2**44)).route(0, 0)
    assert alone.describe().startswith("nothing from pipeline stage 0 of 2")


def test_statistics_and_residency_follow_the_calls() -> None:
    index = kp.PrefixIndex(2, device_pages=8, host_pages=8)
    assert index.statistics() == kp.PrefixIndex(2, device_pages=8).statistics()
    first = index.insert([1, 2, 3, 4], [1, 2])
    index.insert([1, 2, 9, 9], [3, 4])
    index.match([1, 2, 3, 4, 5], max_tokens=4)
    index.backed_up(first.nodes, [5, 6])
    assert [column.tolist() for column in index.residency(first.nodes)] == [[1, 2], [5, 6]]
    assert sorted(index.evict_device(9).pages.tolist()) == [1, 2, 4]
    assert [column.tolist() for column in index.residency(first.nodes)] == [[-1, -1], [5, 6]]
    index.loaded(first.nodes[:1], [7])
    with pytest.raises(kp.LengthError):
        kp.PrefixIndex(0, device_pages=8)
    index.evict_host(1)
    with pytest.raises(kp.StaleNode):
        index.residency(first.nodes)
    totals = index.statistics()
    assert (totals.matches, totals.asked_tokens, totals.matched_tokens) == (1, 4, 4)
    assert (totals.inserted_pages, totals.duplicate_pages) == (3, 1)
    assert (totals.backed_up_pages, totals.loaded_pages) == (2, 1)
    assert (totals.evicted_device_pages, totals.evicted_host_pages) == (3, 1)
