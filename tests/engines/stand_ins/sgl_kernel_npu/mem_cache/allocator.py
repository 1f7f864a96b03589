"""`alloc_extend_kernel`, launched as a Triton kernel is: the meaning of the library's kernel as plain loops."""

from __future__ import annotations

import torch

__all__ = ["alloc_extend_kernel"]


class _Kernel:
    """`kernel[grid](…)`; the library runs one program a request."""

    def __getitem__(self, grid: tuple[int]) -> _Kernel:
        return self

    def __call__(
        self,
        pre_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out_indices: torch.Tensor,
        bs_upper: int,
        page_size: int,
        max_num_extend_tokens: int,
    ) -> None:
        """Continue each request's last page, then take free pages in order. Mutates `out_indices`."""
        pages = iter(free_pages.tolist())
        slots = []
        for start, stop, slot in zip(pre_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
            for token in range(start, stop):
                slot = next(pages) * page_size if token % page_size == 0 else slot + 1
                slots.append(slot)
        out_indices.copy_(torch.tensor(slots, dtype=out_indices.dtype))


alloc_extend_kernel = _Kernel()
