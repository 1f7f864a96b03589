"""Every kind of SGLang's NPU pools, adopted: to another pool, to its host and back elsewhere, and home again.

The way is the manifests' alone, over an engine that knows no more than addresses. `test_engines_hicache_adopt` has what
is published, and refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_npu
from engines_groups import compressed, hybrid_linear, number, sided, sparse, states, windowed, windowed_latents
from engines_pools import PAGE
from kv_planner import Capabilities, Plan, Runs, agree, lower
from kv_pool import Pool
from kv_pool.hicache import HostPool, create_mover
from kv_pool.integrations.sglang import adopt_groups, adopt_pool
from kv_transfer import TransferState
from kv_transfer.engines.loopback import LoopbackEngine
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape, Mamba2StateDType
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool

SHARED: dict[str, Any] = {
    "size": 8 * PAGE, "page_size": PAGE, "layer_num": 3, "start_layer": 2, "end_layer": 4, "device": "npu",
    "enable_memory_saver": False,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "heads": {"dtype": torch.float16, "head_num": 2, "head_dim": 32},
    "heads of unequal widths": {"dtype": torch.bfloat16, "head_num": 3, "head_dim": 24, "v_head_dim": 16},
    "heads of bytes": {"dtype": torch.int8, "head_num": 1, "head_dim": 32},
}
LATENTS: dict[str, dict[str, Any]] = {
    "latents": {"dtype": torch.bfloat16, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
    "latents with index keys": {
        "dtype": torch.float16, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "index_head_dim": 48,
        "indexer_layer_ids": [2, 4],
    },
    "packed latents": {
        "dtype": torch.float8_e4m3fn, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "index_head_dim": 128,
        "indexer_layer_ids": [3], "kv_cache_dim": 256 + 2 * 4 + 32 * 2,
    },
}  # fmt: skip


def heads(**changes: Any) -> Any:
    return NPUMHATokenToKVPool(**{**SHARED, **changes})


def latents(**changes: Any) -> Any:
    return NPUMLATokenToKVPool(**{**SHARED, **changes})


def kimi(**changes: Any) -> Any:
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=6, conv_kernel_size=4)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return states(cache_params=KimiLinearCacheParams(dtype=dtype, layers=[1, 2, 4], shape=shape), **changes)


def single(make: Callable[..., Any], held: dict[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Pool]:
    return {"kv": adopt_pool(make(**held), fingerprint="m")}


def groups(pool: Any) -> dict[str, Pool]:
    return dict(adopt_groups(pool, fingerprint="m"))


MAKERS: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Pool]]] = {
    **{name: partial(single, heads, held) for name, held in HEADS.items()},
    **{name: partial(single, latents, held) for name, held in LATENTS.items()},
    "heads and a draft": lambda patch: {
        "kv": adopt_pool(
            heads(**HEADS["heads"]), fingerprint="m",
            drafts=[heads(**{**HEADS["heads of bytes"], "layer_num": 1, "start_layer": 0, "end_layer": 0})],
        )
    },
    "windowed": lambda patch: groups(windowed()),
    "windowed latents": lambda patch: groups(windowed_latents()),
    "sparse": lambda patch: groups(sparse()),
    "sparse with values": lambda patch: groups(sparse(values=True)),
    "states": lambda patch: groups(states()),
    "states with drafts": lambda patch: groups(states(speculative_num_draft_tokens=3)),
    "states with side states": lambda patch: groups(sided()),
    "states of Kimi's": lambda patch: groups(kimi()),
    "states of Kimi's with drafts": lambda patch: groups(kimi(speculative_num_draft_tokens=4)),
    "hybrid linear": lambda patch: groups(hybrid_linear(states())),
    "compressed": lambda patch: groups(compressed(patch)),
}  # fmt: skip
SWITCHES = {"ASCEND_USE_FIA": ("heads", "windowed", "sparse"), "SGLANG_USE_FIA_NZ": ("latents",)}
EACH = [
    *(pytest.param(kind, "", id=kind) for kind in MAKERS),
    *(
        pytest.param(kind, switch, id=f"{kind}, {switch}")
        for switch, kinds in SWITCHES.items()
        for kind in MAKERS
        if kind.startswith(kinds)
    ),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """An item a row. Shape: [items, bytes]; on the host."""
    host = tensor.cpu().contiguous()
    return host.view(host.shape[0], -1).view(torch.uint8)


def contents(pool: Pool) -> dict[Any, torch.Tensor]:
    torch_npu.npu.synchronize()
    return {
        (component, part, layer): bits(tensor)
        for component, part in pool.components
        for layer, tensor in zip(pool.layer_ids(part, component), pool.layers(component, part), strict=True)
    }


def label(pool: Pool, salt: int) -> None:
    for place, (component, part) in enumerate(pool.components):
        for layer, tensor in enumerate(pool.layers(component, part)):
            number(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor, salt + 17 * place + 5 * layer)


def transfer(source: Pool, target: Pool, items: list[int], into: list[int]) -> None:
    """Items of every entry, by what both manifests say."""
    engines = [LoopbackEngine(), LoopbackEngine()]
    for engine, pool in zip(engines, (source, target), strict=True):
        for entry in pool.manifest().entries:
            engine.register(entry.address, entry.nbytes)
    (kind,) = {spec.item_kind for spec in source.layout.components}
    plan = Plan(agree(source.manifest(), target.manifest()).route(0, 0), Runs(items, into, item_kind=kind))
    for batch in lower(plan, Capabilities(max_entries_per_batch=7)).batches:
        handle = engines[0].submit(engines[1].session, batch)
        assert engines[0].poll(handle).state is TransferState.DONE
    for engine in engines:
        engine.close()


def move(before: dict[Any, torch.Tensor], into: dict[Any, torch.Tensor], items: list[int], places: list[int]) -> None:
    """The meaning of a move: these items, and no others."""
    for name, held in into.items():
        held[places] = before[name][items]


@pytest.mark.parametrize(("kind", "switch"), EACH)
def test_items_go_all_the_way_and_come_home_elsewhere(monkeypatch: pytest.MonkeyPatch, kind: str, switch: str) -> None:
    if switch:
        monkeypatch.setenv(switch, "1")
    near, far = MAKERS[kind](monkeypatch), MAKERS[kind](monkeypatch)
    assert near
    for name, source in near.items():
        target = far[name]
        label(source, 3)
        label(target, 101)
        expected = contents(source), contents(target)
        last = source.num_pages - 1
        there, back = [last, 1], [1, last]
        transfer(source, target, there, back)
        move(expected[0], expected[1], there, back)
        mover = create_mover("auto", HostPool(target, pages=3))
        mover.backup(there, [3, 1])
        torch_npu.npu.synchronize()
        mover.load(back, [3, 1])
        arrived = {key: held.clone() for key, held in expected[1].items()}
        move(arrived, expected[1], there, back)
        assert all(torch.equal(held, expected[1][key]) for key, held in contents(target).items()), name
        transfer(target, source, there, back)
        move(expected[1], expected[0], there, back)
        assert all(torch.equal(held, expected[0][key]) for key, held in contents(source).items()), name
        assert {key[1] for key in expected[0]} == {*source.parts} and len(expected[0]) == len(source.manifest().entries)
