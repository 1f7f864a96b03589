"""Registered memory: which address ranges are open, and whether blocks lie inside them.

Pure bookkeeping over integers with its own lock; it never touches the memory.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterable

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import is_whole, told
from kv_transfer.engine import RegistersTogether, TransferEngine
from kv_transfer.errors import RegionError

__all__ = ["RegionTable", "check_region_count", "plan_regions", "register_buffers", "register_manifests"]

_TOP = 1 << 64


def _number(name: str, value: object) -> int:
    """The whole number `value`, of up to 64 bits.

    Raises:
        RegionError: It is none.
    """
    if is_whole(value) and abs(value) <= _TOP:
        return operator.index(value)
    raise RegionError(
        f"{name}: expected a whole number, got {told(value)}",
        local=type(value).__name__,
        consequence="nothing was registered, or unregistered",
        remedy="give the data pointer and the bytes of a buffer as int",
    )


class RegionTable:
    """Disjoint ranges, each with a count of its registrations.

    Invariants: 1. ranges do not overlap; 2. none is empty; 3. none passes 2**64.
    """

    def __init__(self) -> None:
        """An empty table."""
        self.lock = threading.RLock()
        self._regions: dict[int, tuple[int, int]] = {}
        self._starts = np.empty(0, np.uint64)
        self._ends = np.empty(0, np.uint64)

    def __len__(self) -> int:
        """How many ranges are open."""
        return len(self._regions)

    def add(self, address: int, nbytes: int) -> bool:
        """Opens a range.

        Returns:
            Whether it is new; False when the same range was open already.

        Raises:
            RegionError: Empty, out of the 64-bit range, or it overlaps another range without being equal to it.
        """
        address, nbytes = _number("address", address), _number("nbytes", nbytes)
        if nbytes <= 0 or address <= 0 or address + nbytes > _TOP - 1:
            raise RegionError(
                f"region of {nbytes} bytes at {address:#x} is empty or outside the address space",
                local=(address, nbytes),
                consequence="nothing was registered",
            )
        with self.lock:
            known = self._regions.get(address)
            if known is not None and known[0] == nbytes:
                self._regions[address] = (nbytes, known[1] + 1)
                return False
            for start, (size, _) in self._regions.items():
                if start < address + nbytes and address < start + size:
                    raise RegionError(
                        f"region [{address:#x}, +{nbytes}) overlaps the registered [{start:#x}, +{size})",
                        local=(address, nbytes),
                        consequence="nothing was registered",
                        remedy="register the union once, or unregister the other one first",
                    )
            self._regions[address] = (nbytes, 1)
            self._rebuild()
            return True

    def remove(self, address: int) -> bool:
        """Takes one registration back.

        Returns:
            Whether the range is closed now; False when others still hold it.

        Raises:
            RegionError: No range starts at `address`.
        """
        with self.lock:
            address = _number("address", address)
            known = self._regions.get(address)
            if known is None:
                raise RegionError(
                    f"no registered region starts at {address:#x}",
                    local=address,
                    consequence="nothing was unregistered",
                )
            if known[1] > 1:
                self._regions[address] = (known[0], known[1] - 1)
                return False
            del self._regions[address]
            self._rebuild()
            return True

    def sizes(self) -> dict[int, int]:
        """Bytes of every open range, by address."""
        with self.lock:
            return {address: size for address, (size, _) in self._regions.items()}

    def clear(self) -> tuple[int, ...]:
        """Closes all ranges and returns their addresses."""
        with self.lock:
            addresses = tuple(self._regions)
            self._regions.clear()
            self._rebuild()
            return addresses

    def first_outside(self, addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> int | None:
        """Index of the first block that does not lie wholly inside one range, or None.

        Args:
            addresses: Shape: [blocks]; dtype uint64.
            nbytes: Shape: [blocks]; dtype uint64.
        """
        if len(addresses) == 0:
            return None
        with self.lock:
            if not self._regions:
                return 0
            index = np.searchsorted(self._starts, addresses, side="right") - 1
            ends = self._ends[np.maximum(index, 0)]
            inside = (index >= 0) & (addresses < ends)
            room = np.where(inside, ends - addresses, np.uint64(0))
            inside &= nbytes <= room
        outside = np.flatnonzero(~inside)
        return int(outside[0]) if len(outside) else None

    def check(self, addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64], side: str) -> None:
        """Raises `RegionError` unless every block lies inside one range; `side` is named in the text."""
        bad = self.first_outside(addresses, nbytes)
        if bad is not None:
            raise RegionError(
                f"{side} block {bad} of {len(addresses)}, [{int(addresses[bad]):#x}, +{int(nbytes[bad])}), "
                f"is not inside registered memory",
                local=(int(addresses[bad]), int(nbytes[bad])),
                consequence="nothing of this batch was written",
                remedy="register the buffer before the transfer",
            )

    def _rebuild(self) -> None:
        starts = sorted(self._regions)
        self._starts = np.array(starts, np.uint64)
        self._ends = np.array([start + self._regions[start][0] for start in starts], np.uint64)


def plan_regions(engine: TransferEngine, buffers: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What has to be registered for buffers, within what the engine says about regions.

    Neighbours are joined, ends rounded to the engine's alignment. A region that would be too long ends between two
    buffers, never inside one: no block of a transfer crosses two regions.

    Args:
        engine: Its capabilities count, and its name is in the errors.
        buffers: (address, bytes) of each; empty ones need no region.

    Returns:
        (address, bytes) of each region, ascending.

    Raises:
        RegionError: A buffer is longer than a region may be, or there are more regions than the engine takes.
    """
    own, found = engine.capabilities, sorted(set(buffers))
    starts, sizes = kv_planner.Regions(found, alignment=own.region_alignment).arrays()
    regions = list(zip(starts.tolist(), sizes.tolist(), strict=True))
    if own.max_region_bytes is not None:
        regions = [
            piece
            for region in regions
            for piece in _cut(engine.name, region, found, own.region_alignment, own.max_region_bytes)
        ]
    check_region_count(engine.name, len(regions), own.max_regions)
    return tuple(regions)


def check_region_count(engine: str, count: int, most: int | None) -> None:
    """Refuses more regions than an engine takes.

    Raises:
        RegionError: There are too many.
    """
    if most is not None and count > most:
        raise RegionError(
            f"{count} regions after neighbours were joined; engine {engine!r} takes {most}",
            local=count,
            consequence="nothing was registered; the engine would have refused some of them later, with a bare code",
            remedy="put buffers next to each other, for example all layers in one allocation, or raise max_regions",
        )


def _cut(
    engine: str, region: tuple[int, int], buffers: Iterable[tuple[int, int]], alignment: int, most: int
) -> list[tuple[int, int]]:
    """Pieces of a region, none longer than `most`, with ends that are aligned and between buffers."""
    first, size = region
    end = first + size
    inside = [(address, address + nbytes) for address, nbytes in buffers if nbytes and first <= address < end]
    ends = [end]  # where a piece may end: after each group of buffers that share an aligned block
    reached = first
    for start, stop in inside:
        border = -(-reached // alignment) * alignment
        if reached > first and border <= start:
            ends.append(border)
        reached = max(reached, stop)
    pieces: list[tuple[int, int]] = []
    start = first
    last = None
    for stop in sorted(ends):
        if stop - start > most:
            if last is None or stop - last > most:
                begin = start if last is None else last
                raise RegionError(
                    f"buffers of {stop - begin} bytes at {begin:#x} cannot be parted; engine {engine!r} takes regions "
                    f"of {most} bytes",
                    local=stop - begin,
                    consequence="nothing was registered",
                    remedy="make smaller buffers, for example one a layer, or raise max_region_bytes",
                )
            pieces.append((start, last - start))
            start = last
        last = stop
    return [*pieces, (start, end - start)]


def register_manifests(
    engine: TransferEngine,
    manifests: Iterable[kv_planner.RankManifest],
    parts: Iterable[kv_planner.Part] = ("target", "draft"),
) -> tuple[int, ...]:
    """Registers the memory of a rank's entries of `parts`; other memory stays closed to peers.

    Returns and errors are those of `register_buffers`.
    """
    wanted = set(parts)
    entries = [entry for manifest in manifests for entry in manifest.entries if entry.part in wanted]
    return register_buffers(engine, {(entry.address, entry.nbytes) for entry in entries})


def register_buffers(engine: TransferEngine, buffers: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Registers (address, bytes) ranges.

    All or nothing: what the engine's limits forbid is refused before it is asked, and when one region is refused, those
    before it are taken back.

    Returns:
        The addresses, for `unregister`.

    Raises:
        EngineError: The engine refused a region.
        RegionError: Its limits do not allow them; see `plan_regions`.
    """
    regions = plan_regions(engine, buffers)
    if isinstance(engine, RegistersTogether):
        engine.register_all(regions)
        return tuple(address for address, _ in regions)
    done: list[int] = []
    try:
        for address, nbytes in regions:
            engine.register(address, nbytes)
            done.append(address)
    except BaseException:
        for address in reversed(done):
            with contextlib.suppress(Exception):
                engine.unregister(address)
        raise
    return tuple(done)
