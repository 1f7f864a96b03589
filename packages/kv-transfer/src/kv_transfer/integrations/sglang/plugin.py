"""Owns the hooks that put this backend in the place of SGLang's `ascend` one, through SGLang's own plugin registry.

SGLang's list of backends is a closed enumeration, so that a foreign one takes the place of one of its own. The package
names `plugin` as an entry point of `sglang.srt.plugins`; it does nothing unless an engine is set in the environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.classes import kv_class
from kv_transfer.integrations.sglang.entries import name_entries
from kv_transfer.integrations.sglang.holds import HOLD_SECONDS
from kv_transfer.integrations.sglang.rank import RELEASE
from kv_transfer.integrations.sglang.settings import ENGINE, engine_name
from kv_transfer.integrations.sglang.words import word

__all__ = ["plugin"]

_BACKEND = "ascend"
logger = logging.getLogger(__name__)


def plugin() -> None:
    """Register the hooks; SGLang applies them when it loads its plugins, in each of its processes.

    Pages of a failed request are held until their writers let go: SGLang's limit for that is set to infinity, unless
    the environment has another.
    """
    if engine_name() is None:
        logger.info("kv-transfer stays out of SGLang: %s is not set", ENGINE)
        return
    os.environ.setdefault(HOLD_SECONDS, "inf")
    hooks = engine_module("sglang.srt.plugins.hook_registry", RELEASE)
    register, kind = hooks.HookRegistry.register, hooks.HookType
    register("sglang.srt.disaggregation.utils.get_kv_class", _get_kv_class, kind.AROUND)
    register("sglang.srt.disaggregation.utils.setup_state_kv_args", _setup_state_kv_args, kind.AROUND)
    register("sglang.srt.managers.disagg_service.maybe_create_ascend_config_store", _config_store, kind.AROUND)


def _get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    own = kv_class(class_type) if word(transfer_backend) == _BACKEND else None
    return original(transfer_backend, class_type) if own is None else own


def _setup_state_kv_args(
    original: Callable[..., None],
    kv_args: Any,
    token_to_kv_pool: Any,
    draft_token_to_kv_pool: Any = None,
    total_kv_layers: int | None = None,
    req_to_token_pool: Any = None,
) -> None:
    original(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers, req_to_token_pool=req_to_token_pool)
    name_entries(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers)


def _config_store(original: Callable[..., None], transfer_backend: Any) -> None:
    """SGLang's store for MemFabric, which no other engine needs."""
    if engine_name() == "memfabric" or word(transfer_backend) != _BACKEND:
        original(transfer_backend=transfer_backend)
