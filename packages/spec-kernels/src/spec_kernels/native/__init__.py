"""Owns the torch implementations, which run on any device and define what each op means.

Importing it registers the custom operators; the package does so, because recorders and `torch.compile` look them up by
name.
"""

from __future__ import annotations

from spec_kernels.native import (
    accepted,
    attention,
    cache_locs,
    chain,
    dflash,
    draft_extend,
    kv_writes,
    rolling,
    sampling,
    softmax,
    steps,
    trees,
    widened,
)

__all__ = [
    "accepted",
    "attention",
    "cache_locs",
    "chain",
    "dflash",
    "draft_extend",
    "kv_writes",
    "rolling",
    "sampling",
    "softmax",
    "steps",
    "trees",
    "widened",
]
