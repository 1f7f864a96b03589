"""Owns the proof that latent, state and adopted pools do on the emulated NPU what they do on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import MlaPool, Pool, StatePool, UnknownWriter, UnsupportedMover, adopt
from kv_pool.hicache import HostPool, MoverName, create_mover

NPU = "npu:0"
Labels = Callable[..., torch.Tensor]
Bits = Callable[[torch.Tensor], torch.Tensor]
NAMES: Any = ("latent", "rope", "index_key", "index_scale")


def layout(index_dtype: Any = "int8") -> ModelLayout:
    def spec(component: Any, layers: Any, dims: int, dtype: Any) -> ComponentSpec:
        return ComponentSpec(component, layer_ids=layers, dtype=dtype, total_heads=1, dims=dims)

    specs = [
        spec("latent", [0, 1], 64, "bfloat16"),
        spec("rope", [0, 1], 32, "bfloat16"),
        spec("index_key", [1], 32, index_dtype),
        spec("index_scale", [1], 8, "float32"),
    ]
    return ModelLayout(specs, page_size=4, fingerprint="sparse")


@pytest.mark.parametrize("form", ["paged", "nz"])
@pytest.mark.parametrize("writer", ["auto", "index"])
def test_writes_equal_those_on_a_cpu(make_labels: Labels, as_bits: Bits, form: Any, writer: Any) -> None:
    pools = [MlaPool(layout("uint8"), size=16, device=device, form=form, writer=writer) for device in ("cpu", NPU)]
    assert pools[1].writer == ("index" if writer == "index" else "scatter_nd")
    slots = torch.tensor([17, 4, 5, 19, 8, 11, 0])
    rows = {
        "latent": make_labels([7, 1, 64], torch.bfloat16, 1),
        "rope": make_labels([7, 1, 32], torch.bfloat16, 2),
        "index_key": make_labels([7, 1, 32], torch.int8, 3).view(torch.uint8),
        "index_scale": make_labels([7, 1, 8], torch.float32, 4),
    }
    for pool in pools:
        given = {name: row.to(pool.device) for name, row in rows.items()}
        pool.write(1, slots.to(pool.device), given["latent"], given["rope"])
        pool.write_index(1, slots.to(pool.device), given["index_key"], given["index_scale"])
    for name in NAMES:
        written = as_bits(pools[1].storage(name))
        assert torch.equal(written, as_bits(pools[0].storage(name))) and written.any()


def test_a_writer_of_pairs_does_not_serve_index_keys() -> None:
    with pytest.raises(UnknownWriter, match="single components"):
        MlaPool(layout("uint8"), size=16, device=NPU, writer="reshape_and_cache", form="nz")


def adopted(make_labels: Labels) -> Pool:
    """A list of flat layers for the rope, one tensor for the others."""
    tensors: Any = {
        "latent": torch.zeros(2, 6, 4, 1, 64, dtype=torch.bfloat16, device=NPU),
        "rope": [torch.zeros(24, 1, 1, 32, dtype=torch.bfloat16, device=NPU) for _ in range(2)],
        "index_key": torch.zeros(1, 6, 4, 1, 32, dtype=torch.int8, device=NPU),
        "index_scale": torch.zeros(1, 6, 4, 1, 8, device=NPU),
    }
    return adopt(tensors, layout())


@pytest.mark.parametrize("mover", ["indexed", "dim_exchange"])
@pytest.mark.parametrize("kind", ["own", "adopted"])
def test_pages_travel_bit_for_bit(make_labels: Labels, as_bits: Bits, mover: MoverName, kind: str) -> None:
    pool: Pool = MlaPool(layout(), size=20, device=NPU) if kind == "own" else adopted(make_labels)
    host = HostPool(pool, pages=6)
    if kind == "adopted" and mover == "dim_exchange":
        with pytest.raises(UnsupportedMover, match="a tensor a layer"):
            create_mover(mover, host)
        return
    moves = create_mover(mover, host)
    expected = []
    for seed, mirror in enumerate(host.mirrors):
        for number, layer in enumerate(mirror.layers):
            layer.copy_(make_labels(layer.shape, layer.dtype, 10 * seed + number))
        mirror.host.copy_(make_labels(mirror.host.shape, mirror.host.dtype, 70 + seed))
        expected.append(([as_bits(layer).clone() for layer in mirror.layers], as_bits(mirror.host).clone()))
    moves.backup([4, 1], [2, 5])
    torch.get_device_module(NPU).synchronize()
    moves.load([3, 5, 1], [5, 2, 6])
    torch.get_device_module(NPU).synchronize()
    for mirror, (near, far) in zip(host.mirrors, expected, strict=True):
        for number, layer in enumerate(near):
            far[[2, 5], number] = layer[[4, 1]]
            layer[[3, 5, 1]] = far[[5, 2, 6], number]
            assert torch.equal(as_bits(mirror.layers[number]), layer), mirror.component
        assert torch.equal(as_bits(mirror.host), far), mirror.component


def test_copies_and_states(make_labels: Labels, as_bits: Bits) -> None:
    pool = MlaPool(layout(), size=20, device=NPU)
    for seed, name in enumerate(NAMES):
        pool.storage(name).copy_(make_labels(pool.storage(name).shape, pool.storage(name).dtype, seed))
    before = {name: as_bits(pool.storage(name)).clone() for name in NAMES}
    pool.copy_in([2, 3], pool.copy_out([5, 1]))
    for name, bits in before.items():
        bits[:, [2, 3]] = bits[:, [5, 1]]
        assert torch.equal(as_bits(pool.storage(name)), bits)
    spec = ComponentSpec("state", layer_ids=[1], dtype="float32", total_heads=2, dims=6, item_kind="request_row")
    states = StatePool(
        {"conv": ModelLayout([spec], page_size=4, fingerprint="s")}, requests=3, device=NPU, shapes={"conv": (3, 2)}
    )
    rows = make_labels([2, 2, 3, 2], torch.float32, 5)
    states.write("conv", 1, torch.tensor([3, 1], device=NPU), rows.to(NPU))
    states.clear(torch.tensor([1], device=NPU))
    assert torch.equal(as_bits(states.state("conv", 1)[3]), as_bits(rows[0])) and not states.state("conv", 1)[:3].any()


@pytest.mark.parametrize("writer", ["scatter_nd", "index"])
@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_captured_states_follow_their_rows(
    make_labels: Labels, as_bits: Bits, writer: Any, rows_dtype: torch.dtype
) -> None:
    """One graph of a bucket of four, replayed for 3, 1 and 4 requests: padded rows name row 0 and nobody's state moves.

    Both kinds, target and draft; before the writes a clear of newly given rows, and copies that change places; contents
    and rows are new each time.
    """
    shared: Any = {"total_heads": 2, "item_kind": "request_row"}
    kinds: list[tuple[str, Any, int]] = [("conv", "bfloat16", 6), ("recurrent", "float32", 8)]
    layouts = {
        kind: ModelLayout(
            [
                ComponentSpec("state", layer_ids=[1, 3], dtype=dtype, dims=dims, **shared),
                ComponentSpec("state", "draft", layer_ids=[7], dtype=dtype, dims=dims, **shared),
            ],
            page_size=4,
            fingerprint="s",
        )
        for kind, dtype, dims in kinds
    }  # fmt: skip
    pool = StatePool(layouts, requests=6, device=NPU, shapes={"recurrent": (2, 4)}, writer=writer)
    where: list[tuple[str, int, Any]] = [
        (kind, layer, part) for kind in pool.kinds for layer, part in ((1, "target"), (3, "target"), (7, "draft"))
    ]
    rows, fresh, sources, targets = (torch.zeros(4, dtype=rows_dtype, device=NPU) for _ in range(4))
    static = {place: torch.zeros_like(pool.state(*place)[:4]) for place in where}

    def step() -> None:
        pool.clear(fresh)
        pool.copy(sources, targets)
        for place in where:
            pool.write(place[0], place[1], rows, static[place], place[2])

    for _ in range(2):
        step()
    npu: Any = torch.get_device_module(NPU)
    npu.synchronize()
    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        step()
    expected = {}
    for seed, place in enumerate(where):
        pool.state(*place).copy_(make_labels(pool.state(*place).shape, pool.state(*place).dtype, seed))
        expected[place] = as_bits(pool.state(*place)).clone()
    replays: list[tuple[list[int], list[int], list[int], list[int]]] = [
        ([5, 2, 6], [], [1, 4], [4, 1]),
        ([3], [4], [5, 5, 2], [1, 6, 5]),
        ([6, 1, 4, 2], [1, 3], [], []),
    ]
    for number, (live, given, read, written) in enumerate(replays):
        for index, wanted in ((rows, live), (fresh, given), (sources, read), (targets, written)):
            index.copy_(torch.tensor(wanted + [0] * (4 - len(wanted))))
        contents = {}
        for seed, place in enumerate(where):
            contents[place] = make_labels(static[place].shape, static[place].dtype, 100 * number + seed + 20)
            static[place].copy_(contents[place])
        graph.replay()
        npu.synchronize()
        for place in where:
            expected[place][given] = 0
            expected[place][written] = expected[place][read].clone()
            expected[place][live] = as_bits(contents[place])[: len(live)]
            found = as_bits(pool.state(*place))
            assert torch.equal(found[1:], expected[place][1:]), (number, place)
