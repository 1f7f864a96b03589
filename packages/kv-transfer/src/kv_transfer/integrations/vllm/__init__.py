"""Owns what vLLM and vllm-ascend 0.23 plug in: a KVConnector v1 that moves KV from prefill to decode.

`KvTransferConnector` derives from vLLM's base, so it is made when it is asked for; importing this imports nothing of
vLLM. Configured as

    {"kv_connector": "KvTransferConnector", "kv_connector_module_path": "kv_transfer.integrations.vllm",
     "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"directory": "tcp://10.0.0.1:7701", "engine": "mooncake"}}

on the prefill side, with the role `kv_consumer` on the decode side. `Settings` lists what the extra config may hold.
"""

from __future__ import annotations

from typing import Any

from kv_transfer.integrations.vllm.connector import connector_class, register
from kv_transfer.integrations.vllm.settings import Settings

__all__ = ["KvTransferConnector", "Settings", "connector_class", "register"]


def __getattr__(name: str) -> Any:
    if name == "KvTransferConnector":
        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
