"""The connector has the calls of the installed vLLM, with its arguments; a change of the engine fails here first."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import kv_transfer as kt
import pytest
from kv_transfer.integrations import vllm as integration
from kv_transfer.integrations.vllm.connector import Connector
from kv_transfer.integrations.vllm.words import Chunk, Failures, Handshake, StepWords, Stretch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    supports_hma,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

# What vLLM's base has and the connector leaves as it is, each for a reason that its documentation gives.
LEFT = {
    "bind_connector_metadata", "build_kv_connector_stats",
    "build_prom_metrics", "clear_connector_metadata", "get_finished_count", "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats", "get_required_kvcache_layout", "has_connector_metadata", 
    "prefer_cross_layer_blocks", "register_cross_layers_kv_cache", "requires_piecewise_for_cudagraph", "reset_cache",
    "role", "set_host_xfer_buffer_ops", "take_events",
}  # fmt: skip


def test_every_call_is_answered_with_the_engines_arguments() -> None:
    ours = integration.KvTransferConnector
    assert issubclass(ours, KVConnectorBase_V1) and not inspect.isabstract(ours)
    theirs = {name for base in (KVConnectorBase_V1, SupportsHMA) for name in vars(base) if not name.startswith("_")}
    own = {name for name in vars(Connector) if not name.startswith("_")}
    assert theirs == own | LEFT and not own & LEFT
    for name in sorted(own | {"__init__"}):
        base = SupportsHMA if name in vars(SupportsHMA) else KVConnectorBase_V1
        wanted = list(inspect.signature(getattr(base, name)).parameters)
        assert list(inspect.signature(getattr(Connector, name)).parameters) == wanted, name
    assert KVConnectorBase_V1.__abstractmethods__ <= own
    assert supports_hma(ours), "vLLM then gives windows and states groups of their own"
    assert ours.get_required_kvcache_layout.__func__ is KVConnectorBase_V1.get_required_kvcache_layout.__func__


def test_fields_that_are_read_are_there() -> None:
    def fields(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert {"req_id", "block_ids", "num_computed_tokens"} <= fields(NewRequestData)
    assert {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"} <= fields(CachedRequestData)
    assert {
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
    } <= fields(SchedulerOutput)  # fmt: skip
    assert {"finished_recving", "kv_connector_worker_meta"} <= fields(KVConnectorOutput)
    assert {
        "kv_role", "kv_ip", "engine_id", "kv_connector_extra_config",
    } <= fields(KVTransferConfig)  # fmt: skip
    request = Request("a", [1, 2], SamplingParams(max_tokens=4), None)
    assert {
        "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "_all_token_ids", "num_prompt_tokens", "max_tokens",
        "num_computed_tokens", "skip_reading_prefix_cache",
    } <= set(vars(request))  # fmt: skip
    assert (
        fields(KVCacheBlocks) == {"blocks"} and "ordered_blocks" in inspect.signature(BlockPool.free_blocks).parameters
    )
    assert {"mamba_cache_mode", "num_speculative_blocks"} <= fields(MambaSpec)
    assert {"kv_cache_spec", "layer_names"} <= fields(KVCacheGroupSpec)
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RequestStatus.__members__)
    assert {role.name for role in KVConnectorRole} == {"SCHEDULER", "WORKER"}


def test_what_crosses_processes_can_be_pickled_and_is_the_engines() -> None:
    words = StepWords((Chunk("a", 1, 2, (Stretch(0, (3,)),), True),))
    shake, failures = Handshake(kt.Place(), "nixl", "m", 4), Failures(frozenset({"a"}))
    assert pickle.loads(pickle.dumps(failures)) == failures and isinstance(failures, KVConnectorWorkerMetadata)
    assert pickle.loads(pickle.dumps(words)) == words and pickle.loads(pickle.dumps(shake)) == shake
    assert pickle.loads(pickle.dumps(integration.KvTransferConnector)) is integration.KvTransferConnector
    assert isinstance(words, KVConnectorMetadata) and isinstance(shake, KVConnectorHandshakeMetadata)


def test_the_factory_knows_it_after_it_was_registered() -> None:
    integration.register()
    assert KVConnectorFactory.get_connector_class_by_name("KvTransferConnector") is integration.KvTransferConnector
    with pytest.raises(ValueError, match="already registered"):
        integration.register()
