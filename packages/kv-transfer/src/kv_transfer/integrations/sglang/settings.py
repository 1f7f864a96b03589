"""Owns what the environment says of the engine for SGLang's managers: its name, its options, and nothing else.

`KV_TRANSFER_SGLANG_ENGINE` names a `create_engine` engine; set, it also switches the plugin on.
`KV_TRANSFER_SGLANG_OPTIONS` is a JSON object with its options, for example `{"hostname": "10.0.0.7"}`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from kv_transfer.errors import ArgumentError
from kv_transfer.integrations.sglang.engine import SessionEngine
from kv_transfer.integrations.sglang.words import word
from kv_transfer.registry import create_engine

__all__ = ["ENGINE", "OPTIONS", "create_session_engine", "engine_name"]

ENGINE = "KV_TRANSFER_SGLANG_ENGINE"
OPTIONS = "KV_TRANSFER_SGLANG_OPTIONS"


def engine_name() -> str | None:
    """The engine that is set, or None."""
    return os.environ.get(ENGINE, "").strip() or None


def create_session_engine(manager: Any) -> SessionEngine:
    """The engine of a manager: the named one, on this machine's address where it takes one.

    Args:
        manager: SGLang's; its address is what peers reach.

    Raises:
        ArgumentError: No engine is named, or the options are no JSON object or not those of the engine.
        EngineError: The engine does not start.
    """
    name = engine_name()
    if name is None:
        raise ArgumentError(
            f"{ENGINE} is not set", consequence="no engine could be made", remedy="name one, for example mooncake"
        )
    text = os.environ.get(OPTIONS, "").strip() or "{}"
    try:
        options = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArgumentError(
            f"{OPTIONS}: {error}", local=text[:200], consequence="no engine could be made", remedy="give a JSON object"
        ) from error
    if not isinstance(options, dict):
        raise ArgumentError(
            f"{OPTIONS} is no JSON object", local=text[:200], consequence="no engine could be made",
            remedy='give {"option": value}',
        )  # fmt: skip
    if name in ("mooncake", "memfabric"):
        options.setdefault("hostname", manager.local_ip)
    if name == "memfabric":
        options.setdefault("store_url", os.environ.get("ASCEND_MF_STORE_URL", ""))
        options.setdefault("role", word(manager.disaggregation_mode).capitalize())
        options.setdefault("device_id", manager.kv_args.gpu_id)
    return SessionEngine(create_engine(name, **options))
