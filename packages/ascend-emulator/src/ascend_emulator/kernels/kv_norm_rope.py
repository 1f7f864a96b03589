"""npu_kv_rmsnorm_rope_cache in its three forms: normalise the latent part, rotate the rope part, write both caches.

This module owns the ops' refusals and where each token goes in every cache mode. Quantised caches and the form with a
separate v are not computed.
"""

from __future__ import annotations

import torch

from .caches import check_slots, nz_width, write_slots
from .errors import KernelNotCovered
from .faults import fill_poison_
from .rope import rotate_interleaved
from .rules import declare, note, online, refuse

OP = "npu::npu_kv_rmsnorm_rope_cache"
OP_V2 = "npu::npu_kv_rmsnorm_rope_cache_v2"
OP_FUNCTIONAL = "npu::npu_kv_rmsnorm_rope_cache_v2_functional"
_FAMILY = "npu_kv_rmsnorm_rope_cache[_v2[_functional]]"
_DOC = online("torch_npu-npu_kv_rmsnorm_rope_cache")
_TEST = "test_kernels_rope.py"
RMS, ROPE = 512, 64
_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")

declare(
    _FAMILY,
    _DOC,
    _TEST,
    {
        "kvnorm-dtype": (
            "float16 or bfloat16 throughout (int8 caches in the quantised form)",
            "cast them to one dtype",
        ),
        "kvnorm-index-dtype": ("an int64 index", "call .long() on the index"),
        "kvnorm-kv": ("kv (B, 1, S, 576), gamma (512,), cos and sin (B, 1, S, 64)", "reshape them"),
        "kvnorm-mode": ("cache_mode Norm, PA, PA_BNSD, PA_NZ, PA_BLK_BNSD or PA_BLK_NZ", "spell a supported mode"),
        "kvnorm-cache": (
            "Norm: k_cache (B, 1, L, 64) and ckv_cache (B, 1, L, 512), L >= S; else (blocks, block_size, 1, 64) and "
            "(blocks, block_size, 1, 512)",
            "reshape the caches",
        ),
        "kvnorm-blocks": ("paged: at least B * ceil(S / block_size) blocks", "pass the whole cache"),
        "kvnorm-index": (
            "Norm: an index (B, S); PA*: (B * S,); PA_BLK*: (B * ceil(S / block_size),)",
            "reshape the index",
        ),
        "kvnorm-offset": ("no k_rope_offset, no c_kv_offset", "leave them None"),
        "kvnorm-scales": ("k_rope_scale and c_kv_scale both or neither", "pass both"),
    },
)
note(_FAMILY, "no index twice", _DOC, "not refused; the last token wins here")
note(
    _FAMILY,
    "(not documented) negative indices, and indices past the cache",
    "—",
    "negative: that token is not written, as engines pad; past the end: a `DeviceFault` (507015): " + _TEST,
)
note(_FAMILY, "PA_BLK*: an index names the first slot of a block, whose tokens follow", _DOC, "as written: " + _TEST)
note(_FAMILY, "PA_NZ, PA_BLK_NZ: the caches' bytes are [blocks, width / 16, block_size, 1, 16]", _DOC, "as written")
note(_FAMILY, "quantised caches; a separate v", _DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(
    _FAMILY,
    "is_output_kv False: the two intermediate results mean nothing; in mode Norm they never do",
    _DOC,
    "they are poison: " + _TEST,
)
note(
    "npu_kv_rmsnorm_rope_cache",
    "the caches are updated in place",
    _DOC,
    "they are, although version 1's schema does not say so",
)


def _check(
    op: str,
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    caches: dict[str, torch.Tensor],
    cache_mode: str,
    options: dict[str, object],
) -> None:
    if (options["k_rope_scale"] is None) != (options["c_kv_scale"] is None):
        refuse(op, "kvnorm-scales", "c_kv_scale", "one of the two")
    for name in ("k_rope_offset", "c_kv_offset"):
        if options[name] is not None:
            refuse(op, "kvnorm-offset", name, "a tensor")
    for name, value in options.items():
        if value is not None:
            raise KernelNotCovered(op, name, "a value (quantised caches and a separate v are not computed)")
    tensors = {"kv": kv, "gamma": gamma, "cos": cos, "sin": sin, **caches}
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != kv.dtype:
            refuse(op, "kvnorm-dtype", name, tensor.dtype)
    if index.dtype != torch.int64:
        refuse(op, "kvnorm-index-dtype", "index", index.dtype)
    if cache_mode not in _MODES:
        refuse(op, "kvnorm-mode", "cache_mode", repr(cache_mode))
    batch, seq = (kv.size(0), kv.size(2)) if kv.dim() == 4 else (0, 0)
    wanted = {
        "kv": (batch, 1, seq, RMS + ROPE),
        "gamma": (RMS,),
        "cos": (batch, 1, seq, ROPE),
        "sin": (batch, 1, seq, ROPE),
    }
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            refuse(op, "kvnorm-kv", name, f"shape {tuple(tensors[name].shape)}")
    for (name, cache), width in zip(caches.items(), (ROPE, RMS), strict=True):
        fits = cache.dim() == 4 and cache.is_contiguous() and cache.size(3) == width
        if cache_mode == "Norm":
            fits = fits and tuple(cache.shape[:2]) == (batch, 1) and cache.size(2) >= seq
        else:
            fits = fits and cache.size(2) == 1
        if not fits or cache.shape[:3] != caches["k_cache"].shape[:3]:
            refuse(op, "kvnorm-cache", name, f"shape {tuple(cache.shape)} in mode {cache_mode}")
    rows: tuple[int, ...] = (batch, seq)
    if cache_mode != "Norm":
        size = caches["k_cache"].size(1)
        blocks = batch * -(-seq // size)
        if caches["k_cache"].size(0) < blocks:
            refuse(op, "kvnorm-blocks", "k_cache", f"{caches['k_cache'].size(0)} blocks, {blocks} needed")
        rows = (blocks,) if "BLK" in cache_mode else (batch * seq,)
    if tuple(index.shape) != rows:
        refuse(op, "kvnorm-index", "index", f"shape {tuple(index.shape)}, wanted {rows} in mode {cache_mode}")


def _slots(index: torch.Tensor, cache_mode: str, batch: int, seq: int, size: int) -> torch.Tensor:
    """Slot of each token, token by token; negative for none. Norm: over (B, L)."""
    if cache_mode == "Norm":
        return torch.where(index < 0, index, index + torch.arange(batch).unsqueeze(1) * size).view(-1)
    if "BLK" not in cache_mode:
        return index
    starts = index.view(batch, -1).repeat_interleave(size, 1)[:, :seq]
    return torch.where(starts < 0, starts, starts + torch.arange(seq) % size).reshape(-1)


def _run(
    op: str,
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
    options: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    caches = {"k_cache": k_cache, "ckv_cache": ckv_cache}
    _check(op, kv, gamma, cos, sin, index, caches, cache_mode, options)
    batch, seq = kv.size(0), kv.size(2)
    latent = kv[..., :RMS].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    rows = rotate_interleaved(kv[..., RMS:], cos, sin).to(kv.dtype), latent.to(kv.dtype)
    size = k_cache.size(2 if cache_mode == "Norm" else 1)
    slots = _slots(index, cache_mode, batch, seq, size)
    if cache_mode == "Norm" and index.numel() and int(index.max()) >= size:
        past = torch.where(index.view(-1) >= size, batch * size + index.view(-1), slots)
        check_slots(op, past, k_cache, size, "index")
    check_slots(op, slots, k_cache, size, "index")
    for cache, part in zip((k_cache, ckv_cache), rows, strict=True):
        if cache_mode.endswith("NZ"):
            c0 = nz_width(cache.dtype)
            view = cache.view(cache.size(0), cache.size(3) // c0, size, c0).permute(0, 2, 1, 3)
        else:
            view = cache.view(-1, size, cache.size(3))
        write_slots(view, slots, part.view(batch * seq, -1))
    if is_output_kv and cache_mode != "Norm":
        return rows
    return fill_poison_(torch.empty_like(rows[0])), fill_poison_(torch.empty_like(rows[1]))


def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-05,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalises the latent part of kv, rotates its rope part, and writes both into their caches.

    Args:
        kv: 512 latent elements, then 64 of rope, interleaved. Shape: [B, 1, S, 576]; float16 or bfloat16.
        gamma: Shape: [512].
        cos: Shape: [B, 1, S, 64].
        sin: Shape: [B, 1, S, 64].
        index: where tokens go. Norm: positions, shape [B, S]; PA, PA_BNSD, PA_NZ: slots, shape [B * S]; PA_BLK_*: first
            slots of blocks, shape [B * ceil(S / block_size)]; int64. *Padding*: negative.
        k_cache: rope parts. Norm: Shape: [B, 1, L, 64]; else [blocks, block_size, 1, 64]. *Mutated*.
        ckv_cache: latent parts, likewise 512 wide. *Mutated*.
        k_rope_scale: not computed.
        c_kv_scale: not computed.
        k_rope_offset: None.
        c_kv_offset: None.
        v: not computed.
        epsilon: added to the mean square.
        cache_mode: Norm, PA, PA_BNSD, PA_NZ, PA_BLK_BNSD or PA_BLK_NZ.
        is_output_kv: whether the rotated and normalised parts are wanted (not in mode Norm).

    Returns:
        k_cache, ckv_cache, the rotated parts [B, 1, S, 64] and the normalised parts [B, 1, S, 512] (poison when not
        wanted).

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``; nothing is written then.

    Source:
        op-plugin, torch_npu-npu_kv_rmsnorm_rope_cache.md.
    """
    options = _options(k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v)
    tensors = kv, gamma, cos, sin, index, k_cache, ckv_cache
    return k_cache, ckv_cache, *_run(OP, *tensors, epsilon, cache_mode, is_output_kv, options)


def _options(*values: object) -> dict[str, object]:
    names = ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")
    return dict(zip(names, values, strict=True))


def npu_kv_rmsnorm_rope_cache_v2(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-05,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without the caches among the results; see ``npu_kv_rmsnorm_rope_cache``. *Mutates* the caches."""
    options = _options(k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v)
    options |= {"k_cache_dtype": k_cache_dtype, "ckv_cache_dtype": ckv_cache_dtype}
    tensors = kv, gamma, cos, sin, index, k_cache, ckv_cache
    return _run(OP_V2, *tensors, epsilon, cache_mode, is_output_kv, options)


def npu_kv_rmsnorm_rope_cache_v2_functional(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-05,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same into copies of the caches; returns rotated and normalised parts, then the copies."""
    options = _options(k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v)
    options |= {"k_cache_dtype": k_cache_dtype, "ckv_cache_dtype": ckv_cache_dtype}
    caches = k_cache.clone(), ckv_cache.clone()
    tensors = kv, gamma, cos, sin, index, *caches
    return *_run(OP_FUNCTIONAL, *tensors, epsilon, cache_mode, is_output_kv, options), *caches


UNDECLARED_WRITES = {OP: ("k_cache", "ckv_cache")}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {
    OP: npu_kv_rmsnorm_rope_cache,
    OP_V2: npu_kv_rmsnorm_rope_cache_v2,
    OP_FUNCTIONAL: npu_kv_rmsnorm_rope_cache_v2_functional,
}
