"""Owns the proof that a memory budget is kept by all pools together, and is the same on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import (
    BudgetError,
    HybridPool,
    MhaPool,
    Pool,
    PoolShare,
    StatePool,
    available_host_bytes,
    plan_memory,
)
from kv_pool.__main__ import app
from kv_pool.hicache import HostPool
from kv_pool.sizing import request_from_json
from typer.testing import CliRunner

GIB = 2**30


def layout(
    part: Any = "target", *, layers: Any = range(4), heads: int = 4, dims: int = 64, kind: str = "page"
) -> ModelLayout:
    names = ("key", "value") if kind == "page" else ("state",)
    specs = [
        ComponentSpec(name, part, layer_ids=layers, dtype="float16", total_heads=heads, dims=dims, item_kind=kind)  # type: ignore[arg-type]
        for name in names
    ]
    return ModelLayout(specs, page_size=16, fingerprint="x")


def ranks(pp: int = 1, tp: int = 1) -> list[Placement]:
    return [Placement(pp_rank=p, pp_size=pp, tp_rank=t, tp_size=tp) for p in range(pp) for t in range(tp)]


def test_a_host_budget_is_divided_by_bytes_not_given_to_each() -> None:
    """A limit of 100 over pools whose bytes are as 75 to 25 means 75 and 25."""
    pools = [PoolShare("full", layout(layers=range(3))), PoolShare("window", layout(layers=range(3, 4)))]
    plan = plan_memory(pools, placements=ranks(), device_bytes=GIB, host_bytes=100 * 10**6)
    host = {pool.name: pool.host_nbytes for pool in plan.pools}
    assert host["full"] == 3 * host["window"] and 97 * 10**6 < sum(host.values()) <= 100 * 10**6


@settings(max_examples=80, deadline=None)
@given(
    share=st.floats(0.05, 1.0),
    requests=st.integers(1, 40),
    device=st.lists(st.integers(6 * 10**6, 10**9), min_size=4, max_size=4),
    host=st.integers(0, 10**9),
)
def test_everything_fits_and_one_page_more_does_not(share: float, requests: int, device: list[int], host: int) -> None:
    pools = [
        PoolShare("full", layout(layers=range(6)), layer_ids=[range(4), range(4, 6)]),
        PoolShare("window", layout(layers=range(6, 10), dims=16), share, layer_ids=[[6], [7, 8, 9]]),
        PoolShare("draft", layout("draft", layers=[10, 11], dims=8), layer_ids=[{"draft": [10]}, {"draft": [11]}]),
        PoolShare("states", layout(layers=range(6), dims=32, kind="request_row"), requests=requests,
                  layer_ids=[range(3), range(3, 6)], on_host=False),
    ]  # fmt: skip
    plan = plan_memory(pools, placements=ranks(2, 2), device_bytes=device, host_bytes=host)
    assert plan == plan_memory(pools, placements=ranks(2, 2), device_bytes=device, host_bytes=host)
    used = [sum(pool.nbytes for pool in plan.pools[4 * rank : 4 * rank + 4]) for rank in range(4)]
    assert all(spent <= budget for spent, budget in zip(used, device, strict=True))
    pages = plan.tokens // 16
    by_name = [{pool.name: pool for pool in plan.pools[4 * rank : 4 * rank + 4]} for rank in range(4)]
    for row in by_name:
        assert row["full"].items == row["draft"].items == pages + 1
        assert pages * share <= row["window"].items - 1 < pages * share + 1
        assert row["states"].items == requests + 1 and row["states"].host_items == 0
    worst = by_name[plan.tightest]
    grown = sum(pool.nbytes + (pool.name != "states") * pool.item_bytes for pool in worst.values())
    assert grown > device[plan.tightest]
    assert sum(pool.host_nbytes for pool in plan.pools) <= host


def test_the_plan_is_what_pools_then_take() -> None:
    model = layout(layers=range(4), heads=2)
    plan = plan_memory([PoolShare("kv", model)], placements=ranks(tp=2), device_bytes=10**6, host_bytes=2 * 10**6)
    for budget in plan.pools:
        pool = MhaPool(model, size=plan.tokens, device="cpu", placement=budget.placement)
        assert (pool.num_pages, pool.nbytes) == (budget.items, budget.nbytes)
        host = HostPool(pool, pages=plan.host_tokens // 16)
        assert host.num_pages == budget.host_items and host.nbytes >= budget.host_nbytes
    assert 2 * host.nbytes <= 2 * 10**6


def test_pools_of_every_kind_take_what_was_planned() -> None:
    """Both groups of a hybrid pool, states, a draft apart; two stages of two ranks: all fits, and bytes are equal."""
    full, window = layout(layers=range(6)), layout(layers=range(6, 10), dims=16)
    draft, state = layout("draft", layers=[10, 11], dims=8), layout(layers=range(6), dims=32, kind="request_row")
    stages: dict[str, list[Any]] = {
        "full": [range(4), range(4, 6)], "window": [[6], [7, 8, 9]], "draft": [{"draft": [10]}, {"draft": [11]}],
        "state": [range(3), range(3, 6)],
    }  # fmt: skip
    shares = [
        PoolShare("full", full, layer_ids=stages["full"]), PoolShare("window", window, 0.3, layer_ids=stages["window"]),
        PoolShare("draft", draft, layer_ids=stages["draft"]),
        PoolShare("state", state, requests=5, layer_ids=stages["state"]),
    ]  # fmt: skip
    device, host_bytes = [3 * 10**6, 2 * 10**6, 3 * 10**6, 3 * 10**6], 40 * 10**6
    plan = plan_memory(shares, placements=ranks(2, 2), device_bytes=device, host_bytes=host_bytes)
    hosts = 0
    for rank, placement in enumerate(ranks(2, 2)):
        budgets = {budget.name: budget for budget in plan.pools if budget.placement == placement}
        stage = {name: layers[placement.pp_rank] for name, layers in stages.items()}

        def pages(
            name: str, held: ModelLayout, budgets: Any = budgets, stage: Any = stage, at: Any = placement
        ) -> MhaPool:
            return MhaPool(held, size=(budgets[name].items - 1) * 16, device="cpu", layer_ids=stage[name], placement=at)

        hybrid = HybridPool(pages("full", full), pages("window", window))
        rows = StatePool({"s": state}, requests=5, device="cpu", layer_ids=stage["state"], placement=placement)
        made: dict[str, Pool] = {
            "full": hybrid.full, "window": hybrid.window, "draft": pages("draft", draft), "state": rows.kind("s"),
        }  # fmt: skip
        for name, pool in made.items():
            assert (pool.num_pages, pool.nbytes) == (budgets[name].items, budgets[name].nbytes), name
            host = HostPool(pool, pages=budgets[name].host_items - 1)
            assert host.num_pages == budgets[name].host_items and host.nbytes >= budgets[name].host_nbytes
            hosts += host.nbytes
        assert sum(pool.nbytes for pool in made.values()) <= device[rank]
        assert hybrid.full.num_pages == made["draft"].num_pages == plan.tokens // 16 + 1
    assert hosts <= host_bytes


def test_a_stage_without_layers_of_a_pool_has_none_of_it() -> None:
    """A draft apart lies on the last stage, a window's layers on the first, keys and values not on the third."""
    pools = [
        PoolShare("full", layout(layers=range(4)), layer_ids=[[0, 1, 2], [3], []]),
        PoolShare("window", layout(layers=[4]), 0.5, layer_ids=[[4], [], []]),
        PoolShare("draft", layout("draft", layers=[5, 6]), layer_ids=[{"draft": []}, {"draft": [5, 6]}, {"draft": []}]),
        PoolShare("states", layout(layers=[7], kind="request_row"), requests=3, layer_ids=[[], [], [7]]),
    ]
    plan = plan_memory(pools, placements=ranks(3), device_bytes=10**7, host_bytes=10**7)
    held = {(pool.name, pool.placement.pp_rank): pool for pool in plan.pools}
    there = {("full", 0), ("full", 1), ("window", 0), ("draft", 1), ("states", 2)}
    for name, pool in held.items():
        assert (pool.items > 0) == (pool.host_items > 0) == (pool.nbytes > 0) == (name in there), name
    pages = plan.tokens // 16
    assert plan.tightest == 0 and held["draft", 1].items == held["full", 1].items == pages + 1 > 1
    page, half = held["full", 0].item_bytes, held["window", 0].item_bytes
    assert held["full", 0].nbytes + held["window", 0].nbytes <= 10**7 < (pages + 2) * page + (pages // 2 + 2) * half
    assert sum(pool.host_nbytes for pool in plan.pools) <= 10**7
    alone = plan_memory(pools[:1], placements=ranks(3)[:2], device_bytes=10**7)
    assert alone.tokens > plan.tokens and alone.host_tokens == 0
    with pytest.raises(BudgetError, match="ranks whose stages"):
        plan_memory(pools, placements=ranks(3)[2:], device_bytes=10**7)
    with pytest.raises(BudgetError, match=r"device_bytes\[2\].*not one page"):
        plan_memory(pools, placements=ranks(3), device_bytes=[10**7, 10**7, 10])


def test_rows_alone_on_the_host_have_an_end() -> None:
    pools = [PoolShare("kv", layout(), on_host=False), PoolShare("s", layout(kind="request_row"), requests=3)]
    for host_bytes, rows in ((10**7, 4), (100, 0)):
        plan = plan_memory(pools, placements=ranks(), device_bytes=10**7, host_bytes=host_bytes)
        assert [pool.host_items for pool in plan.pools] == [0, rows] and plan.host_tokens == 0
    vast = plan_memory([PoolShare("kv", layout())], placements=ranks(), device_bytes=2**62)
    assert vast.pools[0].items == 2**31 - 1  # what a page id can name


@pytest.mark.parametrize(
    ("pools", "options", "text"),
    [
        ([PoolShare("kv", layout())], {"device_bytes": 1000}, "not one page"),
        ([PoolShare("kv", layout()), PoolShare("d", layout("draft"), 0.5)], {}, "the target's 1.0"),
        ([PoolShare("kv", layout()), PoolShare("kv", layout("draft"))], {}, "distinct"),
        ([PoolShare("s", layout(kind="request_row"), requests=3)], {}, "grows with the tokens"),
        ([PoolShare("kv", layout())], {"placements": ranks(pp=2)}, "layers of each"),
        ([PoolShare("kv", layout(), layer_ids=[[0], [1]])], {}, "layers of each"),
        ([PoolShare("kv", layout())], {"device_bytes": [1, 2]}, "one budget a rank"),
        ([PoolShare("kv", layout())], {"placements": []}, "one budget a rank"),
    ],
)
def test_budgets_that_cannot_be_kept(pools: list[PoolShare], options: dict[str, Any], text: str) -> None:
    with pytest.raises(BudgetError, match=text):
        plan_memory(pools, **{"placements": ranks(), "device_bytes": GIB, **options})


def test_what_is_free_is_the_least_of_machine_and_cgroups(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    with pytest.raises(BudgetError, match="MemAvailable"):
        available_host_bytes(tmp_path)
    put("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert available_host_bytes(tmp_path) == 65536
    put("proc/self/cgroup", "0::/pod/engine\n")
    put("sys/fs/cgroup/pod/engine/memory.max", "max\n")
    put("sys/fs/cgroup/pod/engine/memory.current", "7\n")
    assert available_host_bytes(tmp_path) == 65536
    put("sys/fs/cgroup/pod/memory.max", "5000\n")
    put("sys/fs/cgroup/pod/memory.current", "4000\n")
    assert available_host_bytes(tmp_path) == 1000
    put("sys/fs/cgroup/pod/memory.stat", "anon 3400\ninactive_file 600\n")
    assert available_host_bytes(tmp_path) == 1600
    put("sys/fs/cgroup/pod/memory.current", "9000\n")
    assert available_host_bytes(tmp_path) == 0
    put("proc/self/cgroup", "3:cpu:/x\n2:memory:/job\n")
    put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "3000")
    put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "5")
    assert available_host_bytes(tmp_path) == 2000
    assert available_host_bytes() > 0


def config() -> dict[str, Any]:
    return {
        "pools": [{"name": "kv", "layout": json.loads(layout().to_json())}],
        "placements": [{"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}],
        "device_bytes": 10**7,
        "host_bytes": 10**7,
    }


def test_the_command_prints_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    run = [sys.executable, "-m", "kv_pool", "size", str(path)]
    done = subprocess.run([*run, "--json"], capture_output=True, text=True, check=True, timeout=60)
    plan = plan_memory(**request_from_json(path.read_text()))
    assert json.loads(done.stdout)["tokens"] == plan.tokens > 0
    path.write_text("{}")
    refused = CliRunner().invoke(app, ["size", str(path)])
    assert refused.exit_code == 2 and "pools" in refused.output
    for odd in (bytes(range(256)), b"[" * 100_000, b'{"pools": [' + b"9" * 5000 + b"]}"):
        path.write_bytes(odd)
        assert CliRunner().invoke(app, ["size", str(path)]).exit_code == 2
    path.write_text(json.dumps({**config(), "host_bytes": 0}))
    shown = CliRunner().invoke(app, ["size", str(path), "--host-free"])
    assert shown.exit_code == 0 and f"{plan.tokens} tokens" in shown.output


@pytest.mark.parametrize(
    "change",
    [
        {"pools": None},
        {"pools": [{}]},
        {"placements": [{"tp_rank": 5}]},
        {"device_bytes": 1.5},
        {"host_bytes": -1},
        {"more": 1},
    ],
)
def test_configurations_that_do_not_fit_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="placements"):
        request_from_json(json.dumps({**config(), **change}))
    with pytest.raises(BudgetError):
        request_from_json("[")
