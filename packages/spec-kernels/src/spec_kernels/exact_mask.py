"""Owns the mask that hides what lies past lengths that only the device knows."""

from __future__ import annotations

import torch

from spec_kernels.errors import DtypeError
from spec_kernels.paged_metadata import whole

__all__ = ["exact_length_mask"]


def exact_length_mask(
    kv_lens: torch.Tensor, *, q_len: int, columns: int, page_size: int, window: int | None = None
) -> torch.Tensor:
    """Hide what lies past lengths that only the device knows, and past each query token's own position.

    For steps that are prepared before the step before them has ended: the host then knows upper bounds of the lengths,
    and passes those as `PagedAttentionMetadata.kv_lens`. Reads no value on the host, so it may be captured.

    Args:
        kv_lens: KV tokens of each request, this step's included; below `q_len` only in padded rows. Shape: [rows];
            dtype int64 or int32. Never mutated.
        q_len: Query tokens of each request, the last ones of its KV tokens.
        columns: Columns of the block table.
        page_size: Tokens in a page.
        window: Tokens that a query token sees, itself included; None for all before it.

    Returns:
        Shape: [rows, q_len, columns * page_size]; dtype bool; True hides.

    Raises:
        DtypeError: Lengths are not integers of one axis.
        MetadataError: A size is no whole number in its range.
    """
    for name, number, least in (("q_len", q_len, 1), ("columns", columns, 1), ("page_size", page_size, 1)):
        whole(name, number, least=least)
    if kv_lens.ndim != 1 or kv_lens.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            "kv_lens",
            given=f"{kv_lens.dtype} of shape {tuple(kv_lens.shape)}",
            expected="int32 or int64 of shape [rows]",
            consequence="lengths would be misread",
            remedy="pass the device's lengths, one a request",
        )
    last = (kv_lens - q_len).unsqueeze(1) + torch.arange(q_len, device=kv_lens.device)
    place = torch.arange(columns * page_size, device=kv_lens.device)
    hidden = place > last.unsqueeze(2)
    if window is None:
        return hidden
    whole("window", window, least=1)
    return hidden | (place <= last.unsqueeze(2) - window)
