"""Owns greedy chain acceptance in plain torch, as the custom operator `spec_kernels::accept_chain`.

Static shapes, no host synchronisation. The checks are in `spec_kernels.chain`.
"""

from __future__ import annotations

import torch

__all__ = ["accept_chain", "run"]


@torch.library.custom_op("spec_kernels::accept_chain", mutates_args=())
def accept_chain(
    candidates: torch.Tensor, target_predict: torch.Tensor, num_drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `spec_kernels.accept_chain`."""
    width = candidates.shape[1]
    column = torch.arange(width - 1, device=candidates.device)
    drafts = candidates[:, 1:]
    stands = (drafts == target_predict[:, :-1]) & (drafts >= 0) & (column[None, :] < num_drafts[:, None])
    correct = stands.to(torch.int32).cumprod(1).sum(1)
    bonus = target_predict.gather(1, correct[:, None]).squeeze(1)
    return correct.to(torch.int32), bonus


@accept_chain.register_fake
def _accept_chain_fake(
    candidates: torch.Tensor, target_predict: torch.Tensor, num_drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = candidates.shape[0]
    return candidates.new_empty((rows,), dtype=torch.int32), target_predict.new_empty((rows,))


run = accept_chain
