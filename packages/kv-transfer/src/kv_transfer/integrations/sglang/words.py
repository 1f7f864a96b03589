"""Owns SGLang's words for kinds of state: which go by pages, which of those are cut by heads, which are rows."""

from __future__ import annotations

from typing import Final

__all__ = ["C4_STATE", "C128", "MAMBA", "PAGED", "SLICED", "WINDOW", "word"]

MAMBA: Final = "mamba"
WINDOW: Final = "swa"
C128: Final = "dsv4_c128"
C4_STATE: Final = "dsv4_c4_state"
SLICED: Final = frozenset({WINDOW})
"""K and V of their own, so that unequal TP cuts their pages by heads."""
PAGED: Final = frozenset(
    {
        WINDOW, "dsa", C128, C4_STATE, "qsa_pending", "qsa_compressed", "swa_ring", "c128_state", "request_row",
        "minimax_index_k", "minimax_dense_kv", "block_scale", "block_scale_swa",
    }
)  # fmt: skip
"""Moved item by item at indices that both sides list."""


def word(kind: object) -> str:
    """SGLang's own word for a state type."""
    return str(getattr(kind, "value", kind))
