"""Ragged requests for the tests of sparse attention: laid out as the operators want, and row by row. Not a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ascend_emulator.kernels.faults import fill_poison_
from hypothesis import strategies as st

INT32 = torch.int32


def draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Batch:
    """Ragged requests laid out as the op wants them, and each request's own rows for the loops."""

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        layout: str,
        paged: bool,
        keys: dict[str, list[torch.Tensor]],
    ) -> None:
        self.q_lens, self.kv_lens, self.layout, self.keys = q_lens, kv_lens, layout, keys
        self.options: dict[str, Any] = {"layout_query": layout, "layout_kv": "PA_BSND" if paged else layout}
        counts = {"query": q_lens, "kv": kv_lens}
        for name, lens in counts.items():
            cumulative = layout == "TND" and not (paged and name == "kv")
            given_lens = np.cumsum(lens).tolist() if cumulative else lens
            self.options[f"actual_seq_lengths_{name}"] = torch.tensor(given_lens, dtype=INT32)
        if paged:
            width = max(1, -(-max(kv_lens) // 16))
            order = torch.randperm(len(kv_lens) * width, generator=torch.Generator().manual_seed(1))
            self.table = (order.view(len(kv_lens), width) + 1).to(INT32)
            self.options["block_table"] = self.table

    def queries(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.layout == "TND":
            return torch.cat(parts)
        whole = torch.zeros(len(parts), max(self.q_lens), *parts[0].shape[1:], dtype=parts[0].dtype)
        for row, part in enumerate(parts):
            whole[row, : part.size(0)] = part
        return whole

    def key(self, name: str) -> torch.Tensor:
        parts = self.keys[name]
        width, dtype = parts[0].size(1), parts[0].dtype
        if "block_table" in self.options:
            cache = fill_poison_(torch.empty(int(self.table.max()) + 1, 16, 1, width, dtype=dtype))
            for row, part in enumerate(parts):
                for token in range(part.size(0)):
                    cache[int(self.table[row, token // 16]), token % 16, 0] = part[token]
            return cache
        if self.layout == "TND":
            return torch.cat(parts).unsqueeze(1)
        whole = fill_poison_(torch.empty(len(parts), max(1, max(self.kv_lens)), 1, width, dtype=dtype))
        for row, part in enumerate(parts):
            whole[row, : part.size(0), 0] = part
        return whole

    def row(self, out: torch.Tensor, request: int, i: int) -> torch.Tensor:
        return out[sum(self.q_lens[:request]) + i] if self.layout == "TND" else out[request, i]

    def sees(self, request: int, i: int, mode: int) -> int:
        """How many keys token i sees."""
        return max(0, self.kv_lens[request] - self.q_lens[request] + i + 1) if mode == 3 else self.kv_lens[request]


FORMS = st.tuples(st.sampled_from(["BSND", "TND"]), st.booleans())
LENS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=3).filter(
    lambda x: any(k for _, k in x)
)
