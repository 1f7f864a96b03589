"""Owns the proof that nothing strange in a folder of pages is served, followed or removed, and that processes share it.

Headers whose own checksum is right, things that are no files under a page's name, names that are no page's; several
processes that write, read and evict at once.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pool import StorageDamaged, StorageError
from kv_pool.hicache import FileStorage
from kv_pool.hicache.storage._record import HEADER_BYTES, pack_header, unpack_header

sys.path.insert(0, str(Path(__file__).parent))

from test_pool_storage_files import NBYTES, empty, key, page, path_of, same

FIELDS = {"magic": (0, 8), "key": (8, 40), "length": (40, 48), "checksum": (48, 56)}


@pytest.fixture
def store(tmp_path: Path) -> FileStorage:
    """Two pages in a folder."""
    made = FileStorage(tmp_path / "pages", capacity_bytes=10**9)
    assert made.write([key(0), key(1)], [page(0), page(1)]) == 2
    return made


@settings(max_examples=150, deadline=None)
@given(
    field=st.sampled_from(sorted(FIELDS)),
    value=st.one_of(
        st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<4Q", n, n, n, n))
    ),
    signed=st.booleans(),
)
def test_a_header_is_read_as_it_was_written_or_named_wrong(field: str, value: bytes, signed: bool) -> None:
    """Any bytes in any field, under a checksum of the header that is right for them, or not."""
    digest = bytes(range(8))
    header = bytearray(pack_header(key(1), NBYTES, digest))
    start, stop = FIELDS[field]
    changed = bytes(header[start:stop]) != value[: stop - start]
    header[start:stop] = value[: stop - start]
    if signed:
        header[56:60] = struct.pack("<I", zlib.crc32(header[:56]))
    read = unpack_header(bytes(header), key(1), NBYTES)
    if not changed:
        assert read == digest
    elif signed and field == "checksum":
        assert read == value[:8]  # the payload will not have it
    else:
        assert isinstance(read, str) and read


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=3 * HEADER_BYTES))
def test_any_bytes_are_no_header_by_chance(content: bytes) -> None:
    assert isinstance(unpack_header(content, key(1), NBYTES), str)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_of_any_length_and_any_bytes_is_not_served(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Also one with a true header and a checksum of other bytes."""
    made = FileStorage(tmp_path_factory.mktemp("pages"), capacity_bytes=10**9)
    made.write([key(1)], [page(1)])
    whole = path_of(made, 1).read_bytes()
    noise = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(2 * NBYTES)
    kept = data.draw(st.sampled_from([0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, NBYTES - 1]))
    length = data.draw(st.sampled_from([0, 1, HEADER_BYTES, NBYTES - 1, NBYTES, NBYTES + 1, 2 * NBYTES]))
    content = (whole[:kept] + noise)[:length]
    path_of(made, 1).write_bytes(content)
    with pytest.raises(StorageDamaged):
        made.read([key(1)], [empty()])
    assert made.read([key(1)], [empty()]) == 0 and made.used_bytes <= NBYTES


def elsewhere(path: Path, folder: Path) -> Path:
    target = folder / "secret"
    target.write_bytes(path.read_bytes())
    path.unlink()
    return target


def link(path: Path, folder: Path) -> None:
    path.symlink_to(elsewhere(path, folder))  # a whole page, but not in the folder


def loop(path: Path, folder: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def dangling(path: Path, folder: Path) -> None:
    path.unlink()
    path.symlink_to(folder / "nowhere")


def pipe(path: Path, folder: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def door(path: Path, folder: Path) -> None:
    path.unlink()
    made = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        made.bind("door")  # such a path is short
    finally:
        os.chdir(here)
        made.close()
    (path.parent / "door").rename(path)


def hole(path: Path, folder: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("thing", [link, loop, dangling, pipe, door, hole])
def test_what_is_no_file_is_no_page(store: FileStorage, tmp_path: Path, thing: Callable[[Path, Path], None]) -> None:
    path = path_of(store, 1)
    thing(path, tmp_path)
    assert store.exists([key(0), key(1)]) == 1
    got = [empty(), empty()]
    with pytest.raises(StorageDamaged, match="no regular file") as caught:
        store.read([key(0), key(1)], got)
    assert caught.value.pages_read == 1 and same(got[0], page(0)) and same(got[1], empty())
    assert not os.path.lexists(path) and store.read([key(1)], [got[1]]) == 0
    if thing is link:
        assert (tmp_path / "secret").stat().st_size == NBYTES  # what it led to is still there
    assert store.write([key(1)], [page(1)]) == store.read([key(1)], [got[1]]) == 1 and same(got[1], page(1))


@pytest.mark.parametrize("thing", [link, loop, dangling, pipe, door])
def test_a_page_takes_the_place_of_what_is_no_file(
    store: FileStorage, tmp_path: Path, thing: Callable[[Path, Path], None]
) -> None:
    thing(path_of(store, 1), tmp_path)
    assert store.write([key(1)], [page(1)]) == 1
    got = empty()
    assert store.read([key(1)], [got]) == 1 and same(got, page(1)) and not path_of(store, 1).is_symlink()


def test_a_folder_with_something_in_it_stays_and_is_an_error(store: FileStorage) -> None:
    path = path_of(store, 1)
    hole(path, path)
    (path / "diary").write_text("mine")
    with pytest.raises(StorageDamaged, match="not empty"):
        store.read([key(1)], [empty()])
    with pytest.raises(StorageError):
        store.remove([key(1)])
    with pytest.raises(StorageError):
        store.write([key(1)], [page(1)])
    assert (path / "diary").read_text() == "mine" and not list(store.root.glob(".part-*"))


def test_removed_pages_are_gone_and_no_longer_counted(store: FileStorage) -> None:
    store.remove([key(0), key(7)])
    assert store.exists([key(0)]) == 0 and store.exists([key(1)]) == 1 and store.used_bytes == NBYTES


def test_foreign_files_are_neither_counted_nor_removed(store: FileStorage, tmp_path: Path) -> None:
    """Long names, names in bytes, pages of another folder, a folder behind a link; things named as unfinished files."""
    folder = path_of(store, 0).parent
    strange = [
        store.root / "README", store.root / "zz" / "notes", folder / "notes", folder / ("a" * 255),
        folder / (key(0) + "0"), folder / key(0).upper(), folder / ("0" * 64 if folder.name != "00" else "1" * 64),
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")),
    ]  # fmt: skip
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine" * 1000)
    outside = tmp_path / "outside"
    outside.mkdir()
    behind = outside / ("ee" + "e" * 62)
    behind.write_bytes(b"mine" * 1000)
    (store.root / "ee").symlink_to(outside)
    os.mkfifo(store.root / ".part-pipe")
    (store.root / ".part-folder").mkdir()
    (store.root / ".part-link").symlink_to(outside)
    full = FileStorage(store.root, capacity_bytes=3 * NBYTES)  # does not hang on the pipe
    assert full.used_bytes == 2 * NBYTES
    for number in range(2, 40):
        assert full.write([key(number)], [page(number)]) == 1 and full.used_bytes <= 3 * NBYTES
    assert all(path.read_bytes() == b"mine" * 1000 for path in (*strange, behind))
    held = [path for path in store.root.glob("??/*") if path not in strange and path.parent.name != "ee"]
    assert sum(path.stat().st_size for path in held) == full.used_bytes


def test_what_others_have_written_is_counted_before_the_room_is_twice_as_large(tmp_path: Path) -> None:
    """Neither of two stores would fill the room by itself; each looks again after a twentieth of it."""
    stores = [FileStorage(tmp_path / "pages", capacity_bytes=40 * NBYTES) for _ in range(2)]
    for number in range(35):
        for other, store in enumerate(stores):
            assert store.write([key(100 * other + number)], [page(number)]) == 1
    assert sum(path.stat().st_size for path in (tmp_path / "pages").glob("??/*")) <= (40 + 2 * 3) * NBYTES


WORK = """
import os, random, sys
from test_pool_storage_files import SIZES, FileStorage, empty, key, page, same

root, seed, capacity, rounds = sys.argv[1], *map(int, sys.argv[2:])
rng = random.Random(seed)
store = FileStorage(root, capacity_bytes=capacity)
pages = {number: page(number) for number in range(60)}
written = read = 0
sys.stdin.readline()
for _ in range(rounds):
    number = rng.randrange(60)
    if rng.random() < 0.5:
        written += store.write([key(number)], [pages[number]])
    else:
        got = empty()
        if store.read([key(number)], [got]):
            assert same(got, pages[number]), f"page {number} is torn"
            read += 1
    if rng.random() < 0.02:
        store.remove([key(rng.randrange(60))])
        store = FileStorage(root, capacity_bytes=capacity)
print(written, read)
"""


def share(root: Path, writers: int, rounds: int) -> None:
    """Processes write, read, evict and remove the same sixty pages in a room for twenty."""
    capacity = 20 * NBYTES
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(root), str(seed), str(capacity), str(rounds)],
            env={**os.environ, "PYTHONPATH": search}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for seed in range(writers)
    ]  # fmt: skip
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    most = 0
    while True:
        living = [process.pid for process in running if process.poll() is None]
        for pid in living:  # nobody writes or evicts while the files are counted, however slowly
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        most = max(most, sum(path.stat().st_size for path in root.glob("??/*")))
        for pid in living:
            os.kill(pid, signal.SIGCONT)
        if not living:
            break
        time.sleep(0.05)
    for process in running:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors[-2000:]
        written, read = map(int, out.split())
        assert written > rounds // 8 and read > rounds // 50
    # each may write a twentieth and a page more before it looks at what the others have written
    assert 10 * NBYTES < most <= capacity + writers * (capacity // 20 + NBYTES)
    store = FileStorage(root, capacity_bytes=capacity)
    held = [number for number in range(60) if store.exists([key(number)])]
    for number in held:
        got = empty()
        assert store.read([key(number)], [got]) == 1 and same(got, page(number))
    assert store.used_bytes == len(held) * NBYTES and not list(store.root.glob(".part-*"))


def test_processes_that_share_a_folder_keep_its_capacity_and_tear_nothing(tmp_path: Path) -> None:
    share(tmp_path / "pages", writers=3, rounds=150)
