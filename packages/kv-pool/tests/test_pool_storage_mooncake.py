"""Owns the proof that Mooncake Store serves as the third level: real master, real stores, loopback only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kv_pool import LibraryUnavailable, StorageError
from kv_pool.hicache import create_storage
from kv_pool.hicache.storage.engines.mooncake import describe_code

HERE = Path(__file__).parent
SCENARIOS = (
    "pages_come_back", "no_room_while_pages_are_leased", "a_dead_master_is_an_error",
    "a_paused_master_is_an_error_in_time", "a_host_that_lends_memory_dies", "a_cache_is_served_from_it",
    "a_lease_that_ends_is_taken_anew", "companions_are_served_from_it",
)  # fmt: skip


Run = subprocess.CompletedProcess[str]


def _run(scenario: str) -> Run:
    script = [sys.executable, str(HERE / "pool_mooncake_checks.py"), scenario]
    return subprocess.run(
        [sys.executable, "-m", "kv_transfer.isolation", "--", *script],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """All chosen scenarios, some at a time: most of each is waiting for the library to give up."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(call["scenario"] for call in calls if call.get("scenario") in SCENARIOS)
    with ThreadPoolExecutor(3) as pool:
        yield {scenario: pool.submit(_run, scenario) for scenario in chosen}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_store(scenario: str, runs: dict[str, Future[Run]]) -> None:
    done = runs[scenario].result()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert "as it should be" in done.stdout


def test_every_scenario_is_run() -> None:
    assert all(f"def {name}()" in (HERE / "pool_mooncake_checks.py").read_text() for name in SCENARIOS)


def test_an_absent_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(LibraryUnavailable, match=r"kv-pool\[mooncake\]") as caught:
        create_storage("mooncake", master="127.0.0.1:1")
    assert isinstance(caught.value, ImportError) and caught.value.argument == "mooncake"


def test_codes_have_words() -> None:
    assert describe_code(-200) == "no room: all segments are full of pages under a lease (mooncake code -200)"
    assert "without a known meaning (mooncake code -1)" in describe_code(-1)


class Kept:
    """A store that another package would declare."""

    name = "kept"

    def __init__(self, *, room: int) -> None:
        self.room = room


class Entry:
    name = "kept"

    def load(self) -> type[Kept]:
        return Kept


def test_other_stores_come_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*, group: str) -> list[Any]:
        assert group == "kv_pool.storages"
        return [Entry()]

    monkeypatch.setattr("kv_pool.hicache.storage.entry_points", entries)
    made: Any = create_storage("kept", room=3)
    assert isinstance(made, Kept) and made.room == 3
    with pytest.raises(StorageError, match=r"files.*kept.*mooncake"):
        create_storage("elsewhere")
