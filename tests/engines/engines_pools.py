"""The same pool twice: SGLang's class and ours, of one geometry, and rows whose bytes tell where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch_npu
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import MhaPool
from kv_pool.writers import WriterName
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool

__all__ = ["LAYERS", "NPU", "PAGE", "Pair", "rows"]

NPU = "npu:0"
LAYERS, PAGE = 3, 16
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DType = Literal["float16", "bfloat16"]


class Pair:
    """One geometry on both sides.

    Args:
        heads: KV heads.
        dims: Width of K.
        value_dims: Width of V.
        size: Tokens; page 0 comes on top.
        start: First layer of this pipeline stage.
        writer: Ours.
        dtype: Of the rows.
    """

    def __init__(
        self,
        *,
        heads: int = 2,
        dims: int = 32,
        value_dims: int = 32,
        size: int = 8 * PAGE,
        start: int = 0,
        writer: WriterName = "auto",
        dtype: DType = "float16",
    ) -> None:
        self.heads, self.dims, self.value_dims, self.dtype = heads, dims, value_dims, TORCH_DTYPES[dtype]
        self.layers = tuple(range(start, start + LAYERS))
        self.theirs: Any = NPUMHATokenToKVPool(
            size=size, page_size=PAGE, dtype=self.dtype, head_num=heads, head_dim=dims, v_head_dim=value_dims,
            layer_num=LAYERS, device="npu", enable_memory_saver=False, start_layer=start, end_layer=start + LAYERS - 1,
        )  # fmt: skip
        specs = [
            ComponentSpec("key", layer_ids=self.layers, dtype=dtype, total_heads=heads, dims=dims),
            ComponentSpec("value", layer_ids=self.layers, dtype=dtype, total_heads=heads, dims=value_dims),
        ]
        layout = ModelLayout(specs, page_size=PAGE, fingerprint="engines")
        self.ours = MhaPool(layout, size=size, device=NPU, placement=Placement(), writer=writer)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the same rows on both sides; both must leave their arguments as they were."""
        before = [tensor.cpu() for tensor in (slots, key, value)]
        self.theirs.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, key, value)
        self.ours.write(layer, slots, key, value)
        for tensor, old in zip((slots, key, value), before, strict=True):
            assert torch.equal(tensor.cpu(), old)

    def storages(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """(theirs, ours) on the host for K and V. Shape: [layers, pages, PAGE, heads, width]."""
        torch_npu.npu.synchronize()
        key, value = self.theirs.get_hicache_transfer_buffers()
        return {"key": (key.cpu(), self.ours.key_storage.cpu()), "value": (value.cpu(), self.ours.value_storage.cpu())}


def rows(slots: list[int], heads: int, dims: int, dtype: torch.dtype, *, salt: int) -> torch.Tensor:
    """Rows of a running number, exact in 16 bits. Shape: [slots, heads, dims]; on the NPU."""
    count = len(slots) * heads * dims
    numbers = torch.arange(salt, salt + count).remainder(509) - 254
    return numbers.to(dtype).view(len(slots), heads, dims).to(NPU)
