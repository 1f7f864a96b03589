"""`alloc_extend_kernel`, launched as a Triton kernel is, over the library's own operator of the same meaning."""

from __future__ import annotations

import torch

__all__ = ["alloc_extend_kernel"]


class _Kernel:
    """`kernel[grid](…)`: the library runs one program a request, here `npu::alloc_extend` runs once."""

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
        used = torch.zeros(1, dtype=torch.int64, device=out_indices.device)
        inputs = (tensor.long() for tensor in (pre_lens, seq_lens, last_loc, free_pages))
        torch.ops.npu.alloc_extend(*inputs, page_size, out_indices, used)


alloc_extend_kernel = _Kernel()
