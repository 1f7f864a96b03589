"""Static buffers: every row rewritten, one copy, refusals that change nothing, poison, addresses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from graph_runtime import StaticBuffers, get_device
from graph_runtime.errors import (
    AddressChanged,
    AliasedValue,
    FenceTimeout,
    GraphClosed,
    RowCountError,
    RowDtypeError,
    RowValueError,
    RowWidthError,
    UnknownField,
    UnwrittenRows,
    ValueDevice,
)
from graph_runtime.testing import RecordingDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner import DType, RowField, RowLayout

_NAMES: tuple[DType, ...] = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int32",
    "int64",
    "float8_e4m3fn",
    "float8_e5m2",
    "bool",
)


def _layout() -> RowLayout:
    return RowLayout(
        [
            RowField("ids", "int64", rows=4, fill=9),
            RowField("table", "int32", rows=4, width=3, fill=0),
            RowField("scale", "float16", rows=4, fill=1),
            RowField("flag", "bool", rows=4, fill=0),
        ]
    )


def _values(n: int) -> dict[str, Any]:
    return {
        "ids": torch.arange(1, n + 1),
        "table": np.arange(3 * n, dtype=np.int32).reshape(n, 3) + 1,
        "scale": [0.5 + i for i in range(n)],
        "flag": [True] * n,
    }


def _bytes(buffers: StaticBuffers) -> list[bytes]:
    return [buffers.view(name).contiguous().view(torch.uint8).numpy().tobytes() for name in buffers.names]


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(get_device("cpu"))


def test_live_padded_and_beyond_are_all_written(device: RecordingDevice) -> None:
    buffers = StaticBuffers(_layout(), device)
    assert buffers.view("ids").tolist() == [9, 9, 9, 9]
    buffers.load(4, _values(4))
    buffers.load(2, _values(2))
    assert buffers.view("ids").tolist() == [1, 2, 9, 9]
    assert buffers.view("table").tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert buffers.view("scale").tolist() == [0.5, 1.5, 1.0, 1.0]
    assert buffers.view("flag", 3).tolist() == [True, True, False]
    buffers.load(0, {})
    assert buffers.view("ids").tolist() == [9, 9, 9, 9]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_a_load_does_not_depend_on_history(sizes: list[int]) -> None:
    used, fresh = (StaticBuffers(_layout(), get_device("cpu")) for _ in range(2))
    for n in sizes:
        used.load(n, _values(n))
    fresh.load(sizes[-1], _values(sizes[-1]))
    assert _bytes(used) == _bytes(fresh)


def test_the_naive_copy_leaves_old_rows() -> None:
    """E01: what a runner does that copies live rows only; the same steps through a load leave none."""
    naive = torch.zeros(4, dtype=torch.int64)
    buffers = StaticBuffers(RowLayout([RowField("slots", "int64", rows=4)]), get_device("cpu"))
    for slots in ([11, 12, 13, 14], [21, 22]):
        naive[: len(slots)].copy_(torch.tensor(slots))
        buffers.load(len(slots), {"slots": slots})
    assert naive.tolist() == [21, 22, 13, 14]  # rows 2 and 3 would write into pages of other requests
    assert buffers.view("slots").tolist() == [21, 22, 0, 0]


@pytest.mark.parametrize("dtype", _NAMES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_dtype(dtype: DType, width: int) -> None:
    torch_dtype = getattr(torch, dtype)
    buffers = StaticBuffers(RowLayout([RowField("x", dtype, rows=5, width=width, fill=1)]), get_device("cpu"))
    raw = torch.arange(3 * width).remainder(2 if dtype == "bool" else 100).reshape(3, width)
    value = (raw if width > 1 else raw.flatten()).to(torch_dtype)
    buffers.load(3, {"x": value})
    view = buffers.view("x")
    assert view.dtype == torch_dtype and tuple(view.shape) == ((5,) if width == 1 else (5, width))
    assert view[:3].float().tolist() == value.float().tolist()
    assert (view[3:].float() == 1).all()
    buffers.load(3, {"x": (raw if width > 1 else raw.flatten()).to(torch_dtype).tolist()})
    assert view[:3].float().tolist() == value.float().tolist()


def test_one_copy_a_load(device: RecordingDevice) -> None:
    buffers = StaticBuffers(_layout(), device)
    device.events.clear()
    buffers.load(3, _values(3))
    assert device.events == ["wait", "copy", "fence"]


def test_twins_have_one_capacity() -> None:
    """E07: host and device side come from one layout, so neither can be smaller."""
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    assert buffers._host.shape == buffers._arena.shape == (buffers.nbytes,)
    for name in buffers.names:
        assert buffers._host_views[name].shape == buffers._views[name].shape
        assert buffers._host_views[name].storage_offset() == buffers._views[name].storage_offset()
        assert buffers._host_views[name].data_ptr() != buffers._views[name].data_ptr()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ids": torch.arange(1, 3, dtype=torch.int32)}, RowDtypeError),
        ({"ids": np.arange(2.0)}, RowDtypeError),
        ({"ids": [1.5, 2.0]}, RowDtypeError),
        ({"ids": "ab"}, RowDtypeError),
        ({"ids": [[1], [2, 3]]}, RowDtypeError),
        ({"table": [[1, 2, 3], [4, 5, 2**31]]}, RowDtypeError),
        ({"scale": [1e6, 1.0]}, RowDtypeError),
        ({"flag": [1, 0]}, RowDtypeError),
        ({"ids": torch.arange(3)}, RowCountError),
        ({"ids": torch.tensor(3)}, RowCountError),
        ({"table": torch.zeros(2, 2, dtype=torch.int32)}, RowWidthError),
        ({"table": torch.zeros(2, dtype=torch.int32)}, RowWidthError),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, RowWidthError),
        ({"other": [1, 2]}, UnknownField),
    ],
)
def test_a_refused_value_leaves_all_bytes(change: dict[str, Any], error: type[RowValueError]) -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    buffers.load(4, _values(4))
    before = _bytes(buffers)
    host = buffers._host.clone()
    with pytest.raises(error) as caught:
        buffers.load(2, {**_values(2), **change})
    assert isinstance(caught.value, ValueError) and caught.value.remedy
    assert _bytes(buffers) == before and torch.equal(host, buffers._host)


def test_rows_and_missing_values() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    with pytest.raises(RowCountError, match="0 to 4"):
        buffers.load(5, _values(5))
    values = _values(2)
    del values["scale"]
    with pytest.raises(UnknownField, match="scale"):
        buffers.load(2, values)
    with pytest.raises(UnknownField, match="other"):
        buffers.load({"other": 1}, {})
    with pytest.raises(UnknownField):
        buffers.view("other")
    with pytest.raises(RowCountError):
        buffers.view("ids", 5)
    buffers.load({"ids": 2, "table": 1}, {"ids": [1, 2], "table": [[7, 7, 7]]})
    assert buffers.view("ids").tolist() == [1, 2, 9, 9] and buffers.view("scale").tolist() == [1.0] * 4


def test_empty_and_column_shapes() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    buffers.load(0, {"ids": [], "table": [], "scale": torch.zeros(0, dtype=torch.float16), "flag": []})
    buffers.load({"ids": 2}, {"ids": torch.tensor([[3], [4]])})
    assert buffers.view("ids").tolist() == [3, 4, 9, 9]
    frozen = np.array([5, 6], dtype=np.int64)
    frozen.setflags(write=False)
    buffers.load({"ids": 2}, {"ids": frozen})
    buffers.load({"ids": 2}, {"ids": np.arange(8, dtype=np.int64)[::4]})
    assert buffers.view("ids").tolist() == [0, 4, 9, 9]


def test_a_value_inside_the_buffers_is_refused() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    buffers.load(4, _values(4))
    with pytest.raises(AliasedValue):
        buffers.load({"ids": 2}, {"ids": buffers.view("ids")[2:]})
    buffers.load({"ids": 2}, {"ids": buffers.view("ids")[2:].clone()})
    assert buffers.view("ids").tolist() == [3, 4, 9, 9]


def test_the_host_side_waits_for_the_copy_before(device: RecordingDevice) -> None:
    buffers = StaticBuffers(_layout(), device, fence_timeout=0.01)
    buffers.load(1, _values(1))
    host = buffers._host.clone()

    class Never:
        def done(self) -> bool:
            return False

        def wait(self, timeout: float | None) -> bool:
            assert timeout == 0.01
            return False

    buffers._fence = Never()
    with pytest.raises(FenceTimeout):
        buffers.load(2, _values(2))
    assert torch.equal(host, buffers._host)


@pytest.mark.parametrize("dtype", _NAMES)
def test_poison_finds_rows_that_nobody_wrote(dtype: DType) -> None:
    layout = RowLayout([RowField("ids", "int64", rows=4), RowField("made", dtype, rows=4, width=2, fill=0)])
    buffers = StaticBuffers(layout, get_device("cpu"), device_written=["made"], poison=True)
    buffers.load(3, {"ids": [1, 2, 3]})
    buffers.view("made")[1].fill_(1)
    with pytest.raises(UnwrittenRows) as caught:
        buffers.check_written()
    assert caught.value.got == {"made": [0, 2]}
    buffers.view("made", 3).fill_(1)
    buffers.check_written()
    assert (buffers.view("made")[3:].float() == 0).all()
    buffers.load(0, {})
    buffers.check_written()


def test_without_poison_device_written_rows_get_the_fill() -> None:
    layout = RowLayout([RowField("made", "int32", rows=2, fill=5)])
    buffers = StaticBuffers(layout, get_device("cpu"), device_written=["made"])
    buffers.view("made").fill_(1)
    buffers.load(2, {})
    assert buffers.view("made").tolist() == [5, 5]
    buffers.check_written()
    with pytest.raises(UnknownField):
        StaticBuffers(layout, get_device("cpu"), device_written=["other"])


def test_moved_views_are_seen() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    buffers.check_addresses()
    buffers._views["ids"].data = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(AddressChanged, match="ids"):
        buffers.check_addresses()


def test_nothing_of_a_value_is_kept() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    value = torch.arange(2)
    watch = weakref.ref(value)
    buffers.load({"ids": 2}, {"ids": value})
    del value
    gc.collect()
    assert watch() is None


def test_closed() -> None:
    buffers = StaticBuffers(_layout(), get_device("cpu"))
    buffers.close()
    buffers.close()
    for call in (lambda: buffers.load(0, {}), lambda: buffers.view("ids"), buffers.check_addresses):
        with pytest.raises(GraphClosed):
            call()


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_a_value_that_cannot_be_copied_is_refused_before_anything_is_written(kind: str, position: int) -> None:
    names = ("a", "b", "c")
    buffers = StaticBuffers(
        RowLayout([RowField(name, "float32", rows=2, width=2) for name in names]), get_device("cpu")
    )
    buffers.load(2, {name: torch.ones(2, 2) for name in names})
    bad = torch.zeros(2, 2, device="meta") if kind == "meta" else torch.zeros(2, 2).to_sparse()
    values = {name: torch.full((2, 2), 7.0) for name in names}
    values[names[position]] = bad
    with pytest.raises(ValueDevice, match=names[position]):
        buffers.load(2, values)
    assert all(buffers.view(name).eq(1).all() for name in names) and buffers.loads == 2
