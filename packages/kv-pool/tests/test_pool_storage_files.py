"""Owns the proof that files keep pages whole: damage, crashes, other writers, a full disk's worth of pages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pool import StorageDamaged, StorageError
from kv_pool.hicache import FileStorage, create_storage
from kv_pool.hicache.storage import files
from kv_pool.hicache.storage._record import HEADER_BYTES, checksum

Page = list[npt.NDArray[np.uint8]]
SIZES = (70_001, 8, 3)
NBYTES = HEADER_BYTES + sum(SIZES)


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def page(number: int, sizes: tuple[int, ...] = SIZES) -> Page:
    return [
        np.random.default_rng([number, piece]).integers(0, 256, size, dtype=np.uint8)
        for piece, size in enumerate(sizes)
    ]


def empty(sizes: tuple[int, ...] = SIZES) -> Page:
    return [np.zeros(size, dtype=np.uint8) for size in sizes]


def same(one: Page, two: Page) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., FileStorage]:
    def build(capacity: int = 10**9, **options: Any) -> FileStorage:
        made = create_storage("files", root=tmp_path / "pages", capacity_bytes=capacity, **options)
        assert isinstance(made, FileStorage)
        return made

    return build


@pytest.mark.parametrize("durable", [False, True])
def test_pages_come_back_in_any_order_until_the_first_miss(make: Callable[..., FileStorage], durable: bool) -> None:
    store = make(durable=durable)
    assert store.write([key(n) for n in range(5)], [page(n) for n in range(5)]) == 5
    other = make()
    assert other.used_bytes == store.used_bytes == 5 * NBYTES
    order = [4, 0, 3, 9, 1]
    assert other.exists([key(n) for n in order]) == 3
    got = [empty() for _ in order]
    assert other.read([key(n) for n in order], got) == 3
    assert all(same(got[place], page(order[place])) for place in range(3)) and same(got[4], empty())
    assert store.write([key(0)], [page(7)]) == 1  # there already
    assert other.read([key(0)], [got[0]]) == 1 and same(got[0], page(0))
    assert not list(store.root.glob(".part-*"))


def path_of(store: FileStorage, number: int) -> Path:
    return store.root / key(number)[:2] / key(number)


def test_a_durable_page_is_on_the_disk_before_its_name_is(
    make: Callable[..., FileStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before it is renamed, then the folders whose entries are new."""
    seen: list[Path] = []
    sync, rename = os.fsync, os.rename

    def synced(file: int) -> None:
        sync(file)
        seen.append(Path(os.readlink(f"/proc/self/fd/{file}")))

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    assert make(durable=False).write([key(0)], [page(0)]) == 1 and seen == [path_of(make(), 0)]
    store, path = make(durable=True), path_of(make(), 1)
    assert store.write([key(1)], [page(1)]) == 1
    assert seen[1].name.startswith(".part-")
    assert seen[2:] == [path, store.root, path.parent]


def test_every_byte_of_a_header_counts(tmp_path: Path) -> None:
    for number in range(HEADER_BYTES):
        store = FileStorage(tmp_path, capacity_bytes=10**9)
        store.write([key(0)], [page(0)])  # anew: a damaged one was removed
        content = bytearray(path_of(store, 0).read_bytes())
        content[number] ^= 1
        path_of(store, 0).write_bytes(content)
        with pytest.raises(StorageDamaged):
            store.read([key(0)], [empty()])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damaged_file_is_served(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = FileStorage(tmp_path_factory.mktemp("damage"), capacity_bytes=10**9)
    store.write([key(0), key(1)], [page(0), page(1)])
    path = path_of(store, 1)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "swap", "other", "empty", "noise"]))
    if kind == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "grow":
        content += bytes(data.draw(st.integers(1, 9)))
    elif kind == "swap":
        first, second = HEADER_BYTES + 8, HEADER_BYTES + 65536
        content[first : first + 8], content[second : second + 8] = (
            content[second : second + 8],
            content[first : first + 8],
        )
    elif kind == "other":
        content = bytearray(path_of(store, 0).read_bytes())
    else:
        content = bytearray() if kind == "empty" else bytearray(os.urandom(len(content)))
    untouched = bytes(content) == path.read_bytes()
    path.write_bytes(content)
    got = [empty(), empty()]
    if untouched:
        assert store.read([key(0), key(1)], got) == 2
        return
    with pytest.raises(StorageDamaged) as caught:
        store.read([key(0), key(1)], got)
    assert caught.value.pages_read == 1 and same(got[0], page(0)) and str(path) in str(caught.value)
    assert store.exists([key(1)]) == 0
    assert store.write([key(1)], [page(1)]) == 1 and store.read([key(1)], [got[1]]) == 1


NAMES = st.one_of(
    st.text(max_size=70),
    st.text(alphabet="0123456789abcdefABCDEF./", min_size=60, max_size=68),
    st.sampled_from(["..", "../" * 21 + "a", "/etc/passwd", "a" * 63, "A" * 64, "a" * 62 + "/a", "\0" * 64]),
)


@settings(max_examples=200, deadline=None)
@given(name=NAMES)
def test_no_key_names_a_file_elsewhere(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """64 hexadecimal digits name a page below the folder; all else is refused by every call and leaves nothing."""
    folder = tmp_path_factory.mktemp("keys")
    store = FileStorage(folder / "pages", capacity_bytes=10**6)
    calls: list[Callable[[], int]] = [
        lambda: store.exists([name]), lambda: store.read([name], [empty()]), lambda: store.write([name], [page(1)]),
    ]  # fmt: skip
    legal = len(name) == 64 and set(name) <= set("0123456789abcdef")
    for call, wanted in zip(calls, (0, 0, 1), strict=True):
        if legal:
            assert call() == wanted
        else:
            with pytest.raises(StorageError, match="64 hexadecimal digits"):
                call()
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == ([folder / "pages" / name[:2] / name] if legal else [])


def test_another_length_is_an_error_not_a_page(make: Callable[..., FileStorage]) -> None:
    store = make()
    store.write([key(0)], [page(0)])
    with pytest.raises(StorageDamaged, match="bytes instead of"):
        store.read([key(0)], [empty((70_001, 8))])


def test_the_checksum_sees_order_lengths_and_every_word() -> None:
    data = np.arange(200_000, dtype=np.uint8)
    seen = {
        checksum([data]),
        checksum([data[:-1]]),
        checksum([data[:100], data[100:]]),
        checksum([data[100:], data[:100]]),
    }
    for place in (0, 7, 8, 65535, 65536, 199_999):
        changed = data.copy()
        changed[place] ^= 128
        seen.add(checksum([changed]))
        changed[8] ^= 128
        seen.add(checksum([changed]))
    zeros = np.zeros(65536 * 2, dtype=np.uint8)
    zeros[3] = 1
    seen |= {checksum([zeros]), checksum([np.roll(zeros, 8)]), checksum([np.roll(zeros, 65536)])}
    assert len(seen) == 4 + 11 + 3


def test_the_least_recently_used_leave_first(make: Callable[..., FileStorage]) -> None:
    store = make(capacity=10 * NBYTES)
    for number in range(10):
        assert store.write([key(number)], [page(number)]) == 1
        os.utime(path_of(store, number), (number, number))
    assert store.read([key(0)], [empty()]) == 1  # used just now
    assert store.write([key(10), key(11)], [page(10), page(11)]) == 2
    assert store.exists([key(0)]) == 1 and store.exists([key(1)]) == 0
    held = sum(path.stat().st_size for path in store.root.glob("??/*"))
    assert held == store.used_bytes <= 10 * NBYTES
    assert make(capacity=NBYTES - 1).write([key(20)], [page(20)]) == 0


def test_writers_of_the_same_and_of_other_pages_do_not_meet(make: Callable[..., FileStorage]) -> None:
    stores = [make() for _ in range(4)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in np.random.default_rng(seed).permutation(24).tolist():
                assert stores[seed % 4].write([key(number)], [page(number)]) == 1
                got = empty()
                assert stores[(seed + 1) % 4].read([key(number)], [got]) == 1 and same(got, page(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and make().used_bytes == 24 * NBYTES


CRASHES = """
import os, random, signal, sys, time
import numpy as np
from test_pool_storage_files import SIZES, FileStorage, empty, key, page, same

root, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
pages = [page(number) for number in range(40)]
acknowledged = set()
for round in range(rounds):
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        store = FileStorage(root, capacity_bytes=10**9)
        os.write(far, b"\\xff")
        for number in rng.sample(range(40), 40):
            store.write([key(number)], [pages[number]])
            os.write(far, bytes([number]))
        os._exit(0)
    os.close(far)
    os.read(near, 1)
    time.sleep(rng.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledged.update(os.read(near, 4096))
    os.close(near)
    store = FileStorage(root, capacity_bytes=10**9)
    assert not list(store.root.glob(".part-*")), "a leftover stayed"
    for number in range(40):
        got = empty()
        found = store.read([key(number)], [got])
        assert found or number not in acknowledged, f"page {number} was acknowledged and is lost"
        assert not found or same(got, pages[number]), f"page {number} is torn"
    if len(acknowledged) > 30:
        for number in list(acknowledged):
            (store.root / key(number)[:2] / key(number)).unlink()
        acknowledged.clear()
print("rounds", rounds)
"""


def crash(root: Path, seed: int, rounds: int) -> None:
    """Kill a writer at random places: nothing acknowledged is lost, nothing torn is served."""
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(root), str(seed), str(rounds)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0 and done.stdout == f"rounds {rounds}\n", done.stderr[-2000:]


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    crash(tmp_path / "pages", 1, 60)


def test_calls_that_the_kernel_cuts_short_are_continued(
    make: Callable[..., FileStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 999 bytes a call, both ways, through the real calls."""
    real = {"writev": os.writev, "readv": os.readv}
    calls = {"writev": 0, "readv": 0}

    def cut(name: str) -> Callable[..., int]:
        def call(file: int, views: list[memoryview]) -> int:
            calls[name] += 1
            return int(real[name](file, [views[0][:999]]))

        return call

    for name in real:
        monkeypatch.setattr(os, name, cut(name))
    store = make()
    assert store.write([key(1)], [page(1)]) == 1
    assert (store.root / key(1)[:2] / key(1)).stat().st_size == NBYTES
    got = empty()
    assert store.read([key(1)], [got]) == 1 and same(got, page(1))
    assert min(calls.values()) >= NBYTES // 999


def test_3_gib_are_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux ends a call before 2 GiB; the bytes are pages of zeros that nobody touches, and go nowhere."""
    taken: list[int] = []
    real = os.writev

    def counted(file: int, views: list[memoryview]) -> int:
        taken.append(real(file, views))
        return taken[-1]

    monkeypatch.setattr(os, "writev", counted)
    huge = np.zeros(3 << 30, dtype=np.uint8)
    with open(os.devnull, "wb", buffering=0) as nowhere:
        files._write_all(nowhere.fileno(), [memoryview(b"head"), huge.data])
    assert sum(taken) == huge.nbytes + 4 and len(taken) >= 2
    monkeypatch.setattr(os, "writev", lambda file, views: 0)
    with pytest.raises(OSError, match="no byte"):
        files._write_all(0, [huge.data])


FULL = """
import resource, signal, sys
from test_pool_storage_files import FileStorage, StorageError, empty, key, page, same

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = FileStorage(sys.argv[1], capacity_bytes=10**9)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    store.write([key(1), key(2)], [page(1, (10,)), page(2)])
except StorageError as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError("a page that was cut short counts as kept")
assert store.exists([key(1), key(2)]) == 1 and not list(store.root.glob(".part-*"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
got = empty()
assert store.write([key(2)], [page(2)]) == store.read([key(2)], [got]) == 1 and same(got, page(2))
print("as it should be")
"""


def test_a_page_that_the_system_cuts_short_is_not_kept(tmp_path: Path) -> None:
    """A file may grow to 50,000 bytes: the kernel takes a part of the page, then refuses the rest."""
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "pages")],
        env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.stdout == "as it should be\n", done.stderr[-2000:]


def test_a_living_writer_keeps_its_unfinished_file(make: Callable[..., FileStorage]) -> None:
    store = make()
    aside, file = store._aside()
    (store.root / ".part-1-dead-0").write_bytes(b"left by a killed process")
    make()
    assert list(store.root.glob(".part-*")) == [aside]
    os.close(file)
    make()
    assert not list(store.root.glob(".part-*"))


def test_what_cannot_be_used_is_refused(make: Callable[..., FileStorage], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="capacity"):
        make(capacity=0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="folder"):
        FileStorage(tmp_path / "file", capacity_bytes=1)
    for bad in ("../x", "A" * 64, "0" * 63):
        with pytest.raises(StorageError, match="hexadecimal"):
            make().exists([bad])
    with pytest.raises(StorageError, match="files"):
        create_storage("absent")
    for options in ({}, {"root": tmp_path, "capacity_bytes": 1, "folder": "x"}):
        with pytest.raises(StorageError, match=r"options.*root, capacity_bytes"):
            create_storage("files", **options)
    store = make()
    (store.root / key(0)[:2]).write_text("in the way")
    with pytest.raises(StorageError) as caught:
        store.write([key(0)], [page(0)])
    assert isinstance(caught.value, OSError) and not list(store.root.glob(".part-*"))
