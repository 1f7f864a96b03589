"""Owns block drafting in plain torch; contracts in `spec_kernels.dflash`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op
from spec_kernels.native.cache_locs import lookup

__all__ = ["accept_block", "prepare_block"]


@filling_op("prepare_block", "ids", "positions", "locs")
def prepare_block(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    bonus: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    mask_token: int,
) -> None:
    """See `spec_kernels.prepare_block`."""
    bs = bonus.shape[0]
    block = ids.shape[0] // bs
    ids.fill_(mask_token)
    ids.view(bs, block)[:, 0].copy_(bonus.clamp(min=0))
    column = prefix_lens.to(torch.int64).unsqueeze(1) + torch.arange(block, device=ids.device)
    positions.copy_(column.reshape(-1))
    locs.copy_(lookup(req_to_token, req_pool_indices.to(torch.int64).unsqueeze(1), column).reshape(-1))


@filling_op("accept_block", "rows", "tokens")
def accept_block(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    prefix_lens: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """See `spec_kernels.accept_block`; `rows` are the first four fields of `BlockAccept`."""
    drafts = candidates[:, 1:]
    stands = (drafts == target_predict[:, :-1]) & (drafts >= 0)
    correct = stands.to(torch.int64).cumprod(1).sum(1)
    bonus = target_predict.gather(1, correct.unsqueeze(1)).to(torch.int64)
    rows[0].copy_(correct)
    rows[1].copy_(correct + 1)
    rows[2].copy_(bonus.squeeze(1))
    rows[3].copy_(prefix_lens.to(torch.int64) + correct + 1)
    tokens[:, :-1].copy_(drafts)
    tokens[:, -1].zero_()
    tokens.scatter_(1, correct.unsqueeze(1), bonus)
