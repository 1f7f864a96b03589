"""Which prefill ranks SGLang's decode rank reads from, and which heads each sends where, for unequal TP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

__all__ = ["record"]


def _sources(prefill: int, decode: int, rank: int) -> list[int]:
    manager = object.__new__(CommonKVManager)
    vars(manager).update(
        is_mla_backend=False, is_hybrid_mla_backend=False, attn_tp_size=decode, attn_cp_size=1, attn_cp_rank=0,
        pp_size=1, pp_rank=0, enable_all_cp_ranks_for_transfer=False, kv_args=SimpleNamespace(engine_rank=rank),
    )  # fmt: skip
    info = SimpleNamespace(
        enable_kv_cache_sharding=False,
        attn_cp_size=1,
        attn_tp_size=prefill,
        pp_size=1,
        enable_dsa_cache_layer_split=False,
    )
    manager._resolve_rank_mapping(info)
    return list(info.target_tp_ranks)


def record() -> dict[str, Any]:
    """For each decode rank [source rank, first source head, heads, first destination head], counted in the ranks."""
    cases = []
    for heads in (1, 2, 4, 8, 12):
        for prefill in (1, 2, 3, 4, 8):
            for decode in (1, 2, 3, 4, 8):
                ranks = []
                for rank in range(decode):
                    sends = []
                    for source in _sources(prefill, decode, rank):
                        first, count, to, _ = compute_head_slice_params(prefill, decode, source, rank, heads)
                        sends.append([source, first, count, to])
                    ranks.append(sends)
                cases.append({"total_heads": heads, "prefill": prefill, "decode": decode, "ranks": ranks})
    return {"cases": cases}
