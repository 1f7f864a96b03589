"""Owns the description of SGLang's NPU pool of compressed latents (DeepSeek-V4): `compressed_groups`.

Its parts have page sizes and page ids of their own: a window of plain latents, latents of 4 and of 128 tokens with the
index keys of the former, and the rings in which a compressor gathers tokens, one ring an item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kv_pool.integrations.sglang.pools import Held, foreign

if TYPE_CHECKING:
    from kv_pool._paged import Pool

__all__ = ["COMPRESSED_MODULE", "compressed_groups"]

COMPRESSED_MODULE = "sglang.srt.hardware_backend.npu.dsv4.dsv4_memory_pool"


def compressed_groups(pool: Any, wrap: Callable[..., Pool]) -> dict[str, Pool]:
    """Wrap every part of a `DSV4NPUTokenToKVPool`.

    Args:
        pool: SGLang's pool.
        wrap: Makes a pool of a group's name, components and layers, and of `page_size=`.

    Returns:
        `swa` (pages of the window), `c4` and `c128` (pages of compressed latents), `c4_indexer` (index keys and scales
        of `c4`'s pages), `c4_state` and `c4_indexer_state` (a ring a page of the window), `c128_state` (a ring a
        request); a ratio that no layer of this stage has is left out. The packed index buffer that the class inherits
        holds nothing on an NPU and belongs to no group.

    Raises:
        LayoutError: Plain latents that are not paged (request windows, unified pools).
    """
    if pool.swa_kv_pool is None or pool.unified_kv_pool is not None or pool.request_window is not None:
        raise foreign("pool", "latents in a ring a request, or in one unified pool", "a paged window")
    first = pool._stage_start
    ratios = {first + place: item.compress_ratio for place, item in enumerate(pool.layer_mapping)}
    groups = {"swa": _pages("swa", pool.swa_kv_pool.kv_buffer, list(ratios), wrap)}
    for ratio, latents in pool.kv_pools.items():
        layers = [layer for layer, own in ratios.items() if own == ratio]
        if not layers:
            continue
        groups[f"c{ratio}"] = _pages(f"c{ratio}", latents.kv_buffer, layers, wrap)
        if ratio in pool.index_pools:
            index = pool.index_pools[ratio]
            key, scale = index.index_k_buffer, index.index_scale_buffer
            every = range(len(layers))
            held = {
                "index_key": Held(key, key[0].shape[-1], 1, every),
                "index_scale": Held(scale, 1, 1, every),
            }
            groups[f"c{ratio}_indexer"] = wrap(f"c{ratio}_indexer", held, layers, page_size=key[0].shape[1])
        for name, pools in (("state", pool.compress_state_pools), ("indexer_state", pool.indexer_compress_state_pools)):
            rings = [ring for ring in pools if ring is not None and ring.ratio == ratio]
            if rings:
                memory = [ring.kv_score_buffer.kv_score for ring in rings]
                width = rings[0].ring_size * memory[0].shape[-1]
                state = Held(memory, width, 1, range(len(rings)), item_kind="request_row")
                groups[f"c{ratio}_{name}"] = wrap(f"c{ratio}_{name}", {"state": state}, layers)
    return groups


def _pages(group: str, memory: Sequence[Any], layers: list[int], wrap: Callable[..., Pool]) -> Pool:
    latent = Held(memory, memory[0].shape[-1], 1, range(len(memory)))
    return wrap(group, {"latent": latent}, layers, page_size=memory[0].shape[1])
