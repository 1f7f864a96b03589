"""npu_interleave_rope, npu_apply_rotary_pos_emb, npu_mrope and atb's _npu_rotary_embedding.

This module owns rotary embedding of query and key, computed in float32 and rounded once; ``rotary.py`` has
npu_rotary_mul. Two of the ops write their arguments: the schema of one of them does not say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import DeviceFault
from .pose import Scope
from .rules import declare, holds, note, online, refuse

OP_INTERLEAVE = "npu::npu_interleave_rope"
OP_APPLY = "npu::npu_apply_rotary_pos_emb"
OP_MROPE = "npu::npu_mrope"
OP_ATB = "atb::_npu_rotary_embedding"
_TEST = "test_kernels_rope.py"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_APPLY_DOC = online("torch_npu-apply_rotary_pos_emb")
_MROPE_DOC = online("torch_npu-npu_mrope")
_ATB_DOC = "CANN 8.0, ATB API, RopeOperation"
_SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])
_NOT_950 = Scope(chips=("910B", "910C"))

declare(
    "npu_interleave_rope",
    online("torch_npu-npu_interleave_rope"),
    _TEST,
    {
        "interleave-dtype": ("float16, bfloat16 throughout", "cast x, cos and sin to one dtype"),
        "interleave-shape": (
            "x (B, N, S, 64); cos and sin (B, 1, S or 1, 64), alike",
            "reshape, or use npu_rotary_mul for other head dims",
        ),
        "interleave-contiguous": ("contiguous tensors", "call .contiguous() on it"),
    },
)
declare(
    "npu_apply_rotary_pos_emb",
    _APPLY_DOC,
    _TEST,
    {
        "apply-rotary-dtype": ("float16, bfloat16, float32 throughout", "cast query, key, cos and sin to one dtype"),
        "apply-rotary-shape": (
            "BSND: 4 axes, TND: 3 axes; query and key alike but for N; cos and sin with N of 1, alike",
            "reshape them",
        ),
        "apply-rotary-layout": ("layout BSND, SBND, BNSD or TND", "spell a supported layout"),
        "apply-rotary-mode": ("rotary_mode half, quarter or interleave", "pass 'half'"),
    },
)
declare(
    "npu_apply_rotary_pos_emb",
    _APPLY_DOC,
    _TEST,
    {
        "apply-rotary-a2-layout": ("layout BSND or TND", "reshape to BSND"),
        "apply-rotary-a2-mode": ("rotary_mode half", "pass 'half', or use npu_rotary_mul"),
        "apply-rotary-a2-dim": ("D of 64 or 128, equal in cos and sin, and no empty tensor", "use npu_rotary_mul"),
    },
    _NOT_950,
)
declare(
    "npu_mrope",
    _MROPE_DOC,
    _TEST,
    {
        "mrope-dtype": ("query, key and cache of one of float16, bfloat16, float32", "cast them to one dtype"),
        "mrope-positions": (
            "int32 or int64 positions (tokens,), or (3 or 4, tokens) with mrope_section",
            "reshape them",
        ),
        "mrope-section": (
            "mrope_section None, [0, 0, 0], [16, 24, 24], [24, 20, 20], [8, 12, 12] or [16, 16, 16, 16], adding up to "
            "rotary_dim / 2, one entry a row of positions",
            "pass a section of the list",
        ),
        "mrope-mode": ("rotary_mode half or interleaved", "pass 'half'"),
        "mrope-cache-mode": (
            "cache_mode default, or interleave with a section of 3",
            "pass 'default'",
        ),
        "mrope-dims": (
            "query and key (tokens, heads * head_size), a cache (positions, rotary_dim), rotary_dim at most head_size",
            "reshape them",
        ),
        "mrope-align": (
            "head_size and rotary_dim multiples of 32 (float32: 16)",
            "pad the heads",
        ),
    },
)
declare(
    "atb::_npu_rotary_embedding",
    _ATB_DOC,
    _TEST,
    {
        "atb-rope-dtype": ("query, key and cache of float16 or bfloat16, all alike; int positions", "cast them"),
        "atb-rope-dims": (
            "positions (tokens,), query and key (tokens, heads * head_size), a cache (positions, head_size at most)",
            "reshape them",
        ),
    },
)
note(
    "npu_apply_rotary_pos_emb",
    "query and key are updated in place",
    _APPLY_DOC,
    "they are, although the schema does not say so; the op's schema also lacks the aliasing of its results",
)
note("npu_mrope", "positions below the length of the cache", _MROPE_DOC, "a `DeviceFault` (507015): " + _TEST)
note("atb::_npu_rotary_embedding", "(not documented) positions past the cache", "—", "a `DeviceFault` (507015)")


def _turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Sorts even elements before odd ones, then turns halves: the rotary embedding of latent attention.

    Args:
        x: Shape: [..., D].
        cos: broadcast against ``x``.
        sin: likewise.

    Returns:
        float32 of the shape of ``x``.
    """
    halves = x.float().view(*x.shape[:-1], x.size(-1) // 2, 2).transpose(-1, -2).flatten(-2)
    return halves * cos.float() + _turn(halves, False) * sin.float()


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of interleaved pairs; the result has the halves one after the other.

    Args:
        x: Shape: [B, N, S, 64]; float16 or bfloat16; contiguous.
        cos: Shape: [B, 1, S or 1, 64]; dtype of ``x``.
        sin: Shape and dtype of ``cos``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_interleave_rope.md.
    """
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if tensor.dtype not in _FLOATS[:2] or tensor.dtype != x.dtype:
            refuse(OP_INTERLEAVE, "interleave-dtype", name, tensor.dtype)
        if tensor.dim() != 4 or tensor.size(3) != 64:
            refuse(OP_INTERLEAVE, "interleave-shape", name, f"shape {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            refuse(OP_INTERLEAVE, "interleave-contiguous", name, f"strides {tensor.stride()}")
    if cos.shape != sin.shape or (cos.size(0), cos.size(1)) != (x.size(0), 1) or cos.size(2) not in (1, x.size(2)):
        refuse(OP_INTERLEAVE, "interleave-shape", "cos", f"{tuple(cos.shape)}, sin {tuple(sin.shape)}")
    return rotate_interleaved(x, cos, sin).to(x.dtype)


def _check_apply(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, mode: str
) -> None:
    if layout not in ("BSND", "SBND", "BNSD", "TND"):
        refuse(OP_APPLY, "apply-rotary-layout", "layout", repr(layout))
    if layout not in ("BSND", "TND") and holds("apply-rotary-a2-layout"):
        refuse(OP_APPLY, "apply-rotary-a2-layout", "layout", repr(layout))
    if mode not in ("half", "quarter", "interleave"):
        refuse(OP_APPLY, "apply-rotary-mode", "rotary_mode", repr(mode))
    if mode != "half" and holds("apply-rotary-a2-mode"):
        refuse(OP_APPLY, "apply-rotary-a2-mode", "rotary_mode", repr(mode))
    heads = layout.index("N")
    tensors = {"query": query, "key": key, "cos": cos, "sin": sin}
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS or tensor.dtype != query.dtype:
            refuse(OP_APPLY, "apply-rotary-dtype", name, tensor.dtype)
        if tensor.dim() != len(layout) or (name in ("cos", "sin") and tensor.size(heads) != 1):
            refuse(OP_APPLY, "apply-rotary-shape", name, f"shape {tuple(tensor.shape)} in {layout}")
        if (tensor.size(-1) not in (64, 128) or tensor.numel() == 0) and holds("apply-rotary-a2-dim"):
            refuse(OP_APPLY, "apply-rotary-a2-dim", name, f"shape {tuple(tensor.shape)}")
        leading = [size for axis, size in enumerate(tensor.shape[:-1]) if axis != heads]
        wanted = [size for axis, size in enumerate(query.shape[:-1]) if axis != heads]
        if leading != wanted:
            refuse(OP_APPLY, "apply-rotary-shape", name, f"{tuple(tensor.shape)} beside {tuple(query.shape)}")
    if key.size(-1) != query.size(-1) or cos.shape != sin.shape or cos.size(-1) > query.size(-1):
        refuse(OP_APPLY, "apply-rotary-shape", "key", f"{tuple(key.shape)}, cos {tuple(cos.shape)}")
    if cos.size(-1) % (4 if mode == "quarter" else 2):
        refuse(OP_APPLY, "apply-rotary-shape", "cos", f"D of {cos.size(-1)} in mode {mode}")


def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of query and key in place; elements past the width of cos stay.

    Args:
        query: Shape: as the layout spells; float16, bfloat16 or float32. *Mutated*.
        key: likewise, with heads of its own. *Mutated*.
        cos: Shape: as the layout spells with N of 1.
        sin: Shape: that of cos.
        layout: BSND or TND; on 950 also SBND and BNSD.
        rotary_mode: half; on 950 also interleave and quarter (halves turned within each half).

    Returns:
        query and key.

    Raises:
        OpRefused: a documented constraint is broken; nothing is written then.

    Source:
        op-plugin, torch_npu-apply_rotary_pos_emb.md.
    """
    _check_apply(query, key, cos, sin, layout, rotary_mode)
    width = cos.size(-1)
    for tensor in (query, key):
        part = tensor[..., :width].float()
        if rotary_mode == "quarter":
            turned = torch.cat([_turn(half, False) for half in part.chunk(2, -1)], -1)
        else:
            turned = _turn(part, rotary_mode == "interleave")
        tensor[..., :width] = (part * cos.float() + turned * sin.float()).to(tensor.dtype)
    return query, key


def _look_up(op: str, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows = positions.long()
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < cache.size(0):
        outside = [int(n) for n in rows.flatten() if not 0 <= int(n) < cache.size(0)]
        raise DeviceFault(op, f"position {outside[0]} lies outside the cosine cache of {cache.size(0)} positions")
    return cache[rows].float()


def _rotate_heads(
    x: torch.Tensor, head_size: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotates the first 2 * cos.size(-1) elements of each head. Shape: [tokens, heads * head_size]."""
    heads = x.float().view(x.size(0), -1, head_size).clone()
    width = 2 * cos.size(-1)
    repeat = (lambda half: half.repeat_interleave(2, -1)) if interleaved else (lambda half: torch.cat((half, half), -1))
    part = heads[..., :width]
    heads[..., :width] = part * repeat(cos).unsqueeze(1) + _turn(part, interleaved) * repeat(sin).unsqueeze(1)
    return heads.view_as(x).to(x.dtype)


def _check_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cache: torch.Tensor,
    head_size: int,
    section: list[int],
    rotary_mode: str | None,
    cache_mode: str | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cache)):
        if tensor.dtype not in _FLOATS or tensor.dtype != query.dtype:
            refuse(OP_MROPE, "mrope-dtype", name, tensor.dtype)
        if tensor.dim() != 2:
            refuse(OP_MROPE, "mrope-dims", name, f"shape {tuple(tensor.shape)}")
    if section and section not in _SECTIONS:
        refuse(OP_MROPE, "mrope-section", "mrope_section", section)
    wanted = (len(section), query.size(0)) if section else (query.size(0),)
    if positions.dtype not in (torch.int32, torch.int64) or tuple(positions.shape) != wanted:
        given = f"{positions.dtype}, shape {tuple(positions.shape)}, wanted {wanted}"
        refuse(OP_MROPE, "mrope-positions", "positions", given)
    rotary_dim = cache.size(1)
    for name, tensor in (("query", query), ("key", key)):
        if head_size < 1 or tensor.size(1) % head_size or tensor.size(0) != query.size(0) or rotary_dim > head_size:
            refuse(OP_MROPE, "mrope-dims", name, f"{tuple(tensor.shape)}, head_size {head_size}, rotary {rotary_dim}")
    multiple = 16 if query.dtype == torch.float32 else 32
    if head_size % multiple or rotary_dim % multiple:
        refuse(OP_MROPE, "mrope-align", "head_size", f"{head_size}, rotary_dim {rotary_dim}")
    if section and sum(section) != rotary_dim // 2:
        refuse(OP_MROPE, "mrope-section", "mrope_section", f"{section} for rotary_dim {rotary_dim}")
    if rotary_mode not in ("half", "interleaved"):
        refuse(OP_MROPE, "mrope-mode", "rotary_mode", repr(rotary_mode))
    if cache_mode not in ("default", "interleave") or (cache_mode == "interleave" and len(section) != 3):
        refuse(OP_MROPE, "mrope-cache-mode", "cache_mode", f"{cache_mode!r} with mrope_section {section}")


def npu_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding from a cache of cosines and sines, by one position a token or by three or four.

    Args:
        positions: Shape: [tokens], or [3 or 4, tokens] with a section; int32 or int64.
        query: Shape: [tokens, heads * head_size]; float16, bfloat16 or float32.
        key: Shape: [tokens, kv_heads * head_size]; dtype of the query.
        cos_sin_cache: cosines, then sines. Shape: [positions, rotary_dim]; dtype of the query.
        head_size: width of a head; elements past rotary_dim stay.
        mrope_section: None or zeros for one position a token; else how many of the rotary_dim / 2 frequencies follow
            each row of positions.
        rotary_mode: half (halves turn) or interleaved (neighbours turn).
        cache_mode: default (sections one after the other) or interleave (frequencies 1, 4, 7 … from row 1 and 2, 5,
            8 … from row 2, below three times the section's second entry).

    Returns:
        Query and key, embedded.

    Raises:
        OpRefused: a documented constraint is broken.
        DeviceFault: a position outside the cache.

    Source:
        op-plugin, torch_npu-npu_mrope.md.
    """
    section = [] if mrope_section is None or not any(mrope_section) else list(mrope_section)
    _check_mrope(positions, query, key, cos_sin_cache, head_size, section, rotary_mode, cache_mode)
    cos, sin = _look_up(OP_MROPE, cos_sin_cache, positions).chunk(2, -1)
    if section and cache_mode == "default":
        source = torch.arange(len(section)).repeat_interleave(torch.tensor(section)).expand(1, query.size(0), -1)
        cos, sin = (x.gather(0, source).squeeze(0) for x in (cos, sin))
    elif section:
        parts = []
        for x in (cos, sin):
            merged = x[0].clone()
            for row in (1, 2):
                merged[:, row : section[1] * 3 : 3] = x[row, :, row : section[1] * 3 : 3]
            parts.append(merged)
        cos, sin = parts
    interleaved = rotary_mode == "interleaved"
    return (
        _rotate_heads(query, head_size, cos, sin, interleaved),
        _rotate_heads(key, head_size, cos, sin, interleaved),
    )


def npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotary embedding of query and key in place, from a cache of cosines and sines.

    Args:
        positions: Shape: [tokens]; int32 or int64.
        query: Shape: [tokens, heads * head_size]; float16 or bfloat16. *Mutated*.
        key: Shape: [tokens, kv_heads * head_size]. *Mutated*.
        head_size: width of a head.
        cos_sin_cache: cosines, then sines. Shape: [positions, rotary_dim].
        is_neox_style: True turns halves, False neighbours.

    Raises:
        OpRefused: a documented constraint is broken; nothing is written then.
        DeviceFault: a position outside the cache; nothing is written then.

    Source:
        CANN, ATB API, RopeOperation.
    """
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        if tensor.dtype not in _FLOATS[:2] or tensor.dtype != query.dtype:
            refuse(OP_ATB, "atb-rope-dtype", name, tensor.dtype)
    if positions.dtype not in (torch.int32, torch.int64):
        refuse(OP_ATB, "atb-rope-dtype", "positions", positions.dtype)
    for name, tensor in (("query", query), ("key", key)):
        fits = tensor.dim() == 2 and tuple(positions.shape) == (tensor.size(0),) and head_size > 0
        if not fits or tensor.size(1) % head_size or cos_sin_cache.dim() != 2 or cos_sin_cache.size(1) > head_size:
            given = f"{tuple(tensor.shape)}, positions {tuple(positions.shape)}, cache {tuple(cos_sin_cache.shape)}"
            refuse(OP_ATB, "atb-rope-dims", name, given)
    cos, sin = _look_up(OP_ATB, cos_sin_cache, positions).chunk(2, -1)
    for tensor in (query, key):
        tensor.copy_(_rotate_heads(tensor, head_size, cos, sin, not is_neox_style))


UNDECLARED_WRITES = {OP_APPLY: ("query", "key")}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {
    OP_INTERLEAVE: npu_interleave_rope,
    OP_APPLY: npu_apply_rotary_pos_emb,
    OP_MROPE: npu_mrope,
    OP_ATB: npu_rotary_embedding,
}
