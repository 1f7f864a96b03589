"""Prompt-lookup drafts: what followed the last few tokens the last time they occurred.

An example-level drafter without a model. It runs on the device, inside the captured step, so that the drafts of a step
can depend on tokens that the host has not seen yet. Whether a draft is right is for the verify step to say.
"""

from __future__ import annotations

import torch

LONGEST = 3


def propose(history: torch.Tensor, sizes: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest matching ending.

    Args:
        history: prompt and output so far of each request; what lies past its size is never read as a draft. Shape:
            [requests, capacity]; int64.
        sizes: tokens of each request. Shape: [requests]; int64.
        count: most drafts wanted.

    Returns:
        The drafts, and how many of them count: none when no ending of one to three tokens occurred before. Shapes:
        [requests, count] and [requests]; int64.
    """
    capacity = history.shape[1]
    places = torch.arange(capacity, device=history.device)
    matches = places < (sizes - 1).unsqueeze(1)  # places where an earlier occurrence of the ending may end
    best = torch.full_like(sizes, -1)
    for length in range(1, LONGEST + 1):
        token = history.gather(1, (sizes - length).clamp(min=0).unsqueeze(1))
        equal = (history == token).roll(length - 1, 1)
        equal[:, : length - 1] = False
        matches = matches & equal & (sizes > length).unsqueeze(1)
        found = torch.where(matches, places, -1).amax(1)
        best = torch.where(found >= 0, found, best)
    available = torch.where(best >= 0, sizes - 1 - best, 0).clamp(max=count)
    wanted = (best + 1).unsqueeze(1) + torch.arange(count, device=history.device)
    return history.gather(1, wanted.clamp(max=capacity - 1)), available
