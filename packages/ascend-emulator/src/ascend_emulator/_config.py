"""Reads the environment variables that choose how the emulator works; the compilers' own are read in `_build.py`."""

from __future__ import annotations

import os

__all__ = ["compiled_from_environment"]

_COMPILED = "ASCEND_EMULATOR_COMPILED"


def compiled_from_environment() -> bool | None:
    """What ASCEND_EMULATOR_COMPILED says of the compiled kernels: 1 must, 0 must not, absent or empty: where possible.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get(_COMPILED, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_COMPILED}: expected 0 or 1, got {value!r}; unset it to choose by what the machine has")
    return None if value == "" else value == "1"
