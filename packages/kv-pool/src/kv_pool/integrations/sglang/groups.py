"""Owns the description of SGLang's pools that are groups of pools: `adopt_groups` wraps each of them.

Sliding windows, sparse attention with index keys, recurrent states, and (by `compressed`) compressed latents. Pools of
one group share page ids (or rows); page ids of two groups have nothing to do with each other, so each group gets a host
pool and a manifest of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from kv_planner import Placement

from kv_pool._arguments import check_kind, check_list, check_mapping, check_numbers
from kv_pool.errors import LayoutError
from kv_pool.integrations._engine import engine_module
from kv_pool.integrations.sglang.compressed import COMPRESSED_MODULE, compressed_groups
from kv_pool.integrations.sglang.pools import (
    MODULE,
    RELEASE,
    Held,
    adopted,
    check_fingerprint,
    check_heads,
    components_of,
    foreign,
)

if TYPE_CHECKING:
    from kv_planner import Component

    from kv_pool._paged import Pool

__all__ = ["adopt_groups"]

_Value = TypeVar("_Value")
_WINDOWED = "sglang.srt.mem_cache.swa_memory_pool"
_MEMORY = "sglang.srt.mem_cache.memory_pool"


def adopt_groups(
    pool: Any,
    *,
    fingerprint: str,
    drafts: Sequence[Any] = (),
    placement: Placement | None = None,
    total_heads: Mapping[str, int] | None = None,
    model_layers: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Pool]:
    """Wrap every pool of one of SGLang's groups, so that host pools, controllers and transfer serve each.

    Args:
        pool: An `SWAKVPool` over NPU pools (groups `kv` and `swa`), an `NPUMiniMaxSparseKVPool` (`kv`, with its index
            keys; `index_kv` for layers whose index has values too), a `MambaPool` (`temporal`, `conv0`, `conv1` …: a
            kind of state each; side states under their own names, as bytes of one head that all ranks have), a
            `HybridLinearKVPool` over an NPU pool (`kv`, and the kinds of its states), or a `DSV4NPUTokenToKVPool`
            (see `compressed_groups`).
        fingerprint: Identity of the model.
        drafts: Of an `SWAKVPool`: those of draft models, in order; their layers are numbered behind the model's.
        placement: This rank.
        total_heads: KV heads over all ranks, by group; this rank has all where a group is not named. States
            of a rank that are not named are an equal share; a conv state is split by its inner axis and counts as one
            head a rank.
        model_layers: Layer ids of the whole model that each group holds, and under `index_key` those that own index
            keys; this stage has all where a group is not named.

    Returns:
        Adopted pools by group; their layers are SGLang's memory.

    Raises:
        LibraryUnavailable: SGLang 0.5.23 is not installed.
        LayoutError: Another class of pool, pools of unequal page sizes, or memory that does not fit.
    """
    kinds, memory = engine_module(MODULE, RELEASE), engine_module(_MEMORY, RELEASE)
    others: tuple[Any, ...] = check_list("drafts", drafts, LayoutError)
    check_fingerprint(fingerprint)
    placement = Placement() if placement is None else check_kind("placement", placement, Placement, LayoutError)
    heads = {
        group: check_heads(f"total_heads[{group!r:.80}]", count)
        for group, count in _named("total_heads", total_heads).items()
    }
    model = {
        group: list(check_numbers(f"model_layers[{group!r:.80}]", ids, LayoutError))
        for group, ids in _named("model_layers", model_layers).items()
    }

    def wrap(
        group: str,
        held: Mapping[Component, Held],
        layers: Sequence[int],
        *,
        drafted: Sequence[Any] = (),
        page_size: int = 1,
        total: int | None = None,
    ) -> Pool:
        # Groups of disjoint layers are told apart by those; others by the fingerprint.
        identity = fingerprint if group in ("kv", "swa") else f"{fingerprint}/{group}"
        return adopted(
            held, layers, page_size=page_size, fingerprint=identity, drafts=drafted, placement=placement,
            total_heads=heads.get(group, total), model_layers=model.get(group),
            model_indexer_layers=model.get("index_key"),
        )  # fmt: skip

    window = engine_module(_WINDOWED, RELEASE).SWAKVPool
    strange = next((type(draft).__name__ for draft in others if type(draft) is not window), None)
    if others and (type(pool) is not window or strange is not None):
        given = f"{strange or 'SWAKVPool'} as drafts of a {type(pool).__name__}"
        raise foreign("drafts", given, "SWAKVPools as drafts of an SWAKVPool; other drafts alone")
    if type(pool) is window:
        behind = max([layer for ids in model.values() for layer in ids] + list(pool.layers_mapping)) + 1
        groups: dict[str, Pool] = {}
        for group, windowed in (("kv", False), ("swa", True)):
            held, layers = _side(pool, kinds, pool.page_size, windowed=windowed)
            drafted, first = [], behind
            for draft in others:
                more, places = _side(draft, kinds, pool.page_size, windowed=windowed)
                if places:
                    drafted.append((more, [first + place for place in places]))
                first += draft.layer_num
            if layers:
                groups[group] = wrap(group, held, layers, drafted=drafted, page_size=pool.page_size)
        return groups
    if type(pool) is kinds.NPUMiniMaxSparseKVPool:
        return _sparse(pool, kinds, wrap)
    if type(pool) is memory.HybridLinearKVPool:
        layers = list(pool.full_attention_layer_id_mapping)
        held = components_of(pool.full_kv_pool, kinds, pool.page_size)
        return {"kv": wrap("kv", held, layers, page_size=pool.page_size), **_states(pool.mamba_pool, placement, wrap)}
    if type(pool) is memory.MambaPool:
        return _states(pool, placement, wrap)
    if type(pool).__module__ == COMPRESSED_MODULE and type(pool).__name__ == "DSV4NPUTokenToKVPool":
        return compressed_groups(pool, wrap)
    expected = "SWAKVPool, NPUMiniMaxSparseKVPool, HybridLinearKVPool, MambaPool or DSV4NPUTokenToKVPool"
    raise foreign("pool", type(pool).__name__, expected)


def _named(name: str, given: Mapping[str, _Value] | None) -> Mapping[str, _Value]:
    return {} if given is None else check_mapping(name, given, LayoutError)


def _side(pool: Any, kinds: Any, page_size: int, *, windowed: bool) -> tuple[Mapping[Component, Held], list[int]]:
    """One of the two pools of an `SWAKVPool`, and the layer ids of its places."""
    inner = pool.swa_kv_pool if windowed else pool.full_kv_pool
    found = {place: layer for layer, (place, is_windowed) in pool.layers_mapping.items() if is_windowed == windowed}
    return components_of(inner, kinds, page_size), [found[place] for place in range(inner.layer_num)]


def _sparse(pool: Any, kinds: Any, wrap: Any) -> dict[str, Pool]:
    if pool.dense_pool is not None:
        raise foreign("pool", "dense layers in a pool apart (HiSparse)", "one main pool")
    layers = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
    held = dict(components_of(pool.main_pool, kinds, pool.page_size))
    if pool.index_k_pool is not None:
        index = components_of(pool.index_k_pool, kinds, pool.page_size)["index_key"]
        owners = {place: layer for layer, place in pool.index_k_layer_id_mapping.items()}
        places = [owners[place] - pool.start_layer for place in range(pool.index_k_pool.layer_num)]
        held["index_key"] = Held(index.memory, index.dims, index.heads, places, indexer=True)
    groups = {"kv": wrap("kv", held, layers, page_size=pool.page_size)}
    if pool.index_kv_pool is not None:
        owners = {place: layer for layer, place in pool.index_kv_layer_id_mapping.items()}
        ids = [owners[place] for place in range(pool.index_kv_pool.layer_num)]
        inner = components_of(pool.index_kv_pool, kinds, pool.page_size)
        groups["index_kv"] = wrap("index_kv", inner, ids, page_size=pool.page_size)
    return groups


def _states(pool: Any, placement: Placement, wrap: Any) -> dict[str, Pool]:
    """Each kind of state; work space of speculation is no state of a request."""
    (info,) = pool.get_device_pool_infos()
    buffers = info.buffer_info
    kinds = {"temporal": buffers.temporal} if buffers.temporal.numel() else {}
    kinds |= {f"conv{number}": conv for number, conv in enumerate(buffers.conv)}
    groups = {}
    for name, tensor in kinds.items():
        shape = tensor.shape[2:]
        own = shape[0] if name == "temporal" else 1  # its heads come first; the channels of a conv state come last
        held = Held(tensor, shape.numel() // own, own, range(tensor.shape[0]), item_kind="request_row")
        groups[name] = wrap(name, {"state": held}, list(info.layer_ids), total=own * placement.tp_size)
    sides: dict[str, list[tuple[Any, int]]] = {}
    for sibling in pool._slot_siblings:
        for name, tensor, _, layer in sibling.iter_transfer_state_entries():
            rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
            sides.setdefault(name, []).append((rows, layer))
    for name, entries in sides.items():
        held = Held(
            [rows for rows, _ in entries], entries[0][0].shape[1], 1, range(len(entries)), item_kind="request_row"
        )
        groups[name] = wrap(name, {"state": held}, [layer for _, layer in entries], total=1)
    return groups
