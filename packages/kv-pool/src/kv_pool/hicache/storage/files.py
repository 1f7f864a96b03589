"""Owns a store of pages in files: one file a page, written aside and renamed, verified whenever it is read.

Any number of processes may share a folder. It does not own keys (see `identity`).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kv_pool._arguments import check_kind
from kv_pool.errors import StorageDamaged, StorageError
from kv_pool.hicache.storage._record import HEADER_BYTES, checksum, pack_header, unpack_header
from kv_pool.hicache.storage.protocols import check_keys, check_pages
from kv_pool.tables import shown, whole_number

if TYPE_CHECKING:
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["FileStorage"]

_MOST_PIECES = 1000  # buffers in one call of the kernel
_WORTH_A_THREAD = 1 << 20  # bytes of a page while which is written the next one's checksum is taken
_KEY = frozenset("0123456789abcdef")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # no link leads elsewhere, no pipe keeps a reader waiting


class FileStorage:
    """Pages in files below one folder.

    Invariants:

    1. a file under a page's name is whole: it gets that name when all of its bytes are written;
    2. a page that was read has the length and checksum with which it was written; a damaged file is removed, and so is
       what is no file; what has no page's name is neither read, counted nor removed;
    3. what a killed process left unfinished is removed when the folder is opened next, never what a living one writes.

    Args:
        root: The folder; made if absent.
        capacity_bytes: Bytes that the files may take; the least recently used leave first. Processes that share the
            folder look again at what all of them have written after every twentieth of the capacity of their own.
        durable: Whether every page is also safe from a crash of the machine (`fsync` of file and folder). A crash of
            the process loses nothing either way.

    Raises:
        StorageError: The folder cannot be used, or a capacity below 1.
    """

    name = "files"

    def __init__(self, root: str | Path, *, capacity_bytes: int, durable: bool = False) -> None:
        if not isinstance(root, str | Path) or not str(root):
            raise _unusable("root", shown(root), "a folder that this process may write")
        consequence = "nothing could be kept beyond the host"
        self._root = Path(root)
        self._capacity = whole_number(
            "capacity_bytes", capacity_bytes, least=1, error=StorageError, consequence=consequence
        )
        self._durable = check_kind("durable", durable, bool, StorageError)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._token = os.urandom(8).hex()  # process ids repeat, across containers too
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._exclusive():
                self._remove_leftovers()
            self._used = sum(size for _, size, _ in self._stored())
        except (OSError, ValueError) as error:  # the latter from characters that no file system takes
            raise _unusable("root", f"{root} ({error})", "a folder that this process may write") from error
        self._since_look = 0

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, as far as this process knows."""
        return self._used

    def exists(self, keys: Sequence[str]) -> int:
        """See `PageStorage.exists`."""
        for number, key in enumerate(check_keys(keys)):
            if not _is_page(self._path(key)):
                return number
        return len(keys)

    def read(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """See `PageStorage.read`."""
        check_pages(keys, pages, writable=True)
        for number, (key, pieces) in enumerate(zip(keys, pages, strict=True)):
            path = self._path(key)
            wrong = self._read_one(path, key, pieces)
            if wrong is None:
                return number
            if wrong:
                stays = self._discard(path)
                damaged = StorageDamaged(
                    str(path),
                    given=wrong,
                    expected=f"{sum(piece.size for piece in pieces)} bytes as they were written under this key",
                    consequence=f"attention would read foreign bytes; {stays or 'the page was removed'}",
                    remedy="compute the page again; check the disk if this repeats",
                )
                damaged.pages_read = number
                raise damaged
        return len(keys)

    def remove(self, keys: Sequence[str]) -> None:
        """See `Removes.remove`."""
        for key in check_keys(keys):
            path = self._path(key)
            stays = self._discard(path)
            if stays is not None:
                raise StorageError(str(path), given=stays, **_REMOVE) from stays

    def _read_one(self, path: Path, key: str, pieces: Pieces) -> str | None:
        """Fill one page; returns what is wrong with it in words, none if it is whole, `None` if it is not there."""
        try:
            file = os.open(path, _OPEN)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
                return "no regular file"
            raise StorageError(str(path), given=error, **_READ) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return "no regular file"
            wrong = _fill(file, key, pieces)
            if wrong is None:
                with suppress(PermissionError):  # another user's file: its time of last use stays as it is
                    os.utime(file)
        except OSError as error:
            wrong = str(error)
        finally:
            os.close(file)
        return wrong or ""

    def _discard(self, path: Path) -> OSError | None:
        """Remove what lies under a page's name, a folder too if it is empty; returns what stands against it."""
        try:
            found = os.lstat(path)
            (path.rmdir if stat.S_ISDIR(found.st_mode) else path.unlink)()
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        if stat.S_ISREG(found.st_mode):
            with self._lock:
                self._used = max(0, self._used - found.st_size)
        return None

    def write(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """See `PageStorage.write`; a key that is there stays as it is, and writing ends where there is no room."""
        check_pages(keys, pages, writable=False)
        with ThreadPoolExecutor(1, "kv-pool-sums") as other:  # its thread starts when something is submitted
            ahead: Future[bytes] | None = None
            for number, (key, pieces) in enumerate(zip(keys, pages, strict=True)):
                digest, ahead = ahead, None
                path = self._path(key)
                if _is_page(path):
                    continue
                size = HEADER_BYTES + sum(piece.size for piece in pieces)
                try:
                    if not self._make_room(size):
                        return number
                    if size > _WORTH_A_THREAD and self._is_new(keys[number + 1 : number + 2]):
                        ahead = other.submit(checksum, pages[number + 1])
                    self._write_one(path, key, pieces, checksum(pieces) if digest is None else digest.result())
                except OSError as error:
                    raise StorageError(str(path), given=error, **_WRITE) from error
                with self._lock:
                    self._used += size
                    self._since_look += size
        return len(keys)

    def _is_new(self, keys: Sequence[str]) -> bool:
        """Whether there is a next key, and no page of it."""
        return any(_is_key(key) and not _is_page(self._path(key)) for key in keys)

    def _write_one(self, path: Path, key: str, pieces: Pieces, digest: bytes) -> None:
        aside, file = self._aside()
        try:
            header = pack_header(key, sum(piece.size for piece in pieces), digest)
            _write_all(file, [memoryview(header), *(piece.data for piece in pieces)])
            if self._durable:
                os.fsync(file)
            try:
                os.rename(aside, path)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                os.rename(aside, path)
                if self._durable:
                    _sync_folder(self._root)
            if self._durable:
                _sync_folder(path.parent)
        except BaseException:
            self._remove(aside)
            raise
        finally:
            os.close(file)

    def _aside(self) -> tuple[Path, int]:
        """A new file that is locked while this process lives, so that nobody takes it for a leftover."""
        while True:
            aside = self._root / f".part-{os.getpid()}-{self._token}-{next(self._numbers)}"
            file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink:  # else it was taken for one between the two calls
                    return aside, file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _path(self, key: str) -> Path:
        if not _is_key(key):
            raise StorageError(
                "key",
                given=key,
                expected="64 hexadecimal digits",
                consequence="a key could name a file outside the folder",
                remedy="make keys with page_keys",
            )
        return self._root / key[:2] / key

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files until `size` more bytes fit, and a tenth of the capacity beside them."""
        with self._lock:
            if size > self._capacity:
                return False
            if self._used + size <= self._capacity and self._since_look < self._capacity // 20:
                return True
            with self._exclusive():
                stored = sorted(self._stored())
                self._used = sum(held for _, held, _ in stored)
                self._since_look = 0
                if self._used + size <= self._capacity:
                    return True
                for _, held, path in stored:
                    self._remove(path)
                    self._used -= held
                    if self._used + size <= self._capacity - self._capacity // 10:
                        break
            return self._used + size <= self._capacity

    def _stored(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and path of every page."""
        for folder in os.scandir(self._root):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                if not _is_key(entry.name) or entry.name[:2] != folder.name:
                    continue  # somebody else's: neither counted nor removed
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield found.st_mtime, found.st_size, Path(entry.path)

    def _remove_leftovers(self) -> None:
        """Remove unfinished files of processes that are gone; those of living ones are locked."""
        for path in self._root.glob(".part-*"):
            try:
                file = os.open(path, _OPEN)
            except OSError:
                continue  # gone, or another user's, or no file
            try:
                if stat.S_ISREG(os.fstat(file).st_mode):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._remove(path)
            except BlockingIOError:
                continue
            finally:
                os.close(file)

    def _remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            path.unlink()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One process at a time removes files."""
        file = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _is_key(name: str) -> bool:
    return len(name) == 64 and _KEY.issuperset(name)


def _is_page(path: Path) -> bool:
    """Whether a file has a page's name; a link, a pipe or a folder is no page."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fill(file: int, key: str, pieces: Pieces) -> str | None:
    """Read a file into pieces, and say what is wrong with it."""
    nbytes = sum(piece.size for piece in pieces)
    size = os.fstat(file).st_size
    if size != HEADER_BYTES + nbytes:
        return f"a file of {size} bytes instead of {HEADER_BYTES + nbytes}"
    header = bytearray(HEADER_BYTES)
    wanted = [memoryview(header), *(piece.data for piece in pieces)]
    while wanted:
        got = os.readv(file, wanted[:_MOST_PIECES])
        if got == 0:
            return "a file that ended early"
        wanted = _after(wanted, got)
    digest = unpack_header(bytes(header), key, nbytes)
    if isinstance(digest, str):
        return digest
    return None if checksum(pieces) == digest else "other bytes than were written"


def _write_all(file: int, views: list[memoryview]) -> None:
    """Write all of it: the kernel takes at most 2 GiB in a call, and less when it is interrupted."""
    while views:
        taken = os.writev(file, views[:_MOST_PIECES])
        if not taken:
            raise OSError(errno.EIO, "the system took no byte of a write")
        views = _after(views, taken)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of views when the kernel has taken `done` bytes: it may take fewer than it was given."""
    for number, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[number + 1 :]]
        done -= view.nbytes
    return []


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_READ = {"expected": "a file that can be read", "consequence": "its pages are not there", "remedy": "check the folder"}
_REMOVE = {
    "expected": "permission to remove a page that is not what was written",
    "consequence": "it would be read and refused again and again",
    "remedy": "remove it by hand",
}
_WRITE = {
    "expected": "room and permission",
    "consequence": "the page was not kept",
    "remedy": "check the folder and disk",
}


def _unusable(argument: str, given: object, expected: str) -> StorageError:
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence="nothing could be kept beyond the host",
        remedy="name a folder on a disk with room",
    )
