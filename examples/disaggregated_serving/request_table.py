"""What the device knows about each running request: its tokens and how many of them are committed.

The captured step reads and writes this table, so that a step can be launched before the host has read what the step
before it accepted. Row 0 belongs to padded rows and stays zero. It does not know pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .drafter import propose

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Window:
    """The tokens that a step verifies for each request.

    Attributes:
        ids: the last known token, whose KV is not in the pool yet, then the drafts. Shape: [requests, window]; int64.
        num_drafts: drafts that count. Shape: [requests]; int64.
        positions: Shape: [requests, window]; int64.
        kv_lens: KV tokens of each request, the window included. Shape: [requests]; int64.
    """

    ids: torch.Tensor
    num_drafts: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor


class RequestTable:
    """Rows of tokens on the device; rows are taken and given back on the host.

    Attributes:
        drafts: what draft layers proposed for each row. Shape: [requests + 1, draft layers]; int64.
    """

    def __init__(self, *, requests: int, capacity: int, device: torch.device, draft_layers: int = 0) -> None:
        """Memory for `requests` requests of `capacity` tokens each."""
        self.drafts = torch.zeros(requests + 1, draft_layers, dtype=torch.int64, device=device)
        self._free = list(range(requests, 0, -1))
        self._tokens = torch.zeros(requests + 1, capacity, dtype=torch.int64, device=device)
        self._sizes = torch.zeros(requests + 1, dtype=torch.int64, device=device)

    @property
    def free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def admit(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> int:
        """Give a request a row, after everything that was launched before. Returns the row.

        Args:
            tokens: prompt and first tokens.
            drafts: what the draft layers proposed after them, one a layer.
        """
        row = self._free.pop()
        self._tokens[row, : len(tokens)] = torch.tensor(tokens, device=self._tokens.device)
        self._sizes[row] = len(tokens)
        if drafts:
            self.drafts[row] = torch.tensor(drafts, device=self.drafts.device)
        return row

    def release(self, row: int) -> None:
        """Take a row back that no step in flight uses."""
        self._free.append(row)

    def window(self, rows: torch.Tensor, width: int) -> Window:
        """What to verify next for `rows`; row 0 gives a window at position 0. Shape of rows: [requests]; int64."""
        tokens, sizes = self._tokens[rows], self._sizes[rows]
        start = (sizes - 1).clamp(min=0)
        last = tokens.gather(1, start.unsqueeze(1))
        if self.drafts.shape[1] and width > 1:
            ids, num_drafts = torch.cat([last, self.drafts[rows]], 1), torch.full_like(sizes, width - 1)
        elif width == 1:
            ids, num_drafts = last, torch.zeros_like(sizes)
        else:
            drafts, num_drafts = propose(tokens, sizes, width - 1)
            ids = torch.cat([last, drafts], 1)
        positions = start.unsqueeze(1) + torch.arange(width, device=tokens.device)
        return Window(ids, num_drafts, positions, start + width)

    def commit(self, rows: torch.Tensor, window: Window, predicted: torch.Tensor, correct: torch.Tensor) -> None:
        """Keep the accepted drafts and the token after them.

        Args:
            rows: as given to `window`.
            window: what `window` gave.
            predicted: the model's choice after each token of the window. Shape: [requests, window]; int64.
            correct: accepted drafts. Shape: [requests]; int64.
        """
        live = rows > 0
        # Past the accepted ones lie tokens that nobody reads: the next window overwrites them.
        self._tokens[rows.unsqueeze(1), window.positions + 1] = predicted * live.unsqueeze(1)
        self._sizes[rows] = torch.where(live, self._sizes[rows] + correct + 1, 0)
