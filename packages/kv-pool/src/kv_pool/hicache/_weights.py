"""Owns the weights under which checksums add words up: the same in every process and release, as files hold them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["odd_weights"]


def odd_weights(count: int) -> npt.NDArray[np.uint64]:
    """Fixed odd weights: SplitMix64 over the position. Shape: [count]."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return mixed
