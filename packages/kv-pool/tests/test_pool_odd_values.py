"""Owns the proof that every public argument refuses an odd value by name, and that nothing has happened then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import kv_pool
import numpy as np
import pytest
import torch
from kv_planner import Component, ComponentSpec, ItemKind, ModelLayout, PlanError
from kv_planner.testing.odd_values import ANY, LISTED, NUMBER, ODD, OPTIONAL, Case, missing, public, wrongs
from kv_pool import (
    HybridPool,
    KvPoolError,
    MhaPool,
    MlaPool,
    PageAllocator,
    PageMap,
    PoolShare,
    SlotAllocator,
    StatePool,
    StorageError,
    WindowPages,
)
from kv_pool.integrations import sglang, vllm
from kv_pool.integrations.sglang.storage import HostPages

TYPED = (KvPoolError, PlanError)
RECORD = "a record that calls return"
EXEMPT = {
    "MemoryPlan": RECORD,
    "PoolBudget": RECORD,
    "PageCopy": RECORD,
    "WriteSlots": RECORD,
    "PageUse": "made by PageAllocator.in_use, once a copy",
    "Pool": "made by pools over storage of their own",
    "StateKind": "made by StatePool",
}


PAIR: tuple[Component, ...] = ("key", "value")


def layout(layers: tuple[int, ...] = (0, 1), *names: Component, item: ItemKind = "page") -> ModelLayout:
    specs = [
        ComponentSpec(name, layer_ids=list(layers), dtype="float16", total_heads=2 if name in "key value" else 1,
                      dims=16, item_kind=item)
        for name in names or PAIR
    ]  # fmt: skip
    return ModelLayout(specs, page_size=4 if item == "page" else 1, fingerprint="m")


def states() -> ModelLayout:
    return layout((0, 1), "state", item="request_row")


class World:
    """One pool of each kind, allocators, and the table over them."""

    def __init__(self) -> None:
        self.mha = MhaPool(layout(), size=16, device="cpu")
        self.window = MhaPool(layout((2, 3)), size=16, device="cpu")
        self.mla = MlaPool(layout((0, 1), "latent", "rope", "index_key"), size=16, device="cpu")
        self.hybrid = HybridPool(self.mha, self.window)
        self.states = StatePool({"a": states()}, requests=2, device="cpu", shapes={"a": (4, 4)})
        self.pages = PageAllocator(10, 4)
        self.held = self.pages.alloc(2)
        self.slots = SlotAllocator(self.pages)
        self.map = PageMap(PageAllocator(8, 4), PageAllocator(8, 4))
        lead, own = self.map.lead.alloc(3), self.map.own.alloc(3)
        self.map.give(lead[:1], own[:1])
        self.windows = WindowPages(PageAllocator(8, 4), PageAllocator(8, 4))
        self.windows.alloc(2)
        self.before = self.state()

    def state(self) -> list[Any]:
        """All books and all bytes."""
        books = [self.pages, self.map.lead, self.map.own, self.windows.full, self.windows.window]
        for own in books:
            own.verify()
        pools = [self.mha, self.window, self.mla, *(self.states.kind(kind) for kind in self.states.kinds)]
        held = [layer for pool in pools for name in pool.components for layer in pool.layers(*name)]
        return [
            [own.available for own in books],
            self.map.named().tolist(),
            [int(layer.count_nonzero()) for layer in held],
        ]

    def cases(self) -> dict[str, Case]:
        """How each public callable is called, and what its arguments take beside."""
        part, place = {"part": "target"}, kp.Placement()
        layer = {"layer_id": 0, **part}
        layers = {"layer_id": NUMBER}
        of = {"component": "key", **part}
        one = np.array([1])
        ids = ("empty list",)
        slots = torch.tensor([4])
        row = torch.ones(1, 2, 16, dtype=torch.float16)
        single = torch.ones(1, 1, 16, dtype=torch.float16)
        write = {**layer, "slots": slots, "key": row, "value": row}
        made = {
            "layout": layout(), "size": 16, "device": "cpu", "layer_ids": None, "placement": None, "writer": "index",
            "region": None, "zero": False,
        }  # fmt: skip
        takes = {"layer_ids": OPTIONAL, "placement": OPTIONAL, "region": OPTIONAL, "zero": ("true",)}
        share: dict[str, Any] = {
            "name": "a", "layout": layout(), "share": 1.0, "requests": None, "layer_ids": None, "on_host": True,
        }  # fmt: skip
        storage = {"key": self.mha.storage("key"), "value": self.mha.storage("value")}
        lens = {"prefix_lens": [0], "seq_lens": [3], "last_slots": [0]}
        return {
            "HybridPool": Case(HybridPool, {"full": self.mha, "window": self.window}),
            "HybridPool.group_of": Case(self.hybrid.group_of, layer, layers, {"part": "part"}),
            "HybridPool.locate": Case(self.hybrid.locate, {"slots": [0]}, {"slots": ids}),
            "HybridPool.write": Case(self.hybrid.write, {**write, "slots": self.hybrid.locate([0])}, layers),
            "MhaPool": Case(MhaPool, {**made, "head_range": None}, {**takes, "head_range": OPTIONAL}),
            "MhaPool.key": Case(self.mha.key, layer, layers),
            "MhaPool.value": Case(self.mha.value, layer, layers),
            "MhaPool.write": Case(self.mha.write, write, layers),
            "MlaPool": Case(MlaPool, {**made, "layout": layout((0, 1), "latent", "rope"), "form": "paged"}, takes),
            "MlaPool.latent": Case(self.mla.latent, layer, layers),
            "MlaPool.rope": Case(self.mla.rope, layer, layers),
            "MlaPool.write": Case(
                self.mla.write, {**layer, "slots": slots, "latent": single, "rope": single}, layers
            ),
            "MlaPool.write_index": Case(
                self.mla.write_index, {**layer, "slots": slots, "index_key": single, "index_scale": None},
                {**layers, "index_scale": OPTIONAL},
            ),
            "PageAllocator": Case(PageAllocator, {"num_pages": 10, "page_size": 4}),
            "PageAllocator.alloc": Case(self.pages.alloc, {"count": 1}, {"count": NUMBER}),
            "PageAllocator.holders": Case(self.pages.holders, {"pages": one}, {"pages": ids}),
            "PageAllocator.in_use": Case(self.pages.in_use, {"pages": one}, {"pages": ids}),
            "PageAllocator.release": Case(self.pages.release, {"pages": one}, {"pages": ids}),
            "PageAllocator.retain": Case(self.pages.retain, {"pages": one}, {"pages": ids}),
            "PageAllocator.watch": Case(
                self.pages.watch, {"left": None, "freed": None}, {"left": OPTIONAL, "freed": OPTIONAL}
            ),
            "PageMap": Case(PageMap, {"lead": self.map.lead, "own": self.map.own}),
            "PageMap.evict": Case(self.map.evict, {"count": 0}, {"count": ("-1", "0", "2**64", "many digits")}),
            "PageMap.find": Case(self.map.find, {"pages": one}, {"pages": ids}),
            "PageMap.give": Case(self.map.give, {"pages": one + 1, "own_pages": one + 1}),
            "PageMap.leave": Case(self.map.leave, {"pages": one}, {"pages": ids}),
            "PageMap.pass_on": Case(self.map.pass_on, {"source": one, "target": one + 1}),
            "PageMap.touch": Case(self.map.touch, {"pages": one}, {"pages": ids}),
            "Pool.copy_in": Case(self.mha.copy_in, {"pages": [1], "copy": self.mha.copy_out([1])}),
            "Pool.copy_out": Case(self.mha.copy_out, {"pages": [1]}, {"pages": ids}),
            "Pool.head_range": Case(self.mha.head_range, {**part, "component": "key"}, {"component": OPTIONAL}),
            "Pool.layer_ids": Case(self.mha.layer_ids, {**part, "component": "key"}, {"component": OPTIONAL}),
            "Pool.layers": Case(self.mha.layers, of),
            "Pool.storage": Case(self.mha.storage, of),
            "Pool.view": Case(self.mha.view, {**of, "layer_id": 0, "form": "paged"}, layers),
            "PoolShare": Case(
                PoolShare, share,
                {"name": ("text", "empty text", "half a pair"), "share": ("fraction",),
                 "on_host": ("true",),
                 "requests": OPTIONAL,
                 "layer_ids": ("None", "bools", "empty list", "ragged", "fractions", "objects")},
            ),
            "SlotAllocator": Case(SlotAllocator, {"pages": self.pages}),
            "SlotAllocator.decode": Case(self.slots.decode, {"seq_lens": [1], "last_slots": [0]}),
            "SlotAllocator.extend": Case(self.slots.extend, lens),
            "SlotAllocator.free": Case(self.slots.free, {"slots": [0]}, {"slots": ids}),
            "StatePool": Case(
                StatePool,
                {"layouts": {"a": states()}, "requests": 2, "device": "cpu", "layer_ids": None, "placement": None,
                 "shapes": None, "writer": "auto", "region": None},
                {"layer_ids": OPTIONAL, "placement": OPTIONAL, "shapes": OPTIONAL, "region": OPTIONAL},
                {"layouts": "layout"},
            ),
            "StatePool.clear": Case(self.states.clear, {"rows": torch.tensor([1])}),
            "StatePool.copy": Case(self.states.copy, {"sources": torch.tensor([1]), "targets": torch.tensor([2])}),
            "StatePool.kind": Case(self.states.kind, {"name": "a"}, says={"name": "kind"}),
            "StatePool.state": Case(self.states.state, {"kind": "a", **layer}, layers),
            "StatePool.write": Case(
                self.states.write,
                {"kind": "a", **layer, "rows": torch.tensor([1]), "states": row.view(2, 1, 4, 4)[:1]},
                layers, {"rows": "slots"},
            ),
            "WindowPages": Case(
                WindowPages, {"full": PageAllocator(8, 4), "window": PageAllocator(8, 4)}
            ),
            "WindowPages.alloc": Case(self.windows.alloc, {"count": 1}, {"count": NUMBER}),
            "WindowPages.release": Case(self.windows.release, {"pages": one}, {"pages": ids}),
            "WindowPages.retain": Case(self.windows.retain, {"pages": one}, {"pages": ids}),
            "WindowPages.window_pages": Case(self.windows.window_pages, {"pages": one}, {"pages": ids}),
            "WindowPages.window_slots": Case(
                self.windows.window_slots, {"slots": one}, {"slots": ids}, {"slots": "s"}
            ),
            "WindowPages.window_table": Case(self.windows.window_table, {"table": one}),
            "adopt": Case(
                kv_pool.adopt,
                {"tensors": storage, "layout": layout(), "layer_ids": None, "placement": None, "head_range": None,
                 "form": "paged"},
                {"layer_ids": OPTIONAL, "placement": OPTIONAL, "head_range": OPTIONAL},
            ),
            "available_host_bytes": Case(kv_pool.available_host_bytes, {"root": Path("/")}),
            "block_table": Case(
                kv_pool.block_table, {"requests": [[1]], "columns": 2, "rows": 1},
                {"requests": ("empty list", "ragged"), "columns": ("2**64",), "rows": OPTIONAL},
            ),
            "create_writer": Case(
                kv_pool.create_writer, {"name": "index", "device": torch.device("cpu"), "num_slots": 4},
                {"num_slots": NUMBER}, {"name": "writer", "num_slots": "s"},
            ),
            "narrow_slots": Case(kv_pool.narrow_slots, {"slots": [1]}, {"slots": ids}),
            "packed_record_bytes": Case(
                kv_pool.packed_record_bytes, {"latent": 128, "rope": 64}, {"rope": NUMBER}
            ),
            "plan_memory": Case(
                kv_pool.plan_memory,
                {"pools": [PoolShare(**share)], "placements": [place], "device_bytes": 10**6, "host_bytes": 0},
                {"host_bytes": NUMBER},
            ),
            "slots_for": Case(
                kv_pool.slots_for, {"pages": [1, 2], "start": 0, "stop": 4, "page_size": 4},
                {"start": NUMBER, "stop": NUMBER},
            ),
            "writer_names": Case(
                kv_pool.writer_names, {"device_type": "cpu"}, {"device_type": ("text", "empty text", "half a pair")}
            ),
        }  # fmt: skip


def test_the_table_has_every_public_argument() -> None:
    cases = World().cases()
    assert missing(kv_pool, cases, EXEMPT) == []
    assert (set(cases) | set(EXEMPT)) - set(public(kv_pool)) == set()


def test_odd_values_are_refused_by_name_and_change_nothing() -> None:
    world = World()
    assert wrongs(world.cases(), TYPED) == []
    assert world.state() == world.before


def _host_pages(**extra: object) -> HostPages:
    return HostPages(SimpleNamespace(extra_config=extra or None))


def test_odd_settings_of_the_engines_are_refused_before_a_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    view = np.zeros((2, 4096), np.int8).data
    block: dict[str, object] = {
        "offloading_spec": None, "tier_type": "kv_pool", "primary_kv_view": view, "storage": "files", "options": {},
        "threads": 1, "salt": "", "shared": True,
    }  # fmt: skip
    words = ("text", "empty text", "half a pair")
    cases = {
        "HostPages": Case(_host_pages, {"storage": "files", "options": {}, "salt": ""}, {"salt": words}),
        "BlockStore": Case(
            vllm.BlockStore, block,
            {"offloading_spec": ANY, "tier_type": ANY, "options": ("None", "mapping"), "salt": words, "storage": words,
             "shared": ("true",)},
        ),
    }  # fmt: skip
    assert wrongs(cases, TYPED) == []
    for value in (5, "x", [1]):
        with pytest.raises(StorageError, match="extra_config"):
            HostPages(SimpleNamespace(extra_config=value))
    assert sglang.HostPages is HostPages and LISTED[0] in ODD


@pytest.mark.parametrize(
    "ids",
    [
        torch.ones(1, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.int64, device="meta"),
        torch.ones(1).requires_grad_(),
    ],
)
def test_ids_that_the_host_cannot_read_are_named(ids: Any) -> None:
    """A tensor of a device is none that NumPy takes."""
    world = World()
    calls = (
        world.pages.release, world.pages.holders, world.slots.free, world.map.find, world.mha.copy_out,
        world.windows.window_slots, kv_pool.narrow_slots,
    )  # fmt: skip
    for call in calls:
        with pytest.raises(KvPoolError, match=r"pages|slots"):
            call(ids)
    assert world.state() == world.before


def test_errors_of_pages_name_the_argument_that_they_came_in() -> None:
    world = World()
    lead, own = world.map.lead.alloc(2), world.map.own.alloc(2)
    wrong = np.array([70, 71])
    calls: dict[str, Callable[[], object]] = {
        "own_pages": lambda: world.map.give(lead, wrong),
        "source": lambda: world.map.pass_on(wrong, lead),
        "target": lambda: world.map.pass_on(lead, wrong),
        "slots": lambda: world.slots.free([400]),
    }
    for name, call in calls.items():
        with pytest.raises(KvPoolError, match=f"{name}: expected"):
            call()
    for twice in (lead[[0, 0]], lead[:1]):
        with pytest.raises(KvPoolError, match="pages that pair"):
            world.map.give(twice, own)
    world.map.verify()


@pytest.mark.parametrize("layer", [True, 1.0, np.float64(1), np.True_, torch.tensor(1), np.array(1)])
def test_what_equals_a_layer_id_is_none(layer: Any) -> None:
    world = World()
    for call in (world.mha.key, world.mla.latent, world.hybrid.group_of):
        with pytest.raises(KvPoolError, match="layer_id"):
            call(layer)
        call(np.int64(1))
    with pytest.raises(KvPoolError, match="layer_ids"):
        MhaPool(layout(), size=16, device="cpu", layer_ids=[layer])
    assert MhaPool(layout(), size=np.int32(16), device="cpu", layer_ids=[np.int64(1)]).layer_ids() == (1,)


def test_rows_of_a_pool_are_named_as_the_caller_knows_them() -> None:
    world = World()
    slots, right, wide = torch.tensor([4]), torch.ones(1, 1, 16, dtype=torch.float16), torch.ones(1, 2, 16)
    for name, rows in {"latent": (wide, right), "rope": (right, wide)}.items():
        with pytest.raises(KvPoolError, match=f"{name}: expected"):
            world.mla.write(0, slots, *rows)
    with pytest.raises(KvPoolError, match="index_key: expected"):
        world.mla.write_index(0, slots, wide)
    with pytest.raises(KvPoolError, match="states: expected"):
        world.states.write("a", 0, torch.tensor([1]), wide)
    with pytest.raises(KvPoolError, match="rows: expected"):
        world.states.write("a", 0, torch.tensor([1.0]), right)


def test_a_region_that_is_no_context_is_refused() -> None:
    with pytest.raises(KvPoolError, match="region"):
        MhaPool(layout(), size=16, device="cpu", region=lambda: 5)  # type: ignore[arg-type, return-value]
