"""The golden files of planner and pools are still what SGLang answers, except those of two parts of it.

Its compiled tree reads tensors of the torch release that it was built for, which is not the one that torch_npu pairs
with; the backends that write back accepted states replace `torch.cuda` for the whole process when they are imported
beside torch_npu. `nox -s golden` checks both in an environment of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import record_golden


@pytest.mark.parametrize("name", sorted({*record_golden.NAMES} - {"prefixes", "recurrent"}))
def test_the_file_is_what_the_engine_answers(name: str) -> None:
    text = record_golden.place(name).read_text(encoding="utf-8")
    assert record_golden.dump(record_golden.record(name)) == text
