"""Owns what this package reads from the environment, in one place and each time that it is asked."""

from __future__ import annotations

import os

__all__ = ["cann_home", "triton_interpreted"]


def cann_home() -> str | None:
    """Folder of the CANN toolkit, as its `set_env.sh` names it."""
    return os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or None


def triton_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter; Triton reads `TRITON_INTERPRET` when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
