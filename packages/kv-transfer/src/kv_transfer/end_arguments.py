"""What every end is given, checked before memory is registered, a socket opened or a directory told.

Looks at kinds and ranges only; whether two ends fit is the handshake's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import kv_planner

from kv_transfer.arguments import check_kind
from kv_transfer.aux_rows import AuxField, check_fields
from kv_transfer.config import Limits, Timeouts
from kv_transfer.engine import TransferEngine
from kv_transfer.engine_check import require_engine
from kv_transfer.groups import Groups, Manifests
from kv_transfer.handshake import check_movable
from kv_transfer.secret import check_secret
from kv_transfer.terms import check_parts

__all__ = ["EndArguments"]


@dataclasses.dataclass(frozen=True, slots=True)
class EndArguments:
    """Arguments that all ends have, as `Sender` describes them."""

    groups: Groups
    parts: tuple[kv_planner.Part, ...]
    aux: tuple[AuxField, ...]
    timeouts: Timeouts
    limits: Limits

    @classmethod
    def of(
        cls,
        manifest: Manifests,
        engine: TransferEngine,
        windows: Mapping[str, int] | None,
        parts: Iterable[kv_planner.Part],
        aux: Iterable[AuxField],
        timeouts: Timeouts | None,
        limits: Limits | None,
        secret: str | None,
    ) -> EndArguments:
        """The arguments, with defaults for those that are None.

        Raises:
            ArgumentError: One is of another kind, the secret is too short, two auxiliary rows have one name, or the
                groups and windows do not fit together.
            ValueError: The parts are none.
            UnsupportedLayout: A component is organised neither in pages nor in request rows.
            EngineError: The engine is none of this version.
        """
        require_engine(engine)
        check_secret(secret)
        own_parts, fields = check_parts(parts), check_fields(aux)
        groups = Groups.of(manifest, windows)
        check_movable(groups, own_parts)
        return cls(
            groups,
            own_parts,
            fields,
            Timeouts() if timeouts is None else check_kind("timeouts", timeouts, Timeouts),
            Limits() if limits is None else check_kind("limits", limits, Limits),
        )
