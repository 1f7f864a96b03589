"""Memory that other processes of this host can map, and the board on which an engine says what of it is open.

For the `loopback` engine between processes: a writer maps the reader's arena and copies. It moves no bytes. Files
lie in /dev/shm, are readable by their user alone, and carry their owner's process in their name, so that what a killed
process left behind is known and swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import check_whole
from kv_transfer.errors import EngineError, RegionError

__all__ = ["Board", "PeerBoard", "SharedArena"]

_FOLDER: Final = Path("/dev/shm")
_PREFIX: Final = "kv-transfer-"
_TOP: Final = 2**64 - 1
_HEADER: Final = 16  # bytes: a version that changes with the table, then the length of the table
_WRITER_SECONDS: Final = 5.0

_ARENAS: weakref.WeakSet[SharedArena] = weakref.WeakSet()


def _started(pid: int) -> str:
    """When a process started, in clock ticks; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(name: str) -> bool:
    """Whether the process that made a file of this name still runs."""
    pid, start = name.removeprefix(_PREFIX).split("-")[:2]
    return _started(int(pid)) == start


def _sweep() -> None:
    """Removes what killed processes of this user left."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_uid == os.getuid() and not _is_alive(path.name):
                path.unlink()


def _create() -> tuple[Path, int]:
    _sweep()
    path = _FOLDER / f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(8)}"
    try:
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineError(
            f"no shared memory: {path} cannot be made: {error}",
            code=error.errno,
            consequence="loopback cannot reach other processes",
            remedy="mount a tmpfs on /dev/shm, or use another engine",
        ) from error


class SharedArena:
    """Bytes that other processes of this user may map; give pools their buffers out of it.

    Args:
        nbytes: Size.

    Raises:
        ArgumentError: No size.
        EngineError: There is not so much shared memory; the size is named.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocates; all bytes are zero."""
        nbytes = check_whole("nbytes", nbytes, least=1)
        self._path, descriptor = _create()
        self.nbytes = nbytes
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            self._path.unlink()
            raise EngineError(
                f"nbytes: {nbytes} bytes of shared memory cannot be had: {error}",
                code=error.errno,
                local=nbytes,
                remedy="make /dev/shm larger (docker: --shm-size)",
            ) from error
        finally:
            os.close(descriptor)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.array.ctypes.data)
        self._unlink = weakref.finalize(self, _unlink, self._path)
        _ARENAS.add(self)

    def close(self) -> None:
        """Gives the name up; the bytes live on until nobody maps them. May be called twice."""
        _ARENAS.discard(self)
        self._unlink()

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a range lies inside."""
        address, nbytes = check_whole("address", address, _TOP), check_whole("nbytes", nbytes, _TOP)
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    @property
    def path(self) -> str:
        """Where it can be mapped."""
        return str(self._path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


class Board:
    """What one engine has registered, for writers of other processes.

    A writer holds the board's lock while it copies, so that a range that `publish` took away is written no more.
    """

    def __init__(self) -> None:
        """Opens an empty board."""
        self._path, self._file = _create()
        self._version = 0
        self._unlink = weakref.finalize(self, _unlink, self._path)
        self.publish({})

    @property
    def path(self) -> str:
        """Where writers find it."""
        return str(self._path)

    def publish(self, regions: dict[int, int]) -> None:
        """Replaces the table.

        Args:
            regions: Bytes by address.

        Raises:
            RegionError: A range is not in a `SharedArena`.
            EngineError: A writer held the board for too long.
        """
        table = []
        for address, nbytes in regions.items():
            arena = next((own for own in _ARENAS if own.holds(address, nbytes)), None)
            if arena is None:
                raise RegionError(
                    f"[{address:#x}, +{nbytes}) is not in shared memory",
                    local=(address, nbytes),
                    consequence="other processes could not reach it; nothing was registered",
                    remedy="take the buffer from a kv_transfer.SharedArena",
                )
            table.append([address, nbytes, arena.path, address - arena.address])
        text = json.dumps(table).encode()
        self._lock()
        try:
            self._version += 1
            header = self._version.to_bytes(8, "little") + len(text).to_bytes(8, "little")
            os.pwrite(self._file, header + text, 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Takes the board down: writers that come find nothing."""
        self._unlink()
        os.close(self._file)

    def _lock(self) -> None:
        end = time.monotonic() + _WRITER_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise EngineError(
                        f"a writer has held {self._path} for {_WRITER_SECONDS:g} s",
                        consequence="it may still write; its ranges stay registered",
                        remedy="end or resume the process that stands still",
                    ) from None
                time.sleep(0.001)


class PeerBoard:
    """The board of another process, as a writer uses it.

    Raises:
        OSError: There is none of this name.
    """

    def __init__(self, path: str) -> None:
        """Opens it."""
        if not Path(path).name.startswith(_PREFIX) or Path(path).parent != _FOLDER:
            raise FileNotFoundError(f"{path!r} is no board")
        self._name = Path(path).name
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._version = -1
        self._regions: list[tuple[int, int, str, int]] = []
        self._maps: dict[str, tuple[mmap.mmap, int]] = {}

    @contextlib.contextmanager
    def open_regions(self) -> Iterator[list[tuple[int, int]]]:
        """The open (address, bytes) of the peer, which stay open until the block ends; none of a dead peer."""
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            self._refresh()
            yield [(address, nbytes) for address, nbytes, _, _ in self._regions] if _is_alive(self._name) else []
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def here(self, address: int) -> int:
        """Where a peer's address lies in this process; inside `open_regions` only."""
        for start, nbytes, path, offset in self._regions:
            if start <= address < start + nbytes:
                if path not in self._maps:
                    self._maps[path] = _map(path)
                return self._maps[path][1] + offset + address - start
        raise RegionError(f"{address:#x} is not registered at the peer", local=address)

    def close(self) -> None:
        """Forgets the peer."""
        self._maps.clear()
        os.close(self._file)

    def _refresh(self) -> None:
        header = os.pread(self._file, _HEADER, 0)
        version = int.from_bytes(header[:8], "little")
        if version != self._version:
            text = os.pread(self._file, int.from_bytes(header[8:], "little"), _HEADER)
            self._regions = [(int(a), int(n), str(p), int(o)) for a, n, p, o in json.loads(text)]
            kept = {path for _, _, path, _ in self._regions}
            self._maps = {path: mapped for path, mapped in self._maps.items() if path in kept}
            self._version = version


def _map(path: str) -> tuple[mmap.mmap, int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))
