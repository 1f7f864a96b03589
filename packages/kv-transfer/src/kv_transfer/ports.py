"""Ports of control endpoints: one a rank, unique over data, pipeline, context and tensor parallelism.

Arithmetic only; whether a port is free is known when it is bound.
"""

from __future__ import annotations

import kv_planner

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.errors import ArgumentError

__all__ = ["rank_port"]

_TOP = 65_535


def rank_port(base: int, placement: kv_planner.Placement) -> int:
    """The port of a rank, counted from the first one of its deployment.

    Args:
        base: Port of rank 0.
        placement: Of the rank; another one has another port.

    Raises:
        ArgumentError: The deployment reaches past the last port.
    """
    base = check_whole("base", base, _TOP)
    place = check_kind("placement", placement, kv_planner.Placement)
    size = place.dp_size * place.pp_size * place.dcp_size * place.tp_size
    if base == 0 or base + size - 1 > _TOP:
        raise ArgumentError(
            f"base: ports {base} to {base + size - 1} for {size} ranks (dp {place.dp_size} x pp {place.pp_size} x "
            f"dcp {place.dcp_size} x tp {place.tp_size}); ports go from 1 to {_TOP}",
            local=base,
            consequence="ranks would have no port, or one that others have",
            remedy=f"give a base from 1 to {_TOP - size + 1}",
        )
    rank = (place.dp_rank * place.pp_size + place.pp_rank) * place.dcp_size + place.dcp_rank
    return base + rank * place.tp_size + place.tp_rank
