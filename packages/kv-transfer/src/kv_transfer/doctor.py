"""What this machine offers for transfers: engines that really move bytes, ports, limits, shared memory, settings.

Every engine is tried in a process of its own, inside the loopback-only namespace where that is possible: a library that
crashes, hangs or listens takes nothing else with it. It changes nothing.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
import time

import numpy as np
from pydantic import BaseModel, ConfigDict

from kv_transfer.arguments import check_items, check_period, check_word
from kv_transfer.engine import TransferEngine, TransferState, wait_batch
from kv_transfer.errors import ArgumentError, TransferError
from kv_transfer.machine import Finding, Setting, check_place, effective_settings, findings
from kv_transfer.messages import PROTOCOL_VERSION
from kv_transfer.registry import create_engine, engine_names

__all__ = ["EngineReport", "Finding", "Report", "examine"]

_BYTES = 8 << 20
_BLOCKS = 64
_SMALL_BLOCKS, _SMALL_BYTES = 512, 4096
_SECONDS = 30.0
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineReport(_Data):
    """One engine.

    Attributes:
        name: As for `create_engine`.
        works: Whether it moved bytes and they arrived.
        cross_process: Whether it reaches other processes.
        megabytes_per_second: Of 8 MiB on this machine, without what blocks cost, in 10**6 bytes; not a benchmark.
        microseconds_per_block: What a block costs beside its bytes, from writes of few large and of many small blocks.
        problem: Why it does not work, with the remedy; empty otherwise.
    """

    name: str
    works: bool
    cross_process: bool = False
    megabytes_per_second: float | None = None
    microseconds_per_block: float | None = None
    problem: str = ""


class Report(_Data):
    """Everything that was looked at.

    Attributes:
        protocol: Version of the control messages.
        engines: One report an engine that is known by name.
        findings: Isolation, ports, host name, limits, shared memory, versions, settings that cannot work.
        settings: Environment variables that the engines read, with what counts here.
    """

    protocol: int
    python: str
    engines: tuple[EngineReport, ...]
    findings: tuple[Finding, ...]
    settings: dict[str, Setting]

    @property
    def ok(self) -> bool:
        """Whether an engine reaches other processes, and nothing else is a problem."""
        reaches = any(engine.works and engine.cross_process for engine in self.engines)
        return reaches and all(finding.level != "problem" for finding in self.findings)


def examine(
    engines: tuple[str, ...] | None = None,
    *,
    seconds: float = _SECONDS,
    host: str | None = None,
    ports: range = range(0),
) -> Report:
    """Look at this machine.

    Args:
        engines: Names to try; all that are known by default.
        seconds: Most time for one engine.
        host: Address that ends are to listen on; every address of this machine by default.
        ports: Ports that they are to have there, such as range(7701, 7709); any free one by default.

    Raises:
        ArgumentError: A name is that of no engine, or the time, the host or the ports are none.
    """
    known = engine_names()
    names = (
        known if engines is None else [check_word("engines", name, known) for name in check_items("engines", engines)]
    )
    check_period("seconds", seconds)
    check_place(host, ports)
    return Report(
        protocol=PROTOCOL_VERSION,
        python=platform.python_version(),
        engines=tuple(_try_apart(name, seconds) for name in names),
        findings=findings(host, ports),
        settings=effective_settings(os.environ),
    )


def _try_apart(name: str, seconds: float) -> EngineReport:
    command = [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, "-m", "kv_transfer.doctor", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return EngineReport(name=name, works=False, problem=f"did not end within {seconds:g} s; see its log settings")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return EngineReport(name=name, works=False, problem=f"its process ended with {done.returncode}: {last}")
    return EngineReport.model_validate_json(lines[-1])


def _try(name: str) -> EngineReport:
    """Write between two engines of this process, in few large and in many small blocks, and compare the bytes."""
    try:
        try:
            writer, reader = create_engine(name), create_engine(name)
        except ArgumentError as error:
            return EngineReport(name=name, works=False, problem=f"not tried: in a deployment, {error.remedy}")
        try:
            source = np.random.default_rng(0).integers(0, 256, _BYTES, dtype=np.uint8)
            target = np.zeros_like(source)
            writer.register(int(source.ctypes.data), _BYTES)
            reader.register(int(target.ctypes.data), _BYTES)
            took = []
            for blocks, size in ((_BLOCKS, _BYTES // _BLOCKS), (_SMALL_BLOCKS, _SMALL_BYTES)):
                for _ in range(2):  # the first write opens the connection
                    target.fill(0)
                    began = time.monotonic()
                    problem = _write(writer, reader.session, _Blocks(source, target, blocks, size))
                    seconds = time.monotonic() - began
                    if problem:
                        return EngineReport(name=name, works=False, problem=problem)
                if not np.array_equal(source[: blocks * size], target[: blocks * size]):
                    return EngineReport(name=name, works=False, problem="it says that bytes arrived which did not")
                took.append(seconds)
            rate, cost = _rates(*took)
            return EngineReport(
                name=name,
                works=True,
                cross_process=writer.capabilities.cross_process,
                megabytes_per_second=round(rate / 1e6, 1),
                microseconds_per_block=round(cost * 1e6, 2),
            )
        finally:
            writer.close()
            reader.close()
    except TransferError as error:
        return EngineReport(name=name, works=False, problem=str(error))


def _write(writer: TransferEngine, peer: str, blocks: _Blocks) -> str:
    """Write in batches as long as the engine takes; the error of the first one that failed."""
    most = writer.capabilities.max_entries_per_batch or len(blocks.nbytes)
    for first in range(0, len(blocks.nbytes), most):
        handle = writer.submit(peer, blocks.part(first, first + most))
        status = wait_batch(writer, handle)
        if status.state is not TransferState.DONE:
            return status.error
    return ""


def _rates(large: float, small: float) -> tuple[float, float]:
    """Bytes a second and seconds a block, that explain the times of both writes; a cost below zero is none."""
    small_bytes = _SMALL_BLOCKS * _SMALL_BYTES
    cost = (small * _BYTES - large * small_bytes) / (_SMALL_BLOCKS * _BYTES - _BLOCKS * small_bytes)
    cost = min(max(cost, 0.0), large / (2 * _BLOCKS))
    return _BYTES / (large - _BLOCKS * cost), cost


class _Blocks:
    """Equal blocks of two arrays, in reverse order at the destination's end of the list."""

    def __init__(self, source: _Bytes, target: _Bytes, blocks: int, size: int) -> None:
        offsets = np.arange(blocks, dtype=np.uint64)[::-1] * np.uint64(size)
        self.source = offsets + np.uint64(source.ctypes.data)
        self.destination = offsets + np.uint64(target.ctypes.data)
        self.nbytes = np.full(blocks, size, np.uint64)

    def part(self, first: int, last: int) -> _Blocks:
        found = copy.copy(self)
        found.source, found.destination = self.source[first:last], self.destination[first:last]
        found.nbytes = self.nbytes[first:last]
        return found


if __name__ == "__main__":
    print(json.dumps(_try(sys.argv[1]).model_dump()))
