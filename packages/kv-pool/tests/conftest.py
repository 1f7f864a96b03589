"""Owns what the pool tests share: labelled rows, the plain-loop reference write, and a layout builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool.writers import Writer

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers on the host, so that NaN patterns compare too."""
    return tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()])


def labels(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that tell where they belong: a running number, mixed with a seed, as raw bits of `dtype`."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    numbers = (torch.arange(count, dtype=torch.int64) * 7 + seed * 131 + 1) % 2 ** (8 * size - 2)
    labelled: torch.Tensor = numbers.to(BITS[size]).view(dtype).reshape(tuple(shape))
    return labelled


def loop_write(cache: torch.Tensor, slots: Sequence[int], rows: torch.Tensor) -> None:
    """The meaning of a write, said once more: element by element, on integers."""
    page_size = cache.shape[1]
    for token, slot in enumerate(slots):
        for head in range(cache.shape[2]):
            for dim in range(cache.shape[3]):
                cache[slot // page_size, slot % page_size, head, dim] = rows[token, head, dim]


@pytest.fixture
def check_writer() -> Callable[..., None]:
    """A writer, on a device, equals the plain loop: everything else keeps its bytes, inputs stay untouched."""

    def check(
        writer: Writer, device: str, dtype: torch.dtype, *, slot_dtype: torch.dtype = torch.int64, strided: bool = False
    ) -> None:
        pages, page_size, heads, dims, value_dims, margin = 5, 4, 3, 16, 32, 64
        slots = [17, 4, 5, 19, 8, 11, 0]
        buffers, caches = [], []
        for seed, width in ((1, dims), (2, value_dims)):
            count = pages * page_size * heads * width
            buffer = labels([count + 2 * margin], dtype, seed).to(device)
            buffers.append(buffer)
            caches.append(buffer[margin : margin + count].view(pages, page_size, heads, width))
        expected = [bits(buffer).clone() for buffer in buffers]
        rows = [labels([len(slots), heads, width], dtype, seed) for seed, width in ((3, dims), (4, value_dims))]
        for flat, cache, row in zip(expected, caches, rows, strict=True):
            loop_write(flat[margin : margin + cache.numel()].view(cache.shape), slots, bits(row))
        given = [row.to(device) for row in rows]
        if strided:
            given = [row.transpose(1, 2).contiguous().transpose(1, 2) for row in given]
        before = [bits(row) for row in given]
        index = torch.tensor(slots, dtype=slot_dtype, device=device)
        writer.write(caches[0], caches[1], index, given[0], given[1])
        for buffer, flat in zip(buffers, expected, strict=True):
            assert torch.equal(bits(buffer), flat)
        for row, old in zip(given, before, strict=True):
            assert torch.equal(bits(row), old)
        assert index.tolist() == slots and index.dtype == slot_dtype

    return check


@pytest.fixture
def make_layout() -> Callable[..., ModelLayout]:
    """Build a layout with K and V of unequal width, and a draft part of other widths when asked."""

    def make(
        *,
        layers: Sequence[int] = (0, 1),
        heads: int = 2,
        dims: int = 8,
        value_dims: int = 6,
        dtype: str = "float16",
        page_size: int = 4,
        draft: Sequence[int] = (),
    ) -> ModelLayout:
        shared: Any = {"layer_ids": layers, "dtype": dtype, "total_heads": heads}
        specs = [ComponentSpec("key", dims=dims, **shared), ComponentSpec("value", dims=value_dims, **shared)]
        if draft:
            own: Any = {"layer_ids": draft, "dtype": "float32", "total_heads": 1}
            specs += [ComponentSpec("key", "draft", dims=4, **own), ComponentSpec("value", "draft", dims=3, **own)]
        return ModelLayout(specs, page_size=page_size, fingerprint="test")

    return make


@pytest.fixture
def as_bits() -> Callable[[torch.Tensor], torch.Tensor]:
    """The bytes of a tensor as integers on the host."""
    return bits


@pytest.fixture
def make_labels() -> Callable[..., torch.Tensor]:
    """Values that tell where they belong, as raw bits of a dtype."""
    return labels
