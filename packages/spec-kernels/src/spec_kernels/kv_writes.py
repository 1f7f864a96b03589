"""Owns the contract of writing new keys and values into paged caches by slot.

It does not allocate slots, and it does not quantise: rows come in the dtype of the cache.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from spec_kernels._checks import check_disjoint, check_tensor
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import ShapeError, UnsupportedByOp

__all__ = ["NpuWriter", "npu_writer", "write_kv"]

NpuWriter: TypeAlias = Literal["reshape_and_cache", "scatter_pa", "scatter_nd"]
_TILE = 16
_RESHAPED = (torch.float16, torch.bfloat16, torch.int8)
_PAGED = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_valid: torch.Tensor | None = None,
    tiled: bool = False,
    backend: BackendName | None = None,
) -> None:
    """Write token `i` of key and value into slot `slots[i]` of the caches.

    Slot `s` is token `s % page_size` of page `s // page_size`. In tiled caches (NZ) the dims of a token lie in pieces
    of 16, each beside the same piece of the page's other tokens.

    Args:
        key: Shape: [tokens, heads, dims]; dtype of the cache, any (fp16, bf16, fp32, int8, fp8); any strides.
        value: Shape: [tokens, heads, value_dims]; dtype of its cache; any strides.
        key_cache: Contiguous. Shape: [pages, page_size, heads, dims], or [pages, heads * dims / 16, page_size, 16] when
            tiled.
        value_cache: Likewise for value_dims; contiguous.
        slots: Distinct, those of the reserved page 0 apart. Shape: [tokens]; dtype int32 or int64.
        num_valid: Leading tokens that are real; others are not written. Shape: [1]; dtype int32 or int64. None: all.
        tiled: Whether the caches are tiled.
        backend: Insist on a backend.

    Padding: a negative slot, and one past the cache, writes nothing. Zero tokens launch nothing.

    Mutates: both caches.

    Raises:
        ShapeError: Widths, heads or pages do not fit together, or a cache is not contiguous.
        DtypeError: Rows are not in the dtype of their cache.
        DeviceError, AliasError: See `cache_locs.uniform_cache_locs`.
        UnsupportedByOp: (npu, when insisted on) No operator takes the call; see `npu_writer`.

    Source: contracts.md §4.2; field_faults E08, E09.
    """
    check_tensor("slots", slots, ("tokens",))
    tokens, device = int(slots.shape[0]), slots.device
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        check_tensor(name, rows, (tokens, "heads", "dims"), dtypes=(cache.dtype,), device=device)
        heads, dims = (int(size) for size in rows.shape[1:])
        if tiled and heads * dims % _TILE:
            raise ShapeError(
                name,
                given=f"{heads * dims} values a token",
                expected=f"a multiple of {_TILE} in tiled caches",
                consequence="the last piece would run into the next token",
                remedy="pad the head dim, or use caches that are not tiled",
            )
        shape = ("pages", heads * dims // _TILE, "page_size", _TILE) if tiled else ("pages", "page_size", heads, dims)
        check_tensor(f"{name}_cache", cache, shape, dtypes=(cache.dtype,), device=device)
        if not cache.is_contiguous():
            raise ShapeError(
                f"{name}_cache",
                given=f"strides {cache.stride()}",
                expected="a contiguous cache",
                consequence="a slot would name another token's bytes",
                remedy="pass a layer's view of the pool's storage",
            )
    page_axis = 2 if tiled else 1
    places = [(int(cache.shape[0]), int(cache.shape[page_axis])) for cache in (key_cache, value_cache)]
    if places[0] != places[1]:
        raise ShapeError(
            "value_cache",
            given=f"{places[1][0]} pages of {places[1][1]}",
            expected=f"{places[0][0]} pages of {places[0][1]} like key_cache",
            consequence="K and V of a token would lie in different places",
            remedy="pass both caches of one layer",
        )
    inputs = {"key": key, "value": value, "slots": slots}
    if num_valid is not None:
        check_tensor("num_valid", num_valid, (1,), device=device)
        inputs["num_valid"] = num_valid
    check_disjoint({"key_cache": key_cache, "value_cache": value_cache}, inputs)
    chosen = choose("write_kv", device, backend)
    if chosen == "npu" and npu_writer(key, value, tiled=tiled) is None:
        if backend is not None:
            raise UnsupportedByOp(
                "key, value",
                given=f"{key.dtype} and {value.dtype}, tiled={tiled}",
                expected="in tiled caches, a 16-bit dtype for both and equal heads",
                consequence="the device's operator refuses it",
                remedy="leave backend out",
            )
        chosen = "native"
    if tokens and key_cache.shape[0]:
        load("write_kv", chosen)(key, value, key_cache, value_cache, slots, num_valid, tiled)


def npu_writer(key: torch.Tensor, value: torch.Tensor, *, tiled: bool) -> NpuWriter | None:
    """Return which of torch_npu's operators writes such rows, or None.

    Tiles of the device's operator hold 32 bytes, so those of 16 values are its own in 16-bit dtypes only. Unequal heads
    or dtypes of K and V go cache by cache.

    Args:
        key: See `write_kv`.
        value: See `write_kv`.
        tiled: See `write_kv`.
    """
    alike = key.dtype == value.dtype and key.shape[1] == value.shape[1]
    if tiled:
        return "scatter_pa" if alike and key.dtype in (torch.float16, torch.bfloat16) else None
    if alike and key.dtype in _RESHAPED:
        return "reshape_and_cache"
    return "scatter_pa" if alike and key.dtype in _PAGED else "scatter_nd"
