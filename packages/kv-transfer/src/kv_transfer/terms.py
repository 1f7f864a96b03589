"""What an end says of itself besides its manifest, and whether two ends can talk: engine, process, parts, rows.

Compares words; layouts are compared in `handshake`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import kv_planner

from kv_transfer.arguments import told
from kv_transfer.aux_rows import AuxField, check_fields
from kv_transfer.config import Limits
from kv_transfer.engine import TransferEngine
from kv_transfer.errors import ArgumentError, PeerRefused
from kv_transfer.groups import Groups
from kv_transfer.messages import DifferenceRecord, GroupManifest, Hello, RefusalCode, Welcome
from kv_transfer.process import process_name
from kv_transfer.spans import Interleave

__all__ = ["ALL_PARTS", "Terms", "check_parts"]

ALL_PARTS: Final[tuple[kv_planner.Part, ...]] = ("target", "draft")
"""Every part of a model, in the order in which they are named."""


def check_parts(parts: Iterable[kv_planner.Part]) -> tuple[kv_planner.Part, ...]:
    """The parts without repetitions, in the order of `ALL_PARTS`.

    Raises:
        ArgumentError: None is named, or one that there is not.
    """
    try:
        given = () if isinstance(parts, str) else tuple(parts)
    except TypeError:
        given = ()
    if not given or not all(isinstance(part, str) and part in ALL_PARTS for part in given):
        raise ArgumentError(
            f"parts: expected some of {list(ALL_PARTS)}, got {told(parts)}",
            local=told(parts),
            consequence="it would be unknown what is sent",
            remedy="use ['target'] for a transfer without the draft",
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
        aux: Auxiliary rows of a request.
        message_bytes: Longest message that it takes.
    """

    engine: str
    session: str
    process: str = ""
    parts: tuple[kv_planner.Part, ...] = ALL_PARTS
    aux: tuple[AuxField, ...] = ()
    message_bytes: int = Limits().message_bytes

    @classmethod
    def of(
        cls,
        engine: TransferEngine,
        parts: Iterable[kv_planner.Part] = ALL_PARTS,
        aux: Iterable[AuxField] = (),
        limits: Limits | None = None,
    ) -> Terms:
        """The terms of an end of this process.

        Raises:
            ArgumentError: Two auxiliary rows have one name, or the parts are none.
        """
        process = "" if engine.capabilities.cross_process else process_name()
        most = (limits or Limits()).message_bytes
        return cls(engine.name, engine.session, process, check_parts(parts), check_fields(aux), most)

    def hello(self, groups: Groups) -> Hello:
        """The first word of a sender with these terms."""
        return Hello(
            engine=self.engine,
            session=self.session,
            groups=_words(groups),
            process=self.process,
            parts=self.parts,
            aux=self._rows(),
            message_bytes=self.message_bytes,
        )

    def welcome(self, groups: Groups, incarnation: int, interleave: Interleave) -> Welcome:
        """The answer of a receiver with these terms."""
        return Welcome(
            engine=self.engine,
            session=self.session,
            groups=_words(groups),
            incarnation=incarnation,
            process=self.process,
            parts=self.parts,
            aux=self._rows(),
            message_bytes=self.message_bytes,
            interleave=interleave,
        )

    def _rows(self) -> tuple[tuple[str, kv_planner.DType, int], ...]:
        return tuple((field.name, field.dtype, field.width) for field in self.aux)

    def check(self, message: Hello | Welcome) -> None:
        """Compares with the other end's.

        Raises:
            PeerRefused: Other engines, an engine that would have to leave its process, other parts or other rows.
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
        self._check_aux({name: str(AuxField(name, dtype, width)) for name, dtype, width in message.aux})

    def _check_aux(self, remote: dict[str, str]) -> None:
        local = {field.name: str(field) for field in self.aux}
        records = tuple(
            DifferenceRecord(
                field=f"aux.{name}",
                local=local.get(name, "none"),
                remote=remote.get(name, "none"),
                consequence="the first token, or what the draft starts from, would be missing or of another width",
                remedy="declare the same auxiliary rows at Sender and Receiver",
            )
            for name in sorted(local.keys() | remote.keys())
            if local.get(name) != remote.get(name)
        )
        if records:
            raise PeerRefused(
                "the two sides declare different auxiliary rows", code=RefusalCode.LAYOUT.value, differences=records
            )


def _words(groups: Groups) -> dict[str, GroupManifest]:
    return {own.name: GroupManifest(manifest=own.manifest.to_json(), window=own.window) for own in groups}
