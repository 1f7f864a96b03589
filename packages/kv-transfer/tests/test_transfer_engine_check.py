"""Engines of another version and factories that cannot be imported are found when they are given, not when used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kv_planner as kp
import pytest
from transfer_memory import make_layout, whole

import kv_transfer as kt
from kv_transfer.engine import Blocks
from kv_transfer.engine_check import require_engine
from kv_transfer.engines.loopback import LoopbackEngine


class Partial:
    """Everything but `cancel`."""

    name: object = "partial"
    session: object = "s"
    capabilities: object = kt.EngineCapabilities()

    def register(self, address: int, nbytes: int) -> None:
        return

    def unregister(self, address: int) -> None:
        return

    def submit(self, peer: str, batch: Blocks) -> kt.TransferHandle:
        return kt.TransferHandle(peer, len(batch.nbytes), 0)

    def poll(self, handle: kt.TransferHandle) -> kt.TransferStatus:
        return handle.status

    def close(self) -> None:
        return


class Whole(Partial):
    def cancel(self, handle: kt.TransferHandle) -> None:
        return


class OldSubmit(Whole):
    def submit(self, peer: str, source: object, destination: object, nbytes: object) -> kt.TransferHandle:  # type: ignore[override]
        raise AssertionError("called")


class NoHandle(Whole):
    def cancel(self) -> None:  # type: ignore[override]
        raise AssertionError("called")


class NoMethod(Whole):
    poll = "poll"  # type: ignore[assignment]


class Wide(Whole):
    """More parameters with defaults, and other names, are no matter."""

    def submit(self, to: str, blocks: Blocks, *more: object, urgent: bool = False) -> kt.TransferHandle:
        return kt.TransferHandle(to, len(blocks.nbytes), 0)


class PlannerCapabilities(Whole):
    capabilities = kp.Capabilities(max_entries_per_batch=4)


class NoSession(Whole):
    session = ""


WRONG: list[tuple[Callable[[], object], str]] = [
    (Partial, r"Partial does not satisfy TransferEngine: it lacks cancel"),
    (OldSubmit, r"OldSubmit\.submit: expected a method that can be called as submit\(peer, batch\), got submit\(peer"),
    (NoHandle, r"NoHandle\.cancel: expected a method that can be called as cancel\(handle\)"),
    (NoMethod, r"NoMethod\.poll: expected a method poll\(handle\), got 'poll'"),
    (PlannerCapabilities, r"capabilities: expected EngineCapabilities, got Capabilities"),
    (NoSession, r"session: expected a text of 1 to 1048576 characters, got ''"),
]


@pytest.mark.parametrize(("make", "text"), WRONG, ids=[text[:12] for _, text in WRONG])
def test_a_lagging_engine_is_named_by_everyone_who_takes_one(make: Callable[[], object], text: str) -> None:
    manifest = whole(make_layout()).manifest
    engine = make()
    name = f"lagging-{type(engine).__name__}"
    kt.register_engine(name, f"{__name__}:{type(engine).__name__}")
    for take in (
        lambda: require_engine(engine),
        lambda: kt.create_engine(name),
        lambda: kt.Receiver(manifest, engine, prefill_ranks=1),  # type: ignore[arg-type]
        lambda: kt.Sender(manifest, engine, endpoint="tcp://127.0.0.1:9"),  # type: ignore[arg-type]
    ):
        with pytest.raises(kt.EngineError, match=text) as caught:
            take()
        assert "TransferEngine protocol" in str(caught.value)


def test_engines_of_this_version_pass() -> None:
    for engine in (LoopbackEngine(), Whole(), Wide()):
        assert require_engine(engine) is engine
        engine.close()


def test_a_factory_that_cannot_be_imported_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv_transfer_broken_plugin.py").write_text("raise OSError('libfabric.so: cannot open shared object')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, factory, text in (
        ("no-module", "kv_transfer_no_such_module:Engine", "ModuleNotFoundError"),
        ("no-attribute", "kv_transfer.engines.loopback:NoSuchEngine", "AttributeError"),
        ("broken", "kv_transfer_broken_plugin:Engine", "OSError: libfabric.so"),
    ):
        kt.register_engine(name, factory)
        with pytest.raises(kt.EngineUnavailable, match=f"'{name}': '{factory}' cannot be imported: {text}") as caught:
            kt.create_engine(name)
        assert caught.value.__cause__ is not None
        assert isinstance(caught.value, ImportError)
