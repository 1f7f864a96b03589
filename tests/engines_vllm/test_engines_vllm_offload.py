"""vLLM's tiered K/V offloading over our stores: its own managers and memory, our secondary tier."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_pool import StorageError, UnrepeatableKeys
from kv_pool.integrations import vllm as integration
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobMetadata, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

BLOCKS, BYTES = 8, 4096
CONTEXT = ReqContext(req_id="one")
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(12)]


def spec(**changes: Any) -> Any:
    """What the tier reads of vLLM's `OffloadingSpec`."""
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
                "decode_context_parallel_size": 1, "rank": 0}  # fmt: skip
    parallel |= {name: value for name, value in changes.items() if name in parallel}
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["layers.0", "layers.1"])
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(model=changes.get("model", "m/x"), dtype="bfloat16"),
            cache_config=SimpleNamespace(
                cache_dtype=changes.get("dtype", "auto"), prefix_caching_hash_algo=changes.get("hash", "sha256")
            ),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group] * changes.get("groups", 1)),
        hash_block_size=16,
        block_size_factor=changes.get("factor", 1),
    )


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def tier(folder: Path, view: memoryview, **changes: Any) -> Any:
    config = {"type": "kv_pool", "storage": "files", "options": {"root": str(folder), "capacity_bytes": 10**8}}
    config |= {"salt": changes.pop("salt", ""), **changes.pop("config", {})}
    return SecondaryTierFactory.create_secondary_tier(config, view, spec(**changes))


def finished(made: Any) -> dict[int, bool]:
    ended: dict[int, bool] = {}
    deadline = time.monotonic() + 30
    while made._jobs and time.monotonic() < deadline:
        ended |= {result.job_id: result.success for result in made.get_finished_jobs()}
    return ended


def job(number: int, keys: list[int], blocks: list[int], *, load: bool) -> JobMetadata:
    return JobMetadata(number, [KEYS[key] for key in keys], np.array(blocks), load, CONTEXT)


def memory(seed: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    return np.random.default_rng(seed).integers(-128, 128, (BLOCKS, BYTES), dtype=np.int8)


def test_the_class_is_what_the_engine_asks_for() -> None:
    ours = integration.tier_class()
    assert issubclass(ours, SecondaryTierManager) and not inspect.isabstract(ours)
    for name in sorted(SecondaryTierManager.__abstractmethods__):
        theirs = list(inspect.signature(getattr(SecondaryTierManager, name)).parameters)
        assert list(inspect.signature(getattr(integration.BlockStore, name)).parameters) == theirs, name
    first = list(inspect.signature(SecondaryTierManager.__init__).parameters)
    assert list(inspect.signature(integration.BlockStore.__init__).parameters)[: len(first)] == first
    with pytest.raises(ValueError, match="already registered"):
        integration.register()


def test_blocks_go_and_come(tmp_path: Path) -> None:
    before, after = memory(1), np.zeros((BLOCKS, BYTES), np.int8)
    made = tier(tmp_path, before.data)
    assert made.tier_type == "kv_pool" and made.lookup(KEYS[0], CONTEXT) is False
    made.submit_store(job(7, [0, 1, 2], [4, 1, 6], load=False))
    assert finished(made) == {7: True} and made.lookup(KEYS[1], CONTEXT) is True
    again = tier(tmp_path, after.data)
    again.submit_load(job(8, [2, 0], [3, 5], load=True))
    again.submit_load(job(9, [1, 9], [2, 0], load=True))  # the second block is not there: the job has failed
    assert finished(again) == {8: True, 9: False}
    assert (after[3] == before[6]).all() and (after[5] == before[4]).all() and not after[[0, 1, 4, 6, 7]].any()
    made.shutdown()
    again.shutdown()


def test_every_part_of_the_identity_counts(tmp_path: Path) -> None:
    made = tier(tmp_path, memory(1).data)
    made.submit_store(job(1, [0], [0], load=False))
    assert finished(made) == {1: True} and tier(tmp_path, memory(2).data).lookup(KEYS[0], CONTEXT) is True
    changes: list[dict[str, Any]] = [
        {"model": "m/y"}, {"dtype": "fp8"}, {"tensor_parallel_size": 4}, {"rank": 1}, {"groups": 2}, {"factor": 2},
        {"pipeline_parallel_size": 2}, {"decode_context_parallel_size": 2}, {"salt": "x"},
        {"prefill_context_parallel_size": 2}, {"hash": "xxhash"},
    ]  # fmt: skip
    for change in changes:
        assert tier(tmp_path, memory(1).data, **change).lookup(KEYS[0], CONTEXT) is False, change
    assert tier(tmp_path, memory(1)[:, :2048].copy().data).lookup(KEYS[0], CONTEXT) is False
    assert made.lookup(make_offload_key(KEYS[0][:-4], 1), CONTEXT) is False  # another group


def test_damage_and_failure_are_failed_jobs(tmp_path: Path) -> None:
    made = tier(tmp_path, memory(1).data)
    made.submit_store(job(1, [0, 1], [0, 1], load=False))
    assert finished(made) == {1: True}
    key = made._keys([KEYS[1]])[0]
    path = tmp_path / key[:2] / key
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    made.submit_load(job(2, [0, 1], [2, 3], load=True))
    assert finished(made) == {2: False} and made.lookup(KEYS[1], CONTEXT) is False
    for view in (memoryview(bytes(64)), memoryview(bytearray(64)), memory(1)[:, ::2].data):
        with pytest.raises(StorageError, match="primary_kv_view"):
            tier(tmp_path, view)


@contextmanager
def manager(folder: Path, name: str) -> Iterator[tuple[Any, np.ndarray[Any, np.dtype[np.int8]]]]:
    """vLLM's manager of tiers over its shared memory, with ours as the only secondary tier."""
    region = SharedOffloadRegion(
        instance_id=name, num_blocks=BLOCKS, rank=None, kv_bytes_per_block=BYTES, cpu_page_size=BYTES
    )
    primary = CPUPrimaryTierOffloadingManager(num_blocks=BLOCKS, mmap_region=region)
    view = primary.get_kv_memoryview()
    made = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[tier(folder, view)])
    rows = np.asarray(region._base.view(BLOCKS, BYTES).numpy())
    yield made, rows
    del rows
    made.shutdown()


def test_the_managers_of_the_engine_use_it(tmp_path: Path) -> None:
    """One server stores, another one with an empty primary tier finds the blocks, promotes them and reads them."""
    wanted, keys = memory(3), KEYS[:3]
    with manager(tmp_path, "kv-pool-test-a") as (made, rows):
        made.on_new_request(CONTEXT)
        output = made.prepare_store(keys, CONTEXT)
        assert output is not None and list(output.keys_to_store) == keys
        for number, block in enumerate(output.store_spec.block_ids.tolist()):
            rows[block] = wanted[number]
        made.complete_store(keys, CONTEXT)
        deadline = time.monotonic() + 30
        while made.secondary_tiers[0]._jobs and time.monotonic() < deadline:
            made.on_schedule_end()
            made.lookup(keys[0], CONTEXT)
    with manager(tmp_path, "kv-pool-test-b") as (made, rows):
        made.on_new_request(CONTEXT)
        assert made.lookup(KEYS[5], CONTEXT) is False
        deadline = time.monotonic() + 30
        while [made.lookup(key, CONTEXT) for key in keys] != [True] * 3:
            made.on_schedule_end()
            assert time.monotonic() < deadline, "blocks are not promoted"
        blocks = made.prepare_load(keys, CONTEXT).block_ids.tolist()
        assert all((rows[block] == wanted[number]).all() for number, block in enumerate(blocks))
        made.complete_load(keys, CONTEXT)


def test_blocks_have_one_hash_in_every_process_only_with_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's own hash of one block, begun twice as two processes begin it; the tier knows when they will differ."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)

    def begun(seed: str | None) -> bytes:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED")
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(sha256)
        if seed is None:
            monkeypatch.setenv("PYTHONHASHSEED", "0")
        return bytes(kv_cache_utils.hash_block_tokens(sha256, None, (1, 2, 3)))

    assert begun("0") == begun("0") and begun("0") != begun("1") and begun(None) != begun(None)
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(UnrepeatableKeys, match="set PYTHONHASHSEED before vLLM starts"):
        tier(tmp_path, memory(1).data)
    alone = tier(tmp_path, memory(1).data, config={"shared": False})
    alone.submit_store(job(1, [0], [0], load=False))
    assert finished(alone) == {1: True}


def test_the_plugins_own_spec_does_not_load_beside_this_release() -> None:
    """A finding: vllm-ascend 0.23's `NPUOffloadingSpec` imports modules that vLLM 0.23.0 does not have."""
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.v1\.kv_offload\.(abstract|mediums|spec)"):
        __import__("vllm_ascend.kv_offload.npu")
