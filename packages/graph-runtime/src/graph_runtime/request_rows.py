"""How many rows of each static field a request has.

It owns the arithmetic between requests and rows. It loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .buffers import StaticBuffers

__all__ = ["RequestRows"]


class RequestRows:
    """Rows of static buffers by request.

    Args:
        buffers: The static buffers.
        per_request: Field to rows a request, where that is not 1; 0 for a field that is whole whatever the batch.
    """

    def __init__(self, buffers: StaticBuffers, per_request: Mapping[str, int]) -> None:
        self._buffers = buffers
        self._factors = {name: per_request.get(name, 1) for name in buffers.names}

    @property
    def capacity(self) -> int:
        """The most requests that every field holds."""
        factors = self._factors.items()
        return min((self._buffers.field(name).rows // factor for name, factor in factors if factor), default=0)

    def live(self, raw_bs: int) -> dict[str, int]:
        """Field to rows that so many requests load."""
        return {
            name: raw_bs * factor if factor else self._buffers.field(name).rows
            for name, factor in self._factors.items()
        }

    def views(self, bs: int) -> dict[str, torch.Tensor]:
        """Field to device view of the rows of a bucket."""
        return {
            name: self._buffers.view(name, bs * factor if factor else None) for name, factor in self._factors.items()
        }
