"""Moves KV caches from prefill to decode.

Layouts are agreed before anything is sent, sessions end once, engines can be changed. Start at `Sender` and `Receiver`;
the README says which module has what. The names below are the public interface. They are loaded when first used, so
that importing the package starts no thread and loads no numerical library; engines are loaded by `create_engine` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_transfer.aux_rows import AuxField as AuxField
    from kv_transfer.config import Limits as Limits
    from kv_transfer.config import Timeouts as Timeouts
    from kv_transfer.decode_end import DecodeEnd as DecodeEnd
    from kv_transfer.directory import Directory as Directory
    from kv_transfer.directory import Member as Member
    from kv_transfer.directory import Place as Place
    from kv_transfer.directory_service import DirectoryClient as DirectoryClient
    from kv_transfer.directory_service import DirectoryServer as DirectoryServer
    from kv_transfer.engine import EngineCapabilities as EngineCapabilities
    from kv_transfer.engine import TransferEngine as TransferEngine
    from kv_transfer.engine import TransferHandle as TransferHandle
    from kv_transfer.engine import TransferState as TransferState
    from kv_transfer.engine import TransferStatus as TransferStatus
    from kv_transfer.engine import wait_batch as wait_batch
    from kv_transfer.errors import ArgumentError as ArgumentError
    from kv_transfer.errors import CoverageError as CoverageError
    from kv_transfer.errors import EngineError as EngineError
    from kv_transfer.errors import EngineUnavailable as EngineUnavailable
    from kv_transfer.errors import MessageTooLarge as MessageTooLarge
    from kv_transfer.errors import PageHeld as PageHeld
    from kv_transfer.errors import PeerLost as PeerLost
    from kv_transfer.errors import PeerRefused as PeerRefused
    from kv_transfer.errors import ProtocolError as ProtocolError
    from kv_transfer.errors import ProtocolVersionError as ProtocolVersionError
    from kv_transfer.errors import RegionError as RegionError
    from kv_transfer.errors import SessionStateError as SessionStateError
    from kv_transfer.errors import TransferAborted as TransferAborted
    from kv_transfer.errors import TransferError as TransferError
    from kv_transfer.errors import TransferFailed as TransferFailed
    from kv_transfer.errors import TransferTimeout as TransferTimeout
    from kv_transfer.errors import UnsupportedLayout as UnsupportedLayout
    from kv_transfer.groups import Manifests as Manifests
    from kv_transfer.handshake import Rank as Rank
    from kv_transfer.isolation import Isolation as Isolation
    from kv_transfer.isolation import current_isolation as current_isolation
    from kv_transfer.isolation import enter_loopback_namespace as enter_loopback_namespace
    from kv_transfer.messages import PROTOCOL_VERSION as PROTOCOL_VERSION
    from kv_transfer.ports import rank_port as rank_port
    from kv_transfer.prefill_end import PrefillEnd as PrefillEnd
    from kv_transfer.ready import LayerMarks as LayerMarks
    from kv_transfer.ready import NotifyingReady as NotifyingReady
    from kv_transfer.ready import Ready as Ready
    from kv_transfer.receiver import Receiver as Receiver
    from kv_transfer.receiver_room import TransferResult as TransferResult
    from kv_transfer.receiver_session import ReceiverSession as ReceiverSession
    from kv_transfer.registration import Registration as Registration
    from kv_transfer.registry import create_engine as create_engine
    from kv_transfer.registry import engine_names as engine_names
    from kv_transfer.registry import register_engine as register_engine
    from kv_transfer.sender import Sender as Sender
    from kv_transfer.sender_group import GroupSession as GroupSession
    from kv_transfer.sender_group import SenderGroup as SenderGroup
    from kv_transfer.sender_session import SenderSession as SenderSession
    from kv_transfer.shared_memory import SharedArena as SharedArena
    from kv_transfer.spans import Span as Span
    from kv_transfer.states import ReceiverState as ReceiverState
    from kv_transfer.states import SenderState as SenderState

__version__ = "0.1.0"

_HOMES = {
    "aux_rows": ("AuxField",),
    "config": ("Limits", "Timeouts"),
    "decode_end": ("DecodeEnd",),
    "directory": ("Directory", "Member", "Place"),
    "directory_service": ("DirectoryClient", "DirectoryServer"),
    "engine": (
        "EngineCapabilities",
        "TransferEngine",
        "TransferHandle",
        "TransferState",
        "TransferStatus",
        "wait_batch",
    ),
    "shared_memory": ("SharedArena",),
    "errors": (
        "ArgumentError",
        "CoverageError",
        "EngineError",
        "EngineUnavailable",
        "MessageTooLarge",
        "PageHeld",
        "PeerLost",
        "PeerRefused",
        "ProtocolError",
        "ProtocolVersionError",
        "RegionError",
        "SessionStateError",
        "TransferAborted",
        "TransferError",
        "TransferFailed",
        "TransferTimeout",
        "UnsupportedLayout",
    ),
    "groups": ("Manifests",),
    "handshake": ("Rank",),
    "isolation": ("Isolation", "current_isolation", "enter_loopback_namespace"),
    "messages": ("PROTOCOL_VERSION",),
    "ports": ("rank_port",),
    "prefill_end": ("PrefillEnd",),
    "ready": ("LayerMarks", "NotifyingReady", "Ready"),
    "receiver": ("Receiver",),
    "receiver_session": ("ReceiverSession",),
    "receiver_room": ("TransferResult",),
    "registration": ("Registration",),
    "registry": ("create_engine", "engine_names", "register_engine"),
    "sender": ("Sender",),
    "sender_group": ("GroupSession", "SenderGroup"),
    "sender_session": ("SenderSession",),
    "spans": ("Span",),
    "states": ("ReceiverState", "SenderState"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "PROTOCOL_VERSION",
    "ArgumentError",
    "AuxField",
    "CoverageError",
    "DecodeEnd",
    "Directory",
    "DirectoryClient",
    "DirectoryServer",
    "EngineCapabilities",
    "EngineError",
    "EngineUnavailable",
    "GroupSession",
    "Isolation",
    "LayerMarks",
    "Limits",
    "Manifests",
    "Member",
    "MessageTooLarge",
    "NotifyingReady",
    "PageHeld",
    "PeerLost",
    "PeerRefused",
    "Place",
    "PrefillEnd",
    "ProtocolError",
    "ProtocolVersionError",
    "Rank",
    "Ready",
    "Receiver",
    "ReceiverSession",
    "ReceiverState",
    "RegionError",
    "Registration",
    "Sender",
    "SenderGroup",
    "SenderSession",
    "SenderState",
    "SessionStateError",
    "SharedArena",
    "Span",
    "Timeouts",
    "TransferAborted",
    "TransferEngine",
    "TransferError",
    "TransferFailed",
    "TransferHandle",
    "TransferResult",
    "TransferState",
    "TransferStatus",
    "TransferTimeout",
    "UnsupportedLayout",
    "create_engine",
    "current_isolation",
    "engine_names",
    "enter_loopback_namespace",
    "rank_port",
    "register_engine",
    "wait_batch",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
