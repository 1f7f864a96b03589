"""PyTorch's database of operators on the device against the CPU: all of it a little, a seeded slice of it whole.

`docs/operators.md` lists what happens otherwise than on the CPU and why; every row of it is checked, and nothing else
may differ. `nox -s soak -- ascend-emulator` runs the whole.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import emulator_opinfo as opinfo
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OPERATORS = opinfo.operators()
PAIRS = [(name, dtype) for name in OPERATORS for dtype in opinfo.DTYPES]
STRIPES = 200

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]  # of deprecated operators, fallbacks, …


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """torch_npu logs every capture that fails, which those of operators that need the host do."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_database_is_there() -> None:
    assert len(OPERATORS) > 600


@pytest.mark.parametrize("modes", [("eager", "inplace", "resized"), ("graph",)], ids="+".join)
def test_every_operator_with_its_first_sample(modes: tuple[str, ...]) -> None:
    """In float32, or in the first dtype that the operator takes."""
    failures: list[opinfo.Failure] = []
    for operator in OPERATORS.values():
        supported = [dtype for dtype in opinfo.DTYPES if opinfo.takes(operator, dtype)] or ["float32"]
        failures += opinfo.check(operator, supported[0], modes, limit=1)
    assert opinfo.unexcused(failures) == []


@pytest.mark.parametrize("row", opinfo.ledger(), ids=lambda row: f"{row.operator}-{row.says[:12]}")
def test_rows_of_the_ledger_hold(row: opinfo.Row) -> None:
    """What a row says happens, in one of its dtypes and ways of calling."""
    operator = OPERATORS[row.operator]
    for dtype in row.dtypes:
        if any(row.covers(failure) for failure in opinfo.check(operator, dtype, row.modes)):
            return
    raise AssertionError(f"no failure any more: remove the row {row}")


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(stripe=st.integers(0, STRIPES - 1))
def test_a_stripe_of_the_database_in_all_dtypes_and_ways(stripe: int) -> None:
    """A soak tries every stripe, hence the whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failures = [f for name, dtype in PAIRS[stripe::STRIPES] for f in opinfo.check(OPERATORS[name], dtype, limit=40)]
    assert opinfo.unexcused(failures) == []
