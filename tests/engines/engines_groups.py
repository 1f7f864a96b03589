"""SGLang's groups of pools on the emulated NPU and their host pools: windows, sparse attention, states, compressed.

It owns their geometry, small and with widths that differ wherever they may. Bytes are those of `engines_pools`.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_pools import PAGE
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKVPool,
    NPUMiniMaxSparseKVPool,
    NPUMLATokenToKVPool,
)
from sglang.srt.mem_cache import deepseek_v4_memory_pool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKOnlyPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.hardware_backend.npu.dsv4 import dsv4_memory_pool

__all__ = [
    "HOST_PAGES", "compressed", "host_of", "hybrid_linear", "index_host", "number", "numbers", "page_slots", "sided",
    "sparse", "state_host", "states", "windowed", "windowed_latents",
]  # fmt: skip

HOST_PAGES = 8
FULL, SLIDING = [1, 3], [0, 2, 4]


def numbers(count: int, salt: int, *, small: bool = False) -> torch.Tensor:
    """A running number that 16 bits hold exactly; a byte's worth where the type has no more. Shape: [count]."""
    return torch.arange(salt, salt + count).remainder(120 if small else 509) - (0 if small else 254)


def number(tensor: torch.Tensor, salt: int) -> None:
    """Fill with a running number."""
    tensor.copy_(numbers(tensor.numel(), salt, small=tensor.element_size() == 1).view(tensor.shape).to(tensor.dtype))


def page_slots(pages: list[int], page_size: int = PAGE) -> torch.Tensor:
    """Every slot of pages. Shape: [pages * page_size]; int64 on the host."""
    return (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).reshape(-1)


def windowed(*, full: list[int] = FULL, sliding: list[int] = SLIDING, **changes: Any) -> Any:
    """Full and sliding layers of unequal heads and widths; fewer sliding pages than full ones."""
    return SWAKVPool(**{
        "size": 8 * PAGE, "size_swa": 6 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2,
        "head_dim": 24, "v_head_dim": 16, "swa_head_num": 3, "swa_head_dim": 16, "swa_v_head_dim": 8,
        "swa_attention_layer_ids": sliding, "full_attention_layer_ids": full, "device": "npu",
        "token_to_kv_pool_class": NPUMHATokenToKVPool, **changes,
    })  # fmt: skip


def windowed_latents() -> Any:
    """A latent for full layers, heads for sliding ones."""
    shared: dict[str, Any] = {"page_size": PAGE, "device": "npu", "enable_memory_saver": False}
    return SWAKVPool(
        size=8 * PAGE, size_swa=6 * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=1, head_dim=64,
        swa_attention_layer_ids=SLIDING, full_attention_layer_ids=FULL, device="npu",
        full_kv_pool_class=NPUMLATokenToKVPool, swa_kv_pool_class=NPUMHATokenToKVPool,
        full_kv_pool_kwargs={**shared, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
        swa_kv_pool_kwargs={**shared, "head_num": 2, "head_dim": 16},
    )  # fmt: skip


def sparse(*, values: bool = False, **changes: Any) -> Any:
    """Layers 2 to 6, two dense; index keys in 8 bits of one more width; `values`: layer 5's index has values too."""
    return NPUMiniMaxSparseKVPool(**{
        "size": 8 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 24, "idx_head_dim": 40,
        "dense_layer_ids": [0, 1, 2, 6], "sparse_layer_ids": [3, 4, 5], "device": "npu",
        "disable_value_sparse_layer_ids": [3, 4] if values else [3, 4, 5], "index_dtype": torch.int8, "start_layer": 2,
        "end_layer": 7, **changes,
    })  # fmt: skip


def states(*, rows: int = 7, layers: tuple[int, ...] = (1, 2, 4), **changes: Any) -> Any:
    """A pool of conv and recurrent states, each kind with a dtype of its own."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=6, conv_kernel=4
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return MambaPool(**{
        "size": rows, "spec_state_size": 3, "mamba_layer_ids": list(layers), "device": "npu",
        "cache_params": Mamba2CacheParams(dtype=dtype, layers=list(layers), shape=shape),
        **changes,
    })  # fmt: skip


def sided(**changes: Any) -> Any:
    """States with a short convolution of layers 1 and 4, and the last five tokens, beside them."""
    pool = states(**changes)
    short = ShortConvPool(size=pool.size, state_shape=(3, 7), layer_ids=[1, 4], dtype=torch.bfloat16, device="npu")
    pool.register_slot_state(short)
    pool.register_slot_state(NGramPool(size=pool.size, context_len=5, eos_token_id=2, device="npu"))
    return pool


def hybrid_linear(pool: Any) -> Any:
    """Full attention on layers 0 and 3, states on the others."""
    return HybridLinearKVPool(
        size=8 * PAGE, dtype=torch.float16, page_size=PAGE, head_num=2, head_dim=24, full_attention_layer_ids=[0, 3],
        device="npu", mamba_pool=pool, full_kv_pool_class=NPUMHATokenToKVPool,
    )  # fmt: skip


def compressed(patch: pytest.MonkeyPatch) -> Any:
    """Layers 0 to 3: plain, by 4, by 128, by 4; on a chip before A5. What SGLang reads of its arguments is given."""
    kernel = SimpleNamespace(dsv4_attn_backend=None, enable_deepseek_v4_fp4_indexer=False)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    patch.setattr(dsv4_memory_pool, "get_schedule", lambda: SimpleNamespace(c128_page_size=16))
    patch.setattr(dsv4_memory_pool, "is_npu_arch35", lambda: False)
    patch.setattr(deepseek_v4_memory_pool, "get_exec", lambda: SimpleNamespace(kernel=kernel, features=features))
    patch.setattr(deepseek_v4_memory_pool, "resolve_compress_state_ring_size", lambda ratio: {4: 8, 128: 128}[ratio])
    patch.setattr(deepseek_v4_memory_pool, "uses_draft_swa_ring", lambda: False)
    return dsv4_memory_pool.DSV4NPUTokenToKVPool(
        max_num_reqs=4, swa_size=6 * 128, c4_size=32 * 32, c128_size=32, c4_state_pool_size=6 * 8,
        c128_state_pool_size=4 * 128, page_size=128, swa_page_size=128, dtype=torch.bfloat16,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=48, qk_rope_head_dim=16,
        indexer_head_dim=128, layer_num=4, device="npu", enable_memory_saver=False,
        compression_ratios=[0, 4, 128, 4], sliding_window=128,
    )  # fmt: skip


def host_of(pool: Any, layout: str = "page_first_direct") -> Any:
    """SGLang's host pool of one pool of K and V."""
    kind = MHATokenToKVPoolHost if pool.head_dim == pool.v_head_dim else AsymmetricMHATokenToKVPoolHost
    return kind(
        pool._mha_buffer_info(), 2.0, 0, PAGE, layout, device_capacity_tokens=pool.size, start_layer=0,
        end_layer=pool.layer_num, host_token_capacity=HOST_PAGES * PAGE,
    )  # fmt: skip


def index_host(pool: Any, anchor: Any, layout: str = "page_first_direct") -> Any:
    """SGLang's host pool of index keys that have no values."""
    return MHATokenToKOnlyPoolHost(pool.index_k_pool, anchor, layout)


def state_host(pool: Any, rows: int = HOST_PAGES) -> Any:
    """SGLang's host pool of states."""
    (info,) = pool.get_device_pool_infos()
    return MambaPoolHost(info.buffer_info, rows / pool.size, 0, device_capacity=pool.size, layout="page_first_direct")
