"""npu_mla_prolog_v2, npu_mla_prolog_v3: from hidden states to the queries and the cached keys of latent attention.

Long because three forms with eleven tensors each share one set of checks.

This module owns the ops' refusals and where each token goes in every cache mode. Products are summed in float32 and
rounded where the next product takes bfloat16. Quantised forms are not computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import pose
from .caches import check_slots, nz_width, write_slots
from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .fia_run import not_covered
from .rope import rotate_interleaved
from .rules import declare, note, online, refuse

OP_V2 = "npu::npu_mla_prolog_v2"
OP_V3 = "npu::npu_mla_prolog_v3"
OP_FUNCTIONAL = "npu::npu_mla_prolog_v3_functional"
_FAMILY = "npu_mla_prolog_v2, npu_mla_prolog_v3[_functional]"
_V2, _V3 = "npu_mla_prolog_v2", "npu_mla_prolog_v3[_functional]"
_V2_DOC = online("torch_npu-npu_mla_prolog_v2")
_V3_DOC = online("torch_npu-npu_mla_prolog_v3")
_DESIGN = "ops-transformer c29bc10, attention/mla_prolog_v3/README.md"
_KERNEL = "ops-transformer c29bc10, attention/mla_prolog/op_kernel/service_scatter_cache.h"
_TEST = "test_kernels_mla_prolog.py"
_LATENT, _ROPE = 512, 64
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_T = torch.Tensor
_Tensors = tuple[_T, _T, _T, _T, _T, _T, _T, _T, _T, _T, _T]
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_NARROW = (torch.int8, torch.uint8, torch.float8_e4m3fn)

declare(
    _FAMILY,
    f"{_V2_DOC}; {_V3_DOC}",
    _TEST,
    {
        "prolog-dtype": ("bfloat16 throughout, unless quantised; an int64 cache_index", "cast them"),
        "prolog-token": (
            "token_x (T, He) or (B, S, He), B at most 65536; rope_sin and rope_cos (…, 64) beside it",
            "reshape them",
        ),
        "prolog-weights": (
            "weight_dq (He, Hcq), weight_uq_qr (Hcq, N * (D + 64)), weight_uk (N, D, 512), weight_dkv_kr (He, 576), "
            "rmsnorm_gamma_cq (Hcq,), rmsnorm_gamma_ckv (512,)",
            "reshape them",
        ),
        "prolog-heads": ("N = 1, 2, 4, 8, 16, 32, 64 or 128 heads", "split the heads otherwise"),
        "prolog-index": (
            "PA_BSND, PA_NZ: an index (T,) or (B, S) as token_x; PA_BLK_*: one a block, (sum(ceil(S_i / block_size)),) "
            "or (B, ceil(S / block_size)); BSND, TND: none",
            "reshape the index",
        ),
        "prolog-cache": (
            "PA*: caches (blocks, block_size, 1, 512) and (blocks, block_size, 1, 64); BSND: (B, S, 1, …); TND: "
            "(T, 1, …)",
            "reshape the caches",
        ),
    },
)
declare(
    _V2,
    _V2_DOC,
    _TEST,
    {
        "prolog-sizes": ("He = 7168, Hcq = 1536, D = 128, S at most 16, T at most 1048576", "use version 3"),
        "prolog-block": ("a block_size of 16 or 128", "use version 3, or another block size"),
        "prolog-mode": ("cache_mode PA_BSND or PA_NZ", "use version 3, or spell a supported mode"),
    },
)
declare(
    _V3,
    _V3_DOC,
    _TEST,
    {
        "prolog-v3-sizes": (
            "He of 1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 or 8192; Hcq of 1536 or 2048; D of 128 or 192",
            "project with plain matrix products",
        ),
        "prolog-v3-block": ("a block_size that is a multiple of 16, from 16 to 1024", "use another block size"),
        "prolog-v3-mode": (
            "cache_mode PA_BSND, PA_NZ, PA_BLK_BSND, PA_BLK_NZ, BSND beside (B, S, He) or TND beside (T, He)",
            "spell a supported mode",
        ),
        "prolog-v3-lengths": (
            "PA_BLK_* beside (T, He): an int32 actual_seq_len (B,) of running sums; it is for that alone",
            "pass the ends of the sequences",
        ),
        "prolog-v3-contiguous": ("contiguous tensors", "call .contiguous()"),
    },
)
note(_FAMILY, "quantised inputs, caches and queries", _V3_DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(_FAMILY, "weights in format FRACTAL_NZ", _V3_DOC, "not checked: a format cast keeps values here")
note(
    _FAMILY,
    "cache_index within the cache",
    _V3_DOC,
    "past the end: a `DeviceFault` (507015); negative: that token is not written, as in the device's kernel "
    f"({_KERNEL}): {_TEST}",
)
note(_FAMILY, "PA_NZ, PA_BLK_NZ: the caches' bytes are [blocks, width / 16, block_size, 1, 16]", _V3_DOC, "as written")
note(_V2, "the caches are updated in place", _V2_DOC, "they are, although the schema does not say so: " + _TEST)
note(_V2, "dequant_scale_q_nope of shape (1,) without quantisation", _V2_DOC, "it is poison")
note(
    _V3,
    "results that are not asked for",
    "torch_npu 2.12.0, op_plugin/meta/_meta_registrations.py",
    "one element of poison; none for CANN 8.5 and later: " + _TEST,
)
note(_V3, "qc_qr_scale and kc_scale multiply what the norms give", _DESIGN, "as written, query_norm included: " + _TEST)


@dataclass(frozen=True)
class _Inputs:
    """Tensors and numbers of one call that every version has. ``merged``: token_x is (T, He)."""

    token_x: torch.Tensor
    weight_dq: torch.Tensor
    weight_uq_qr: torch.Tensor
    weight_uk: torch.Tensor
    weight_dkv_kr: torch.Tensor
    rmsnorm_gamma_cq: torch.Tensor
    rmsnorm_gamma_ckv: torch.Tensor
    rope_sin: torch.Tensor
    rope_cos: torch.Tensor
    kv_cache: torch.Tensor
    kr_cache: torch.Tensor
    cache_index: torch.Tensor | None
    actual_seq_len: torch.Tensor | None
    epsilons: tuple[float, float]
    cache_mode: str

    @property
    def merged(self) -> bool:
        return self.token_x.dim() == 2

    @property
    def tokens(self) -> int:
        return self.token_x.numel() // max(self.token_x.size(-1), 1)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def _check_tensors(op: str, given: _Inputs) -> None:
    for name, tensor in given.named.items():
        if name == "actual_seq_len":
            continue
        if tensor.dtype in _NARROW:
            raise KernelNotCovered(op, name, f"a tensor of dtype {tensor.dtype} (quantised form)")
        if tensor.dtype != (torch.int64 if name == "cache_index" else torch.bfloat16):
            refuse(op, "prolog-dtype", name, tensor.dtype)
    x, uk = given.token_x, given.weight_uk
    if x.dim() not in (2, 3) or x.size(0) > (65536 if x.dim() == 3 else x.size(0)):
        refuse(op, "prolog-token", "token_x", f"shape {tuple(x.shape)}")
    for name in ("rope_sin", "rope_cos"):
        if tuple(given.named[name].shape) != (*x.shape[:-1], _ROPE):
            refuse(op, "prolog-token", name, f"shape {tuple(given.named[name].shape)} beside {tuple(x.shape)}")
    heads, dim = (uk.size(0), uk.size(1)) if uk.dim() == 3 else (0, 0)
    low = given.weight_dq.size(-1)
    wanted = {
        "weight_dq": (x.size(-1), low),
        "weight_uk": (heads, dim, _LATENT),
        "weight_uq_qr": (low, heads * (dim + _ROPE)),
        "weight_dkv_kr": (x.size(-1), _LATENT + _ROPE),
        "rmsnorm_gamma_cq": (low,),
        "rmsnorm_gamma_ckv": (_LATENT,),
    }
    for name, shape in wanted.items():
        if tuple(given.named[name].shape) != shape:
            refuse(op, "prolog-weights", name, f"shape {tuple(given.named[name].shape)}, wanted {shape}")
    if heads not in _HEADS:
        refuse(op, "prolog-heads", "weight_uk", f"{heads} heads")


def _check_sizes(op: str, given: _Inputs) -> None:
    x, low, dim = given.token_x, given.weight_dq.size(1), given.weight_uk.size(1)
    shown = f"He = {x.size(-1)}, Hcq = {low}, D = {dim}, shape {tuple(x.shape)}"
    if op == OP_V2:
        seq = 1 if given.merged else x.size(1)
        if (x.size(-1), low, dim) != (7168, 1536, 128) or seq > 16 or given.tokens > 1048576:
            refuse(op, "prolog-sizes", "token_x", shown)
        if given.cache_mode not in ("PA_BSND", "PA_NZ"):
            refuse(op, "prolog-mode", "cache_mode", repr(given.cache_mode))
        return
    wide = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
    if x.size(-1) not in wide or low not in (1536, 2048) or dim not in (128, 192):
        refuse(op, "prolog-v3-sizes", "token_x", shown)
    modes = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "TND" if given.merged else "BSND")
    if given.cache_mode not in modes:
        refuse(op, "prolog-v3-mode", "cache_mode", f"{given.cache_mode!r} beside {tuple(x.shape)}")
    for name, tensor in given.named.items():
        if not tensor.is_contiguous():
            refuse(op, "prolog-v3-contiguous", name, f"strides {tensor.stride()}")


def _sequences(op: str, given: _Inputs) -> list[int]:
    """Lengths of the sequences whose blocks are named one by one."""
    lens = given.actual_seq_len
    if (lens is not None) != (given.merged and "BLK" in given.cache_mode):
        refuse(op, "prolog-v3-lengths", "actual_seq_len", "a tensor" if lens is not None else None)
    if lens is None:
        return [] if given.merged else [given.token_x.size(1)] * given.token_x.size(0)
    if lens.dtype != torch.int32 or lens.dim() != 1:
        refuse(op, "prolog-v3-lengths", "actual_seq_len", f"{lens.dtype}, shape {tuple(lens.shape)}")
    out: list[int] = lens.diff(prepend=lens.new_zeros(1)).tolist()
    if min(out, default=0) < 0 or sum(out) > given.tokens:
        raise DeviceFault(op, f"actual_seq_len {lens.tolist()} falls, or leaves the {given.tokens} tokens")
    return out


def _check_caches(op: str, given: _Inputs) -> None:
    paged = given.cache_mode.startswith("PA")
    for name, wide in (("kv_cache", _LATENT), ("kr_cache", _ROPE)):
        cache = given.named[name]
        if paged:
            fits = cache.dim() == 4 and cache.shape[:2] == given.kv_cache.shape[:2]
            fits = fits and tuple(cache.shape[2:]) == (1, wide) and cache.is_contiguous()
        else:
            fits = tuple(cache.shape) == (*given.token_x.shape[:-1], 1, wide)
        if not fits:
            refuse(op, "prolog-cache", name, f"shape {tuple(cache.shape)} in mode {given.cache_mode}")
    size = given.kv_cache.size(1)
    if op == OP_V2 and size not in (16, 128):
        refuse(op, "prolog-block", "kv_cache", f"block_size {size}")
    if op != OP_V2 and paged and (size % 16 or not 16 <= size <= 1024):
        refuse(op, "prolog-v3-block", "kv_cache", f"block_size {size}")


def _slots(op: str, given: _Inputs, lengths: list[int]) -> torch.Tensor:
    """Slot of each token; negative for none. Shape: [tokens]."""
    index, mode, size = given.cache_index, given.cache_mode, given.kv_cache.size(1)
    if not mode.startswith("PA"):
        if index is not None:
            refuse(op, "prolog-index", "cache_index", f"a tensor in mode {mode}")
        return torch.arange(given.tokens)
    wanted: tuple[int, ...] = tuple(given.token_x.shape[:-1])
    if "BLK" in mode:
        counts = [-(-length // size) for length in lengths]
        wanted = (sum(counts),) if given.merged else (len(counts), -(-given.token_x.size(1) // size))
    if index is None or tuple(index.shape) != wanted:
        shown = None if index is None else f"shape {tuple(index.shape)}"
        refuse(op, "prolog-index", "cache_index", f"{shown}, wanted {wanted} in mode {mode}")
    if "BLK" not in mode:
        return index.reshape(-1)
    slots = torch.full((given.tokens,), -1, dtype=torch.int64)
    blocks, start = index.reshape(-1), 0
    for length, count in zip(lengths, counts, strict=True):
        place = torch.arange(length)
        block, blocks = blocks[:count][place // size], blocks[count:]
        slots[start : start + length] = torch.where(block < 0, block, block * size + place % size)
        start += length
    return slots


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, factor: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float() * factor


def _write(given: _Inputs, slots: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    for cache, part in zip((given.kv_cache, given.kr_cache), rows, strict=True):
        wide, size = cache.size(-1), cache.size(1)
        if given.cache_mode.endswith("NZ"):
            c0 = nz_width(cache.dtype)
            view = cache.view(cache.size(0), wide // c0, size, c0).permute(0, 2, 1, 3)
        elif given.cache_mode.startswith("PA"):
            view = cache.view(-1, size, wide)
        else:
            view = cache.view(1, -1, wide)
        write_slots(view, slots, part)


def _run(
    op: str, given: _Inputs, factors: tuple[float, float] = (1.0, 1.0)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Checks, computes and writes; returns queries, their rope parts and their norm, all bfloat16."""
    _check_tensors(op, given)
    _check_sizes(op, given)
    _check_caches(op, given)
    slots = _slots(op, given, _sequences(op, given))
    kept = given.kv_cache.numel() > 0
    if kept and given.cache_mode.startswith("PA"):
        check_slots(op, slots, given.kv_cache, given.kv_cache.size(1), "cache_index")
    x = given.token_x.reshape(given.tokens, given.token_x.size(-1)).float()
    cos, sin = (part.reshape(given.tokens, _ROPE) for part in (given.rope_cos, given.rope_sin))
    heads, dim = given.weight_uk.shape[:2]
    low = _norm(x @ given.weight_dq.float(), given.rmsnorm_gamma_cq, given.epsilons[0], factors[0]).bfloat16()
    high = (low.float() @ given.weight_uq_qr.float()).view(given.tokens, heads, dim + _ROPE)
    query = torch.einsum("tnd,ndh->tnh", high[..., :dim].bfloat16().float(), given.weight_uk.float()).bfloat16()
    turned = rotate_interleaved(high[..., dim:], cos.unsqueeze(1), sin.unsqueeze(1)).bfloat16()
    if kept:
        joint = x @ given.weight_dkv_kr.float()
        latent = _norm(joint[:, :_LATENT], given.rmsnorm_gamma_ckv, given.epsilons[1], factors[1]).bfloat16()
        _write(given, slots, (latent, rotate_interleaved(joint[:, _LATENT:], cos, sin).bfloat16()))
    outer = given.token_x.shape[:-1]
    return query.view(*outer, heads, _LATENT), turned.view(*outer, heads, _ROPE), low.view(*outer, low.size(1))


def npu_mla_prolog_v2(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    cache_index: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Version 2: paged caches, sizes of one model; see ``npu_mla_prolog_v3``. *Mutates* the caches.

    Returns:
        Queries, their rope parts, both caches, and one undefined float32.
    """
    not_covered(
        OP_V2,
        dequant_scale_x=dequant_scale_x,
        dequant_scale_w_dq=dequant_scale_w_dq,
        dequant_scale_w_uq_qr=dequant_scale_w_uq_qr,
        dequant_scale_w_dkv_kr=dequant_scale_w_dkv_kr,
        quant_scale_ckv=quant_scale_ckv,
        quant_scale_ckr=quant_scale_ckr,
        smooth_scales_cq=smooth_scales_cq,
    )
    given = _Inputs(
        *(token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv),
        *(rope_sin, rope_cos, kv_cache, kr_cache, cache_index, None),
        epsilons=(rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        cache_mode=cache_mode,
    )
    query, turned, _ = _run(OP_V2, given)
    return query, turned, kv_cache, kr_cache, fill_poison_(torch.empty(1))


def _unused(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A result that is not asked for."""
    cann = pose.current().cann
    return fill_poison_(torch.empty(1 if cann is None or cann < (8, 5) else 0, dtype=dtype))


def _options(
    *,
    cache_index: torch.Tensor | None = None,
    dequant_scale_x: torch.Tensor | None = None,
    dequant_scale_w_dq: torch.Tensor | None = None,
    dequant_scale_w_uq_qr: torch.Tensor | None = None,
    dequant_scale_w_dkv_kr: torch.Tensor | None = None,
    quant_scale_ckv: torch.Tensor | None = None,
    quant_scale_ckr: torch.Tensor | None = None,
    smooth_scales_cq: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    k_nope_clip_alpha: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> None:
    """The keyword arguments of version 3 and their defaults, once for both forms."""


def _with_options(kernel: _Kernel) -> _Kernel:
    """Give a kernel the signature of its op: ``**options`` are those of ``_options``."""
    own = [p for p in inspect.signature(kernel).parameters.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([*own, *inspect.signature(_options).parameters.values()])
    kernel.__signature__ = signature  # type: ignore[attr-defined]
    return kernel


def _run_v3(
    op: str,
    tensors: _Tensors,
    *,
    cache_index: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-05,
    rmsnorm_epsilon_ckv: float = 1e-05,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **quantised: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    modes = {name: value or None for name, value in quantised.items() if name.endswith("_mode")}
    not_covered(op, **(quantised | modes))
    epsilons = rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv
    given = _Inputs(*tensors, cache_index, actual_seq_len, epsilons=epsilons, cache_mode=cache_mode)
    query, turned, norm = _run(op, given, (qc_qr_scale, kc_scale))
    return query, turned, _unused(), norm if query_norm_flag else _unused(torch.bfloat16), _unused()


@_with_options
def npu_mla_prolog_v3(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projects hidden states to absorbed queries and to latent keys, and writes the keys into their caches.

    Args:
        token_x: hidden states. Shape: [T, He] or [B, S, He]; bfloat16, as all but the index and the lengths.
        weight_dq: Shape: [He, Hcq].
        weight_uq_qr: every head's D columns without position, then its 64 with. Shape: [Hcq, N * (D + 64)].
        weight_uk: Shape: [N, D, 512].
        weight_dkv_kr: Shape: [He, 512 + 64].
        rmsnorm_gamma_cq: Shape: [Hcq].
        rmsnorm_gamma_ckv: Shape: [512].
        rope_sin: Shape: [T, 64] or [B, S, 64].
        rope_cos: likewise.
        kv_cache: latent keys. Shape: PA*: [blocks, block_size, 1, 512]; else as the tokens, [..., 1, 512]. *Mutated*.
        kr_cache: their rope parts, likewise 64 wide. *Mutated*.
        **options: keyword arguments of the op's schema: ``cache_index`` (slots; in the modes PA_BLK_* block ids; int64;
            *padding*: negative), ``actual_seq_len`` (running sums, PA_BLK_* beside [T, He]; int32), ``cache_mode``,
            ``query_norm_flag``, the epsilons, ``qc_qr_scale`` and ``kc_scale``; those of quantised forms are not
            computed.

    Returns:
        Queries [..., N, 512], their rope parts [..., N, 64], a scale (unused), the normalised low-rank query
        [..., Hcq] (unused unless ``query_norm_flag``) and its scale (unused). Unused ones have one element of
        poison, or none for CANN 8.5 and later.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``; nothing is written then.

    Source:
        op-plugin, torch_npu-npu_mla_prolog_v3.md.
    """
    projections = weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr
    rest = rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin, rope_cos, kv_cache, kr_cache
    return _run_v3(OP_V3, (token_x, *projections, *rest), **options)


@_with_options
def npu_mla_prolog_v3_functional(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The same into copies of the caches, which follow the other results; see ``npu_mla_prolog_v3``."""
    caches = kv_cache.clone(), kr_cache.clone()
    before = token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv
    return *_run_v3(OP_FUNCTIONAL, (*before, rope_sin, rope_cos, *caches), **options), *caches


UNDECLARED_WRITES = {OP_V2: ("kv_cache", "kr_cache")}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {
    OP_V2: npu_mla_prolog_v2,
    OP_V3: npu_mla_prolog_v3,
    OP_FUNCTIONAL: npu_mla_prolog_v3_functional,
}
