"""Owns the description of SGLang's NPU pools: `adopt_pool` wraps one, with its drafts, as a pool of this package.

It knows the classes of SGLang 0.5.23 by their attributes; the memory stays SGLang's. Pools of sliding windows and of
sparse attention are refused, not half described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kv_planner import ComponentSpec, ModelLayout, Placement

from kv_pool._storage import TORCH_DTYPES
from kv_pool.adopted import adopt
from kv_pool.errors import LayoutError
from kv_pool.integrations._engine import engine_module

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName
    from kv_planner.words import DType

    from kv_pool._paged import Pool

__all__ = ["adopt_pool"]

_MODULE = "sglang.srt.hardware_backend.npu.memory_pool_npu"
_NAMES: dict[torch.dtype, Any] = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}


def adopt_pool(
    pool: Any,
    *,
    fingerprint: str,
    drafts: Sequence[Any] = (),
    placement: Placement | None = None,
    total_heads: int | None = None,
    model_layers: Sequence[int] | None = None,
    model_indexer_layers: Sequence[int] | None = None,
) -> Pool:
    """Wrap SGLang's NPU pool, so that host pools, controllers and transfer serve it.

    Args:
        pool: An `NPUMHATokenToKVPool` or `NPUMLATokenToKVPool`.
        fingerprint: Identity of the model.
        drafts: Pools of draft models, in order; their layers are numbered behind those of the model.
        placement: This rank.
        total_heads: KV heads over all ranks; `None`: this rank has all. Latents have one.
        model_layers: Layer ids of the whole model; `None`: this stage has all.
        model_indexer_layers: Those of them that own index keys; `None`: those of this stage are all.

    Returns:
        An adopted pool; its layers are SGLang's memory.

    Raises:
        LibraryUnavailable: SGLang 0.5.23 is not installed.
        LayoutError: Another class of pool, pools that are not of one kind and page size, or memory that does not fit.
    """
    kinds = engine_module(_MODULE, "SGLang 0.5.23")
    layers = list(range(pool.start_layer, pool.start_layer + pool.layer_num))
    model = layers if model_layers is None else list(model_layers)
    behind = max(model) + 1
    drafted = list(range(behind, behind + sum(draft.layer_num for draft in drafts)))
    sides: list[tuple[PartName, list[Any], list[int]]] = [("target", [pool], layers)]
    if drafts:
        sides.append(("draft", list(drafts), drafted))
    specs: list[ComponentSpec] = []
    tensors: dict[Component | tuple[Component, PartName], torch.Tensor | Sequence[torch.Tensor]] = {}
    for part, pools, here in sides:
        found = [_components(one, kinds, pool.page_size) for one in pools]
        if any(other.keys() != found[0].keys() for other in found):
            raise _foreign("drafts", [sorted(other) for other in found], "drafts of equal components")
        starts = np.cumsum([0, *(one.layer_num for one in pools)]).tolist()
        for name, first in found[0].items():
            owners = [
                here[start + place] for start, one in zip(starts, found, strict=False) for place in one[name].layers
            ]
            if part == "target":
                owners = (
                    (owners if model_indexer_layers is None else list(model_indexer_layers)) if first.indexer else model
                )
            heads = total_heads if total_heads is not None and name in ("key", "value") else first.heads
            specs.append(
                ComponentSpec(name, part, layer_ids=owners, dtype=first.dtype, total_heads=heads, dims=first.dims)
            )
            rows = [row for one in found for row in one[name].memory.unbind(0)]
            tensors[name, part] = first.memory if len(found) == 1 else rows
    layout = ModelLayout(specs, page_size=pool.page_size, fingerprint=fingerprint)
    ids: dict[PartName, Sequence[int]] = {"target": layers, **({"draft": drafted} if drafts else {})}
    return adopt(tensors, layout, layer_ids=ids, placement=placement)


@dataclass(frozen=True)
class _Held:
    """One component of one pool: its memory, geometry, and the places in the pool of the layers that own it."""

    memory: torch.Tensor
    dims: int
    heads: int
    layers: Sequence[int]
    indexer: bool = False

    @property
    def dtype(self) -> DType:
        dtype: DType = _NAMES[self.memory.dtype]
        return dtype


def _components(pool: Any, kinds: Any, page_size: int) -> Mapping[Component, _Held]:
    """What one pool holds."""
    known = type(pool) in (kinds.NPUMHATokenToKVPool, kinds.NPUMLATokenToKVPool)
    if not known or pool.page_size != page_size:
        given = f"{type(pool).__name__}{f' with pages of {pool.page_size} tokens' if known else ''}"
        kind = "NPUMHATokenToKVPool or NPUMLATokenToKVPool"
        raise _foreign("pool", given, f"{kind} with pages of {page_size} tokens")
    every = range(pool.layer_num)
    if type(pool) is kinds.NPUMHATokenToKVPool:
        key, value = pool.get_hicache_transfer_buffers()
        return {
            "key": _Held(key, pool.head_dim, pool.head_num, every),
            "value": _Held(value, pool.v_head_dim, pool.head_num, every),
        }
    if pool.k_buffer is None or pool.index_page_size != page_size:
        raise _foreign("pool", "latents off the device, or other pages for index keys", "one page size, on the device")
    latent = pool.k_buffer.view(torch.uint8) if pool.dsa_kv_cache_store_fp8 else pool.k_buffer
    held: dict[Component, _Held] = {"latent": _Held(latent, pool.kv_cache_dim, 1, every)}
    if pool.kr_cache_dim:
        held["rope"] = _Held(pool.v_buffer, pool.kr_cache_dim, 1, every)
    if pool.index_k_buffer is not None and pool.num_indexer_layers:
        owners = [layer - pool.start_layer for layer in pool.indexer_layer_ids]
        held["index_key"] = _Held(pool.index_k_buffer, pool.index_head_dim, 1, owners, indexer=True)
        if pool.index_k_scale_buffer is not None:
            held["index_scale"] = _Held(pool.index_k_scale_buffer, 1, 1, owners, indexer=True)
    return held


def _foreign(argument: str, given: object, expected: str) -> LayoutError:
    return LayoutError(
        argument,
        given=given,
        expected=expected,
        consequence="backup and transfer would leave some of its memory out",
        remedy="describe the pool by a layout of your own and pass its memory to kv_pool.adopt",
    )
