"""SGLang's own NPU pools registered by its own calls, named by ours, moved by its disaggregation; the plugin.

Where its positional rules would pair other buffers (index keys on some layers, windows, stages with drafts), these
pairs come from the pools.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from engines_transfer import Cluster, Request, configured, free_port
from kv_transfer import UnsupportedLayout
from kv_transfer.integrations import sglang as ours
from kv_transfer.integrations.sglang.holds import HOLD_SECONDS
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import (
    KVClassType,
    TransferBackend,
    build_kv_layer_ids,
    get_kv_transfer_buf_infos,
)
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.plugins import hook_registry

PAGE, PAGES = 16, 8
FROM, TO = [3, 5, 1], [2, 7, 4]


def mha(layers: range, *, value_dims: int = 32) -> Any:
    return NPUMHATokenToKVPool(
        size=PAGES * PAGE, page_size=PAGE, dtype=torch.float16, head_num=2, head_dim=32, v_head_dim=value_dims,
        layer_num=len(layers), device="npu", enable_memory_saver=False, start_layer=layers.start,
        end_layer=layers.stop - 1,
    )  # fmt: skip


def mla(layers: range, indexed: Sequence[int] | None = None) -> Any:
    held = {} if indexed is None else {"index_head_dim": 128, "indexer_layer_ids": [i for i in indexed if i in layers]}
    return NPUMLATokenToKVPool(
        size=PAGES * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=32,
        layer_num=len(layers), device="npu", enable_memory_saver=False, start_layer=layers.start,
        end_layer=layers.stop - 1, **held,
    )  # fmt: skip


def windows() -> Any:
    """Layers 0 and 3 see everything, 1 and 2 a window."""
    return SWAKVPool(
        size=PAGES * PAGE, size_swa=PAGES * PAGE, page_size=PAGE, dtype=torch.float16, head_num=2, head_dim=32,
        swa_attention_layer_ids=[1, 2], full_attention_layer_ids=[0, 3], device="npu",
        token_to_kv_pool_class=NPUMHATokenToKVPool,
    )  # fmt: skip


def filled(pool: Any, draft: Any, total: int, *, stage: int = 0, stages: int = 1) -> Any:
    """A rank whose `KVArgs` are filled by SGLang's calls, as its scheduler does."""
    args = KVArgs()
    args.engine_rank, args.gpu_id, args.pp_rank, args.page_size = 0, 0, stage, PAGE
    args.kv_cache_dtype_str = "auto"
    args.prefill_start_layer = getattr(pool, "start_layer", 0) or 0
    args.prefill_end_layer = getattr(pool, "end_layer", None)
    lists = get_kv_transfer_buf_infos(pool)
    own = draft if stage == stages - 1 else None
    drafted = own.get_contiguous_buf_infos() if own is not None else ([], [], [])
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (a + b for a, b in zip(lists, drafted, strict=True))
    args.num_draft_entries = len(drafted[0])
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=own, num_draft_entries=args.num_draft_entries,
        num_hidden_layers=total,
    )  # fmt: skip
    args.kv_head_num = args.total_kv_head_num = 2
    row = torch.zeros(4, 16, dtype=torch.uint8)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [row.data_ptr()], [row.nbytes], [16]
    ours.setup_state_kv_args(args, pool, draft, total)
    return SimpleNamespace(args=args, pp=(stage, stages), tp=(0, 1), row=row)


def tensors(pool: Any) -> dict[tuple[str, int], Any]:
    """Buffers of a pool by component and global layer. Shape: [pages, …]."""
    found: dict[tuple[str, int], Any] = {}
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    for place, layer in enumerate(layers):
        if isinstance(pool, NPUMHATokenToKVPool):
            found["key", layer], found["value", layer] = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        else:
            found["latent", layer], found["rope", layer] = pool.k_buffer[place], pool.v_buffer[place]
    if isinstance(pool, NPUMLATokenToKVPool):
        for slot, layer in enumerate(pool.indexer_layer_ids):
            found["index_key", layer] = pool.index_k_buffer[slot]
    return found


def number(pool: Any, salt: int) -> None:
    for place, (_, tensor) in enumerate(sorted(tensors(pool).items(), key=lambda held: held[0])):
        running = torch.arange(tensor.numel()).remainder(251) + salt + 17 * place
        tensor.copy_(running.remainder(251).view(tensor.shape).to(tensor.dtype))
    torch_npu.npu.synchronize()


def compare(source: Any, target: Any, pages: tuple[list[int], list[int]] = (FROM, TO)) -> None:
    own, other = tensors(source), tensors(target)
    for name, tensor in own.items():
        assert torch.equal(other[name][pages[1]].cpu(), tensor[pages[0]].cpu()), name
        untouched = [page for page in range(other[name].shape[0]) if page not in pages[1]]
        assert not other[name][untouched].cpu().any(), name


@pytest.fixture
def clusters() -> Iterator[Any]:
    made: list[Cluster] = []
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, configured(patch, port, "loopback") as arguments:

        def make(prefill: Sequence[Any], decode: Sequence[Any], *, mla: bool) -> Cluster:
            made.append(Cluster(arguments, port, prefill, decode, mla=mla))
            return made[-1]

        yield make
        for cluster in made:
            cluster.close()


def go(cluster: Cluster, states: tuple[Any, Any] = (None, None)) -> None:
    request = Request(cluster, 31)
    request.offer(TO, states=states[1])
    request.send(FROM, states=states[0])
    senders, receivers = request.end()
    assert {*senders, *receivers} == {KVPoll.Success}, cluster.prefill[0].failure_records


@pytest.mark.parametrize("cuts", [(4,), (3, 1)])
@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("kind", ["mha", "mla", "indexed"])
def test_pools_of_stages(clusters: Any, kind: str, cuts: tuple[int, ...], drafts: int) -> None:
    """K and V of unequal widths; latents; index keys of layers 0 and 3 alone: SGLang's 3 groups are none (A-25)."""
    total = sum(cuts)

    def make(layers: range) -> Any:
        return mha(layers, value_dims=16) if kind == "mha" else mla(layers, [0, 3] if kind == "indexed" else None)

    def make_draft() -> Any:
        if kind == "mha":
            return mha(range(1), value_dims=16) if drafts else None
        return mla(range(1), [0] if kind == "indexed" else None) if drafts else None

    decode, decode_draft = make(range(total)), make_draft()
    pools = [make(range(sum(cuts[:i]), sum(cuts[: i + 1]))) for i in range(len(cuts))]
    draft = make_draft()
    sides = [filled(pool, draft, total, stage=i, stages=len(cuts)) for i, pool in enumerate(pools)]
    for salt, pool in enumerate([*pools, *([draft] if drafts else [])]):
        number(pool, 3 + 5 * salt)
    go(clusters(sides, [filled(decode, decode_draft, total)], mla=kind != "mha"))
    for pool in pools:
        compare(pool, decode)
    if drafts:
        compare(draft, decode_draft)


def test_windows_of_a_hybrid_pool(clusters: Any) -> None:
    """Full layers by the request's pages, windows by their own; both by layer id."""
    source, target = windows(), windows()
    sides = [filled(pool, None, 4) for pool in (source, target)]
    names = [[name[2] for name in side.args.kv_entry_names] for side in sides]
    assert names[0] == [0, 3, 0, 3] and sides[0].args.state_layer_ids == [[1, 2, 1, 2]]
    for salt, part in enumerate((source.full_kv_pool, source.swa_kv_pool)):
        number(part, 2 + salt)
    go(clusters([sides[0]], [sides[1]], mla=False), ([[1, 2]], [[6, 3]]))
    compare(source.full_kv_pool, target.full_kv_pool)
    compare(source.swa_kv_pool, target.swa_kv_pool, ([1, 2], [6, 3]))


def test_a_pool_that_registers_other_buffers_is_refused() -> None:
    """A09, A13: the draft's index keys left out, or one buffer forgotten."""
    pool, draft = mla(range(2), [0, 1]), mla(range(1), [0])
    side = filled(pool, draft, 2)
    args = side.args
    for lists in (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens):
        lists.pop()
    args.num_draft_entries -= 1
    with pytest.raises(UnsupportedLayout, match="the pools hold 9 buffers, 3 of them the draft's"):
        ours.name_entries(args, pool, draft, 2)


def test_kv_args_of_a_pool_make_a_manifest_and_back() -> None:
    pool, draft = mla(range(2), [0]), mla(range(1), [0])
    side = filled(pool, draft, 2)
    found = ours.manifest_of(side.args, mla=True, fingerprint="m")
    held = {(entry.component, entry.part, entry.layer_id): entry.address for entry in found.entries}
    assert held["index_key", "target", 0] == pool.index_k_buffer[0].data_ptr()
    assert held["rope", "target", 1] == pool.v_buffer[1].data_ptr()
    assert held["index_key", "draft", 2] == draft.index_k_buffer[0].data_ptr() and len(held) == 8
    back = ours.fill_kv_args(KVArgs(), found)
    assert back.kv_data_ptrs == side.args.kv_data_ptrs and back.kv_item_lens == side.args.kv_item_lens


@pytest.fixture
def hooks() -> Iterator[Any]:
    """SGLang's registry of hooks; what a test hooked is taken back."""
    registry = hook_registry.HookRegistry
    registry.reset()
    yield registry
    for target in list(registry._patched):
        module, name = target.rsplit(".", 1)
        wrapped = getattr(sys.modules[module], name)
        setattr(sys.modules[module], name, wrapped.__wrapped__)
        hook_registry._propagate_patch(wrapped, wrapped.__wrapped__, None)
    registry.reset()


@pytest.mark.parametrize("engine", ["", "mooncake", "memfabric"])
def test_the_plugin_takes_the_place_of_the_ascend_backend(
    hooks: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Through SGLang's plugin registry, in every module that imported its functions; switched by the setting alone."""
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.managers import disagg_service

    monkeypatch.setenv("KV_TRANSFER_SGLANG_ENGINE", engine)
    monkeypatch.setenv(HOLD_SECONDS, "")  # so that it is as before behind the test
    monkeypatch.delenv(HOLD_SECONDS)
    ours.plugin()
    assert os.environ.get(HOLD_SECONDS) == ("inf" if engine else None)
    hooks.apply_hooks()
    kinds = (KVClassType.MANAGER, KVClassType.SENDER, KVClassType.RECEIVER, KVClassType.BOOTSTRAP_SERVER)
    for module in (prefill, decode, disagg_service):
        found = [module.get_kv_class(TransferBackend.ASCEND, kind).__name__ for kind in kinds]
        assert all(name.startswith("KvTransfer") == bool(engine) for name in found), found
        assert module.get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER).__name__ == "MooncakeKVManager"
        assert module.get_kv_class(TransferBackend.ASCEND, KVClassType.KVARGS) is KVArgs
    args = filled(mha(range(2)), None, 2).args
    del args.kv_entry_names
    prefill.setup_state_kv_args(args, mha(range(2)), None, 2, req_to_token_pool=None)
    assert hasattr(args, "kv_entry_names") == bool(engine)
    if engine == "mooncake":  # no configuration store is asked of MemFabric, which is not installed
        disagg_service.maybe_create_ascend_config_store(transfer_backend=TransferBackend.ASCEND)
