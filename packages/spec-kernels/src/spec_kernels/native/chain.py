"""Owns greedy chain acceptance in plain torch: static shapes, no host synchronisation; see `spec_kernels.chain`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = ["accept_chain"]


@filling_op("accept_chain", "correct", "bonus")
def accept_chain(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    num_drafts: torch.Tensor,
    correct: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.accept_chain`."""
    width = candidates.shape[1]
    column = torch.arange(width - 1, device=candidates.device)
    drafts = candidates[:, 1:]
    stands = (drafts == target_predict[:, :-1]) & (drafts >= 0) & (column[None, :] < num_drafts[:, None])
    correct.copy_(stands.to(torch.int32).cumprod(1).sum(1))
    bonus.copy_(target_predict.gather(1, correct.to(torch.int64)[:, None]).squeeze(1))
