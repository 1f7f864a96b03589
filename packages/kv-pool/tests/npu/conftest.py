"""Owns the emulated NPU of these tests, installed before torch_npu is imported, and lanes of which one never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ascend_emulator
import pytest
import torch
from kv_pool.hicache import Lane, Mark, Streams, create_streams

ascend_emulator.install()

import torch_npu  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with idle streams: what one left of its pool, the next one's tensors may lie in."""
    yield
    torch_npu.npu.synchronize()


class WithoutWait:
    """The lanes of the device, of which one never waits."""

    name = "without a wait"

    def __init__(self, deaf: Lane) -> None:
        self.inner, self.deaf = create_streams(torch.device("npu:0")), deaf

    def mark(self, lane: Lane) -> Mark:
        return self.inner.mark(lane)

    def wait(self, lane: Lane, mark: Mark) -> None:
        if lane != self.deaf:
            self.inner.wait(lane, mark)

    def on(self, lane: Lane) -> Any:
        return self.inner.on(lane)


class WaitsOnce(WithoutWait):
    """The lanes of the device, of which one waits for the first mark alone."""

    waited = False

    def wait(self, lane: Lane, mark: Mark) -> None:
        if lane != self.deaf or not self.waited:
            self.inner.wait(lane, mark)
        self.waited = self.waited or lane == self.deaf


@contextmanager
def _held_back() -> Iterator[None]:
    event, other = torch_npu.npu.ExternalEvent(), torch_npu.npu.Stream()
    event.wait(torch_npu.npu.current_stream())
    try:
        yield
    finally:
        event.record(other)


@pytest.fixture
def held_back() -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts: the current stream does nothing of what is issued inside, until the end."""
    return _held_back


@pytest.fixture
def waits_once() -> Callable[[Lane], Streams]:
    """Makes the lanes of the device, of which one waits for the first mark alone."""
    return WaitsOnce


@pytest.fixture
def without_wait() -> Callable[[Lane], Streams]:
    """Makes the lanes of the device, of which one never waits."""
    return WithoutWait
