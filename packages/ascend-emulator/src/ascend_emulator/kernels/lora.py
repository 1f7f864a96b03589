"""Products with adapters (LoRA) of a token each: vLLM-Ascend's bgmv and sgmv, sgl_kernel_npu's sgemmv.

This module owns the ops' definitions (torch_npu has none), their refusals, and which adapter a token has. Sums are
float32 and rounded once.
"""

from __future__ import annotations

import torch

from .definitions import define
from .errors import DeviceFault
from .rules import declare, note, refuse

BGMV_SHRINK, BGMV_EXPAND = "_C_ascend::bgmv_shrink", "_C_ascend::bgmv_expand"
SGMV_SHRINK, SGMV_EXPAND = "_C_ascend::sgmv_shrink", "_C_ascend::sgmv_expand"
SGEMMV_SHRINK, SGEMMV_EXPAND = "npu::sgemmv_shrink", "npu::sgemmv_expand"
SCHEMAS = (
    "bgmv_shrink(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, float scale) -> ()",
    "bgmv_expand(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, int slice_offset, int slice_size) -> Tensor",
    "sgmv_shrink(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, float scale) -> ()",
    "sgmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, int slice_offset, "
    "int slice_size) -> Tensor",
)
SGL_SCHEMAS = (
    "sgemmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! lora_ranks, "
    "Tensor! sliceOffsets, Tensor! y) -> Tensor",
    "sgemmv_shrink(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! lora_ranks, "
    "Tensor! lora_scales, Tensor! y) -> ()",
)
RANKS = (8, 16, 32, 64)
_FAMILY = "_C_ascend::bgmv_shrink, bgmv_expand, sgmv_shrink, sgmv_expand, npu::sgemmv_shrink, sgemmv_expand"
_SOURCE = "vllm-ascend v0.23.0, csrc/torch_binding.cpp and csrc/kernels; sgl-kernel-npu f425bdf, csrc/lora"
_TEST = "test_kernels_lora.py"

declare(
    _FAMILY,
    _SOURCE,
    _TEST,
    {
        "lora-dtype": (
            "shrink: float16 or bfloat16 alike for x and weight, float32 y; expand: those for weight and y, float32 x",
            "cast them",
        ),
        "lora-index-dtype": (
            "int64 adapters and lengths (_C_ascend), int32 ones with float16 scales (npu): the kernels read these "
            "whatever is given",
            "cast them",
        ),
        "lora-shape": (
            "x (tokens, in), y (tokens, out), weight (adapters, out, in) or (adapters, 1, out, in), one axis for all "
            "else; bgmv: one adapter a token",
            "reshape them",
        ),
        "lora-shrink": ("shrink: fewer columns in y than in x", "swap the operands, or use a smaller rank"),
        "lora-slice": (
            "expand: a slice inside y that is as wide as weight's rows and at least as wide as the rank",
            "pass the slice of the projection that the adapter belongs to",
        ),
        "lora-rank": ("expand: a rank of 8, 16, 32 or 64; with others the kernel writes no sum", "pad the adapter"),
        "lora-contiguous": ("contiguous tensors: the kernels read no strides", "call .contiguous()"),
    },
)
note(
    _FAMILY,
    "(not documented) adapters within weight, lengths and ranks of 0 or more",
    "—",
    "others are a `DeviceFault` (507015); tokens of requests beyond x are left out: " + _TEST,
)
note(
    _FAMILY,
    "schemas that mark every tensor as written",
    _SOURCE,
    "y alone is; the order of streams is checked as the schema says, so that a read of the weights in another stream "
    "needs an event",
)
note(
    "npu::sgemmv_shrink",
    "seven arguments; SGLang 0.5.23 gives an eighth for stacked projections",
    "sgl-kernel-npu f425bdf, csrc/pytorch_extensions.cpp; sglang 0.5.23, srt/lora/backend/ascend_backend.py",
    "the dispatcher refuses it, as with the library itself; of stacked rows the kernel computes the first `rank`",
)


def _refuse_dtypes(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    index: dict[str, torch.Tensor],
    scales: torch.Tensor | None,
) -> None:
    narrow, wide = ({"x": x}, {"y": y}) if "shrink" in op else ({"y": y}, {"x": x})
    for name, tensor in (narrow | {"weight": weight}).items():
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != weight.dtype:
            refuse(op, "lora-dtype", name, tensor.dtype)
    for name, tensor in wide.items():
        if tensor.dtype != torch.float32:
            refuse(op, "lora-dtype", name, tensor.dtype)
    wanted = torch.int32 if op.startswith("npu") else torch.int64
    for name, tensor in index.items():
        if tensor.dtype != wanted:
            refuse(op, "lora-index-dtype", name, tensor.dtype)
    if scales is not None and scales.dtype != torch.float16:
        refuse(op, "lora-index-dtype", "lora_scales", scales.dtype)


def _check(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    index: dict[str, torch.Tensor],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Refusals that all share; the weight as [adapters, out, in]."""
    _refuse_dtypes(op, x, weight, y, index, scales)
    named = {"x": x, "weight": weight, "y": y, **index} | ({} if scales is None else {"lora_scales": scales})
    for name, tensor in named.items():
        if not tensor.is_contiguous():
            refuse(op, "lora-contiguous", name, f"strides {tensor.stride()}")
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
    plain = weight.squeeze(1) if weight.dim() == 4 and weight.size(1) == 1 else weight
    fits = x.dim() == 2 and y.dim() == 2 and plain.dim() == 3 and x.size(0) == y.size(0)
    fits = fits and all(tensor.dim() == 1 for name, tensor in named.items() if name not in ("x", "weight", "y"))
    if not fits:
        refuse(op, "lora-shape", "x", shapes)
    if "shrink" in op:
        if tuple(plain.shape[1:]) != (y.size(1), x.size(1)):
            refuse(op, "lora-shape", "weight", shapes)
        if x.size(1) <= y.size(1):
            refuse(op, "lora-shrink", "y", shapes)
    if "bgmv" in op and index["indices"].numel() != x.size(0):
        refuse(op, "lora-shape", "indices", shapes)
    if "bgmv" not in op and index["lora_indices"].numel() < index["seq_len"].numel():
        refuse(op, "lora-shape", "lora_indices", shapes)
    return plain


def _adapters(op: str, x: torch.Tensor, indices: list[int], lens: list[int] | None, count: int) -> list[int]:
    """Adapter of each token, -1 for none: tokens behind the last request have none."""
    if lens is not None:
        of_request, indices = indices, []
        for number, (index, length) in enumerate(zip(of_request, lens, strict=False)):
            if length < 0:
                raise DeviceFault(op, f"request {number} has {length} tokens")
            indices += [index] * min(length, x.size(0) - len(indices))
        indices += [-1] * (x.size(0) - len(indices))
    for token, index in enumerate(indices):
        if index >= count:
            raise DeviceFault(op, f"token {token} has adapter {index} of {count}")
    return indices


def _shrink(
    op: str, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, index: dict[str, torch.Tensor], scale: float
) -> None:
    plain = _check(op, x, weight, y, index)
    indices, lens = next(iter(index.values())).tolist(), index["seq_len"].tolist() if "seq_len" in index else None
    for token, adapter in enumerate(_adapters(op, x, indices, lens, plain.size(0))):
        if adapter >= 0:
            y[token] = (plain[adapter].float() @ x[token].float()) * scale


def _expand(
    op: str, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, index: dict[str, torch.Tensor], at: int, size: int
) -> torch.Tensor:
    plain = _check(op, x, weight, y, index)
    if not 0 <= at <= at + size <= y.size(1) or x.size(1) > size or tuple(plain.shape[1:]) != (size, x.size(1)):
        refuse(op, "lora-slice", "slice_size", f"[{at}:{at + size}] of {y.size(1)}, weight {tuple(plain.shape)}")
    if x.size(1) not in RANKS:
        refuse(op, "lora-rank", "x", f"shape {tuple(x.shape)}")
    indices, lens = next(iter(index.values())).tolist(), index["seq_len"].tolist() if "seq_len" in index else None
    for token, adapter in enumerate(_adapters(op, x, indices, lens, plain.size(0))):
        if adapter >= 0:
            y[token, at : at + size] = (y[token, at : at + size].float() + plain[adapter].float() @ x[token]).to(
                y.dtype
            )
    return y


def bgmv_shrink(x: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """Writes ``scale * weight[adapter] @ x`` of each token; tokens with a negative adapter keep what ``y`` has.

    Args:
        x: Shape: [tokens, in]; float16 or bfloat16.
        weight: Shape: [adapters, rank, in] or [adapters, 1, rank, in]; dtype of ``x``.
        indices: adapter of each token. Shape: [tokens]; int64.
        y: Shape: [tokens, rank]; float32. *Mutated*.
        scale: factor.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/kernels/bgmv_shrink.cpp.
    """
    _shrink(BGMV_SHRINK, x, weight, y, {"indices": indices}, scale)


def bgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Adds ``weight[adapter] @ x`` of each token to a slice of ``y``; tokens with a negative adapter add nothing.

    Args:
        x: Shape: [tokens, rank]; float32; a rank of 8, 16, 32 or 64.
        weight: Shape: [adapters, slice_size, rank] or [adapters, 1, slice_size, rank]; dtype of ``y``.
        indices: adapter of each token. Shape: [tokens]; int64.
        y: Shape: [tokens, out]; float16 or bfloat16. *Mutated*.
        slice_offset: first column.
        slice_size: columns.

    Returns:
        ``y``; through the dispatcher a copy of it, as the schema does not name it as the result.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/kernels/bgmv_expand.cpp.
    """
    return _expand(BGMV_EXPAND, x, weight, y, {"indices": indices}, slice_offset, slice_size)


def sgmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    scale: float,
) -> None:
    """As ``bgmv_shrink`` with an adapter a request: the next ``seq_len`` tokens are its own.

    Args:
        x, weight, y, scale: as there. ``y`` is *mutated*.
        lora_indices: adapter of each request; int64.
        seq_len: tokens of each request; int64.

    Raises:
        OpRefused, DeviceFault: see ``errors``.
    """
    _shrink(SGMV_SHRINK, x, weight, y, {"lora_indices": lora_indices, "seq_len": seq_len}, scale)


def sgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """As ``bgmv_expand`` with an adapter a request: the next ``seq_len`` tokens are its own.

    Args:
        x, weight, y, slice_offset, slice_size: as there. ``y`` is *mutated*.
        lora_indices: adapter of each request; int64.
        seq_len: tokens of each request; int64.

    Raises:
        OpRefused, DeviceFault: see ``errors``.
    """
    index = {"lora_indices": lora_indices, "seq_len": seq_len}
    return _expand(SGMV_EXPAND, x, weight, y, index, slice_offset, slice_size)


def _ranks(op: str, ranks: torch.Tensor, adapters: list[int], most: int) -> list[int]:
    """Rank of each token's adapter, 0 for none."""
    known = ranks.tolist()
    chosen = [known[adapter] if 0 <= adapter < len(known) else 0 for adapter in adapters]
    for token, rank in enumerate(chosen):
        if adapters[token] >= len(known) or not 0 <= rank <= most:
            raise DeviceFault(op, f"token {token}: adapter {adapters[token]} of {len(known)} with a rank of {rank}")
    return chosen


def sgemmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    lora_ranks: torch.Tensor,
    lora_scales: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """As ``sgmv_shrink`` with a rank and a scale an adapter: the columns of ``y`` behind its rank are left alone.

    Args:
        x: Shape: [tokens, in]; float16 or bfloat16.
        weight: Shape: [adapters, most rank, in]; dtype of ``x``.
        lora_indices: adapter of each request; int32.
        seq_len: tokens of each request; int32.
        lora_ranks: Shape: [adapters]; int32; 0 skips its tokens.
        lora_scales: Shape: [adapters]; float16.
        y: Shape: [tokens, most rank]; float32. *Mutated*.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu f425bdf, csrc/lora.
    """
    index = {"lora_indices": lora_indices, "seq_len": seq_len, "lora_ranks": lora_ranks}
    plain = _check(SGEMMV_SHRINK, x, weight, y, index, lora_scales)
    adapters = _adapters(SGEMMV_SHRINK, x, lora_indices.tolist(), seq_len.tolist(), plain.size(0))
    if lora_scales.numel() < lora_ranks.numel():
        refuse(SGEMMV_SHRINK, "lora-shape", "lora_scales", f"{lora_scales.numel()} for {lora_ranks.numel()} adapters")
    for token, rank in enumerate(_ranks(SGEMMV_SHRINK, lora_ranks, adapters, y.size(1))):
        if rank:
            scale = float(lora_scales[adapters[token]])
            y[token, :rank] = (plain[adapters[token], :rank].float() @ x[token].float()) * scale


def sgemmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    lora_ranks: torch.Tensor,
    sliceOffsets: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Adds each slice's product to ``y``: the slices of a token lie one behind the other in ``x``, ``rank`` wide each.

    Args:
        x: Shape: [tokens, slices * most rank]; float32.
        weight: Shape: [adapters, out, most rank]; dtype of ``y``.
        lora_indices: adapter of each request; int32.
        seq_len: tokens of each request; int32.
        lora_ranks: Shape: [adapters]; int32; 8, 16, 32 or 64, or 0, which skips its tokens.
        sliceOffsets: first column of each slice, and the end. Shape: [slices + 1]; int32.
        y: Shape: [tokens, out]; float16 or bfloat16. *Mutated*.

    Returns:
        ``y``; through the dispatcher a copy of it.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu f425bdf, csrc/lora.
    """
    index = {"lora_indices": lora_indices, "seq_len": seq_len, "lora_ranks": lora_ranks, "sliceOffsets": sliceOffsets}
    plain = _check(SGEMMV_EXPAND, x, weight, y, index)
    offsets = sliceOffsets.tolist()
    slices = len(offsets) - 1
    most = x.size(1) // slices if slices > 0 else 0
    rising = sorted(offsets) == offsets and offsets[0] >= 0 and offsets[-1] <= y.size(1) if offsets else False
    if not rising or slices < 1 or tuple(plain.shape[1:]) != (y.size(1), most):
        refuse(SGEMMV_EXPAND, "lora-slice", "sliceOffsets", f"{offsets} of {y.size(1)}, weight {tuple(plain.shape)}")
    adapters = _adapters(SGEMMV_EXPAND, x, lora_indices.tolist(), seq_len.tolist(), plain.size(0))
    ranks = _ranks(SGEMMV_EXPAND, lora_ranks, adapters, most)
    for rank in ranks:
        if rank and rank not in RANKS:
            refuse(SGEMMV_EXPAND, "lora-rank", "lora_ranks", rank)
    for token, rank in enumerate(ranks):
        for number in range(slices if rank else 0):
            first, end = offsets[number : number + 2]
            part = plain[adapters[token], first:end, :rank].float() @ x[token, rank * number : rank * (number + 1)]
            y[token, first:end] = (y[token, first:end].float() + part).to(y.dtype)
    return y


for _schema in SCHEMAS:
    define(_schema, "_C_ascend")
for _schema in SGL_SCHEMAS:
    define(_schema)
KERNELS = {
    BGMV_SHRINK: bgmv_shrink,
    BGMV_EXPAND: bgmv_expand,
    SGMV_SHRINK: sgmv_shrink,
    SGMV_EXPAND: sgmv_expand,
    SGEMMV_SHRINK: sgemmv_shrink,
    SGEMMV_EXPAND: sgemmv_expand,
}
