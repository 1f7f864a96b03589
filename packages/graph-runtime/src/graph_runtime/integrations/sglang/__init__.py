"""SGLang's graph backend for an NPU, and its multi-layer draft-extend runners, over this package's devices and checks.

Written for SGLang 0.5.23. Importing this module imports no SGLang; the first use of a class does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graph_runtime.errors import EngineMissing

if TYPE_CHECKING:
    from .backend import GraphBackend
    from .runners import MultiLayerDraftExtendRunner, MultiStepDraftExtendRunner

__all__ = ["GraphBackend", "MultiLayerDraftExtendRunner", "MultiStepDraftExtendRunner"]

_HOMES = {
    "GraphBackend": "backend",
    "MultiLayerDraftExtendRunner": "runners",
    "MultiStepDraftExtendRunner": "runners",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ImportError as error:
        raise EngineMissing(
            f"{__name__}.{name}",
            expected="SGLang 0.5.23, whose base classes it extends",
            got=f"{type(error).__name__}: {error}",
            consequence="There is nothing to extend.",
            remedy="Install sglang in this environment; the runners of graph_runtime itself need no engine.",
        ) from error
    return getattr(module, name)
