"""Stand-ins for what vLLM passes to the connector: plain data with the names that vLLM 0.23 gives its own.

`tests/engines_vllm` proves that the engine has them; nothing here behaves like an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


def configuration(
    side: str = "kv_producer",
    *,
    layers: int = 2,
    heads: int = 2,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    dp: tuple[int, int] = (0, 1),
    text: dict[str, Any] | None = None,
    draft_heads: int | None = None,
    **extra: Any,
) -> Any:
    """A `VllmConfig`, as far as it is read."""
    per_stage = layers // pp
    model = SimpleNamespace(
        model="a-model",
        hf_text_config=SimpleNamespace(**(text or {})),
        get_total_num_hidden_layers=lambda: layers,
        get_total_num_kv_heads=lambda: heads,
        get_layers_start_end_indices=lambda parallel: (
            parallel.rank // tp * per_stage, (parallel.rank // tp + 1) * per_stage,
        ),
    )  # fmt: skip
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: draft_heads)
    return SimpleNamespace(
        model_config=model,
        speculative_config=None if draft_heads is None else SimpleNamespace(draft_model_config=draft),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank, data_parallel_rank=dp[0],
            data_parallel_size=dp[1], prefill_context_parallel_size=1, decode_context_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_role=side, kv_ip="127.0.0.1", engine_id="engine-a",
            kv_connector_extra_config={"directory": "tcp://127.0.0.1:7701", **extra},
        ),
    )  # fmt: skip


class FullAttentionSpec(SimpleNamespace):
    """A group of vLLM is told by the name of its specification's class."""


class SlidingWindowSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def full(block_size: Any = 4, **fields: Any) -> Any:
    return FullAttentionSpec(block_size=block_size, **fields)


def window(size: Any, block_size: int = 4) -> Any:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size)


def states(block_size: int = 64, mode: str = "none", speculative: int = 0) -> Any:
    return MambaSpec(block_size=block_size, mamba_cache_mode=mode, num_speculative_blocks=speculative)


def groups(*specs: Any, layers: Sequence[Sequence[str]] = ()) -> Any:
    """A `KVCacheConfig`: one group of full attention by default, else one for each specification, with its layers."""
    specs = specs or (full(),)
    given = list(layers) or [[] for _ in specs]
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=own) for spec, own in zip(specs, given, strict=True)
        ]
    )


def names(*layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in layers]


def first_axis(*layers: int, blocks: int = 5, tokens: int = 4, heads: int = 2, dims: int = 3) -> dict[str, Any]:
    """[2, blocks, tokens, heads, dims] for each layer."""
    shape = (2, blocks, tokens, heads, dims)
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in names(*layers)}


@dataclasses.dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int = 0
    max_tokens: int = 16
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    status: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))

    def __post_init__(self) -> None:
        self.prompt_token_ids: list[int] | None = list(range(self.num_prompt_tokens))
        self._all_token_ids = list(range(self.num_prompt_tokens))


def blocks(*ids: int) -> Any:
    """`KVCacheBlocks` of one group."""
    return tables(ids)


def tables(*groups: Sequence[int]) -> Any:
    """`KVCacheBlocks` of several."""
    lists = tuple(list(own) for own in groups)
    return SimpleNamespace(get_block_ids=lambda: tuple(list(own) for own in lists), blocks=lists)


def done(*names: str, failed: Any = None) -> Any:
    """A `KVConnectorOutput` of the decode side."""
    return SimpleNamespace(finished_recving=set(names), kv_connector_worker_meta=failed)


def step(
    new: dict[str, tuple[Any, int, int]] | None = None,
    cached: dict[str, tuple[Any, int, int]] | None = None,
    *,
    resumed: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> Any:
    """A `SchedulerOutput`: of each request its (new) block ids, computed tokens, and tokens of this step.

    Block ids are a list, or a tuple of lists where there are several groups.
    """
    new, cached = new or {}, cached or {}

    def by_group(ids: Any) -> Any:
        return ids if ids is None or isinstance(ids, tuple) else (ids,)

    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=by_group(ids), num_computed_tokens=computed)
            for name, (ids, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[by_group(ids) for ids, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
        ),
        num_scheduled_tokens={name: tokens for name, (_, _, tokens) in {**new, **cached}.items()},
        preempted_req_ids=set(preempted),
    )
