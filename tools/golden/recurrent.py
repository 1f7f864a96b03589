"""What SGLang's state pool holds on an NPU after its own writes, clears, forks, copies, backups and accepted drafts.

Contents are digests of whole buffers that began as labels, so that a byte in another place, row 0 included, changes
them. The pool, its allocator, its host pool and its two backends' write-back of accepted drafts run unchanged on a CPU.
Two kernels of sgl_kernel_npu that the write-back calls are plain indexing here.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks
from sglang.srt.hardware_backend.npu.attention import ascend_hybrid_linear_attn_backend
from sglang.srt.hardware_backend.npu.attention.ascend_kda_backend import AscendKDAHybridLinearAttnBackend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

__all__ = ["record"]

REQUESTS, LAYERS, BATCH = 7, [1, 2, 4], 3
HOST_LAYOUTS = ("page_first", "page_first_direct")
MODELS: tuple[dict[str, Any], ...] = (
    {"name": "mamba2", "temporal": "float32"},
    {"name": "gated", "temporal": "bfloat16", "groups": [12, 12, 32]},
    {"name": "selective", "temporal": "float16"},
    {"name": "kimi", "temporal": "float32"},
    {"name": "convs", "temporal": "bfloat16"},
)
# Rows are of requests, never 0; steps are places of the last accepted draft, -1 for none.
WRITTEN, CLEARED = [5, 2, 7], [3, 6]
FORKS = {"forked": ([5, 2], [1, 4]), "chained": ([1, 2, 3], [2, 3, 1]), "spread": ([7, 7], [6, 1])}
COPIED, RESTORED = [4, 7], [6, 1]
BACKED_UP = ([7, 2], [3, 1])  # device rows, host rows
LOADED = ([1, 3], [4, 6])  # host rows, device rows
ACCEPTED: tuple[dict[str, Any], ...] = (
    {"rows": [6, 1, 3], "steps": [2, 0, 1], "tracked": None, "track_steps": None},
    {"rows": [2, 7, 4], "steps": [1, -1, 0], "tracked": None, "track_steps": None},
    {"rows": [5, 3, 1], "steps": [2, 1, 0], "tracked": [2, 6, 7], "track_steps": [-1, 0, 1]},
)
SLOTS = (
    ("alloc", 2), ("alloc", 3), ("free", [2, 4]), ("alloc", 3), ("free", [1]), ("free", [5, 3]), ("alloc", 4),
    ("alloc", 1), ("alloc", 0),
)  # fmt: skip


def labels(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """The formula: a running number, exact in 16 bits."""
    running = (torch.arange(tensor.numel()) * 7 + 31 * salt).remainder(509) - 254
    return running.to(tensor.dtype).view(tensor.shape)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


def _move(states: torch.Tensor, drafts: torch.Tensor, rows: Any, places: Any, steps: Any, h_block_size: int = 2) -> Any:
    for row, place, step in zip(rows.tolist(), places.tolist(), steps.tolist(), strict=True):
        if step >= 0:
            states[:, row] = drafts[:, place, step]
    return states


def _roll_back(windows: torch.Tensor, rows: Any, steps: Any, draft_token_num: int) -> torch.Tensor:
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        back = draft_token_num - 1 - step
        if step >= 0 and back > 0:
            windows[:, row, back:] = windows[:, row, :-back].clone()
    return windows


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Where both backends look for the kernels: names of a module, and modules that are imported by the call."""
    made: dict[str, dict[str, Any]] = {
        "mamba_state_update_triton": {
            "move_intermediate_cache": _move, "move_intermediate_cache_kda": _move, "conv_state_rollback": _roll_back,
        },
        "speculative_state_scatter": {"speculative_state_scatter_npu": None},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in ("sgl_kernel_npu", "sgl_kernel_npu.mamba")}
    for name, members in made.items():
        module = modules[f"sgl_kernel_npu.mamba.{name}"] = ModuleType(name)
        vars(module).update(members)
    backend = ascend_hybrid_linear_attn_backend
    with (
        patch.dict(sys.modules, modules),
        patch.object(backend, "move_intermediate_cache", _move),
        patch.object(backend, "conv_state_rollback", _roll_back),
    ):
        yield


def _shape(model: Mapping[str, Any], ranks: int = 1) -> Any:
    if model["name"] == "kimi":
        return KimiLinearStateShape.create(tp_world_size=ranks, num_heads=2, head_dim=6, conv_kernel_size=4)
    if model["name"] == "selective":
        return Mamba2StateShape.create_full_rank(tp_world_size=ranks, intermediate_size=20, state_size=6, conv_kernel=3)
    if model["name"] == "convs":
        sizes = {"intermediate_size": 10, "conv_dim": 10, "ssm_state_size": 0, "num_heads": 1, "head_dim": 1}
        return Mamba2StateShape(conv=[(10, 3), (6, 1)], temporal=(1, 1, 0), state_size=0, conv_kernel=4, **sizes)
    return Mamba2StateShape.create(
        tp_world_size=ranks, intermediate_size=32, n_groups=2, num_heads=4, head_dim=8, state_size=6, conv_kernel=4,
        conv_shard_groups=model.get("groups"),
    )  # fmt: skip


def _pool(model: Mapping[str, Any], drafts: int | None, ranks: int = 1) -> Any:
    kind = KimiLinearCacheParams if model["name"] == "kimi" else Mamba2CacheParams
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=getattr(torch, model["temporal"]))
    if model["name"] == "convs":
        drafts = None  # its windows are of unequal lengths, which drafts do not go with
    return memory_pool.MambaPool(
        size=REQUESTS, spec_state_size=BATCH, mamba_layer_ids=LAYERS, device="cpu", speculative_num_draft_tokens=drafts,
        cache_params=kind(dtype=dtype, layers=LAYERS, shape=_shape(model, ranks)),
    )  # fmt: skip


def _held(pool: Any) -> dict[str, torch.Tensor]:
    """Every kind of state that has bytes. Shape of each: [layers, rows, ...]."""
    cache = pool.mamba_cache
    held = {f"conv{number}": conv for number, conv in enumerate(cache.conv)}
    return {**held, **({"temporal": cache.temporal} if cache.temporal.numel() else {})}


def _label(pool: Any) -> None:
    for salt, tensor in enumerate(_held(pool).values()):
        tensor.copy_(labels(tensor, salt))


def _digests(pool: Any) -> dict[str, str]:
    return {name: _digest(tensor) for name, tensor in _held(pool).items()}


def _places(addresses: Any, held: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """The kind of state that each address lies in, and the offset in bytes."""
    found = []
    for address in map(int, addresses):
        (name,) = (n for n, t in held.items() if t.data_ptr() <= address < t.data_ptr() + t.nbytes)
        found.append([name, address - held[name].data_ptr()])
    return found


def _geometry(pool: Any) -> dict[str, Any]:
    held, cache = _held(pool), pool.mamba_cache
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    drafts = {}
    if isinstance(cache, pool.SpeculativeState):
        work = {"temporal": cache.intermediate_ssm, "conv0": cache.intermediate_conv_window[0]}
        drafts = {name: [str(tensor.dtype)[6:], list(tensor.shape)] for name, tensor in work.items()}
    entries = zip(_places(addresses, held), lengths, items, strict=True)
    return {
        "kinds": {
            name: [str(tensor.dtype)[6:], list(tensor.shape), list(tensor.stride()), int(tensor.count_nonzero())]
            for name, tensor in held.items()
        },
        "entries": [[*place, length, item] for place, length, item in entries],
        "layer_ids": pool.get_state_layer_ids(),
        "drafts": drafts,
    }  # fmt: skip


def _life(pool: Any) -> dict[str, Any]:
    """Digests after each call on the labelled pool, one upon the other."""
    _label(pool)
    found = {"labelled": _digests(pool)}
    for place in range(len(LAYERS)):
        layer = pool.mamba2_layer_cache(place)  # as the backends write: rows of a layer by index
        views = {f"conv{number}": conv for number, conv in enumerate(layer.conv)}
        views |= {"temporal": layer.temporal} if layer.temporal.numel() else {}
        for salt, view in enumerate(views.values()):
            view[torch.tensor(WRITTEN)] = labels(view[: len(WRITTEN)], 10 * place + salt)
    found["written"] = _digests(pool)
    pool.clear_slots(torch.tensor(CLEARED, dtype=torch.int32))
    found["cleared"] = _digests(pool)
    for name, (sources, targets) in FORKS.items():
        pool.copy_from(torch.tensor(sources), torch.tensor(targets))
        found[name] = _digests(pool)
    copy = pool.get_cpu_copy(torch.tensor(COPIED))
    pool.load_cpu_copy(copy, torch.tensor(RESTORED))
    found["restored"] = _digests(pool)
    return found


def _hosts(pool: Any) -> list[dict[str, Any]]:
    """A backup and a load elsewhere; the bytes of both sides; where a page's pieces are, and its flat form."""
    found = []
    (info,) = pool.get_device_pool_infos()
    for layout in HOST_LAYOUTS:
        _label(pool)
        host = MambaPoolHost(info.buffer_info, 1.0, 0, device_capacity=REQUESTS, layout=layout, pin_memory=False)
        buffers = {f"conv{number}": conv for number, conv in enumerate(host.conv_buffer)}
        buffers |= {"temporal": host.temporal_buffer} if host.temporal_buffer.numel() else {}
        for salt, buffer in enumerate(buffers.values()):
            buffer.copy_(labels(buffer, 70 + salt))
        device, there = (torch.tensor(rows) for rows in BACKED_UP)
        host.backup_from_device_all_layer(None, there, device, "kernel_ascend")
        after = {name: _digest(buffer) for name, buffer in buffers.items()}
        there, device = (torch.tensor(rows) for rows in LOADED)
        for place in range(len(LAYERS)):
            host.load_to_device_per_layer(None, there, device, place, "kernel_ascend")
        addresses, sizes = host.get_page_buffer_meta(there)
        found.append({
            "layout": layout, "shapes": {name: list(buffer.shape) for name, buffer in buffers.items()},
            "host": after, "device": _digests(pool), "places": _places(addresses, buffers),
            "sizes": [int(size) for size in sizes], "flat": _digest(host.get_data_page(LOADED[0][0])),
            "first": int(host.alloc(1)[0]),
        })  # fmt: skip
    return found


def _accepted(model: Mapping[str, Any], pool: Any, case: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's write-back after a verify step: what the rows hold, and the rows that keep a checkpoint."""
    _label(pool)
    drafts = pool.mamba_cache.intermediate_ssm
    drafts.copy_(labels(drafts, 40))
    kept = _digest(drafts)
    rows, steps = torch.tensor(case["rows"], dtype=torch.int32), torch.tensor(case["steps"])
    full = SimpleNamespace(
        token_to_kv_pool=None, req_to_token_pool=None, kv_index_translator=None, needs_cpu_seq_lens=False,
        use_captured_forward_metadata_for_breakable_cuda_graph=False,
    )  # fmt: skip
    linear = SimpleNamespace(
        needs_cpu_seq_lens=False, forward_metadata=SimpleNamespace(mamba_cache_indices=rows),
        supports_prefill_graph_extend=lambda: False,
        req_to_token_pool=SimpleNamespace(get_speculative_mamba2_params_all_layers=lambda: pool.mamba_cache),
    )  # fmt: skip
    plain = ascend_hybrid_linear_attn_backend.AscendHybridLinearAttnBackend
    kind = AscendKDAHybridLinearAttnBackend if model["name"] == "kimi" else plain
    with (
        _kernels(),
        patch("sglang.srt.layers.attention.hybrid_linear_attn_backend.check_cuda_graph_backend", lambda *_: False),
    ):
        tracked = [None if case[name] is None else torch.tensor(case[name]) for name in ("tracked", "track_steps")]
        kind(full, linear, []).update_mamba_state_after_mtp_verify(steps, *tracked, None)
    assert _digest(drafts) == kept
    return {**case, "digests": _digests(pool)}


def _slices(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank of two publishes for unequal TP, and the bytes that it writes into the row of a rank alone."""
    if model["name"] == "convs":
        return {}
    shares, whole = _pool(model, None, 2), _pool(model, None, 1)
    blocks = []
    for entry, groups in enumerate(shares.get_state_conv_shard_groups()):
        lengths = [pool.get_contiguous_buf_infos()[2][entry] for pool in (shares, whole)]
        dims = [pool.get_state_dim_per_tensor()[entry] for pool in (shares, whole)]
        outer = shares.get_state_slice_outer_counts()[entry]
        blocks.append(
            [
                compute_mamba_state_slice_byte_blocks(
                    src_item_len=lengths[0], dst_item_len=lengths[1], src_dim=dims[0], dst_dim=dims[1],
                    outer_count=outer, src_attn_tp_size=2, dst_attn_tp_size=1, dst_tp_rank_in_group=0,
                    local_tp_rank_in_group=rank, conv_shard_groups=groups,
                )
                for rank in range(2)
            ]
        )  # fmt: skip
    per_kind = range(0, len(blocks), len(LAYERS))  # layers do not differ
    return {
        "kinds": [_geometry(shares)["entries"][entry][0] for entry in per_kind],
        "dims": [shares.get_state_dim_per_tensor()[entry] for entry in per_kind],
        "outer": [shares.get_state_slice_outer_counts()[entry] for entry in per_kind],
        "items": [whole.get_contiguous_buf_infos()[2][entry] for entry in per_kind],
        "blocks": [[[list(block) for block in rank] for rank in blocks[entry]] for entry in per_kind],
    }


def _slots() -> list[list[Any]]:
    allocator = MambaSlotAllocator(REQUESTS, "cpu")
    found = []
    for call, argument in SLOTS:
        if call == "alloc":
            taken = allocator.alloc(argument)
            answer = None if taken is None else taken.tolist()
        else:
            answer = allocator.free(torch.tensor(argument))
        found.append([call, argument, answer, allocator.available_size()])
    return found


def _mistakes() -> dict[str, Any]:
    """What is not refused: rows that come out as those of other requests, slots with two owners."""
    model = MODELS[0]

    def after(call: Any) -> list[int]:
        """Rows that a call has changed."""
        pool = _pool(model, None)
        _label(pool)
        before = pool.mamba_cache.temporal.clone()
        call(pool)
        changed = (pool.mamba_cache.temporal != before).flatten(2).any(2).any(0)
        return [int(row) for row in changed.nonzero().flatten()]

    allocator = MambaSlotAllocator(REQUESTS, "cpu")
    allocator.alloc(2)
    allocator.free(torch.tensor([1]))
    allocator.free(torch.tensor([1]))
    twice = [allocator.available_size(), *(allocator.alloc(allocator.available_size()).tolist())]
    allocator = MambaSlotAllocator(REQUESTS, "cpu")
    allocator.free(torch.tensor([0]))
    (info,) = _pool(model, None).get_device_pool_infos()
    host = MambaPoolHost(info.buffer_info, 1.0, 0, device_capacity=REQUESTS, layout="page_first", pin_memory=False)
    taken = host.alloc(1)
    host.free(taken)
    host.free(taken)
    return {
        "freed twice": twice,
        "reserved freed": allocator.alloc(allocator.available_size()).tolist(),
        "host freed twice": [host.size, host.available_size()],
        "fork of -1": after(lambda pool: pool.copy_from(torch.tensor([-1]), torch.tensor([2]))),
        "fork into -1": after(lambda pool: pool.copy_from(torch.tensor([3]), torch.tensor([-1]))),
        "clear of -1": after(lambda pool: pool.clear_slots(torch.tensor([-1]))),
        "one copy, three rows": after(
            lambda pool: pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor([4])), torch.tensor([1, 2, 3]))
        ),
    }


def record() -> dict[str, Any]:
    """Every model, without drafts and with three, as SGLang's pool is on an NPU."""
    cases = []
    with patch.object(memory_pool, "_is_npu", True):
        for model in MODELS:
            for drafts in (None, 3) if model["name"] != "convs" else (None,):
                pool = _pool(model, drafts)
                cases.append({
                    "model": model["name"], "draft_tokens": drafts, **_geometry(pool), "life": _life(pool),
                    "hosts": _hosts(pool),
                    "accepted": [_accepted(model, pool, case) for case in ACCEPTED] if drafts else [],
                    "slices": _slices(model) if drafts is None else {},
                })  # fmt: skip
        mistakes = _mistakes()
    return {
        "requests": REQUESTS, "layers": LAYERS, "written": WRITTEN, "cleared": CLEARED, "forks": FORKS,
        "copied": COPIED, "restored": RESTORED, "backed_up": BACKED_UP, "loaded": LOADED, "slots": _slots(),
        "mistakes": mistakes, "cases": cases,
    }  # fmt: skip
