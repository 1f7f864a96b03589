"""SGLang's NPU pools and their host pools: storage, transfer entries, host layouts, places of a host page.

Addresses are given as component, place of the layer and offset, so that they compare in every run. Nothing is moved
here: `tests/engines` moves the same pages on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

__all__ = ["record"]

PAGE, SIZE, HOST_PAGES = 16, 64, 6
ASKED = [2, 5, 1]  # host pages whose places are recorded
HEADS: tuple[dict[str, Any], ...] = (
    {"heads": 2, "dims": 8, "value_dims": 8, "layers": 3, "start": 0, "dtype": "float16", "drafts": 0},
    {"heads": 2, "dims": 8, "value_dims": 8, "layers": 3, "start": 4, "dtype": "bfloat16", "drafts": 2},
    {"heads": 4, "dims": 24, "value_dims": 16, "layers": 2, "start": 0, "dtype": "bfloat16", "drafts": 0},
    {"heads": 1, "dims": 16, "value_dims": 16, "layers": 1, "start": 7, "dtype": "int8", "drafts": 0},
)
LATENTS: tuple[dict[str, Any], ...] = (
    {"latent": 64, "rope": 32, "layers": 3, "start": 0, "dtype": "bfloat16", "indexer": None},
    {"latent": 512, "rope": 64, "layers": 2, "start": 5, "dtype": "float16", "indexer": None},
    {"latent": 64, "rope": 32, "layers": 4, "start": 2, "dtype": "bfloat16", "indexer": [2, 5]},
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def _heads(case: Mapping[str, Any], layers: int, start: int) -> Any:
    return NPUMHATokenToKVPool(
        size=SIZE, page_size=PAGE, dtype=getattr(torch, case["dtype"]), head_num=case["heads"],
        head_dim=case["dims"], v_head_dim=case["value_dims"], layer_num=layers, device="cpu",
        enable_memory_saver=False, start_layer=start, end_layer=start + layers - 1,
    )  # fmt: skip


def _latents(case: Mapping[str, Any]) -> Any:
    index = {} if case["indexer"] is None else {"index_head_dim": 128, "indexer_layer_ids": case["indexer"]}
    return NPUMLATokenToKVPool(
        size=SIZE, page_size=PAGE, dtype=getattr(torch, case["dtype"]), kv_lora_rank=case["latent"],
        qk_rope_head_dim=case["rope"], layer_num=case["layers"], device="cpu", enable_memory_saver=False,
        start_layer=case["start"], end_layer=case["start"] + case["layers"] - 1, **index,
    )  # fmt: skip


def _shared(case: Mapping[str, Any], pool: Any) -> dict[str, Any]:
    return {
        "device_capacity_tokens": pool.size, "start_layer": case["start"], "end_layer": case["start"] + case["layers"],
        "host_token_capacity": HOST_PAGES * PAGE, "pin_memory": False,
    }  # fmt: skip


def _place(address: int, storages: Mapping[str, torch.Tensor]) -> list[Any]:
    """The component that an address lies in, and the offset in bytes."""
    for name, storage in storages.items():
        if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes:
            return [name, address - storage.data_ptr()]
    raise AssertionError("an address outside the pool")


def _host(host: Any, storages: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    slots = (torch.tensor(ASKED)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
    addresses, sizes = host.get_page_buffer_meta(slots)
    return {
        "shapes": {name: list(storage.shape) for name, storage in storages.items()},
        "places": [_place(int(address), storages) for address in addresses],
        "sizes": [int(size) for size in sizes],
    }


def _device(pool: Any, storages: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    addresses, lengths, items = pool.get_contiguous_buf_infos()[:3]
    return {
        "shapes": {name: list(storage.shape) for name, storage in storages.items()},
        "entries": [_place(int(address), storages) for address in addresses],
        "lengths": [int(length) for length in lengths],
        "items": [int(item) for item in items],
    }


def _named(pool: Any, *names: tuple[str, str]) -> dict[str, torch.Tensor]:
    return {ours: held for ours, theirs in names if isinstance(held := getattr(pool, theirs, None), torch.Tensor)}


def _cases() -> Iterator[dict[str, Any]]:
    for case in HEADS:
        pool = _heads(case, case["layers"], case["start"])
        drafts = [_heads(case, 1, 0)._mha_buffer_info() for _ in range(case["drafts"])]
        alike = case["dims"] == case["value_dims"]
        kind = MHATokenToKVPoolHost if alike else AsymmetricMHATokenToKVPoolHost
        hosts = {}
        for layout in LAYOUTS if alike else LAYOUTS[1:]:  # its class for unequal widths has no layer_first
            shared = _shared(case, pool)
            host = kind(pool._mha_buffer_info(), 2.0, 0, PAGE, layout, draft_buffer_infos=drafts, **shared)
            hosts[layout] = _host(host, _named(host, ("key", "k_buffer"), ("value", "v_buffer")))
        key, value = pool.get_hicache_transfer_buffers()
        yield {**case, "kind": "heads", "device": _device(pool, {"key": key, "value": value}), "hosts": hosts}
    for case in LATENTS:
        pool = _latents(case)
        names = ("latent", "k_buffer"), ("rope", "v_buffer"), ("index_key", "index_k_buffer")
        host = MLATokenToKVPoolHost(
            pool._mla_buffer_info(), 2.0, 0, PAGE, "page_first_kv_split", target_layer_num=case["layers"],
            **_shared(case, pool),
        )  # fmt: skip
        hosts = {"page_first_direct": _host(host, _named(host, *names))}
        yield {**case, "kind": "latents", "device": _device(pool, _named(pool, *names)), "hosts": hosts}


def record() -> dict[str, Any]:
    """Geometry of every case; the host layout `page_first_kv_split` of latents is our `page_first_direct`."""
    alone = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "attn_cp_size": 1, "attn_tp_size": 1, "dcp_enabled": False}
    with get_parallel().override(**alone):
        cases = list(_cases())
    return {"page_size": PAGE, "size": SIZE, "host_pages": HOST_PAGES, "asked": ASKED, "cases": cases}
