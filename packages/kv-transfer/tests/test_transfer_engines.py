"""Registered memory, the loopback engine, and how engines are found."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.engines.mooncake import describe_code
from kv_transfer.regions import RegionTable


@dataclasses.dataclass
class Batch:
    source: npt.NDArray[np.uint64]
    destination: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]


def batch(*blocks: tuple[int, int, int]) -> Batch:
    columns = np.array(blocks, np.uint64).reshape(-1, 3)
    return Batch(columns[:, 0], columns[:, 1], columns[:, 2])


class Two:
    """A writer and a reader with 4 KiB each."""

    def __init__(self, blocks_per_poll: int | None = None) -> None:
        self.source = np.arange(4096, dtype=np.uint16).astype(np.uint8)
        self.target = np.zeros(4096, np.uint8)
        self.here, self.there = int(self.source.ctypes.data), int(self.target.ctypes.data)
        self.writer = LoopbackEngine(blocks_per_poll=blocks_per_poll, max_entries_per_batch=4)
        self.reader = LoopbackEngine()
        self.writer.register(self.here, 4096)
        self.reader.register(self.there, 2048)


def test_bytes_arrive_where_they_belong_and_nowhere_else() -> None:
    two = Two()
    handle = two.writer.submit(
        two.reader.session, batch((two.here + 7, two.there + 100, 50), (two.here, two.there + 1000, 1))
    )
    assert two.writer.poll(handle).state is kt.TransferState.DONE
    expected = np.zeros(4096, np.uint8)
    expected[100:150] = two.source[7:57]
    expected[1000] = two.source[0]
    assert (two.target == expected).all()
    assert two.writer.poll(handle).state is kt.TransferState.DONE


def test_both_sides_are_checked() -> None:
    two = Two()
    with pytest.raises(kt.RegionError, match="source block 1 of 2"):
        two.writer.submit(two.reader.session, batch((two.here, two.there, 8), (two.here + 4090, two.there, 8)))
    for destination, nbytes in ((two.there + 2047, 2), (two.there - 1, 8), (two.there + 2048, 1), (2**63, 1)):
        handle = two.writer.submit(two.reader.session, batch((two.here, destination, nbytes)))
        status = two.writer.poll(handle)
        assert status.state is kt.TransferState.FAILED
        assert "destination block 0 of 1" in status.error
    assert not two.target.any()


def test_a_batch_can_be_stopped_between_blocks() -> None:
    two = Two(blocks_per_poll=1)
    handle = two.writer.submit(two.reader.session, batch(*[(two.here + i, two.there + i, 1) for i in range(1, 4)]))
    assert two.writer.poll(handle).state is kt.TransferState.PENDING
    two.writer.cancel(handle)
    assert two.writer.poll(handle) == kt.TransferStatus(kt.TransferState.FAILED, "cancelled")
    assert two.target.nonzero()[0].tolist() == [1]
    two.reader.unregister(two.there)
    late = two.writer.submit(two.reader.session, batch((two.here, two.there, 1)))
    assert two.writer.poll(late).state is kt.TransferState.FAILED


def test_handles_are_not_kept_and_close_ends_everything() -> None:
    two = Two()
    handle = two.writer.submit(two.reader.session, batch((two.here, two.there, 1)))
    gone = weakref.ref(two.writer.submit(two.reader.session, batch((two.here, two.there, 1))))
    gc.collect()
    assert gone() is None
    two.writer.close()
    two.writer.close()
    assert two.writer.poll(handle).state is kt.TransferState.FAILED
    assert not two.target.any()
    with pytest.raises(kt.EngineError, match="is closed"):
        two.writer.submit(two.reader.session, batch((two.here, two.there, 1)))
    with pytest.raises(kt.EngineError, match="is closed"):
        two.writer.register(two.here, 1)
    two.writer.unregister(two.here)


def test_limits_of_a_batch() -> None:
    two = Two()
    with pytest.raises(kt.EngineError, match="batch of 5 blocks, the engine takes 4"):
        two.writer.submit(two.reader.session, batch(*[(two.here, two.there, 1)] * 5))
    assert two.writer.poll(two.writer.submit(two.reader.session, batch())).state is kt.TransferState.DONE
    with pytest.raises(ValueError, match="blocks_per_poll"):
        LoopbackEngine(blocks_per_poll=0)


def test_a_handle_calls_back_once_and_wakes_who_waits() -> None:
    handle, calls = kt.TransferHandle("peer", 1, 1), list[str]()
    assert handle.wait(0.01).state is kt.TransferState.PENDING
    handle.notify(lambda: calls.append("early"))
    ends: list[kt.TransferStatus] = []
    waiting = threading.Thread(target=lambda: ends.append(handle.wait(60)))
    waiting.start()
    done = kt.TransferStatus(kt.TransferState.DONE)
    assert handle.settle(done)
    waiting.join(60)
    assert ends == [done]
    assert not handle.settle(kt.TransferStatus(kt.TransferState.FAILED, "too late"))
    assert calls == ["early"]
    handle.notify(lambda: calls.append("late"))
    assert calls == ["early", "late"]
    assert handle.wait() == done


def test_whoever_waits_for_a_batch_polls_the_engines_that_need_it() -> None:
    class Watched(LoopbackEngine):
        polls = 0
        moves = False

        @property
        def capabilities(self) -> kt.EngineCapabilities:
            return dataclasses.replace(super().capabilities, progress_on_poll=self.moves)

        def poll(self, handle: kt.TransferHandle) -> kt.TransferStatus:
            self.polls += 1
            return super().poll(handle)

    two = Two(blocks_per_poll=1)
    writer = Watched(blocks_per_poll=1)
    writer.register(two.here, 4096)
    blocks = batch(*[(two.here + i, two.there + i, 1) for i in range(3)])
    for moves in (False, True):
        writer.moves, writer.polls = moves, 0
        assert kt.wait_batch(writer, writer.submit(two.reader.session, blocks)).state is kt.TransferState.DONE
        assert writer.polls == 3
    late = writer.submit(two.reader.session, blocks)
    assert kt.wait_batch(writer, late, 0.0).state is kt.TransferState.PENDING


@given(
    regions=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=6),
    address=st.integers(0, 80),
    nbytes=st.integers(0, 16),
)
def test_a_region_table_agrees_with_a_plain_loop(regions: list[tuple[int, int]], address: int, nbytes: int) -> None:
    table = RegionTable()
    kept: list[tuple[int, int]] = []
    for start, size in regions:
        clash = any(s < start + size and start < s + n for s, n in kept)
        if (start, size) in kept:
            assert not table.add(start, size)
            assert not table.remove(start)
        elif clash:
            with pytest.raises(kt.RegionError, match="overlaps"):
                table.add(start, size)
        else:
            assert table.add(start, size)
            kept.append((start, size))
    inside = any(s <= address < s + n and address + nbytes <= s + n for s, n in kept)
    found = table.first_outside(np.array([address], np.uint64), np.array([nbytes], np.uint64))
    assert (found is None) == inside
    for start, _ in kept:
        assert table.remove(start)
    assert len(table) == 0


def test_regions_at_the_end_of_the_address_space() -> None:
    table = RegionTable()
    table.add(2**64 - 4096, 4095)
    top = np.array([2**64 - 4096], np.uint64)
    assert table.first_outside(top, np.array([4095], np.uint64)) is None
    assert table.first_outside(top, np.array([2**64 - 1], np.uint64)) == 0
    for address, nbytes in ((2**64 - 10, 20), (5, 0), (-1, 5), (0, 5)):
        with pytest.raises(kt.RegionError, match="empty or outside"):
            table.add(address, nbytes)


def test_engines_by_name() -> None:
    assert {"loopback", "mooncake", "nixl"} <= set(kt.engine_names())
    assert list(kt.engine_names()) == sorted(kt.engine_names())
    engine = kt.create_engine("loopback", blocks_per_poll=2)
    assert isinstance(engine, LoopbackEngine)
    assert isinstance(engine, kt.TransferEngine)
    assert engine.capabilities.planner().max_entries_per_batch == 1024
    with pytest.raises(kt.EngineError, match="no transfer engine is named 'rdma'"):
        kt.create_engine("rdma")
    with pytest.raises(ValueError, match="expected 'module:callable'"):
        kt.register_engine("mine", "module.callable")
    with pytest.raises(ValueError, match="taken"):
        kt.register_engine("loopback", "a:b")
    kt.register_engine("not-an-engine", "builtins:dict")
    with pytest.raises(kt.EngineError, match="dict does not satisfy TransferEngine: it lacks name, session"):
        kt.create_engine("not-an-engine")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("mooncake", {"hostnme": "h"}, "it does not take hostnme; .*choose from hostname, protocol"),
        ("loopback", {"shared": True, "x": 2}, "it does not take x; "),
        (
            "memfabric",
            {"role": "Prefill", "shared": True},
            "it needs store_url, device_id and it does not take shared; ",
        ),
    ],
)
def test_options_that_an_engine_does_not_take_are_named(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(kt.ArgumentError, match=f"options of engine '{name}': {text}") as refused:
        kt.create_engine(name, **options)
    assert refused.value.local == sorted(options)


@pytest.mark.parametrize("code", [-1, -3, -7, -102, -999])
def test_every_code_has_words(code: int) -> None:
    assert f"mooncake code {code}" in describe_code(code)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')",
            "apt-get install libibverbs1",
        ),
        (None, "pip install 'kv-transfer[mooncake]'"),
    ],
)
def test_a_missing_library_says_what_to_install(tmp_path: Path, body: str | None, expected: str) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if body is not None:
        (package / "engine.py").write_text(body)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import kv_transfer\n"
        "try:\n    kv_transfer.create_engine('mooncake')\n"
        "except kv_transfer.EngineUnavailable as error:\n    print(error); assert isinstance(error, ImportError)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
