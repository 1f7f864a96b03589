"""vLLM's offloading for vLLM-Ascend's caches: its connector, spec, managers and shared memory, our copies and tier."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from kv_pool import LayoutError, StorageError
from kv_pool.integrations import vllm as tiers
from kv_pool.integrations import vllm_npu as integration
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

NPU = "npu:0"
BLOCKS, BLOCK, HEADS, DIMS = 9, 16, 2, 32
LAYERS = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
CONTEXT = ReqContext(req_id="one")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(8)]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def cache_config(groups: list[list[str]]) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIMS, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[KVCacheTensor(BLOCKS * spec.page_size_bytes, [layer]) for group in groups for layer in group],
        kv_cache_groups=[KVCacheGroupSpec(group, spec) for group in groups],
    )


def vllm_config(folder: Path, name: str, *, factor: int = 1, host_blocks: int = 6) -> Any:
    """What vLLM's connector, spec and tier read of a server's configuration."""
    page = 2 * BLOCK * HEADS * DIMS * 2 * len(LAYERS)
    extra = {
        "spec_name": "NpuTieringSpec", "spec_module_path": "kv_pool.integrations.vllm_npu",
        "block_size": factor * BLOCK, "cpu_bytes_to_use": host_blocks * factor * page,
        "secondary_tiers": [
            {"type": "kv_pool", "storage": "files", "options": {"root": str(folder), "capacity_bytes": 10**8}}
        ],
    }  # fmt: skip
    return SimpleNamespace(
        instance_id=f"kv-pool-npu-{name}",
        kv_transfer_config=SimpleNamespace(
            kv_connector="NpuOffloadingConnector", kv_connector_module_path="kv_pool.integrations.vllm_npu",
            kv_connector_extra_config=extra, engine_id="e",
        ),
        kv_events_config=None,
        parallel_config=SimpleNamespace(
            world_size=1, rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(model="m/x", dtype="bfloat16"),
        cache_config=SimpleNamespace(
            block_size=BLOCK, cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True,
            hash_block_size=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )  # fmt: skip


def caches(salt: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """vLLM-Ascend's: K and V apart, blocks first, every element's bytes telling where it lies."""
    made = {}
    for layer, name in enumerate(LAYERS):
        running = torch.arange(BLOCKS * BLOCK * HEADS * DIMS).view(BLOCKS, BLOCK, HEADS, DIMS)
        pair = [(running * 7 + 1000 * layer + 100 * side + salt).remainder(509) - 254 for side in (0, 1)]
        made[name] = (pair[0].to(torch.bfloat16).to(NPU), pair[1].to(torch.bfloat16).to(NPU))
    return made


@contextmanager
def server(
    folder: Path, name: str, *, factor: int = 1, groups: list[list[str]] | None = None, salt: int = 0
) -> Iterator[Any]:
    """One vLLM: the connector of its scheduler and of its worker, made by vLLM's factory, and the worker's caches."""
    config, cache = vllm_config(folder, name, factor=factor), cache_config(groups or [LAYERS])
    spec = integration.spec_class()(config, cache)
    manager = spec.get_manager()
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    held = caches(salt)
    worker.register_kv_caches(held)
    try:
        yield SimpleNamespace(manager=manager, worker=worker.connector_worker.worker, connector=worker, caches=held)
    finally:
        worker.shutdown()
        manager.shutdown()


def ended(worker: Any, count: int) -> dict[int, tuple[bool, Any]]:
    found: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found |= {one.job_id: (one.success, one.transfer_type) for one in worker.get_finished()}
    return found


def on_host(held: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    torch_npu.npu.synchronize()
    return [side.cpu() for pair in held.values() for side in pair]


def test_the_classes_are_what_the_engine_asks_for() -> None:
    """Signatures of what we override, and the names that we call, in the installed vLLM."""
    for name in sorted(OffloadingHandler.__abstractmethods__):
        theirs = list(inspect.signature(getattr(OffloadingHandler, name)).parameters)
        ours = list(inspect.signature(getattr(integration.BlockCopies, name)).parameters)
        assert ours == theirs or (name, theirs) == ("transfer_async", ["self", "job_id", "spec"])
    handler, spec, connector = integration.handler_class(), integration.spec_class(), integration.connector_class()
    assert not inspect.isabstract(handler) and not inspect.isabstract(spec) and not inspect.isabstract(connector)
    assert issubclass(connector, OffloadingConnector) and integration.NpuTieringSpec is spec
    assert list(inspect.signature(OffloadingConnectorWorker._register_handlers).parameters) == ["self", "kv_caches"]
    assert list(inspect.signature(spec.get_handlers).parameters) == ["self", "kv_caches"]
    assert SecondaryTierManager in tiers.tier_class().__mro__


def test_vllms_own_connector_does_not_take_these_caches(tmp_path: Path) -> None:
    """Why there is one of ours: vLLM wants a tensor a layer, and its spec refuses the platform."""
    config, cache = vllm_config(tmp_path, "own"), cache_config([LAYERS])
    worker = OffloadingConnectorWorker(integration.spec_class()(config, cache))
    with pytest.raises(AssertionError):
        worker.register_kv_caches(caches(0))
    theirs = integration.spec_class().__mro__[2](config, cache)
    with pytest.raises(Exception, match="CUDA-alike"):
        next(iter(theirs.get_handlers(None)))


@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_go_down_to_files_and_up_in_another_server(tmp_path: Path, factor: int) -> None:
    """NPU to shared memory to files; another server finds them, promotes them and loads them into other blocks."""
    keys = KEYS[:2]
    there, back = ([5, 1, 7, 2][: 2 * factor], [3, 8, 4, 6][: 2 * factor])
    with server(tmp_path, f"a{factor}", factor=factor) as one:
        one.manager.on_new_request(CONTEXT)
        output = one.manager.prepare_store(keys, CONTEXT)
        source = GPULoadStoreSpec(there, [len(there)], [0])
        assert one.worker.transfer_async(1, (source, output.store_spec))
        assert ended(one.worker, 1) == {1: (True, ("GPU", "CPU"))}
        one.manager.complete_store(keys, CONTEXT)
        tier = one.manager.secondary_tiers[0]
        deadline = time.monotonic() + 30
        while tier._jobs and time.monotonic() < deadline:
            one.manager.on_schedule_end()
            one.manager.lookup(keys[0], CONTEXT)
        kept = on_host(one.caches)
    with server(tmp_path, f"b{factor}", factor=factor, salt=50) as two:
        two.manager.on_new_request(CONTEXT)
        deadline = time.monotonic() + 30
        while [two.manager.lookup(key, CONTEXT) for key in keys] != [True] * 2:
            two.manager.on_schedule_end()
            assert time.monotonic() < deadline, "blocks are not promoted"
        before = on_host(two.caches)
        load = two.manager.prepare_load(keys, CONTEXT)
        assert two.worker.transfer_async(2, (load, GPULoadStoreSpec(back, [len(back)], [0])))
        assert ended(two.worker, 1) == {2: (True, ("CPU", "GPU"))}
        two.manager.complete_load(keys, CONTEXT)
        for found, old, stored in zip(on_host(two.caches), before, kept, strict=True):
            expected = old.clone()
            expected[back] = stored[there]
            assert torch.equal(found, expected)


def test_groups_begin_inside_host_blocks(tmp_path: Path) -> None:
    """Two groups with host blocks of three: the first starts at its second part, the second at its last."""
    groups = [LAYERS[:2], LAYERS[2:]]
    with server(tmp_path, "groups", factor=3, groups=groups) as one:
        kept = on_host(one.caches)
        host = CPULoadStoreSpec([4, 0, 2, 1])
        source = GPULoadStoreSpec([5, 1, 7, 2, 8, 3, 6], [4, 3], [1, 5])  # parts 1 2 | 0 1 and 2 | 0 1
        one.worker.transfer_async(1, (source, host))
        one.worker.wait({1})
        for pair in one.caches.values():
            for side in pair:
                side.fill_(-7)
        assert ended(one.worker, 1) == {1: (True, ("GPU", "CPU"))}
        target = GPULoadStoreSpec([2, 6, 4, 1, 5, 8, 7], [4, 3], [1, 5])
        one.worker.transfer_async(2, (host, target))
        assert ended(one.worker, 1) == {2: (True, ("CPU", "GPU"))}
        found = on_host(one.caches)
        moved = [dict(zip([2, 6, 4, 1], [5, 1, 7, 2], strict=True)), dict(zip([5, 8, 7], [8, 3, 6], strict=True))]
        for place, (now, then) in enumerate(zip(found, kept, strict=True)):
            group = moved[0] if place < 4 else moved[1]
            for target_block, source_block in group.items():
                assert torch.equal(now[target_block], then[source_block])
            assert (now[[block for block in range(BLOCKS) if block not in group]] == -7).all()


def test_a_store_waits_for_what_was_computed_and_a_load_is_read_when_reported(tmp_path: Path) -> None:
    """On streams of their own: the emulator's order checker finds a missing wait, and blocks come back as written."""
    with server(tmp_path, "order") as one:
        side = one.caches[LAYERS[0]][0]
        side[3].fill_(11)
        one.worker.transfer_async(1, (GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([5])))
        one.worker.wait({1})
        side[3].fill_(12)  # the block was given to another request
        one.worker.transfer_async(2, (CPULoadStoreSpec([5]), GPULoadStoreSpec([6], [1], [0])))
        assert ended(one.worker, 2) == {1: (True, ("GPU", "CPU")), 2: (True, ("CPU", "GPU"))}
        doubled = side * 2
        torch_npu.npu.synchronize()
        assert (doubled[6] == 22).all() and (doubled[3] == 24).all()


def test_what_does_not_match_is_refused(tmp_path: Path) -> None:
    with server(tmp_path, "refused", factor=2) as one:
        host, device = CPULoadStoreSpec([1]), GPULoadStoreSpec([1, 2, 3], [3], [0])
        (handler,) = one.worker.handlers
        for pair, what in (
            ((device, host), "1 host blocks"),
            ((CPULoadStoreSpec([1, 2]), GPULoadStoreSpec([1, 2], [2], [0])), "2 device and 1 host blocks"),
            ((host, GPULoadStoreSpec([1, 2], [1, 1], [0, 0])), "1 groups"),
            ((device, device), "GPU to CPU"),
        ):
            with pytest.raises(StorageError, match=what):
                handler.transfer_async(1, pair)
        assert not handler.get_finished()
        turned = {name: (pair[0].transpose(0, 1), pair[1]) for name, pair in one.caches.items()}
        with pytest.raises(LayoutError, match=f"memory of {BLOCKS} blocks"):
            one.connector.register_kv_caches(turned)
