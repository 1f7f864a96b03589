"""Owns the names of SGLang's pools: which component, part and layer each registered buffer is, from the pool itself.

`setup_state_kv_args` is SGLang's call of that name, and writes the names beside what SGLang writes. Pools that it does
not know keep their own layer ids, or are named by counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kv_planner

from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.names import LATENTS, PAIRS, Name, refusal, stated
from kv_transfer.integrations.sglang.rank import RELEASE
from kv_transfer.integrations.sglang.words import MAMBA, WINDOW, word

if TYPE_CHECKING:
    from kv_planner import Component

__all__ = ["name_entries", "setup_state_kv_args"]

_Groups = list[tuple["Component", list[int]]]


def setup_state_kv_args(
    kv_args: Any,
    token_to_kv_pool: Any,
    draft_token_to_kv_pool: Any = None,
    total_kv_layers: int | None = None,
    req_to_token_pool: Any = None,
) -> None:
    """SGLang's call, and the names of the buffers.

    Args:
        kv_args: SGLang's `KVArgs`, with its KV lists filled.
        token_to_kv_pool: The target's pool.
        draft_token_to_kv_pool: The draft's, if there is one.
        total_kv_layers: Target layers of the whole model.
        req_to_token_pool: SGLang's; passed on. States may be its own.

    Raises:
        EngineUnavailable: SGLang 0.5.23 is not installed.
        UnsupportedLayout: The lists hold other buffers than the pools.
    """
    theirs = engine_module("sglang.srt.disaggregation.utils", RELEASE).setup_state_kv_args
    theirs(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers, req_to_token_pool=req_to_token_pool)
    for owner in (token_to_kv_pool, req_to_token_pool):
        _cut_by_channels(kv_args, getattr(owner, "mamba_pool", None))
    name_entries(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers)


def name_entries(
    kv_args: Any, token_to_kv_pool: Any, draft_token_to_kv_pool: Any = None, total_kv_layers: int | None = None
) -> None:
    """Write `kv_entry_names`, the layers of windows, and, where every layer has K and V, `hidden_kv_layers`.

    Arguments and errors are those of `setup_state_kv_args`.
    """
    drafts = stated(kv_args, "num_draft_entries") or 0
    _name_windows(kv_args, token_to_kv_pool)
    target = _groups(token_to_kv_pool)
    draft = _groups(draft_token_to_kv_pool) if drafts else []
    if target is None or draft is None:
        return
    names: list[Name] = [(component, "target", layer, 0) for component, layers in target for layer in layers]
    if draft:
        if total_kv_layers is None:
            raise refusal(
                "total_kv_layers", None, drafts, "draft layers are numbered behind those of the whole model",
                "pass the target layers of the whole model",
            )  # fmt: skip
        first = kv_planner.first_draft_id(total_kv_layers)
        numbers = {layer: first + i for i, layer in enumerate(sorted({i for _, layers in draft for i in layers}))}
        names += [(component, "draft", numbers[layer], 0) for component, layers in draft for layer in layers]
    if len(names) != len(kv_args.kv_data_ptrs) or sum(name[1] == "draft" for name in names) != drafts:
        raise refusal(
            "kv_data_ptrs", len(kv_args.kv_data_ptrs), len(names),
            f"the pools hold {len(names)} buffers, {sum(name[1] == 'draft' for name in names)} of them the draft's "
            f"(num_draft_entries says {drafts})",
            "register every buffer of target and draft, index keys and scales among them",
        )  # fmt: skip
    kv_args.kv_entry_names = names
    if total_kv_layers is not None and not hasattr(token_to_kv_pool, "full_kv_pool"):
        kv_args.hidden_kv_layers = total_kv_layers
        kv_args.draft_kv_layers = draft_token_to_kv_pool.layer_num if draft_token_to_kv_pool is not None else 0


def _groups(pool: Any) -> _Groups | None:
    """Components of a pool in the order of its list, with the layers of each; None: a pool of another kind."""
    npu = engine_module("sglang.srt.hardware_backend.npu.memory_pool_npu", RELEASE)
    window = engine_module("sglang.srt.mem_cache.swa_memory_pool", RELEASE).SWAKVPool
    if isinstance(pool, npu.NPUMHATokenToKVPool):
        return [(kind, _range(pool)) for kind in PAIRS]
    if isinstance(pool, window) and isinstance(pool.full_kv_pool, npu.NPUMHATokenToKVPool):
        return [(kind, _layers(pool, window=False)) for kind in PAIRS]
    if not isinstance(pool, npu.NPUMLATokenToKVPool):
        return None
    groups: _Groups = [(LATENTS[0], _range(pool))]
    if not pool.dsa_kv_cache_store_fp8:
        groups.append((LATENTS[1], _range(pool)))
    if pool.index_head_dim is not None:
        groups.append((LATENTS[2], list(pool.indexer_layer_ids)))
        if pool.index_k_scale_buffer is not None:
            groups.append((LATENTS[3], list(pool.indexer_layer_ids)))
    return groups


def _name_windows(kv_args: Any, pool: Any) -> None:
    """Layer ids of sliding windows: K of each, then V of each."""
    window = engine_module("sglang.srt.mem_cache.swa_memory_pool", RELEASE).SWAKVPool
    if not isinstance(pool, window):
        return
    layers = _layers(pool, window=True)
    for number, kind in enumerate(kv_args.state_types):
        entries = len(kv_args.state_data_ptrs[number])
        if word(kind) == WINDOW and not kv_args.state_layer_ids[number] and entries == 2 * len(layers):
            kv_args.state_layer_ids[number] = layers * 2


def _cut_by_channels(kv_args: Any, pool: Any) -> None:
    """The axis of conv states that ranks share: on an NPU their window comes first, which SGLang says is that axis."""
    memory = engine_module("sglang.srt.mem_cache.memory_pool", RELEASE)
    if type(pool) is not memory.MambaPool or not memory._is_npu:
        return
    shapes = [conv.shape[2:] for conv in pool.mamba_cache.conv for _ in pool.mamba_layer_ids]
    for number, kind in enumerate(kv_args.state_types):
        if word(kind) == MAMBA:
            for entry, (window, channels) in enumerate(shapes):
                kv_args.state_dim_per_tensor[number][entry] = channels
                kv_args.state_slice_outer_counts[number][entry] = window


def _range(pool: Any) -> list[int]:
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _layers(pool: Any, *, window: bool) -> list[int]:
    """Global layers of a pool of two kinds, in the order of one kind's buffers."""
    kept = [(place, layer) for layer, (place, sliding) in pool.layers_mapping.items() if sliding is window]
    return [layer for _, layer in sorted(kept)]
