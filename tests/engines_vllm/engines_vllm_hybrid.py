"""A vLLM instance whose layers have several block tables: full attention, windows, states.

Groups are made by vLLM's own functions from specifications of layers. Tensors are those of vLLM's model runner on the
CPU, and on the emulated NPU laid out as vllm-ascend's runner does, which this environment cannot import. What the model
reads is checked in every step, not only what has come: all tokens where attention is full, those of the window, and the
state after the last computed token.
"""

from __future__ import annotations

from typing import Any

import torch
from engines_vllm_instance import (  # type: ignore[import-not-found]  # beside the tests
    DIMS,
    HEADS,
    Instance,
    configuration,
    halves,
    main,
    rows,
)
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.utils import maybe_save_kv_layer_to_connector

WINDOW, HYBRID_BLOCKS = 150, 40
STATE_SHAPES = ((4, 16), (HEADS, 8, 64))  # of a state in bfloat16 and one in float32, as large as a block's K
ATTENTION = "model.layers.{}.self_attn.attn"
STATES = "model.layers.{}.linear_attn"
KINDS = {
    "windows": [ATTENTION] * 4, "states": [ATTENTION] + [STATES] * 3, "aligned": [ATTENTION] + [STATES] * 3,
    "all": [ATTENTION] * 2 + [STATES] * 2,
}  # fmt: skip


def state(tokens: list[int], layer: int, number: int) -> torch.Tensor:
    """What a layer keeps of tokens. Shape: as of the state; whole numbers below 251."""
    label = sum((index + 1) * token for index, token in enumerate(tokens)) * 31 + len(tokens) * 7 + layer * 53 + number
    count = STATE_SHAPES[number][0] * int(torch.tensor(STATE_SHAPES[number][1:]).prod())
    return ((label + torch.arange(count)) % 251).view(STATE_SHAPES[number])


def _as_ascend(groups: KVCacheConfig, specs: dict[str, KVCacheSpec]) -> dict[str, Any]:
    """K and V apart; beside states all in one tensor: [padding | conv], [K | second state], [V | padding]."""
    found: dict[str, Any] = {}
    for tensor in groups.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8, device="npu")
        shape = (groups.num_blocks, 128, HEADS, DIMS)
        half = groups.num_blocks * 128 * HEADS * DIMS * 2
        start = tensor.size - 2 * half
        pair = tuple(raw[begin : begin + half].view(torch.bfloat16).view(shape) for begin in (start, start + half))
        for name in tensor.shared_by:
            spec = specs[name]
            if isinstance(spec, MambaSpec):
                found[name], begin = [], 0
                for size, dtype in zip(spec.shapes, spec.dtypes, strict=True):
                    view = (groups.num_blocks, *size)
                    end = begin + torch.Size(view).numel() * dtype.itemsize
                    found[name].append(raw[begin:end].view(dtype).view(view))
                    begin = end
            else:
                found[name] = pair
    return found


class HybridInstance(Instance):  # type: ignore[misc]  # what it derives from is beside the tests
    """Of a kind and an arrangement: "windows ascend", "states vllm", …

    Attributes:
        zeroed: Blocks that vLLM had zeroed before they were used.
    """

    zeroed = 0

    def _configure(self, role: str, directory: str, kind: str) -> VllmConfig:
        what, _ = kind.split()
        cached = what != "states"  # vLLM looks for no prefixes where a state is kept once
        more: dict[str, Any] = {"enable_prefix_caching": cached, "num_gpu_blocks_override": HYBRID_BLOCKS}
        config = configuration(role, directory, layers=4, **more)
        if what in ("aligned", "all"):
            config.cache_config.mamba_cache_mode = "align"
        return config

    def _groups(self, kind: str) -> KVCacheConfig:
        what, arrangement = kind.split()
        padded = None if what == "windows" else 8192 + 128 if arrangement == "ascend" else 8192
        common: dict[str, Any] = {
            "block_size": self.block_size, "num_kv_heads": HEADS, "head_size": DIMS, "dtype": torch.bfloat16,
            "page_size_padded": padded if arrangement == "ascend" else None,
        }  # fmt: skip
        mode = self.config.cache_config.mamba_cache_mode
        specs: dict[str, KVCacheSpec] = {}
        for layer, pattern in enumerate(KINDS[what]):
            name = pattern.format(layer)
            if pattern == STATES:
                specs[name] = MambaSpec(
                    block_size=self.block_size if mode == "align" else 2048, shapes=STATE_SHAPES,
                    dtypes=(torch.bfloat16, torch.float32), page_size_padded=padded, mamba_cache_mode=mode,
                )  # fmt: skip
            else:
                specs[name] = (
                    SlidingWindowSpec(sliding_window=WINDOW, **common) if layer else FullAttentionSpec(**common)
                )
        groups = get_kv_cache_groups(self.config, specs)
        return get_kv_cache_config_from_groups(self.config, groups, 1 << 30)

    def _allocate(self, kind: str, groups: KVCacheConfig) -> dict[str, Any]:
        """As the model runner lays them out."""
        self._kinds = [group.kv_cache_spec for group in groups.kv_cache_groups]
        self._layers = [list(group.layer_names) for group in groups.kv_cache_groups]
        if kind.endswith("ascend"):
            return _as_ascend(
                groups, {name: spec for own, spec in zip(self._layers, self._kinds, strict=True) for name in own}
            )
        runner: Any = object.__new__(GPUModelRunner)
        runner.cache_config, runner.kv_cache_config = self.config.cache_config, groups
        runner.device, runner.runner_only_attn_layers = torch.device("cpu"), set()
        runner.attn_groups = [
            [AttentionGroup(AscendAttentionBackend, list(group.layer_names), group.kv_cache_spec, number)]
            for number, group in enumerate(groups.kv_cache_groups)
        ]
        raw = runner._allocate_kv_cache_tensors(groups)
        return dict(runner._reshape_kv_cache_tensors(raw, [self.block_size] * len(groups.kv_cache_groups)))

    def _prepare(self, output: SchedulerOutput) -> None:
        for group, names in enumerate(self._layers):
            if isinstance(self._kinds[group], FullAttentionSpec):
                for name in names:
                    for block in output.new_block_ids_to_zero or ():
                        for cache in halves(self.caches[name]):
                            cache[block].zero_()
        self.zeroed += len(output.new_block_ids_to_zero or ())

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        starts = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
            starts[new.req_id] = self.loaded[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [[] for _ in self._kinds]
            for table, more in zip(self._tables[name], fresh or (), strict=fresh is not None):
                table.extend(more)
            starts[name] = computed
        for name, first in starts.items():
            self._check_read(name, first, output.num_scheduled_tokens[name])
        sampled = {}
        for number, layers in enumerate(self._layers):
            for layer in layers:
                for name, first in starts.items():
                    self._put(name, first, output.num_scheduled_tokens[name], number, layer)
                maybe_save_kv_layer_to_connector("" if "linear" in layer else layer, [])
        for name, first in starts.items():
            end = first + output.num_scheduled_tokens[name] >= len(self._tokens[name])
            sampled[name] = [len(self._tokens[name]) % 1000] if end else []
            self._tokens[name].extend(sampled[name])
        return sampled

    def _put(self, request: str, first: int, count: int, group: int, name: str) -> None:
        """Keys and values of new tokens, or the state after them, for one layer."""
        layer, spec, stop = int(name.split(".")[2]), self._kinds[group], first + count
        if isinstance(spec, MambaSpec):
            block = self._block(request, group, stop - 1)
            for number, own in enumerate(self.caches[name]):
                new = state(self._tokens[request][:stop], layer, number).to(own.dtype)
                own[block].copy_(new.to(own.device))
            return
        for component, cache in enumerate(halves(self.caches[name])):
            for block, slot, position, size in self._spread(request, group, first, stop):
                new = rows(self._tokens[request][position : position + size], position, layer, component)
                cache[block, slot : slot + size].copy_(new.to(cache.device))

    def _check_read(self, request: str, computed: int, count: int) -> None:
        """That what attention and recurrence read of the computed tokens is there."""
        tokens = self._tokens[request]
        for group, names in enumerate(self._layers):
            spec = self._kinds[group]
            for name in names:
                layer = int(name.split(".")[2])
                if isinstance(spec, MambaSpec):
                    if computed:
                        block = self._block(request, group, computed - 1)
                        for number, own in enumerate(self.caches[name]):
                            wanted = state(tokens[:computed], layer, number).to(own.dtype)
                            if not torch.equal(own[block].cpu(), wanted):
                                self.faults.append(f"{request}: {name}, state {number} after {computed} tokens")
                    continue
                begin = max(0, computed - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
                for component, cache in enumerate(halves(self.caches[name])):
                    for block, slot, position, size in self._spread(request, group, begin, computed):
                        wanted = rows(tokens[position : position + size], position, layer, component)
                        if block == 0 or not torch.equal(cache[block, slot : slot + size].cpu(), wanted):
                            self.faults.append(f"{request}: {name}, component {component}, position {position}")

    def _block(self, request: str, group: int, position: int) -> int:
        block = self._tables[request][group][position // self._kinds[group].block_size]
        assert block, f"{request}: group {group} has no block for position {position}"
        return int(block)

    def _spread(self, request: str, group: int, first: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Block, first slot, first position and tokens of each piece inside a block."""
        found, position = [], first
        while position < stop:
            slot = position % self.block_size
            size = min(self.block_size - slot, stop - position)
            found.append((self._tables[request][group][position // self.block_size], slot, position, size))
            position += size
        return found


if __name__ == "__main__":
    main(HybridInstance)
