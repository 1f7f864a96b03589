"""Capture a decode step once and replay it right: static buffers, buckets, checked updates, graph devices.

It owns the order of a step and its memory. It does not own the model, attention metadata or sampling, and importing it
imports no device library.
"""

from __future__ import annotations

from .agreement import RankAgreement, ReduceMin
from .batch_shape import BatchShape, batch_shape, row_starts, token_capacity
from .buckets import Buckets
from .buffers import StaticBuffers
from .device import CapturedGraph, Fence, GraphDevice, OpRecord, get_device, register_device
from .draft_decode import DraftDecodeRunner
from .errors import GraphError
from .hooks import Hooks, MemorySaver
from .keys import DerivedUpdate, UpdateKey, UpdateRole, step_list
from .kinds import RunnerKind, get_runner, register_runner
from .multi_step import MultiStepDraftExtendRunner, Rotation, step_layers
from .overlap import HostResults, PendingResult
from .runner import DecodeRunner
from .step import CaptureReport, Decision, EagerReason, Mode, RunnerCounters, StepInputs, StepResult
from .update import BoundUpdate, UpdateSpec
from .window_runners import DraftExtendRunner, TargetVerifyRunner
from .worker import UpdateWorker

__version__ = "0.1.0"

__all__ = [
    "BatchShape",
    "BoundUpdate",
    "Buckets",
    "CaptureReport",
    "CapturedGraph",
    "Decision",
    "DecodeRunner",
    "DerivedUpdate",
    "DraftDecodeRunner",
    "DraftExtendRunner",
    "EagerReason",
    "Fence",
    "GraphDevice",
    "GraphError",
    "Hooks",
    "HostResults",
    "MemorySaver",
    "Mode",
    "MultiStepDraftExtendRunner",
    "OpRecord",
    "PendingResult",
    "RankAgreement",
    "ReduceMin",
    "Rotation",
    "RunnerCounters",
    "RunnerKind",
    "StaticBuffers",
    "StepInputs",
    "StepResult",
    "TargetVerifyRunner",
    "UpdateKey",
    "UpdateRole",
    "UpdateSpec",
    "UpdateWorker",
    "batch_shape",
    "get_device",
    "get_runner",
    "register_device",
    "register_runner",
    "row_starts",
    "step_layers",
    "step_list",
    "token_capacity",
]
