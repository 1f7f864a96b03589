"""Process groups under the names that the expert-parallel ops are given, and the exchange of rows between their ranks.

This module owns the names. On a machine HCCL has its own, from ``get_hccl_comm_name``; here a group of any CPU backend
answers, under a name that the caller gives it or that torch has for it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_groups: dict[str, dist.ProcessGroup] = {}


def name_group(name: str, group: dist.ProcessGroup | None) -> None:
    """Makes a process group answer to a name; None takes the name away."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def group_named(name: str) -> dist.ProcessGroup | None:
    """The group of a name: one given by ``name_group``, else torch's own name of it (``ProcessGroup.group_name``)."""
    if name in _groups:
        return _groups[name]
    if not dist.is_initialized():
        return None
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except RuntimeError:
        return None


def gather(group: dist.ProcessGroup, numbers: list[int]) -> torch.Tensor:
    """Every rank's numbers. Shape: [ranks, numbers]; int64."""
    mine = torch.tensor(numbers)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([found], [mine]).wait()
    return torch.stack(found)


def exchange(
    group: dist.ProcessGroup, rows: torch.Tensor, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    """Sends rows to every rank and returns those received, ordered by the rank they come from.

    Args:
        group: process group.
        rows: rows for rank 0 first, then for rank 1, … Shape: [rows, width]; any dtype.
        send: rows for each rank; None for one each.
        receive: rows from each rank; None for one each.
    """
    ones = [1] * group.size()
    send, receive = send or ones, receive or ones
    plain = rows.contiguous().view(torch.uint8)
    found = plain.new_empty(sum(receive), plain.size(1))
    group.alltoall_base(found, plain, receive, send).wait()
    return found.view(rows.dtype)
