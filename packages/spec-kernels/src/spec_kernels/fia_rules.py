"""Owns which calls torch_npu's fused infer attention documents as accepted, and the layout that follows; pure numbers.

Sources: the docstrings of `npu_fused_infer_attention_score` and `..._v2` in torch_npu 2.12. On K and V of unequal width
they disagree with themselves: paged K and V shall have one shape, yet TND takes 192 beside 128, BSND's mask rule speaks
of unequal widths, and the output takes the width of V. So the pairs that TND names go through TND, and other pairs
through BSND. It imports no torch_npu, so the rules are testable anywhere; it does not replace the operator's checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from spec_kernels.capabilities import parse_version
from spec_kernels.errors import DtypeError, UnsupportedByOp

__all__ = ["FiaPlan", "FiaShape", "plan_fia"]

_INT32_MAX = 2**31 - 1
_TND_WIDTHS = ((128, 128), (192, 128), (192, 192))


@dataclass(frozen=True)
class FiaShape:
    """Sizes of one paged call.

    Attributes:
        rows: Requests.
        width: Query tokens of each.
        heads: Query heads.
        kv_heads: KV heads.
        dims: Head dim of Q and K.
        value_dims: Head dim of V.
        page_size: Tokens in a page.
        pages: Pages in the cache.
        dtype: Of query and caches.
        longest: Longest KV length.
        blocks: Pages that all requests need, a shared page counted once a request.
        rope: Dims of the rope parts; 0 without.
        window: Whether a window hides older tokens.
        sinks: Whether heads have sinks.
        tiled: Whether dims lie in pieces of 16 (NZ).
        ragged: Whether requests have unlike query lengths, `width` being the longest.
        fia: Version of the operator.
    """

    rows: int
    width: int
    heads: int
    kv_heads: int
    dims: int
    value_dims: int
    page_size: int
    pages: int
    dtype: torch.dtype
    longest: int = 0
    blocks: int = 0
    rope: int = 0
    window: bool = False
    sinks: bool = False
    tiled: bool = False
    ragged: bool = False
    fia: str = "v2"


@dataclass(frozen=True)
class FiaPlan:
    """How to call the operator.

    Attributes:
        layout: `"BSND"`, or `"TND"` where K and V differ in width and TND takes the pair.
        sparse_mode: 0 without a mask or with a full one, 3 with the fixed 2048x2048 causal mask, 4 with it and a band.
        full_mask: Whether a window must be given as a full mask: BSND ignores bands where rows have one query token.
    """

    layout: Literal["BSND", "TND"]
    sparse_mode: Literal[0, 3, 4]
    full_mask: bool = False

    @property
    def needs_mask(self) -> bool:
        """Whether the fixed causal mask must be passed."""
        return self.sparse_mode != 0


def plan_fia(shape: FiaShape, *, causal: bool, masked: bool = False, cann: str | None = None) -> FiaPlan:
    """Choose a layout that the operator accepts.

    Args:
        shape: Sizes of the call.
        causal: Whether queries see only positions up to their own. One query token a row sees everything either way.
        masked: Whether the caller passes a mask of its own; BSND takes one.
        cann: Version of CANN. From 9.1 on, TND takes float16, heads of 64 without groups and, as rope parts do, pages
            of 16 to 1024 tokens. Unknown: the older limits hold.

    Raises:
        DtypeError: The operator takes float16 and bfloat16 only.
        UnsupportedByOp: No layout fits; the text says why for each.
    """
    if shape.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(
            "query, key_cache, value_cache",
            given=shape.dtype,
            expected="torch.float16 or torch.bfloat16 on npu",
            consequence="the device's operator refuses it",
            remedy="cast the query, keep the cache in half precision, or pass backend='native'",
        )
    wide = cann is not None and parse_version(cann) >= (9, 1)
    common = _common(shape)
    reasons: dict[Literal["BSND", "TND"], list[str]] = {
        "BSND": common + _pages(shape, wide and shape.rope > 0) + _bsnd(shape),
        "TND": common + _pages(shape, wide) + _tnd(shape, wide),
    }
    if masked:
        reasons["TND"].append("no mask for every query token")
    packed_first = shape.ragged or shape.dims != shape.value_dims or (shape.window and shape.width == 1)
    order: tuple[Literal["BSND", "TND"], ...] = ("TND", "BSND") if packed_first else ("BSND", "TND")
    for layout in order:
        if not reasons[layout]:
            banded = shape.window and (layout == "TND" or shape.width > 1)
            chunk = causal and (shape.width > 1 or shape.ragged)
            return FiaPlan(layout, 4 if banded else 3 if chunk else 0, shape.window and not banded)
    raise UnsupportedByOp(
        "query, key_cache, value_cache",
        given=shape,
        expected="sizes that one of the operator's layouts accepts",
        consequence="; ".join(f"{layout}: {', '.join(found)}" for layout, found in reasons.items()),
        remedy="change the sizes, or pass backend='native'",
    )


def _common(shape: FiaShape) -> list[str]:
    found = []
    if shape.heads > 256 or shape.heads // shape.kv_heads > 64:
        found.append(f"at most 256 heads and 64 a KV head, not {shape.heads} over {shape.kv_heads}")
    if max(shape.dims, shape.value_dims) > 512:
        found.append(f"head dims up to 512, not {max(shape.dims, shape.value_dims)}")
    if shape.dims % 16 or shape.value_dims % 16:
        found.append(f"head dims in multiples of 16, not {shape.dims} and {shape.value_dims}")
    if shape.sinks and shape.fia == "v1":
        found.append("sinks in version 2 only")
    if shape.rope:
        found += _latent(shape)
    elif shape.tiled:
        found.append("tiled caches with rope parts only")
    row = shape.kv_heads * max(shape.dims, shape.value_dims)
    if row > 65535:
        found.append(f"KV heads times dims up to 65535, not {row}")
    if shape.width == 1 and shape.pages * shape.page_size * row > _INT32_MAX:
        elements = shape.pages * shape.page_size * row
        found.append(f"at most {_INT32_MAX} elements in a layer's cache for one query token, not {elements}")
    if shape.blocks > shape.pages:
        found.append(f"no more blocks over all requests than the cache has pages, {shape.blocks} over {shape.pages}")
    return found


def _pages(shape: FiaShape, wide: bool) -> list[str]:
    size = shape.page_size
    if wide:
        return [] if size % 16 == 0 and size <= 1024 else [f"pages of 16 to 1024 tokens in multiples of 16, not {size}"]
    if shape.rope:
        return [] if size in (16, 128) else [f"pages of 16 or 128 tokens with rope parts, not {size}"]
    if shape.width == 1 and (size % 16 or size > 512):
        return [f"pages of 16 to 512 tokens in multiples of 16, not {size}"]
    if shape.width > 1 and (size % 128 or not 128 <= size <= 512):
        return [f"pages of 128, 256, 384 or 512 tokens for more than one query token, not {size}"]
    return []


def _latent(shape: FiaShape) -> list[str]:
    found = []
    if (shape.dims, shape.value_dims, shape.rope, shape.kv_heads) != (512, 512, 64, 1):
        given = f"{shape.dims}, {shape.value_dims} and {shape.rope} over {shape.kv_heads}"
        found.append(f"rope parts of 64 beside K and V of 512 over 1 KV head, not {given}")
    if shape.heads > 128:
        found.append(f"at most 128 heads with rope parts, not {shape.heads}")
    if not 1 <= shape.width <= 16:
        found.append(f"1 to 16 query tokens with rope parts, not {shape.width}")
    if shape.window or shape.sinks:
        found.append("no window and no sinks with rope parts")
    return found


def _bsnd(shape: FiaShape) -> list[str]:
    found = []
    if shape.ragged:
        found.append("one query length a call")
    if shape.sinks:
        found.append("no sinks")
    if shape.rows > 65536:
        found.append(f"at most 65536 rows, not {shape.rows}")
    if shape.width > 1 and shape.heads * shape.dims >= 65535:
        found.append(f"heads times dims below 65535, not {shape.heads * shape.dims}")
    if shape.width == 1 and shape.longest > 262_144:
        found.append(f"KV lengths up to 262144 for one query token, not {shape.longest}")
    return found


def _tnd(shape: FiaShape, wide: bool) -> list[str]:
    found = []
    widths = (*_TND_WIDTHS, (64, 64)) if wide and shape.heads == shape.kv_heads else _TND_WIDTHS
    if not shape.rope and (shape.dims, shape.value_dims) not in widths:
        found.append(f"widths out of {list(widths)}, not {(shape.dims, shape.value_dims)}")
    if not shape.rope and not wide and shape.dtype != torch.bfloat16:
        found.append(f"bfloat16, not {shape.dtype}")
    if shape.sinks and shape.value_dims > 128:
        found.append(f"sinks with values of at most 128, not {shape.value_dims}")
    if shape.rows > 4096:
        found.append(f"at most 4096 rows, not {shape.rows}")
    if shape.rows * shape.width > 2**20:
        found.append(f"at most {2**20} query tokens, not {shape.rows * shape.width}")
    return found
