"""Every kind of pool in every dtype, and one round trip of its items that no wrong byte survives.

Device and host are filled with labels that tell them apart; items go over and back permuted, onto others; then every
byte of both sides is compared with what indexing gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import HybridPool, MhaPool, MlaPool, Pool, StatePool, adopt
from kv_pool.hicache import HostLayout, HostPool, MoverName, create_mover

__all__ = ["DTYPES", "POOLS", "Bits", "Labels", "check_round_trip"]

Labels = Callable[..., torch.Tensor]
Bits = Callable[[torch.Tensor], torch.Tensor]
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
PAGE = 4


def spec(name: Any, layers: list[int], dims: int, dtype: Any, heads: int = 1, part: Any = "target", **more: Any) -> Any:
    return ComponentSpec(name, part, layer_ids=layers, dtype=dtype, total_heads=heads, dims=dims, **more)


def layout(*specs: ComponentSpec) -> ModelLayout:
    return ModelLayout(specs, page_size=PAGE, fingerprint="matrix")


def heads(dtype: Any, device: str) -> Iterator[Pool]:
    """K and V of unequal widths, a draft of another geometry, one of two ranks."""
    held = layout(
        spec("key", [0, 1, 2], 24, dtype, 4), spec("value", [0, 1, 2], 16, dtype, 4),
        spec("key", [3], 8, dtype, 2, "draft"), spec("value", [3], 12, dtype, 2, "draft"),
    )  # fmt: skip
    yield MhaPool(held, size=20, device=device, placement=Placement(tp_rank=1, tp_size=2))


def latents(dtype: Any, device: str, form: Any = "paged") -> Iterator[Pool]:
    """Latent and rope of unequal widths on all layers, index keys and scales on two, a draft without them.

    A latent of bytes is a packed record and has no rope.
    """
    ropes = [] if dtype == "uint8" else [
        spec("rope", [0, 1, 2], 32, dtype), spec("rope", [3], 32, dtype, 1, "draft"),
    ]  # fmt: skip
    held = layout(
        spec("latent", [0, 1, 2], 64, dtype), spec("latent", [3], 32, dtype, 1, "draft"), *ropes,
        spec("index_key", [0, 2], 96, dtype), spec("index_scale", [0, 2], 8, "float32"),
    )  # fmt: skip
    yield MlaPool(held, size=20, device=device, form=form)


def tiled(dtype: Any, device: str) -> Iterator[Pool]:
    """The same, its pages in tiles (NZ)."""
    return latents(dtype, device, "nz")


def packed(dtype: Any, device: str) -> Iterator[Pool]:
    """Packed records of bytes, with index keys of the dtype and their scales."""
    held = layout(
        spec("latent", [0, 1], 164, "uint8"), spec("index_key", [1], 32, dtype), spec("index_scale", [1], 1, "float32")
    )
    yield MlaPool(held, size=20, device=device)


def hybrid(dtype: Any, device: str) -> Iterator[Pool]:
    """Both groups of a hybrid pool, each with its own heads and widths; the window has fewer pages."""
    full = layout(spec("key", [1], 24, dtype, 2), spec("value", [1], 16, dtype, 2))
    window = layout(spec("key", [0, 2], 8, dtype, 3), spec("value", [0, 2], 16, dtype, 3))
    both = HybridPool(MhaPool(full, size=24, device=device), MhaPool(window, size=20, device=device))
    yield both.full
    yield both.window


def states(dtype: Any, device: str) -> Iterator[Pool]:
    """Rows of a kind of the dtype and of one in float32, with a draft."""
    kinds: Any = {
        name: layout(
            spec("state", [1, 2], dims, kind, 2, item_kind="request_row"),
            spec("state", [4], dims, kind, 2, "draft", item_kind="request_row"),
        )
        for name, kind, dims in (("conv", dtype, 15), ("recurrent", "float32", 12))
    }  # fmt: skip
    pool = StatePool(kinds, requests=5, device=device, shapes={"recurrent": (3, 4)})
    yield from (pool.kind(name) for name in pool.kinds)


def foreign(dtype: Any, device: str) -> Iterator[Pool]:
    """An engine's memory, a tensor a layer for one component; of fewer heads for values than for keys; its states."""
    kind = getattr(torch, dtype)
    held = layout(spec("key", [0, 1], 24, dtype, 2), spec("value", [0, 1], 16, dtype, 2))
    flat = [torch.zeros(24, 1, 2, 16, dtype=kind, device=device) for _ in range(2)]
    yield adopt({"key": torch.zeros(2, 6, PAGE, 2, 24, dtype=kind, device=device), "value": flat}, held)
    unlike = layout(spec("key", [0, 1], 24, dtype, 4), spec("value", [0, 1], 16, dtype, 2))
    memory = [torch.zeros(2, 6, PAGE, *axes, dtype=kind, device=device) for axes in ((4, 24), (2, 16))]
    yield adopt({"key": memory[0], "value": memory[1]}, unlike)
    rows = layout(spec("state", [1, 3], 20, dtype, 2, item_kind="request_row"))
    yield adopt({"state": torch.zeros(2, 6, 2, 4, 5, dtype=kind, device=device)}, rows)


POOLS: dict[str, Callable[[Any, str], Iterator[Pool]]] = {
    "heads": heads, "latents": latents, "tiled": tiled, "packed": packed, "hybrid": hybrid, "states": states,
    "foreign": foreign,
}  # fmt: skip


def check_round_trip(
    pool: Pool, host_layout: HostLayout, mover_name: MoverName, labels: Labels, bits: Bits, *, threads: int = 1
) -> None:
    """Move items of a pool to the host and back, and compare every byte of both sides."""
    host = HostPool(pool, pages=6, layout=host_layout)
    mover = create_mover(mover_name, host, threads=threads)
    assert {(mirror.component, mirror.part) for mirror in host.mirrors} == {*pool.components}
    expected = []
    for seed, mirror in enumerate(host.mirrors):
        for number, layer in enumerate(mirror.layers):
            layer.copy_(labels(layer.shape, layer.dtype, 10 * seed + number))
        mirror.host.copy_(labels(mirror.host.shape, mirror.host.dtype, 70 + seed))
        expected.append(([bits(layer).clone() for layer in mirror.layers], bits(mirror.host).clone()))
    synchronize = getattr(torch.get_device_module(pool.device), "synchronize", lambda: None)
    mover.backup([4, 1, 5], [2, 6, 3])
    synchronize()
    mover.load([3, 5, 1], [6, 2, 4])
    synchronize()
    for mirror, (near, far) in zip(host.mirrors, expected, strict=True):
        for number, layer in enumerate(near):
            far[[2, 6, 3], number] = layer[[4, 1, 5]]
            layer[[3, 5, 1]] = far[[6, 2, 4], number]
            assert torch.equal(bits(mirror.layers[number]), layer), (mirror.component, mirror.part, number)
        assert torch.equal(bits(mirror.host), far), (mirror.component, mirror.part)
