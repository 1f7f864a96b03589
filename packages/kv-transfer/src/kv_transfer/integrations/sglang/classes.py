"""Owns the set of classes that SGLang's `get_kv_class` asks for: its own, with the parts of ours before them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.manager import manager_class
from kv_transfer.integrations.sglang.rank import RELEASE
from kv_transfer.integrations.sglang.rooms import HoldingReceiver, TellingSender
from kv_transfer.integrations.sglang.words import word

__all__ = ["bootstrap_server_class", "kv_class", "receiver_class", "sender_class"]

_MODULE = "sglang.srt.disaggregation.ascend.conn"


@functools.cache
def _derived(name: str, base: str, words: str, *ours: type[Any]) -> type[Any]:
    parent = getattr(engine_module(_MODULE, RELEASE), base)
    return type(name, (*ours, parent), {"__module__": __name__, "__doc__": words})


def sender_class() -> type[Any]:
    """SGLang's sender: rooms, chunks and time-outs are its own; decode is told of every failure, with its reason.

    Raises:
        EngineUnavailable: SGLang 0.5.23 is not installed.
    """
    return _derived("KvTransferSender", "AscendKVSender", "SGLang's sender over a `KvTransferManager`.", TellingSender)


def receiver_class() -> type[Any]:
    """SGLang's receiver; what it registers comes from the manager, which knows from it who writes its pages.

    Raises:
        EngineUnavailable: SGLang 0.5.23 is not installed.
    """
    words = "SGLang's receiver over a `KvTransferManager`."
    return _derived("KvTransferReceiver", "AscendKVReceiver", words, HoldingReceiver)


def bootstrap_server_class() -> type[Any]:
    """SGLang's bootstrap server.

    Raises:
        EngineUnavailable: SGLang 0.5.23 is not installed.
    """
    return _derived("KvTransferBootstrapServer", "AscendKVBootstrapServer", "SGLang's bootstrap server.")


def kv_class(kind: Any) -> type[Any] | None:
    """The class for a `KVClassType`; None: SGLang's own (its `KVArgs`)."""
    makers: dict[str, Callable[[], type[Any]]] = {
        "manager": manager_class,
        "sender": sender_class,
        "receiver": receiver_class,
        "bootstrap_server": bootstrap_server_class,
    }
    maker = makers.get(word(kind))
    return None if maker is None else maker()
