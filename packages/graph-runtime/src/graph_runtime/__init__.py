"""Capture a decode step once and replay it right: static buffers, buckets, checked updates, graph devices.

It owns the order of a step and its memory. It does not own the model, attention metadata or sampling, and importing it
imports no device library.
"""

from __future__ import annotations

from .buckets import Buckets
from .buffers import StaticBuffers
from .device import CapturedGraph, Fence, GraphDevice, OpRecord, get_device, register_device
from .errors import GraphError
from .runner import DecodeRunner
from .step import CaptureReport, Decision, EagerReason, Mode, RunnerCounters, StepInputs, StepResult
from .update import BoundUpdate, UpdateSpec
from .worker import UpdateWorker

__version__ = "0.1.0"

__all__ = [
    "BoundUpdate",
    "Buckets",
    "CaptureReport",
    "CapturedGraph",
    "Decision",
    "DecodeRunner",
    "EagerReason",
    "Fence",
    "GraphDevice",
    "GraphError",
    "Mode",
    "OpRecord",
    "RunnerCounters",
    "StaticBuffers",
    "StepInputs",
    "StepResult",
    "UpdateSpec",
    "UpdateWorker",
    "get_device",
    "register_device",
]
