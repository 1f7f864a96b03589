"""What an end says of itself besides its manifest, and whether two ends can talk: engine, process and parts.

Compares words; layouts are compared in `handshake`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import kv_planner

from kv_transfer.engine import TransferEngine
from kv_transfer.errors import PeerRefused
from kv_transfer.messages import DifferenceRecord, Hello, RefusalCode, Welcome
from kv_transfer.process import process_name

__all__ = ["ALL_PARTS", "Terms", "check_parts"]

ALL_PARTS: Final[tuple[kv_planner.Part, ...]] = ("target", "draft")
"""Every part of a model, in the order in which they are named."""


def check_parts(parts: Iterable[kv_planner.Part]) -> tuple[kv_planner.Part, ...]:
    """The parts without repetitions, in the order of `ALL_PARTS`.

    Raises:
        ValueError: None is named, or one that there is not.
    """
    given = [parts] if isinstance(parts, str) else list(parts)
    if not given or not set(given) <= set(ALL_PARTS) or isinstance(parts, str):
        raise ValueError(
            f"parts: expected some of {list(ALL_PARTS)}, got {parts!r}; it would be unknown what is sent; "
            f"use ['target'] for a transfer without the draft"
        )
    return tuple(part for part in ALL_PARTS if part in given)


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """How one end takes part.

    Attributes:
        engine: Name of its engine.
        session: Session of its engine.
        process: The process that its engine cannot leave; empty when it reaches others.
        parts: Parts of the model that are sent.
    """

    engine: str
    session: str
    process: str = ""
    parts: tuple[kv_planner.Part, ...] = ALL_PARTS

    @classmethod
    def of(cls, engine: TransferEngine, parts: Iterable[kv_planner.Part] = ALL_PARTS) -> Terms:
        """The terms of an end of this process.

        Raises:
            ValueError: The parts are none.
        """
        process = "" if engine.capabilities.cross_process else process_name()
        return cls(engine.name, engine.session, process, check_parts(parts))

    def check(self, message: Hello | Welcome) -> None:
        """Compares with the other end's.

        Raises:
            PeerRefused: Other engines, an engine that would have to leave its process, or other parts.
        """
        if self.engine != message.engine:
            raise PeerRefused(
                f"transfer engines differ: local {self.engine!r}, remote {message.engine!r}; no bytes could be moved",
                code=RefusalCode.ENGINE.value,
                remedy="create the same engine on both sides",
            )
        if self.process != message.process:
            raise PeerRefused(
                f"engine {self.engine!r} does not reach other processes: local session {self.session[:64]!r} "
                f"of process {self.process or 'any'}, remote session {message.session[:64]!r} "
                f"of process {message.process or 'any'}; "
                f"bytes would be written into the wrong process's memory, or nowhere",
                code=RefusalCode.ENGINE.value,
                remedy="use an engine whose capabilities say cross_process on both sides, such as 'mooncake'",
            )
        if set(self.parts) != set(message.parts):
            raise PeerRefused(
                "the two sides are to transfer different parts of the model",
                code=RefusalCode.LAYOUT.value,
                differences=(
                    DifferenceRecord(
                        field="parts",
                        local=", ".join(self.parts),
                        remote=", ".join(message.parts),
                        consequence="a part would be sent that is not expected, or expected and never filled",
                        remedy="give Sender and Receiver the same parts; ['target'] when prefill has no draft",
                    ),
                ),
            )
