"""Ops that the CPU tests capture, plain loops that share no code with the package, and a maker of small runners.

A capture on the CPU goes through all objects that the garbage collector sees, and so does each of its full runs. Half a
million of them are modules and collected tests, which are taken out of its sight.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch would load torch_npu, which needs a device

import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

# Devices whose tests run only where they are; which ones ran is said in the header.
DEVICES = {"cpu": True, "cuda": torch.cuda.is_available()}


def pytest_report_header() -> str:
    return "graph devices: " + ", ".join(f"{kind} {'tested' if here else 'absent'}" for kind, here in DEVICES.items())


def _set_aside() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file: what its tests have imported."""
    if nextitem is not None and nextitem.path != item.path:
        _set_aside()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_device" in metafunc.fixturenames:
        metafunc.parametrize("any_device", [kind for kind, here in DEVICES.items() if here])


_LIBRARY: Any = torch.library.Library("graph_test", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("scale(Tensor x, int[] lens) -> Tensor")
_LIBRARY.define("scale_optional(Tensor x, *, int[]? lens=None, int[]? more=None) -> Tensor")
_LIBRARY.define(
    "attend(Tensor query, Tensor key_cache, Tensor value_cache, Tensor table, int[] q_lens, int[] kv_lens) -> Tensor"
)


def _scale(x: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """Row i times lens[i]. Shape of x: [rows, width]."""
    return torch.stack([x[row] * length for row, length in enumerate(lens)])


def _scale_optional(x: torch.Tensor, lens: list[int] | None = None, more: list[int] | None = None) -> torch.Tensor:
    """Row i times lens[i] plus more[i]; one and zero where not passed."""
    rows = []
    for row in range(x.shape[0]):
        rows.append(x[row] * (1 if lens is None else lens[row]) + (0 if more is None else more[row]))
    return torch.stack(rows)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    q_lens: list[int],
    kv_lens: list[int],
) -> torch.Tensor:
    """One query a row over a paged cache; rows of length 0 give zeros.

    Shapes: query [rows, dim]; caches [pages, page_size, dim]; table [rows, pages].
    """
    page_size = key_cache.shape[1]
    out = torch.zeros(query.shape[0], value_cache.shape[2], dtype=query.dtype)
    for row, length in enumerate(kv_lens):
        if length and q_lens[row]:
            slots = [(int(table[row, t // page_size]), t % page_size) for t in range(length)]
            keys = torch.stack([key_cache[page, slot] for page, slot in slots])
            values = torch.stack([value_cache[page, slot] for page, slot in slots])
            out[row] = torch.softmax(keys @ query[row], dim=0) @ values
    return out


_LIBRARY.impl("scale", _scale, "CPU")
_LIBRARY.impl("scale_optional", _scale_optional, "CPU")
_LIBRARY.impl("attend", _attend, "CPU")


def _forward(step: StepInputs) -> torch.Tensor:
    x = step.tensors["x"] + step.tensors["seq_lens"][:, None]
    scaled: torch.Tensor = torch.ops.graph_test.scale(x, step.host["kv"])
    return scaled


def _layout(rows: int = 4) -> RowLayout:
    return RowLayout([RowField("x", "float32", rows=rows, width=2), RowField("seq_lens", "int64", rows=rows, fill=1)])


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[DecodeRunner, Any]]]:
    made: list[DecodeRunner] = []

    def build(**changes: Any) -> tuple[DecodeRunner, Any]:
        device = changes.pop("device", None) or RecordingDevice(
            get_device("cpu", updatable={"graph_test::scale": ("lens",)})
        )
        settings: dict[str, Any] = {
            "device": device,
            "forward": _forward,
            "buckets": Buckets([1, 2, 4]),
            "update": UpdateSpec({"lens": "kv"}),
        }
        settings.update(changes)
        settings.setdefault("buffers", StaticBuffers(_layout(), device))
        runner = DecodeRunner(**settings)
        made.append(runner)
        return runner, device

    yield build
    for runner in made:
        runner.close()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    made: list[Any] = []

    def keep(runner: Any) -> Any:
        made.append(runner)
        return runner

    yield keep
    for runner in made:
        runner.close()


settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")
