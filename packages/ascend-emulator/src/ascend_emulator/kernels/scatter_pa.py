"""npu_scatter_pa_kv_cache, its functional form, and npu_scatter_pa_cache: writing tokens into paged caches, ND or NZ.

This module owns the ops' refusals and the write of whole tokens. The compressed form with heads of different lengths
is not computed.
"""

from __future__ import annotations

import torch

from .caches import check_slots, nz_by_token, nz_width, write_slots
from .errors import KernelNotCovered
from .rules import declare, note, online, refuse

OP = "npu::npu_scatter_pa_kv_cache"
OP_FUNCTIONAL = "npu::npu_scatter_pa_kv_cache_functional"
OP_KEY = "npu::npu_scatter_pa_cache.value"
_FAMILY = "npu_scatter_pa_kv_cache[_functional], npu_scatter_pa_cache"
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32),
    *(torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2),
)
_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_DOC = online("torch_npu-npu_scatter_pa_kv_cache")

declare(
    _FAMILY,
    _DOC,
    "test_kernels_paged.py",
    {
        "scatter-pa-dtype": ("8-, 16- and 32-bit floats and integers", "cast keys, values and caches"),
        "scatter-pa-same-dtype": ("keys, values and caches of one dtype", "cast keys and values to the cache's dtype"),
        "scatter-pa-contiguous": ("contiguous tensors", "call .contiguous() on it; pass a cache itself"),
        "scatter-pa-mode": ("cache_mode 'PA_NZ', 'Norm' or None", "pass 'Norm' for caches (blocks, block_size, ...)"),
        "scatter-pa-slots-dtype": ("slots of dtype int32 or int64", "call .to(torch.int32) on the slots"),
        "scatter-pa-slots-shape": ("slots of shape (tokens,)", "pass one slot a token"),
        "scatter-pa-rank": ("keys and values of 3 axes alike in the first two, or of 4", "pass [tokens, heads, dim]"),
        "scatter-pa-cache": (
            "'Norm': caches (blocks, block_size, heads, dim); 'PA_NZ': (blocks, heads * dim / c0, block_size, c0)",
            "view the cache in the form that cache_mode names",
        ),
        "scatter-pa-nz": ("'PA_NZ': c0 of 32 bytes", "use 16 elements for 2-byte dtypes, 32 for 1-byte dtypes"),
    },
)
note(
    _FAMILY,
    "slots within [0, blocks * block_size)",
    _DOC,
    "past the end: a `DeviceFault` (507015), nothing is written; negative: skipped, as engines pad with -1 and "
    "vllm-ascend#15213 says of the op: test_kernels_paged.py",
)
note(_FAMILY, "no slot twice", _DOC, "not refused; the last token wins here")
note(
    _FAMILY,
    "caches of 4 axes only",
    _DOC,
    "'PA_NZ' takes (blocks, heads, dim / c0, block_size, c0) as well: the same bytes, and vLLM-Ascend passes it",
)
note(
    _FAMILY,
    "keys of 4 axes with compress_lens, seq_lens and compress_seq_offsets",
    _DOC,
    "not computed: `KernelNotCovered`: test_kernels_paged.py",
)


def _four_axes(name: str, op: str, cache: torch.Tensor, nz: bool) -> torch.Tensor:
    if nz and cache.dim() == 5:
        cache = cache.flatten(1, 2)
    if cache.dim() != 4:
        refuse(op, "scatter-pa-cache", name, f"shape {tuple(cache.shape)}")
    return cache


def _by_token(op: str, name: str, rows: torch.Tensor, cache: torch.Tensor, nz: bool) -> torch.Tensor:
    """Checks one cache against its rows and views it by token."""
    for argument, tensor in ((name, rows), (f"{name}_cache", cache)):
        if tensor.dtype not in _DTYPES:
            refuse(op, "scatter-pa-dtype", argument, tensor.dtype)
        if not tensor.is_contiguous():
            refuse(op, "scatter-pa-contiguous", argument, f"strides {tensor.stride()} of {tuple(tensor.shape)}")
    if rows.dtype != cache.dtype:
        refuse(op, "scatter-pa-same-dtype", name, f"{rows.dtype} beside a cache of {cache.dtype}")
    argument = f"{name}_cache"
    cache = _four_axes(argument, op, cache, nz)
    fits = f"{tuple(cache.shape)} for rows of {tuple(rows.shape)}"
    if not nz:
        if cache.shape[2:] != rows.shape[1:]:
            refuse(op, "scatter-pa-cache", argument, fits)
        return cache
    if cache.size(3) != nz_width(cache.dtype):
        refuse(op, "scatter-pa-nz", argument, f"c0 = {cache.size(3)} for {cache.dtype}")
    if cache.size(1) * cache.size(3) != rows.size(1) * rows.size(2):
        refuse(op, "scatter-pa-cache", argument, fits)
    return nz_by_token(cache)


def _scatter(
    op: str,
    parts: list[tuple[str, torch.Tensor, torch.Tensor]],
    slot_mapping: torch.Tensor,
    extras: dict[str, torch.Tensor | None],
    cache_mode: str | None,
) -> None:
    if cache_mode not in ("PA_NZ", "Norm", None):
        refuse(op, "scatter-pa-mode", "cache_mode", repr(cache_mode))
    first = parts[0][1]
    for name, rows, _ in parts:
        if rows.dim() not in (3, 4) or rows.dim() != first.dim() or rows.shape[:2] != first.shape[:2]:
            refuse(op, "scatter-pa-rank", name, f"shape {tuple(rows.shape)} beside a key of {tuple(first.shape)}")
    if first.dim() == 4:
        raise KernelNotCovered(op, "key", "a tensor of 4 axes (compressed form)")
    for name, extra in extras.items():
        if extra is not None:
            raise KernelNotCovered(op, name, f"a tensor of shape {tuple(extra.shape)}")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        refuse(op, "scatter-pa-slots-dtype", "slot_mapping", slot_mapping.dtype)
    if tuple(slot_mapping.shape) != (first.size(0),):
        refuse(op, "scatter-pa-slots-shape", "slot_mapping", f"{tuple(slot_mapping.shape)} for {first.size(0)} tokens")
    if not slot_mapping.is_contiguous():
        refuse(op, "scatter-pa-contiguous", "slot_mapping", f"strides {slot_mapping.stride()}")
    nz = cache_mode == "PA_NZ"
    views = [(_by_token(op, name, rows, cache, nz), rows, cache) for name, rows, cache in parts]
    slots = slot_mapping.long()
    for view, _, cache in views:
        check_slots(op, slots, cache, view.size(1), "slot_mapping")
    for view, rows, _ in views:
        same = _BYTES[rows.element_size()]  # integer views: not every dtype has an indexed write
        write_slots(view.view(same), slots, rows.view(same))


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Writes token i's key and value into slot ``slot_mapping[i]`` of the caches.

    Args:
        key: Shape: [tokens, heads, dim].
        value: Shape: [tokens, heads, value_dim]; dtype of the key.
        key_cache: 'Norm', None: Shape: [blocks, block_size, heads, dim]; 'PA_NZ': [blocks, heads * dim / c0,
            block_size, c0] with c0 of 32 bytes. *Mutated*.
        value_cache: likewise. *Mutated*.
        slot_mapping: Shape: [tokens]; int32 or int64. *Padding*: negative slots.
        compress_lens: not computed.
        compress_seq_offsets: not computed.
        seq_lens: not computed.
        cache_mode: 'PA_NZ', 'Norm' or None.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``; nothing is written then.

    Source:
        op-plugin, torch_npu-npu_scatter_pa_kv_cache.md.
    """
    extras = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens}
    _scatter(OP, [("key", key, key_cache), ("value", value, value_cache)], slot_mapping, extras, cache_mode)


def npu_scatter_pa_kv_cache_functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into copies of the caches, which are returned; see ``npu_scatter_pa_kv_cache``."""
    extras = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens}
    caches = key_cache.clone(), value_cache.clone()
    parts = [("key", key, caches[0]), ("value", value, caches[1])]
    _scatter(OP_FUNCTIONAL, parts, slot_mapping, extras, cache_mode)
    return caches


def npu_scatter_pa_cache(
    key: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    key_cache: torch.Tensor,
) -> torch.Tensor:
    """Writes keys alone into an ND cache; see ``npu_scatter_pa_kv_cache``. *Mutates* and returns ``key_cache``."""
    extras = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens}
    _scatter(OP_KEY, [("key", key, key_cache)], slot_mapping, extras, "Norm")
    return key_cache


KERNELS = {
    OP: npu_scatter_pa_kv_cache,
    OP_FUNCTIONAL: npu_scatter_pa_kv_cache_functional,
    OP_KEY: npu_scatter_pa_cache,
}
