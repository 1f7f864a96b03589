"""int8 keys and values of fused_infer_attention_score: their scales and offsets, one a channel or one for all.

This module owns the refusals that bind such calls and the way back to float32. Scales a token are not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import KernelNotCovered
from .fia_rules import FIA, refuse
from .rules import declare, note, online

if TYPE_CHECKING:
    from .fia_call import FiaCall
    from .fia_requests import Geometry

_DOC = online("torch_npu-npu_fused_infer_attention_score")
_TEST = "test_kernels_fia_antiquant.py"
_NZ_HEADS = ((10, 1), (64, 8), (80, 8), (128, 16))

declare(
    FIA,
    _DOC,
    _TEST,
    {
        "antiquant-pair": (
            "key_antiquant_scale and value_antiquant_scale both or neither; key_antiquant_offset and "
            "value_antiquant_offset likewise, with the scales",
            "pass both",
        ),
        "antiquant-mode": (
            "key_antiquant_mode and value_antiquant_mode alike, 0 to 5, or 0 and 1",
            "pass 0 for both",
        ),
        "antiquant-dtype": (
            "int8 key and value; in mode 0 scales and offsets of the query's dtype",
            "quantise to int8, cast the scales",
        ),
        "antiquant-shape": (
            "mode 0: (1,), (N, D), (N, 1, D), (1, N, D), (1, N, 1, D), (H,) or (1, H) of the key/value heads, scale "
            "and offset alike",
            "reshape them",
        ),
        "antiquant-layout": ("BSH, BSND, BNSD or BNSD_BSND; no query_rope, no learnable_sink", "use bfloat16 caches"),
        "antiquant-paged": ("caches of blocks, not NZ: one query token", "pass one query token"),
        "antiquant-nz": (
            "NZ caches: a bfloat16 query of 1 to 16 tokens, heads of width 128, blocks of 128 or 512 tokens, no "
            "offsets",
            "use another cache",
        ),
        "antiquant-nz-heads": (
            "NZ caches: num_heads and num_key_value_heads 10 and 1, 64 and 8, 80 and 8 or 128 and 16",
            "use a cache that is not NZ",
        ),
    },
)
note(
    FIA,
    "one scale for keys and values (antiquant_scale); modes 1 to 5; version 2's scales",
    _DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    FIA,
    "key times key_antiquant_scale within (-1, 1), unless inner_precise asks for precision",
    _DOC,
    "not checked: scaled in float32 here",
)


@dataclass(frozen=True)
class Antiquant:
    """Scales and offsets of int8 keys and values.

    Attributes:
        scales: of keys, of values; as given.
        offsets: likewise; None for none.
    """

    scales: tuple[torch.Tensor, torch.Tensor]
    offsets: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by the names of version 1's arguments."""
        names = ("key_antiquant_scale", "value_antiquant_scale", "key_antiquant_offset", "value_antiquant_offset")
        return dict(zip(names, (*self.scales, *(self.offsets or ())), strict=False))


def antiquant_of(
    op: str,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None],
    modes: tuple[int, int],
) -> Antiquant | None:
    """What a call's arguments ask for; None without scales.

    Raises:
        OpRefused: one of a pair is missing, or the modes do not go together.
        KernelNotCovered: a mode that is not computed.
    """
    key_scale, value_scale = scales
    key_offset, value_offset = offsets
    if (key_scale is None) != (value_scale is None):
        refuse(op, "antiquant-pair", "key_antiquant_scale", "one of the two")
    if (key_offset is None) != (value_offset is None) or (key_offset is not None and key_scale is None):
        refuse(op, "antiquant-pair", "key_antiquant_offset", "one of the two, or no scales")
    if key_scale is None or value_scale is None:
        return None
    if not all(0 <= mode <= 5 for mode in modes) or (modes[0] != modes[1] and modes != (0, 1)):
        refuse(op, "antiquant-mode", "key_antiquant_mode", f"{modes[0]}, value_antiquant_mode {modes[1]}")
    if any(modes):
        raise KernelNotCovered(op, "key_antiquant_mode", f"{modes[0]}, value_antiquant_mode={modes[1]}")
    pair = None if key_offset is None or value_offset is None else (key_offset, value_offset)
    return Antiquant((key_scale, value_scale), pair)


def check_antiquant(call: FiaCall, given: Antiquant) -> None:
    """Refuses dtypes, layouts and shapes of a call with int8 keys and values.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    for name, tensor in (("key", call.key), ("value", call.value)):
        if tensor.dtype != torch.int8:
            refuse(call.op, "antiquant-dtype", name, tensor.dtype)
    for name, tensor in given.named.items():
        if tensor.dtype != call.query.dtype:
            refuse(call.op, "antiquant-dtype", name, f"{tensor.dtype} beside a query of {call.query.dtype}")
    plain = call.query_rope is None and call.sink is None
    if call.input_layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND") or not plain:
        refuse(call.op, "antiquant-layout", "input_layout", repr(call.input_layout))


def check_antiquant_sizes(call: FiaCall, geometry: Geometry, given: Antiquant) -> None:
    """Refuses shapes of scales, and caches that they are not documented for.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    n = call.kv_heads
    for name, tensor in given.named.items():
        width = geometry.value_dim if name.startswith("value") else geometry.head_dim
        shapes = ((1,), (n, width), (n, 1, width), (1, n, width), (1, n, 1, width), (n * width,), (1, n * width))
        if tuple(tensor.shape) not in shapes or tensor.shape != given.named[name.replace("offset", "scale")].shape:
            refuse(call.op, "antiquant-shape", name, f"shape {tuple(tensor.shape)} for {n} heads of width {width}")
    if not call.paged:
        return
    if call.key.dim() < 5:
        if geometry.q_seq != 1:
            refuse(call.op, "antiquant-paged", "query", f"{geometry.q_seq} tokens a request")
        return
    widths = {geometry.head_dim, geometry.value_dim}
    fits = call.query.dtype == torch.bfloat16 and 1 <= geometry.q_seq <= 16 and widths == {128}
    if not fits or call.block_size not in (128, 512) or given.offsets is not None:
        shown = f"{call.query.dtype}, {geometry.q_seq} tokens, widths {sorted(widths)}, blocks of {call.block_size}"
        refuse(call.op, "antiquant-nz", "key", shown)
    if (call.heads, n) not in _NZ_HEADS:
        refuse(call.op, "antiquant-nz-heads", call.names.heads, f"{call.heads} beside {n}")


def widened(rows: torch.Tensor, given: Antiquant, which: int) -> torch.Tensor:
    """float32 rows of int8 ones.

    Args:
        rows: Shape: [kv_heads, tokens, width]; int8.
        given: scales and offsets.
        which: 0 for keys, 1 for values.

    Returns:
        ``(rows + offset) * scale``. Shape: that of ``rows``.
    """
    shape = (rows.size(0), 1, rows.size(2)) if given.scales[which].numel() > 1 else (1, 1, 1)
    out = rows.float()
    if given.offsets is not None:
        out = out + given.offsets[which].float().view(shape)
    return out * given.scales[which].float().view(shape)
