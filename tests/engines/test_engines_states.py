"""SGLang's pool of recurrent states on the emulated NPU beside ours, call by call; and its pages in a store of files.

The golden `recurrent` has more models and the write-back of drafts, on a CPU; here the device's own operators run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from engines_groups import HOST_PAGES, host_of, number, numbers, page_slots, state_host, states, windowed
from engines_pools import NPU
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import StatePool
from kv_pool.hicache import HostPool, create_mover
from kv_pool.integrations.sglang import storage_class
from kv_pool.writers import WriterName
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName, PoolTransfer

LAYERS = (1, 2, 4)


class Both:
    """SGLang's pool and ours of one geometry, equally labelled; a conv state of ours is one head."""

    def __init__(self, drafts: int | None, writer: WriterName) -> None:
        self.theirs = states(layers=LAYERS, speculative_num_draft_tokens=drafts)
        cache = self.theirs.mamba_cache
        self.held = {"conv": cache.conv[0], "temporal": cache.temporal}
        layouts, shapes = {}, {}
        for salt, (kind, tensor) in enumerate(self.held.items()):
            heads, *shape = tensor.shape[2:] if kind == "temporal" else (1, *tensor.shape[2:])
            spec = ComponentSpec(
                "state", layer_ids=LAYERS, dtype="float32" if kind == "temporal" else "bfloat16", total_heads=heads,
                dims=torch.Size(shape).numel(), item_kind="request_row",
            )  # fmt: skip
            layouts[kind], shapes[kind] = ModelLayout([spec], page_size=1, fingerprint=kind), shape
            number(tensor, salt)
        self.ours = StatePool(layouts, requests=self.theirs.size, device=NPU, shapes=shapes, writer=writer)
        for salt, kind in enumerate(self.held):
            number(self.ours.kind(kind).storage("state"), salt)

    def check(self) -> None:
        torch_npu.npu.synchronize()
        for kind, tensor in self.held.items():
            ours = self.ours.kind(kind).storage("state").cpu()
            assert torch.equal(ours.view(tensor.shape), tensor.cpu()), kind


@pytest.mark.parametrize("drafts", [None, 3])
@pytest.mark.parametrize("writer", ["scatter_nd", "index"])
def test_calls_leave_equal_bytes(drafts: int | None, writer: WriterName) -> None:
    both = Both(drafts, writer)
    both.check()
    rows = torch.tensor([5, 2, 0], dtype=torch.int32, device=NPU)
    for place, layer in enumerate(LAYERS):
        held = both.theirs.mamba2_layer_cache(place)
        for salt, (kind, tensor) in enumerate((("conv", held.conv[0]), ("temporal", held.temporal))):
            given = numbers(3 * tensor[0].numel(), 40 + 9 * place + salt).view(3, *tensor.shape[1:])
            given = given.to(tensor.dtype).to(NPU)
            tensor[rows.long()] = given
            both.ours.write(kind, layer, rows, given if kind == "temporal" else given[:, None])
    both.check()
    cleared = torch.tensor([3, 7], dtype=torch.int32, device=NPU)
    both.theirs.clear_slots(cleared)
    both.ours.clear(cleared)
    both.check()
    for sources, targets in (([5, 2], [1, 4]), ([1, 2, 3], [2, 3, 1]), ([6, 6], [7, 5])):
        given, into = (torch.tensor(index, device=NPU) for index in (sources, targets))
        both.theirs.copy_from(given, into)
        both.ours.copy(given, into)
        both.check()
    both.theirs.load_cpu_copy(both.theirs.get_cpu_copy([4, 7]), [6, 1])
    for kind in both.held:
        held = both.ours.kind(kind)
        held.copy_in([6, 1], held.copy_out([4, 7]))
    both.check()


def test_host_pools_hold_and_give_back_equal_bytes() -> None:
    both = Both(3, "auto")
    theirs = state_host(both.theirs)
    hosts = {kind: HostPool(both.ours.kind(kind), pages=theirs.size - 1) for kind in both.held}
    buffers = {"conv": theirs.conv_buffer[0], "temporal": theirs.temporal_buffer}
    movers = {kind: create_mover("auto", host) for kind, host in hosts.items()}
    for kind, buffer in buffers.items():
        buffer.fill_(-7)
        hosts[kind].mirror("state").host.fill_(-7)
        movers[kind].backup([7, 2], [3, 1])
    theirs.backup_from_device_all_layer(None, torch.tensor([3, 1]), torch.tensor([7, 2]), "kernel_ascend")
    torch_npu.npu.synchronize()
    for kind, buffer in buffers.items():
        assert torch.equal(hosts[kind].mirror("state").storage.view(buffer.shape), buffer), kind
        movers[kind].load([4, 6], [1, 3])
    for place in range(len(LAYERS)):
        theirs.load_to_device_per_layer(None, torch.tensor([1, 3]), torch.tensor([4, 6]), place, "kernel_ascend")
    both.check()


def test_pages_of_states_with_drafts_are_no_hits_without(tmp_path: Path) -> None:
    """A-04 once more: SGLang's key does not say how long windows are, and a longer page is read as a shorter one."""
    drafted, plain = (state_host(states(speculative_num_draft_tokens=drafts)) for drafts in (3, None))
    for host in (drafted, plain):
        for salt, buffer in enumerate((host.temporal_buffer, host.conv_buffer[0])):
            number(buffer, 5 * salt)
    options = {"root": str(tmp_path / "ours"), "capacity_bytes": 10**8}
    settings = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
        extra_config={"interface_v1": 1, "storage": "files", "options": options},
    )  # fmt: skip
    anchor = host_of(windowed().full_kv_pool)

    def moved(store: Any, host: Any, call: str, row: int) -> Any:
        store.register_mem_pool_host(anchor)
        store.register_mem_host_pool_v2(host, PoolName.MAMBA)
        if hasattr(store, "on_host_pools_registered"):
            store.on_host_pools_registered()
        return getattr(store, call)([PoolTransfer(PoolName.MAMBA, host_indices=page_slots([row], 1), keys=["ab" * 32])])

    window = drafted.conv_buffer[0][5].clone()
    stores: list[tuple[Callable[[], Any], bool]] = [
        (lambda: HiCacheFile(settings, str(tmp_path / "theirs")), True),
        (lambda: storage_class()(settings), False),
    ]
    for make, hit in stores:
        before = plain.conv_buffer[0][2].clone()
        assert moved(make(), drafted, "batch_set_v2", 5) == {PoolName.MAMBA: [True]}
        assert moved(make(), plain, "batch_get_v2", 2) == {PoolName.MAMBA: [hit]}
        found = plain.conv_buffer[0][2]
        assert torch.equal(found, before) != hit
        if hit:  # the last columns of the windows are the state: they came from elsewhere
            assert not torch.equal(found, window[:, :, -found.shape[2] :])
        assert moved(make(), drafted, "batch_get_v2", HOST_PAGES - 1) == {PoolName.MAMBA: [True]}
        assert torch.equal(drafted.conv_buffer[0][HOST_PAGES - 1], window)
