"""Owns how much host memory this process may still take, within the limits of its cgroups, and how it is taken.

It reads `/proc` and `/sys`, nothing else does. It does not decide how the memory is shared (see `sizing`).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

import torch

from kv_pool._arguments import check_kind
from kv_pool.errors import BudgetError

__all__ = ["available_host_bytes", "zeroed_host_bytes"]

_HUGE = 2 << 20  # bytes of a huge page

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated before the machine or a cgroup runs out.

    Args:
        root: Where `proc` and `sys` lie.

    Returns:
        The least of MemAvailable and, for the process's cgroup and each one above it, limit less what is in use and
        cannot be reclaimed.

    Raises:
        BudgetError: `/proc/meminfo` cannot be read, or the root is no path.
    """
    check_kind("root", root, Path, BudgetError)
    return max(0, min([_machine(root), *_cgroup_rooms(root)]))


def zeroed_host_bytes(nbytes: int, alignment: int, *, pinned: bool) -> torch.Tensor:
    """Take zeroed host memory.

    Large memory that is not pinned lies in huge pages where the system has them: scattered pages of a pool would
    otherwise cost as much in address translation as in copies.

    Args:
        nbytes: Bytes.
        alignment: Where it starts is a multiple of this, a power of two.
        pinned: Whether it is page-locked for an accelerator.

    Returns:
        Shape: [nbytes]; dtype uint8.
    """
    huge = not pinned and nbytes >= 2 * _HUGE
    step = max(alignment, _HUGE) if huge else alignment
    if huge:
        memory = mmap.mmap(-1, nbytes + step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the memory
    else:
        raw = torch.zeros(nbytes + step, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % step
    return raw[start : start + nbytes]


def _machine(root: Path) -> int:
    text = _read(root / "proc/meminfo") or ""
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise BudgetError(
        "/proc/meminfo",
        given="no MemAvailable",
        expected="a line MemAvailable",
        consequence="a host pool could be larger than the machine",
        remedy="pass host_bytes",
    )


def _cgroup_rooms(root: Path) -> list[int]:
    rooms = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version_2 = not controllers
        base = root / "sys/fs/cgroup" if version_2 else root / "sys/fs/cgroup/memory"
        names = ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = base / path.strip("/")
        for place in (folder, *folder.parents):
            if place != base and base not in place.parents:
                break
            limit, used = (_number(place / name) for name in names)
            if limit is not None and used is not None and limit < _UNLIMITED:
                rooms.append(limit - used + _reclaimable(place))
    return rooms


def _reclaimable(folder: Path) -> int:
    """Bytes of the cgroup that are cache, and leave before an allocation fails."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
