"""Owns what SGLang 0.5.23 plugs in: a backend for its prefill/decode disaggregation, and `KVArgs` both ways.

`manager_class()`, `sender_class()`, `receiver_class()` and `bootstrap_server_class()` are what its `get_kv_class` asks
for; `plugin` puts them in the place of its `ascend` backend. Importing this imports nothing of SGLang.
"""

from __future__ import annotations

from kv_transfer.integrations.sglang.classes import bootstrap_server_class, kv_class, receiver_class, sender_class
from kv_transfer.integrations.sglang.engine import SessionEngine
from kv_transfer.integrations.sglang.entries import name_entries, setup_state_kv_args
from kv_transfer.integrations.sglang.kv_args import fill_kv_args, manifest_of
from kv_transfer.integrations.sglang.manager import PlannedTransfers, manager_class
from kv_transfer.integrations.sglang.plugin import plugin

__all__ = [
    "PlannedTransfers",
    "SessionEngine",
    "bootstrap_server_class",
    "fill_kv_args",
    "kv_class",
    "manager_class",
    "manifest_of",
    "name_entries",
    "plugin",
    "receiver_class",
    "sender_class",
    "setup_state_kv_args",
]
