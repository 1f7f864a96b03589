"""Owns the comparison of written bytes: SGLang 0.5.23's pools after its own writes, and ours after ours.

`python tools/record_golden.py contents` records `golden/contents.json`: digests of whole buffers, whose rows follow
the formula that is repeated here. A row at a wrong slot, in a wrong order or of a wrong width changes the digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import HybridPool, MhaPool, MlaPool, Pool, packed_record_bytes

GOLDEN = json.loads((Path(__file__).parent / "golden/contents.json").read_text(encoding="utf-8"))
SLOTS, START = torch.tensor(GOLDEN["slots"]), GOLDEN["start"]
LAYERS = list(range(START, START + GOLDEN["layers"]))


def cases(kind: str) -> pytest.MarkDecorator:
    found = [case for case in GOLDEN["cases"] if case["kind"] == kind]
    assert found
    return pytest.mark.parametrize("case", found, ids=[f"{kind} {number}" for number in range(len(found))])


def rows(dims: tuple[int, ...], dtype: str, salt: int) -> torch.Tensor:
    shape = (len(SLOTS), *dims)
    running = (torch.arange(torch.Size(shape).numel()) * 7 + 31 * salt).remainder(509) - 254
    if dtype == "float8_e4m3fn":
        return running.remainder(120).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
    if dtype == "int8":
        running = running.remainder(256) - 128
    return running.to(getattr(torch, dtype)).view(shape)


def spec(name: Any, layers: list[int], dims: int, dtype: Any, heads: int = 1, **more: Any) -> ComponentSpec:
    return ComponentSpec(name, layer_ids=layers, dtype=dtype, total_heads=heads, dims=dims, **more)


def layout(*specs: ComponentSpec, page_size: int = GOLDEN["page_size"]) -> ModelLayout:
    return ModelLayout(specs, page_size=page_size, fingerprint="golden")


def digest(pool: Pool, component: Any) -> str:
    held = pool.storage(component).contiguous().view(torch.uint8)
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()


@cases("heads")
def test_keys_and_values_lie_where_theirs_do(case: dict[str, Any]) -> None:
    shared = (case["dtype"], case["heads"])
    held = layout(spec("key", LAYERS, case["dims"], *shared), spec("value", LAYERS, case["value_dims"], *shared))
    pool = MhaPool(held, size=GOLDEN["size"], device="cpu")
    for place, layer in enumerate(LAYERS):
        key = rows((case["heads"], case["dims"]), case["dtype"], 2 * place)
        pool.write(layer, SLOTS, key, rows((case["heads"], case["value_dims"]), case["dtype"], 2 * place + 1))
    assert {name: digest(pool, name) for name in ("key", "value")} == case["digests"]


def record_of(case: dict[str, Any], place: int) -> torch.Tensor:
    """A packed record: 8-bit latents (every 128 with a largest value of 448, so scale 1), the rope, the scales."""
    latent = rows((case["latent"],), "float8_e4m3fn", 2 * place).view(torch.uint8)
    latent[:, ::128] = 0x7E  # 448
    rope = rows((case["rope"],), "bfloat16", 2 * place + 1).view(torch.uint8)
    scales = torch.ones(len(SLOTS), case["latent"] // 128).view(torch.uint8)
    return torch.cat([latent, rope, scales], 1)[:, None]


@cases("latents")
def test_latents_ropes_and_index_keys_lie_where_theirs_do(case: dict[str, Any]) -> None:
    packed, indexer = case["dtype"] == "float8_e4m3fn", case["indexer"] or []
    assert case["width"] == (packed_record_bytes(case["latent"], case["rope"]) if packed else case["latent"])
    specs = [spec("latent", LAYERS, case["width"], "uint8" if packed else case["dtype"])]
    specs += [] if packed else [spec("rope", LAYERS, case["rope"], case["dtype"])]
    specs += [spec("index_key", indexer, case["index"], case["dtype"])] if indexer else []
    specs += [spec("index_scale", indexer, 1, "float32")] if packed else []
    pool = MlaPool(layout(*specs), size=GOLDEN["size"], device="cpu", form="nz" if case["nz"] else "paged")
    for place, layer in enumerate(LAYERS):
        if packed:
            pool.write(layer, SLOTS, record_of(case, place))
        else:
            latent = rows((1, case["latent"]), case["dtype"], 2 * place)
            pool.write(layer, SLOTS, latent, rows((1, case["rope"]), case["dtype"], 2 * place + 1))
    for layer in indexer:
        scale = rows((1, 1), "float32", 50 + layer) if packed else None
        pool.write_index(layer, SLOTS, rows((1, case["index"]), case["dtype"], 40 + layer), scale)
    assert {name: digest(pool, name) for name, _ in pool.components} == case["digests"]
    assert [entry.item_bytes for entry in pool.manifest().entries] == case["items"]


@cases("windowed")
def test_both_groups_of_a_windowed_pool_lie_where_theirs_do(case: dict[str, Any]) -> None:
    sizes = {"full": GOLDEN["size"], "window": case["window_size"]}
    made = {}
    for group, prefix in (("full", ""), ("window", "window_")):
        heads, dims, value_dims = (case[f"{prefix}{name}"] for name in ("heads", "dims", "value_dims"))
        key = spec("key", case[group], dims, case["dtype"], heads)
        value = spec("value", case[group], value_dims, case["dtype"], heads)
        made[group] = MhaPool(layout(key, value), size=sizes[group], device="cpu")
    pool = HybridPool(made["full"], made["window"])
    where = {"full": SLOTS, "window": torch.tensor(GOLDEN["window_slots"])}
    for layer in sorted(case["full"] + case["window"]):
        owner = pool.group_of(layer)
        shapes = [held.shape[2:] for held in (owner.key(layer), owner.value(layer))]
        one, two = (rows((*shape,), case["dtype"], 2 * layer + side) for side, shape in enumerate(shapes))
        owner.write(layer, where["window" if owner is pool.window else "full"], one, two)
    for group_name, theirs in case["groups"].items():
        held = made[group_name]
        assert {name: digest(held, name) for name in ("key", "value")} == theirs["digests"]
        entries = held.manifest().entries
        assert [entry.nbytes for entry in entries] == theirs["lengths"]
        assert [entry.item_bytes for entry in entries] == theirs["items"]
