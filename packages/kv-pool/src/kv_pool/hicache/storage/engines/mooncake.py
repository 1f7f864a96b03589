"""Owns the store `mooncake`: pages as objects of Mooncake Store, spread over the memory of many hosts.

A page is one object, put and got in place, its pieces gathered and scattered by the library. The length is verified,
the bytes are not: what travels over TCP is as safe as TCP makes it, and a checksum would cost as much as the copy (see
`kv_pool.hicache.canary` for one a token). It starts no master and opens no other port than the library does, which
listens on every interface and asks nobody who he is: run it in a network of your own.

Source: observed with mooncake-transfer-engine 0.3.13.post1; codes in `describe_code`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, cast

from kv_pool._arguments import check_word
from kv_pool.errors import LibraryUnavailable, StorageDamaged, StorageError
from kv_pool.hicache.storage.protocols import check_keys, check_pages
from kv_pool.tables import shown, whole_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["MooncakeStorage", "describe_code"]

_LONGEST_S = 86_400  # a day: the library counts milliseconds in 32 bits
_NO_ROOM, _TOO_SMALL, _ABSENT, _LEASE_ENDED, _NOT_MOVED = -200, -600, -704, -707, -800
_WORDS = {
    _NO_ROOM: "no room: all segments are full of pages under a lease",
    _TOO_SMALL: "the stored page is longer than the room for it",
    _ABSENT: "no such page",
    -706: "the page is under a lease",
    _LEASE_ENDED: "its lease ended before its bytes came: the master's default_kv_lease_ttl is too short for a page",
    _NOT_MOVED: "the host that lends the memory is gone, or the stored page is shorter than the room for it",
    -900: "the master does not answer",
    -901: "the master has not answered in time",
}
_OPEN: weakref.WeakSet[MooncakeStorage] = weakref.WeakSet()


@atexit.register
def _close_open_stores() -> None:
    """The library's threads must not outlive the interpreter."""
    for storage in list(_OPEN):
        storage.close()


class _Library(Protocol):
    """The calls of `mooncake.store.MooncakeDistributedStore` that are used here; negative codes are failures."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def get_size(self, key: str) -> int: ...

    def remove(self, key: str, force: bool) -> int: ...

    def close(self) -> int: ...


def describe_code(code: int) -> str:
    """What a code of the library means, in words: -200, -600, -704, -706, -707, -800, -900 and -901 were observed."""
    return f"{_WORDS.get(code, 'a code without a known meaning')} (mooncake code {code})"


class MooncakeStorage:
    """Pages in a Mooncake Store.

    Invariants:

    1. a page is one object, so it is there whole or not at all;
    2. an object that is shorter or longer than the page asked for is an error, and is removed;
    3. a key that is there keeps its first value.

    A page that was read or written lately is under a lease of the master's: it is not evicted, and when all memory is
    under leases, `write` keeps fewer pages. When the master does not answer, every call raises, after `timeout_s` at
    the latest. When a host that lends memory dies, its pages raise after about a second, and are misses when the master
    has missed it for its `client_ttl` (ten seconds, unless it was started otherwise).

    Args:
        master: Address of `mooncake_master`, "host:port".
        hostname: Under which other hosts reach this process.
        segment_bytes: Memory that this process lends to the store; 0 for none.
        buffer_bytes: Memory of the library for its own copies.
        protocol: `tcp` or `rdma`; only `tcp` was run here.
        rdma_devices: Names of devices for `rdma`.
        timeout_s: Longest wait for an answer of the master. If it dies in the very moment of the construction, the
            library asks twenty times, and keeps the process waiting as often.
        log_level: What the library writes to standard error, unless MC_LOG_LEVEL says otherwise already.

    Raises:
        LibraryUnavailable: The wheel or a system library of it is missing.
        StorageError: An argument of another kind, or the library did not start; its code is in the text.
    """

    name = "mooncake"

    def __init__(
        self,
        master: str,
        *,
        hostname: str = "127.0.0.1",
        segment_bytes: int = 1 << 30,
        buffer_bytes: int = 64 << 20,
        protocol: Literal["tcp", "rdma"] = "tcp",
        rdma_devices: str = "",
        timeout_s: float = 5.0,
        log_level: Literal["INFO", "WARNING", "ERROR"] = "ERROR",
    ) -> None:
        for name, text in (("master", master), ("hostname", hostname), ("rdma_devices", rdma_devices)):
            if not isinstance(text, str) or not text.isascii() or (not text and name != "rdma_devices"):
                raise _unusable(name, shown(text), "a text of ASCII characters", "the library would fail later")
        for name, nbytes in (("segment_bytes", segment_bytes), ("buffer_bytes", buffer_bytes)):
            whole_number(name, nbytes, error=StorageError, consequence="the library would have no memory")
        check_word("protocol", protocol, ("tcp", "rdma"), StorageError)
        check_word("log_level", log_level, ("INFO", "WARNING", "ERROR"), StorageError)
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not 0 < timeout_s <= _LONGEST_S:
            expected = f"seconds above 0, at most {_LONGEST_S}"
            consequence = "a master that hangs would keep every call waiting"
            raise _unusable("timeout_s", shown(timeout_s), expected, consequence)
        os.environ.setdefault("MC_LOG_LEVEL", log_level)
        try:
            library = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise LibraryUnavailable(
                "mooncake",
                given=str(error),
                expected="Mooncake's wheel and libibverbs",
                consequence="pages would be kept nowhere beyond the host",
                remedy='pip install "kv-pool[mooncake]"; on Debian also libibverbs1',
            ) from error
        _reach(master, timeout_s)
        self._master = master
        self._registered: list[npt.NDArray[np.uint8]] = []
        with _time_limit(timeout_s):
            self._library = cast(_Library, library.MooncakeDistributedStore())
            code = self._library.setup(
                hostname, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, rdma_devices, master
            )
        if code:
            self._library.close()
            raise _unusable("master", f"{master}: {describe_code(code)}", "a master that answers", "nothing is kept")
        self._closed = False
        _OPEN.add(self)

    def register(self, memory: Pieces) -> None:
        """Tell the library of the memory that pages lie in, as RDMA needs it; see `RegistersMemory`.

        Raises:
            StorageError: The library refuses it.
        """
        for piece in memory:
            code = self._library.register_buffer(piece.ctypes.data, piece.nbytes)
            if code:
                raise _unusable("memory", describe_code(code), "memory that is registered once", "copies would fail")
            self._registered.append(piece)  # the library keeps the address

    def exists(self, keys: Sequence[str]) -> int:
        """See `PageStorage.exists`."""
        found = self._library.batch_is_exist(list(keys)) if check_keys(keys) else []
        for number, code in enumerate(found):
            if code < 0:
                raise self._failed("exists", keys[number], code)
            if code == 0:
                return number
        return len(found)

    def read(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """See `PageStorage.read`. A page whose lease ended under way may hold anything: it is asked for once more."""
        check_pages(keys, pages, writable=True)
        if not keys:
            return 0
        places, sizes = _pointers(pages)
        lengths = [sum(row) for row in sizes]
        got = self._get(keys, places, sizes)
        for number, (code, length) in enumerate(zip(got, lengths, strict=True)):
            if code == _LEASE_ENDED:  # leases of a batch begin together, that of one page lasts for it alone
                (code,) = self._get(keys[number : number + 1], places[number : number + 1], sizes[number : number + 1])
            if code == length:
                continue
            size = self._library.get_size(keys[number]) if code == _NOT_MOVED else length
            if _ABSENT in (code, size):
                return number
            if code >= 0 or code == _TOO_SMALL or (size >= 0 and size != length):
                self._library.remove(keys[number], True)
                damaged = StorageDamaged(
                    keys[number],
                    given=f"{code} bytes" if code >= 0 else describe_code(code),
                    expected=f"{length} bytes as they were written under this key",
                    consequence="attention would read foreign bytes; the page was removed",
                    remedy="compute the page again; keep other data out of these keys",
                )
                damaged.pages_read = number
                raise damaged
            raise self._failed("read", keys[number], code)
        return len(got)

    def write(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """See `PageStorage.write`; it ends where the store has no room that it may free."""
        check_pages(keys, pages, writable=False)
        if not keys:
            return 0
        places, sizes = _pointers(pages)
        if all(len(row) == 1 for row in sizes):
            codes = self._library.batch_put_from(list(keys), [row[0] for row in places], [row[0] for row in sizes])
        else:
            codes = self._library.batch_put_from_multi_buffers(list(keys), places, sizes)
        for number, code in enumerate(codes):
            if code == _NO_ROOM:
                return number
            if code:
                raise self._failed("write", keys[number], code)
        return len(codes)

    def remove(self, keys: Sequence[str]) -> None:
        """See `Removes.remove`."""
        for key in check_keys(keys):
            code = self._library.remove(key, True)
            if code not in (0, _ABSENT):
                raise self._failed("remove", key, code)

    def close(self) -> None:
        """Leave the store; what this process lent to it is gone for the others. A second call does nothing."""
        if not self._closed:
            self._closed = True
            _OPEN.discard(self)
            self._library.close()
            self._registered.clear()

    def _get(self, keys: Sequence[str], places: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Bytes of each page, or a code."""
        if all(len(row) == 1 for row in sizes):
            return self._library.batch_get_into(list(keys), [row[0] for row in places], [row[0] for row in sizes])
        return self._library.batch_get_into_multi_buffers(list(keys), places, sizes)

    def _failed(self, call: str, key: str, code: int) -> StorageError:
        return StorageError(
            f"{call}({key})",
            given=describe_code(code),
            expected=f"an answer of the store at {self._master}",
            consequence="the page is neither kept nor found",
            remedy="see that the master and the hosts that lend memory are alive",
        )


def _reach(master: str, timeout_s: float) -> None:
    """Hang up on the master and see it hang up too: the library goes on for minutes when nobody listens or answers.

    The system accepts connections for a process that is stopped, so a connection alone says too little.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as asked:
            asked.shutdown(socket.SHUT_WR)
            asked.recv(1)
    except ConnectionResetError:
        return
    except (OSError, ValueError) as error:
        consequence = "the library would wait for it for minutes"
        raise _unusable("master", f"{master} ({error})", "host:port of a master that answers", consequence) from error


@contextmanager
def _time_limit(timeout_s: float) -> Iterator[None]:
    """The library reads its time limits from the environment, when a client is made."""
    names = ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(max(1, round(timeout_s * 1000)))))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pointers(pages: Sequence[Pieces]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths of all pieces."""
    places = [[_address(piece) for piece in pieces] for pieces in pages]
    return places, [[piece.size for piece in pieces] for pieces in pages]


def _address(piece: npt.NDArray[np.uint8]) -> int:
    """`piece.ctypes.data` in a seventh of its time, which is a tenth of what the library needs for a small page."""
    if piece.flags.writeable and piece.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(piece.data))
    return piece.ctypes.data


def _unusable(argument: str, given: object, expected: str, consequence: str) -> StorageError:
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence=consequence,
        remedy="start mooncake_master first, name it as host:port, and register each memory once",
    )
