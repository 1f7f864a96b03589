"""One vLLM instance of prefill or decode: vLLM's scheduler and connector calls, and a model that writes labelled K/V.

The scheduler, its block manager, the connector factory and the worker's connector context are vLLM's own; only the
model is not one: what it writes for a token tells the token, its position, the layer and the component. Run as a
script, it is a process that takes commands as JSON lines.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.utils import maybe_save_kv_layer_to_connector

LAYERS, HEADS, DIMS, BLOCKS = 3, 2, 8, 12
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIMS,
    "vocab_size": 1024, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
TIMEOUTS = {
    "handshake": 20.0,
    "offer": 20.0,
    "heartbeat_interval": 0.1,
    "peer_lost_after": 2.0,
    "dead_writer_grace": 0.3,
}
STEP_TOKENS = 256


def configuration(role: str, directory: str, layers: int = LAYERS, **cache: Any) -> VllmConfig:
    registry._run_in_subprocess = lambda call: call()  # the emulator lives in this process
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": layers}))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048)
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(**{"block_size": 128, "enable_prefix_caching": True, **cache}),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=2048,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvTransferConnector",
                kv_connector_module_path="kv_transfer.integrations.vllm",
                kv_role=role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "directory": directory,
                    "engine": "nixl",
                    "fingerprint": "labelled",
                    "timeouts": TIMEOUTS,
                },
            ),
        )


def allocate(kind: str, block_size: int) -> dict[str, Any]:
    """Caches as a worker allocates them: vllm-ascend's (k, v) on the device, and vLLM's two single tensors."""
    shape = AscendAttentionBackend.get_kv_cache_shape(BLOCKS, block_size, HEADS, DIMS)
    if kind == "ascend":
        return {
            name: tuple(torch.zeros(shape[1:], dtype=torch.bfloat16, device="npu") for _ in range(2)) for name in NAMES
        }
    if kind == "blocks first":
        shape = (shape[1], shape[0], *shape[2:])
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in NAMES}


def halves(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer. Shape: [blocks, tokens, heads, dim]."""
    if isinstance(cache, tuple):
        return cache
    return (cache[0], cache[1]) if cache.shape[0] == 2 else (cache[:, 0], cache[:, 1])


def rows(tokens: list[int], first: int, layer: int, component: int) -> torch.Tensor:
    """What is written for tokens from position `first` on. Shape: [tokens, heads, dim]; whole numbers below 251."""
    positions = torch.arange(first, first + len(tokens))
    label = torch.tensor(tokens) * 31 + positions * 7 + layer * 53 + component * 101
    inner = torch.arange(HEADS)[:, None] * 17 + torch.arange(DIMS)[None, :]
    return ((label[:, None, None] + inner) % 251).to(torch.bfloat16)


class Instance:
    """A scheduler and one worker.

    Attributes:
        loaded: Of each request that was scheduled first, the tokens that were computed already.
        faults: Bytes of such tokens that were not as they should be.
        answers: `kv_transfer_params` that vLLM returned with a request's last output.
        ended: Requests that have ended, and why.
    """

    def __init__(self, role: str, directory: str, kind: str) -> None:
        self.config = self._configure(role, directory, kind)
        self.block_size = self.config.cache_config.block_size
        groups = self._groups(kind)
        self.config.cache_config.num_gpu_blocks = groups.num_blocks
        block_size, hash_size = resolve_kv_cache_block_sizes(groups, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=False,
        )
        self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, groups)
        self.caches = self._allocate(kind, groups)
        self.worker.register_kv_caches(self.caches)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self._tokens: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self.loaded: dict[str, int] = {}
        self.faults: list[str] = []
        self.answers: dict[str, Any] = {}
        self.ended: dict[str, str] = {}

    def _configure(self, role: str, directory: str, kind: str) -> VllmConfig:
        return configuration(role, directory)

    def _groups(self, kind: str) -> KVCacheConfig:
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=HEADS, head_size=DIMS, dtype=torch.bfloat16)
        return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)])

    def _allocate(self, kind: str, groups: KVCacheConfig) -> dict[str, Any]:
        return allocate(kind, self.block_size)

    def _prepare(self, output: SchedulerOutput) -> None:
        """What the model runner does before the connector hears of a step."""

    def submit(self, name: str, tokens: list[int], params: dict[str, Any], outputs: int = 1) -> None:
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        self._tokens[name] = list(request.prompt_token_ids)  # a connector may have shortened it

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """As `EngineCore.step` and the model runner do it; two instances may take turns in one process."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        output = self.scheduler.schedule()
        self._prepare(output)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        if not output.total_num_scheduled_tokens:
            answer = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        else:
            with (
                set_forward_context({name: object() for name in self.caches}, self.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connector_output,
            ):
                sampled = self._compute(output)
            names = list(output.num_scheduled_tokens)
            answer = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=connector_output,
            )
        for outputs in self.scheduler.update_from_output(output, answer).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)
                    self.answers[each.request_id] = each.kv_transfer_params

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_requests()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        starts = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            starts[new.req_id] = self.loaded[new.req_id] = new.num_computed_tokens
            self._check(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            table = [] if name in cached.resumed_req_ids else self._tables[name]
            self._tables[name] = table + (list(fresh[0]) if fresh is not None else [])
            starts[name] = computed
        for layer, name in enumerate(NAMES):
            for request, first in starts.items():
                self._write(request, first, output.num_scheduled_tokens[request], layer)
            maybe_save_kv_layer_to_connector(name, list(halves(self.caches[name])))
        sampled = {}
        for name, first in starts.items():
            done = first + output.num_scheduled_tokens[name] >= len(self._tokens[name])
            sampled[name] = [len(self._tokens[name]) % 1000] if done else []
            self._tokens[name].extend(sampled[name])
        return sampled

    def _pieces(self, request: str, first: int, count: int) -> list[tuple[int, int, int, int]]:
        """Block, first slot, first position and tokens of each piece inside a block."""
        found, position = [], first
        while position < first + count:
            slot = position % self.block_size
            size = min(self.block_size - slot, first + count - position)
            found.append((self._tables[request][position // self.block_size], slot, position, size))
            position += size
        return found

    def _write(self, request: str, first: int, count: int, layer: int) -> None:
        for component, cache in enumerate(halves(self.caches[NAMES[layer]])):
            for block, slot, position, size in self._pieces(request, first, count):
                new = rows(self._tokens[request][position : position + size], position, layer, component)
                cache[block, slot : slot + size].copy_(new.to(cache.device))

    def _check(self, request: str, computed: int) -> None:
        """All of a prompt that came by transfer; vLLM computes its last token again all the same."""
        total = len(self._tokens[request])
        count = total if computed == total - 1 else computed
        for layer in range(LAYERS):
            for component, cache in enumerate(halves(self.caches[NAMES[layer]])):
                for block, slot, position, size in self._pieces(request, 0, count):
                    wanted = rows(self._tokens[request][position : position + size], position, layer, component)
                    if not torch.equal(cache[block, slot : slot + size].cpu(), wanted):
                        self.faults.append(f"{request}: layer {layer}, component {component}, position {position}")


def main(make: type[Instance]) -> None:
    """Takes commands for an instance of a kind."""
    instance: Instance | None = None
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "start":
            if instance is not None:
                instance.close()
            instance = make(**command)
        assert instance is not None
        if what in ("submit", "abort"):
            getattr(instance, what)(**command)
        elif what == "run":
            for _ in range(command["steps"]):
                instance.step()
        print(
            json.dumps(
                {"answers": instance.answers, "ended": instance.ended, "free": instance.free_blocks,
                 "idle": instance.is_idle, "faults": instance.faults}
            ),
            flush=True,
        )  # fmt: skip
    if instance is not None:
        instance.close()


if __name__ == "__main__":
    main(Instance)
