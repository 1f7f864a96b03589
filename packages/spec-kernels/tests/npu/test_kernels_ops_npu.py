"""Owns the proof that the ops give on an NPU what the plain loops give: the tests of the CPU, run there.

Their modules are loaded from their files; the fixture `place` of this folder names the device.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

FAMILIES = (
    "accepted", "attention_groups", "attention_modes", "cache_locs", "chain", "dflash", "draft_extend_plan",
    "field", "kv_writes", "rolling", "sampling", "softmax", "steps", "trees", "widened",
)  # fmt: skip


def of_family(family: str) -> dict[str, Any]:
    """The tests of one family that take a place."""
    path = Path(__file__).parents[1] / f"test_kernels_{family}.py"
    spec = spec_from_file_location(f"spec_kernels_{family}_tests", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = {
        f"{name}_of_{family}": value
        for name, value in vars(module).items()
        if name.startswith("test_")
        and {"place", "attention_place"} & set(_parameters(value))
        and "place_on" not in _parameters(value)
    }
    assert len(found) > 1, f"no tests in {path}"
    return found


def _parameters(function: Any) -> tuple[str, ...]:
    inner = getattr(function, "hypothesis", None)
    names: tuple[str, ...] = (function if inner is None else inner.inner_test).__code__.co_varnames
    return names


for _family in FAMILIES:
    globals().update(of_family(_family))
