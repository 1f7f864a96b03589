"""Numbers at the edges of their range, in JSON and in calls: each is a result or a `PlanError`, and none is a panic."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kv_planner as kp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_planner.testing import build_rank

TOP = 2**64 - 1
EDGES = [0, 1, 2, 255, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**63, TOP - 1, TOP]
JSON_EDGES: list[Any] = [*EDGES, -1, -(2**63), TOP + 1, 10**30, 0.5, 1e308, True, None, "1", []]
NUMBER = st.integers(0, 3) | st.sampled_from(EDGES)
LARGEST: dict[kp.DType, float] = {
    "float32": (2 - 2**-23) * 2.0**127,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fn": 448.0,
}
DTYPES: list[kp.DType] = ["float16", "float8_e4m3fn", "int8", "int32", "int64", "bool"]

LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=2),
        kp.ComponentSpec("key", "draft", layer_ids=[2], dtype="uint8", total_heads=2, dims=2),
    ],
    page_size=2,
    fingerprint="model",
)
TEXT = build_rank(LAYOUT, range(3)).to_json()


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all numbers in a JSON value."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(value, (*path, key))
    elif isinstance(node, int):
        yield path


PLACES = list(places(json.loads(TEXT)))


def tried(call: Callable[[], object]) -> None:
    """Runs a call that may refuse; a panic fails the test, as an `InternalError` or otherwise."""
    try:
        call()
    except kp.InternalError:
        raise
    except kp.PlanError as error:
        assert error.consequence and error.remedy


@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(JSON_EDGES)), min_size=1, max_size=6))
def test_json_of_any_numbers_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    value = json.loads(TEXT)
    for path, number in changes:
        node = value
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = number

    def use() -> None:
        manifest = kp.RankManifest.from_json(json.dumps(value))
        repr([entry.items for entry in manifest.entries])
        tried(lambda: kp.Deployment([manifest]))
        route = kp.agree(manifest, manifest).route()
        limits = kp.Capabilities(max_blocks=64)
        tried(lambda: kp.lower(kp.Plan(route, kp.Runs([1], [1])), limits))
        tried(lambda: kp.lower(kp.Plan(route, kp.Runs([2**63 - 1], [2**63 - 1])), limits))

    tried(lambda: kp.ModelLayout.from_json(json.dumps(value["layout"])))
    tried(use)


@given(a=NUMBER, b=NUMBER, c=NUMBER, signed=st.integers(-(2**63), 2**63 - 1), dtype=st.sampled_from(DTYPES))
def test_calls_with_any_numbers_answer_or_refuse(a: int, b: int, c: int, signed: int, dtype: kp.DType) -> None:
    def layout(*ids: int) -> kp.ModelLayout:
        parts: tuple[kp.Part, ...] = ("target", "draft")
        specs = [kp.ComponentSpec("key", part, layer_ids=ids, dtype=dtype, total_heads=a, dims=b) for part in parts]
        return kp.ModelLayout(specs, page_size=c, fingerprint="model", kernel_block_size=a)

    tried(lambda: layout(a, b))
    tried(lambda: kp.Placement(pp_rank=a, pp_size=b, tp_rank=b, tp_size=c))
    tried(lambda: kp.split_heads(a, tp_rank=b, tp_size=c))
    tried(lambda: kp.page_count(a, b))
    tried(lambda: kp.select_index([signed], rows=a if a > 2**50 else a % 64, width=b, front=c))
    tried(lambda: kp.kv_lengths("mtp", [signed], window=a))
    tried(lambda: kp.RowLayout([kp.RowField("a", dtype, rows=a, width=b, fill=signed)], alignment=c))
    tried(lambda: kp.Runs([signed], [1]).slice(a, b))
    tried(lambda: kp.TierCounts(capacity=a, held=b, evictable=c, protected=a).outside)
    tried(lambda: kp.PrefixIndex(a, device_pages=b, host_pages=c).evict_device(a))
    tried(lambda: kp.page_hashes([signed], a, partial=True))


def test_a_shared_last_layer_id_is_a_refusal() -> None:
    parts: tuple[kp.Part, ...] = ("target", "draft")
    for ids, free in [([0, TOP], "no id after the target's last"), ([3, TOP - 1], TOP), ([0, 1], 2)]:
        specs = [kp.ComponentSpec("key", p, layer_ids=ids, dtype="int8", total_heads=1, dims=1) for p in parts]
        with pytest.raises(kp.LayoutError, match="would name a target and a draft layer") as caught:
            kp.ModelLayout(specs, page_size=1, fingerprint="model")
        assert (caught.value.local, caught.value.remote) == (ids[0], free)


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_float_fill_is_a_value_of_its_dtype(dtype: kp.DType) -> None:
    largest = LARGEST[dtype]
    fits = [0, 1.5, largest, -largest, math.nan] + ([math.inf, -math.inf] if dtype != "float8_e4m3fn" else [])
    for fill in fits:
        assert kp.RowField("a", dtype, rows=1, fill=fill).dtype == dtype
    beyond = [math.nextafter(largest, math.inf), -1e300, *([] if largest > 1e30 else [10**10, int(largest) + 1])]
    for fill in [*beyond, *([math.inf] if dtype == "float8_e4m3fn" else [])]:
        with pytest.raises(kp.RowLayoutError, match="fill"):
            kp.RowField("a", dtype, rows=1, fill=fill)


def test_many_interleaved_entries_are_read_and_one_shared_byte_is_found() -> None:
    count = 50_000
    geometry = kp.ModelLayout(
        [kp.ComponentSpec("key", layer_ids=range(count), dtype="uint8", total_heads=1, dims=8)],
        page_size=1,
        fingerprint="model",
    )
    value = json.loads(build_rank(geometry, [0]).to_json())
    sample = value["entries"][0]
    stride = 8 * count
    lengths = {"item_stride": stride, "item_bytes": 8, "nbytes": stride + 8}
    value["entries"] = [{**sample, **lengths, "layer_id": i, "address": 4096 + 8 * i} for i in range(count)]
    assert len(kp.RankManifest.from_json(json.dumps(value)).entries) == count
    value["entries"][count // 2]["address"] += stride + 1
    with pytest.raises(kp.ManifestError, match="share bytes"):
        kp.RankManifest.from_json(json.dumps(value))


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Lets a thread run on until it gives the GIL up by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize(
    "call",
    [
        lambda rank: kp.RankManifest.from_json(TEXT),
        lambda rank: kp.ModelLayout.from_json(LAYOUT.to_json()),
        lambda rank: kp.RankManifest(LAYOUT, rank.placement, rank.entries),
        lambda rank: kp.Deployment([rank]),
        lambda rank: kp.agree(rank, rank),
    ],
    ids=["manifest json", "layout json", "manifest", "deployment", "agree"],
)
def test_other_threads_run_during_a_check(call: Callable[[kp.RankManifest], object]) -> None:
    """The waiting thread can run only where a call lets the GIL go; how many calls it takes is the machine's affair."""
    rank, gate, ran = build_rank(LAYOUT, range(3)), threading.Lock(), threading.Event()
    gate.acquire()

    def wait() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=wait)
    thread.start()
    gate.release()
    calls = 0
    while not ran.is_set() and calls < 1_000_000:
        call(rank)
        calls += 1
    alone = not ran.is_set()
    thread.join()
    assert not alone, "no call let another thread run"


def test_one_data_parallel_group_is_a_side() -> None:
    def rank(dp_rank: int, tp_rank: int) -> kp.RankManifest:
        return build_rank(LAYOUT, range(3), kp.Placement(dp_rank=dp_rank, dp_size=2, tp_rank=tp_rank, tp_size=2))

    whole = build_rank(LAYOUT, range(3), base=2**40)
    for group in (0, 1):
        side = kp.Deployment([rank(group, 0), rank(group, 1)])
        assert [len(kp.agree(side, whole).route(index)) for index in (0, 1)] == [3, 3]
    assert len(kp.Deployment([rank(1, 1), rank(0, 0), rank(1, 0), rank(0, 1)])) == 4
    for mixture in ([rank(0, 0)], [rank(0, 0), rank(1, 1)], [rank(0, 0), rank(0, 1), rank(1, 1)]):
        with pytest.raises(kp.IncompleteDeployment, match="of dp_rank") as caught:
            kp.Deployment(mixture)
        assert (caught.value.local, caught.value.remote) == (1, 2)
