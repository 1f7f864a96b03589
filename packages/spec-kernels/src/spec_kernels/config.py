"""Owns what this package reads from the environment, in one place and each time that it is asked."""

from __future__ import annotations

import os

__all__ = ["triton_interpreted"]


def triton_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter; Triton reads `TRITON_INTERPRET` when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
