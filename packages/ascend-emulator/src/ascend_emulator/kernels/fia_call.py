"""One call of fused_infer_attention_score, v1 or v2, under common names.

This module owns the record that the checks and the computation share, and the table of layouts with torch_npu's rule
for the shapes of the outputs. It checks nothing and computes no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .fia_antiquant import Antiquant

UNBOUNDED = 2**31 - 1
"""Value of pre_tokens and next_tokens that means: no limit."""


@dataclass(frozen=True)
class Layout:
    """How query and output are laid out; key and value follow the query when they are dense."""

    name: str
    query: str
    output: str

    @property
    def packed(self) -> bool:
        """True when requests are concatenated along one token axis T."""
        return "T" in self.query


LAYOUTS: dict[str, Layout] = {
    name: Layout(name, *(name.split("_") if "_" in name else (name, name)))
    for name in (
        *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD"),
        *("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
    )
}
"""Every layout of torch_npu's shape rule (op_plugin/meta/_meta_registrations.py)."""


@dataclass(frozen=True)
class ArgumentNames:
    """How this version of the op calls what the record calls otherwise; used in error texts."""

    heads: str
    q_lens: str
    kv_lens: str


V1_NAMES = ArgumentNames("num_heads", "actual_seq_lengths", "actual_seq_lengths_kv")
V2_NAMES = ArgumentNames("num_query_heads", "actual_seq_qlen", "actual_seq_kvlen")


@dataclass(frozen=True)
class FiaCall:
    """Arguments of one call, as given (lengths still cumulative or not, as the layout wants)."""

    op: str
    names: ArgumentNames
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    mask: torch.Tensor | None
    q_lens: Sequence[int] | None
    kv_lens: Sequence[int] | None
    block_table: torch.Tensor | None
    sink: torch.Tensor | None
    heads: int
    kv_heads_given: int
    scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    sparse_mode: int
    block_size: int
    inner_precise: int
    want_lse: bool
    antiquant: Antiquant | None = None

    @property
    def kv_heads(self) -> int:
        """Key/value heads; 0 in the call means as many as query heads."""
        return self.kv_heads_given or self.heads

    @property
    def layout(self) -> Layout:
        """The parsed layout. The name must have been checked."""
        return LAYOUTS[self.input_layout]

    @property
    def paged(self) -> bool:
        """True when key and value are caches of blocks, read through a block table."""
        return self.block_table is not None


def heads_first(tensor: torch.Tensor, axes: str, heads: int) -> torch.Tensor:
    """Views a tensor of any layout heads first.

    Args:
        tensor: Shape: as ``axes`` spells.
        axes: BSH, BSND, BNSD, NBSD, NSD, TND or NTD.
        heads: number of heads, needed for BSH.

    Returns:
        A view. Shape: [B, N, S, D] (B is 1 for NSD), or [N, T, D] for the packed layouts.
    """
    if axes == "BSH":
        return tensor.view(*tensor.shape[:-1], heads, tensor.size(-1) // heads).permute(0, 2, 1, 3)
    if axes == "NSD":
        return tensor.unsqueeze(0)
    order = {"BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "NBSD": (1, 0, 2, 3), "TND": (1, 0, 2), "NTD": (0, 1, 2)}[axes]
    return tensor.permute(*order)


def value_dim(value: torch.Tensor, axes: str, kv_heads: int, paged: bool) -> int:
    """Width of one value head (torch_npu's rule)."""
    if paged and value.dim() == 5:
        return value.size(2) * value.size(4)
    if (paged and value.dim() == 3) or (not paged and axes == "BSH"):
        return value.size(2) // kv_heads
    return value.size(-1)


def output_shapes(
    query: torch.Tensor, value: torch.Tensor, layout: Layout, heads: int, kv_heads: int, paged: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of attention output and log-sum-exp (torch_npu's rule).

    Returns:
        The output's shape in the output layout; and [T, N, 1] for packed layouts, else [B, N, S, 1].
    """
    first = heads_first(query, layout.query, heads)
    wide = value_dim(value, layout.query, kv_heads, paged)
    dims = wide if wide and query.size(-1) else first.size(-1)
    if layout.packed:
        n, t = first.shape[:2]
        return ((t, n, dims) if layout.output == "TND" else (n, t, dims)), (t, n, 1)
    b, n, s = first.shape[:3]
    out = {
        "BSH": (b, s, n * dims),
        "BSND": (b, s, n, dims),
        "BNSD": (b, n, s, dims),
        "NBSD": (n, b, s, dims),
        "NSD": (n, s, dims),
    }[layout.output]
    return out, (b, n, s, 1)
