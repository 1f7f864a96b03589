"""The kinds of runners, and which one serves a kind on a device.

It owns the registry. It does not import a runner before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum
from typing import Any

from .errors import StepKindError

__all__ = ["RunnerKind", "get_runner", "register_runner"]


class RunnerKind(str, Enum):
    """What a step does."""

    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"
    MULTI_STEP_DRAFT_EXTEND = "multi_step_draft_extend"


ANY_DEVICE = "*"

_REGISTRY: dict[tuple[RunnerKind, str], str] = {
    (RunnerKind.DECODE, ANY_DEVICE): "graph_runtime.runner:DecodeRunner",
    (RunnerKind.TARGET_VERIFY, ANY_DEVICE): "graph_runtime.window_runners:TargetVerifyRunner",
    (RunnerKind.DRAFT_DECODE, ANY_DEVICE): "graph_runtime.draft_decode:DraftDecodeRunner",
    (RunnerKind.DRAFT_EXTEND, ANY_DEVICE): "graph_runtime.window_runners:DraftExtendRunner",
    (RunnerKind.MULTI_STEP_DRAFT_EXTEND, ANY_DEVICE): "graph_runtime.multi_step:MultiStepDraftExtendRunner",
}


def register_runner(kind: RunnerKind, device: str, factory: str) -> None:
    """Gives a device a runner of its own for a kind; the general one stays for all others.

    Args:
        kind: The kind.
        device: The part of a device name before the colon, or ``"*"``.
        factory: ``module:name`` of a class or function.

    Raises:
        StepKindError: `factory` has no colon.
    """
    module, _, name = factory.partition(":")
    if not device or not module or not name:
        raise StepKindError(
            "device, factory",
            expected="a device kind and 'module:name'",
            got=(device, factory),
            consequence="The runner could never be imported.",
            remedy="Give the import path and the name, separated by a colon.",
        )
    _REGISTRY[RunnerKind(kind), device] = factory


def get_runner(kind: RunnerKind, device: str) -> Callable[..., Any]:
    """The class or function that makes runners of a kind on a device.

    Args:
        kind: The kind.
        device: A device name, such as ``"npu:0"``.
    """
    kind = RunnerKind(kind)
    factory = _REGISTRY.get((kind, device.partition(":")[0])) or _REGISTRY[kind, ANY_DEVICE]
    module, _, name = factory.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made
