"""Owns rejection sampling in plain torch; contracts in `spec_kernels.sampling`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op
from spec_kernels.native.trees import link

__all__ = ["sample_chain", "sample_tree"]


def _weights(probabilities: torch.Tensor) -> torch.Tensor:
    """NaN and negative values weigh nothing."""
    return torch.where(probabilities > 0, probabilities, 0.0)


def _draw(weights: torch.Tensor, spare: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """First token whose running weight exceeds the coin's share, else the last that weighs. Shape: [bs, vocabulary]."""
    weights = torch.where((weights > 0).any(1, keepdim=True), weights, spare)
    running = weights.cumsum(1)
    heavy = weights > 0
    token = torch.arange(weights.shape[1], device=weights.device)
    over = heavy & (running > coins.unsqueeze(1) * running[:, -1:])
    last = torch.where(heavy, token, 0).amax(1)
    first = torch.where(over, token, weights.shape[1]).amin(1)
    return torch.minimum(first, last)


@filling_op("sample_chain", "num_correct_drafts", "bonus")
def sample_chain(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.sample_chain`."""
    bs, steps, vocabulary = draft_probs.shape
    rows = torch.arange(bs, device=drafts.device)
    real = (drafts >= 0) & (drafts < vocabulary)
    at = drafts.to(torch.int64).clamp(0, vocabulary - 1).unsqueeze(2)
    q = draft_probs.gather(2, at).squeeze(2)
    p = target_probs[:, :steps].gather(2, at).squeeze(2)
    stands = real & (q > 0) & (q <= 1) & (coins * q < p)
    count = stands.to(torch.int64).cumprod(1).sum(1)
    num_correct_drafts.copy_(count)
    spare = _weights(target_probs[rows, count])
    if steps:
        column = count.clamp(max=steps - 1)
        rejected = (count < steps) & real[rows, column]
        left = (spare - _weights(draft_probs[rows, column])).clamp_(min=0)
        weights = torch.where(rejected.unsqueeze(1), left, spare)
    else:
        weights = spare
    bonus.copy_(_draw(weights, spare, final_coins))


@filling_op("sample_tree", "accept_index", "num_correct_drafts", "predict", "bonus")
def sample_tree(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    predict: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.sample_tree`. Each pass visits one token a request; no token is visited twice."""
    bs, width, vocabulary = target_probs.shape
    depth = accept_index.shape[1]
    rows = torch.arange(bs, device=candidates.device)
    current, count = torch.zeros_like(rows), torch.zeros_like(rows)
    path = torch.full((bs, depth + 1), -1, dtype=torch.int64, device=rows.device)  # the last column takes what is void
    path[:, 0] = 0
    predicted = torch.zeros((bs, width), dtype=torch.int64, device=rows.device)
    weights = _weights(target_probs[:, 0])
    mass = torch.zeros((bs,), dtype=torch.float32, device=rows.device)
    child = link(next_token, rows, current)
    for _ in range(width - 1):
        at = child.clamp(min=0)
        token = candidates[rows, at].to(torch.int64)
        visited = (child >= 0) & (count < depth - 1)
        real = visited & (token >= 0) & (token < vocabulary)
        token = token.clamp(0, vocabulary - 1)
        mass = torch.where(real, mass + weights[rows, token], mass)
        hit = real & (weights[rows, token] > 0) & (coins[rows, count] < mass.clamp(max=1.0))
        weights[rows, token] = torch.where(real, 0.0, weights[rows, token])
        predicted[rows, current] = torch.where(hit, token, predicted[rows, current])
        count = count + hit
        path[rows, torch.where(hit, count, depth)] = child
        current = torch.where(hit, child, current)
        weights = torch.where(hit.unsqueeze(1), _weights(target_probs[rows, current]), weights)
        mass = torch.where(hit, 0.0, mass)
        child = torch.where(hit, link(next_token, rows, at), torch.where(visited, link(next_sibling, rows, at), -1))
    drawn = _draw(weights, _weights(target_probs[rows, current]), final_coins)
    predicted[rows, current] = drawn
    accepted = path[:, :depth]
    accept_index.copy_(torch.where(accepted >= 0, accepted + (rows * width).unsqueeze(1), -1))
    num_correct_drafts.copy_(count)
    predict.copy_(predicted.reshape(-1))
    bonus.copy_(drawn)
