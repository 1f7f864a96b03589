"""Makes the helper modules of this folder importable and says how the run is isolated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import kv_planner as kp
import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from transfer_memory import make_layout, stages, whole
from transfer_pair import HeldEngine, Pair

from kv_transfer import registry


def pytest_report_header() -> list[str]:
    from kv_transfer.isolation import current_isolation

    return [
        f"kv-transfer: this process is {current_isolation()}",
        "kv-transfer: Mooncake runs in child processes, inside a namespace of their own where the system allows",
    ]


@pytest.fixture(autouse=True)
def own_engine_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine names that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


@pytest.fixture
def layout() -> kp.ModelLayout:
    return make_layout()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.fixture
def two_stages(layout: kp.ModelLayout, pairs: list[Pair]) -> Pair:
    pairs.append(Pair(stages(layout, 2), whole(layout)))
    return pairs[0]


@pytest.fixture
def held(layout: kp.ModelLayout, pairs: list[Pair]) -> Pair:
    pairs.append(Pair(stages(layout, 1), whole(layout), HeldEngine))
    return pairs[0]


settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")
