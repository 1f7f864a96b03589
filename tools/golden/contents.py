"""What SGLang's NPU pools hold after their own writes, and what their groups publish.

Contents are digests of whole buffers: rows follow a formula that the reader repeats, so that every byte counts and
files stay small. The row operators are plain indexing here; `tests/engines` runs the same writers on the emulated NPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.hardware_backend.npu import memory_pool_npu
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

__all__ = ["record"]

PAGE, SIZE, LAYERS, START = 16, 64, 2, 3
SLOTS = [17, 64, 79, 33, 16, 50]  # of the full pool, in the order of the rows
WINDOW_SLOTS = [33, 17, 31, 16, 47, 32]
MAPPED = 80  # slots of the full pool, page 0 among them
HEADS: tuple[dict[str, Any], ...] = (
    {"heads": 2, "dims": 8, "value_dims": 8, "dtype": "float16", "fia": False},
    {"heads": 2, "dims": 24, "value_dims": 16, "dtype": "bfloat16", "fia": True},
    {"heads": 3, "dims": 16, "value_dims": 16, "dtype": "int8", "fia": True},
    {"heads": 1, "dims": 32, "value_dims": 16, "dtype": "float8_e4m3fn", "fia": False},
)
LATENTS: tuple[dict[str, Any], ...] = (
    {"latent": 64, "rope": 32, "dtype": "bfloat16", "nz": False, "indexer": [4], "index": 48},
    {"latent": 64, "rope": 32, "dtype": "float16", "nz": True, "indexer": None, "index": None},
    {"latent": 256, "rope": 32, "dtype": "float8_e4m3fn", "nz": False, "indexer": [3], "index": 128},
)


def rows(shape: tuple[int, ...], dtype: str, salt: int) -> torch.Tensor:
    """The formula: a running number, exact in 16 bits and in 8."""
    count = torch.Size(shape).numel()
    running = (torch.arange(count) * 7 + 31 * salt).remainder(509) - 254
    if dtype == "float8_e4m3fn":
        return running.remainder(120).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
    if dtype == "int8":
        running = running.remainder(256) - 128
    return running.to(getattr(torch, dtype)).view(shape)


def latent_rows(dims: int, salt: int) -> torch.Tensor:
    """Latents that SGLang's quantization leaves as they are: every 128 of them have a largest value of 448."""
    found = rows((len(SLOTS), dims), "float8_e4m3fn", salt).float()
    found[:, ::128] = 448.0
    return found


def _scatter(cache: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    cache.view(torch.uint8)[indices.reshape(-1).long()] = updates.contiguous().view(torch.uint8)
    return cache


def _reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:  # fmt: skip
    for source, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        _scatter(flat, slot_indices, source.view(-1, *cache.shape[2:]))


def _quantized(tiles: torch.Tensor, *, dst_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = tiles.float().abs().amax(1) / 448.0
    return (tiles.float() / scale[:, None]).to(dst_type), scale


@contextmanager
def _switched(**environment: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _heads(case: Mapping[str, Any]) -> dict[str, Any]:
    with _switched(ASCEND_USE_FIA="1" if case["fia"] else "0"):
        pool = NPUMHATokenToKVPool(
            size=SIZE, page_size=PAGE, dtype=getattr(torch, case["dtype"]), head_num=case["heads"],
            head_dim=case["dims"], v_head_dim=case["value_dims"], layer_num=LAYERS, device="cpu",
            enable_memory_saver=False, start_layer=START, end_layer=START + LAYERS - 1,
        )  # fmt: skip
    for layer in range(LAYERS):
        key = rows((len(SLOTS), case["heads"], case["dims"]), case["dtype"], 2 * layer)
        value = rows((len(SLOTS), case["heads"], case["value_dims"]), case["dtype"], 2 * layer + 1)
        pool.set_kv_buffer(SimpleNamespace(layer_id=START + layer), torch.tensor(SLOTS), key, value)
    key, value = pool.get_hicache_transfer_buffers()
    return {**case, "kind": "heads", "digests": {"key": _digest(key), "value": _digest(value)}}


def _latents(case: Mapping[str, Any]) -> dict[str, Any]:
    packed = case["dtype"] == "float8_e4m3fn"
    width = case["latent"] + case["latent"] // 128 * 4 + case["rope"] * 2
    with _switched(SGLANG_USE_FIA_NZ="1" if case["nz"] else "0"):
        pool = NPUMLATokenToKVPool(
            size=SIZE, page_size=PAGE, dtype=getattr(torch, case["dtype"]), kv_lora_rank=case["latent"],
            qk_rope_head_dim=case["rope"], layer_num=LAYERS, device="cpu", enable_memory_saver=False,
            start_layer=START, end_layer=START + LAYERS - 1, index_head_dim=case["index"],
            indexer_layer_ids=case["indexer"], kv_cache_dim=width if packed else None,
        )  # fmt: skip
    slots = torch.tensor(SLOTS)
    for layer in range(LAYERS):
        dtype = "bfloat16" if packed else case["dtype"]
        latent = (
            latent_rows(case["latent"], 2 * layer) if packed else rows((len(SLOTS), case["latent"]), dtype, 2 * layer)
        )
        rope = rows((len(SLOTS), case["rope"]), dtype, 2 * layer + 1)
        pool.set_kv_buffer(SimpleNamespace(layer_id=START + layer), slots, latent, rope)
    for layer in case["indexer"] or ():
        pool.set_index_k_buffer(layer, slots, rows((len(SLOTS), case["index"]), case["dtype"], 40 + layer))
        if pool.index_k_scale_buffer is not None:
            pool.set_index_k_scale_buffer(layer, slots, rows((len(SLOTS), 1), "float32", 50 + layer))
    held = {"latent": pool.k_buffer, "rope": pool.v_buffer, "index_key": pool.index_k_buffer}
    held["index_scale"] = pool.index_k_scale_buffer
    digests = {name: _digest(buffer) for name, buffer in held.items() if buffer is not None and buffer.numel()}
    items = [int(item) for item in pool.get_contiguous_buf_infos()[2]]
    return {**case, "kind": "latents", "width": pool.kv_cache_dim, "digests": digests, "items": items}


def _windowed() -> dict[str, Any]:
    case: dict[str, Any] = {
        "heads": 2, "dims": 24, "value_dims": 16, "window_heads": 2, "window_dims": 16, "window_value_dims": 8,
        "dtype": "bfloat16", "full": [1, 3], "window": [0, 2], "window_size": 48,
    }  # fmt: skip
    pool = SWAKVPool(
        size=SIZE, size_swa=case["window_size"], page_size=PAGE, dtype=torch.bfloat16, head_num=case["heads"],
        head_dim=case["dims"], v_head_dim=case["value_dims"], swa_head_num=case["window_heads"],
        swa_head_dim=case["window_dims"], swa_v_head_dim=case["window_value_dims"],
        swa_attention_layer_ids=case["window"], full_attention_layer_ids=case["full"], device="cpu",
        token_to_kv_pool_class=NPUMHATokenToKVPool,
    )  # fmt: skip
    mapping = torch.zeros(MAPPED, dtype=torch.int64)
    mapping[SLOTS] = torch.tensor(WINDOW_SLOTS)
    pool.register_mapping(mapping)
    slots = torch.tensor(SLOTS)
    for layer in sorted(case["full"] + case["window"]):
        inner = pool.swa_kv_pool if layer in case["window"] else pool.full_kv_pool
        key = rows((len(SLOTS), inner.head_num, inner.head_dim), case["dtype"], 2 * layer)
        value = rows((len(SLOTS), inner.head_num, inner.v_head_dim), case["dtype"], 2 * layer + 1)
        location = KVWriteLoc(slots, pool.translate_loc_from_full_to_swa(slots))
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), location, key, value)
    groups = {}
    for name, inner, infos in (
        ("full", pool.full_kv_pool, pool.get_contiguous_buf_infos()),
        ("window", pool.swa_kv_pool, pool.get_state_buf_infos()),
    ):
        key, value = inner.get_hicache_transfer_buffers()
        groups[name] = {
            "digests": {"key": _digest(key), "value": _digest(value)},
            "lengths": [int(length) for length in infos[1]],
            "items": [int(item) for item in infos[2]],
        }
    return {**case, "kind": "windowed", "groups": groups}


def record() -> dict[str, Any]:
    """Every case."""
    ops = SimpleNamespace(
        npu_scatter_nd_update_=_scatter, _npu_reshape_and_cache=_reshape_and_cache, npu_dynamic_quant=_quantized
    )
    alone = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "attn_cp_size": 1, "attn_tp_size": 1, "dcp_enabled": False}
    with (
        patch.object(memory_pool_npu, "torch_npu", ops, create=True),
        get_parallel().override(**alone),
    ):
        cases = [*map(_heads, HEADS), *map(_latents, LATENTS), _windowed()]
    return {
        "page_size": PAGE, "size": SIZE, "layers": LAYERS, "start": START, "slots": SLOTS,
        "window_slots": WINDOW_SLOTS, "cases": cases,
    }  # fmt: skip
