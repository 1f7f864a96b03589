"""npu_mm_all_reduce_base and npu_mm_reduce_scatter_base: a product on every rank of a group, and the sum over ranks.

This module owns the ops' refusals, the products and the sums: every rank's product is rounded to the output's dtype,
sums are float32 in the order of the ranks and rounded once. Groups and their names are in ``expert_groups.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .errors import KernelNotCovered
from .expert_groups import exchange, group_named
from .pose import Scope
from .quant_matmul import product
from .quant_params import unpacked_scale
from .quantising import dtype_of
from .rules import declare, holds, note, online, refuse

OP_REDUCE = "npu::npu_mm_all_reduce_base"
OP_SCATTER = "npu::npu_mm_reduce_scatter_base"
_REDUCE_DOC = online("torch_npu-npu_mm_all_reduce_base")
_SCATTER_DOC = online("torch_npu-npu_mm_reduce_scatter_base")
_TEST = "test_kernels_matmul_collective.py"
_HALVES = (torch.float16, torch.bfloat16)

declare(
    "npu_mm_all_reduce_base, npu_mm_reduce_scatter_base",
    _REDUCE_DOC,
    _TEST,
    {
        "mmc-group": (
            "hcom: the name of a process group",
            "name the group: ascend_emulator.kernels.expert_groups.name_group(name, group)",
        ),
        "mmc-op": ("reduce_op sum", "pass 'sum'"),
        "mmc-turn": ("comm_turn 0", "leave it out"),
        "mmc-dtype": (
            "x1 and x2 both float16 or both bfloat16, or int8 with scales; all_reduce: or a float16 or bfloat16 x1 "
            "and an int8 x2 with an antiquant_scale of x1's dtype",
            "cast or quantise them",
        ),
        "mmc-shape": ("a contiguous x1 (m, k), all_reduce: or (b, s, k), and x2 (k, n), not empty", "reshape them"),
        "mmc-bias": ("a bias (n,): of x1's dtype, for int8 products int32", "cast and reshape the bias"),
    },
)
declare(
    "npu_mm_all_reduce_base",
    _REDUCE_DOC,
    _TEST,
    {
        "mmar-world": ("1, 2, 4 or 8 ranks", "use a group of one of these sizes"),
        "mmar-x3": ("x3 of the output's dtype and shape", "cast and reshape x3"),
        "mmar-scales": (
            "int8: a dequant_scale (1,), (n,) or (1, n) of int64 or bfloat16, or of float32 with a pertoken_scale",
            "pass npu_trans_quant_param(scale)",
        ),
        "mmar-pertoken": ("a float32 pertoken_scale (rows of x1,), beside bfloat16 or float32", "reshape it"),
        "mmar-antiquant": (
            "antiquant_scale and antiquant_offset (1,), (n,) or (1, n); in groups (ceil(k / group), n)",
            "reshape them",
        ),
        "mmar-group-size": ("antiquant_group_size 0, or a multiple of 32 from 32 to k - 1", "pass 0"),
    },
)
declare(
    "npu_mm_reduce_scatter_base",
    _SCATTER_DOC,
    _TEST,
    {
        "mmrs-world": ("world_size ranks in the group, a divisor of m", "pass the group's size; pad the rows"),
        "mmrs-k": ("k of 256 to 65534", "split the product otherwise"),
        "mmrs-zero": ("a bias of zeros", "add the bias afterwards"),
        "mmrs-mode": ("comm_mode ai_cpu or aiv, aiv for int8", "pass comm_mode='aiv'"),
        "mmrs-scales": (
            "int8: x2_scale (1, n) of float32 or int64, x1_scale none or (m, 1) of float32; none of them else",
            "cast and reshape the scales",
        ),
        "mmrs-output": ("an output_dtype with float32 scales alone, bfloat16 or float16", "leave it out"),
    },
)
declare(
    "npu_mm_reduce_scatter_base",
    _SCATTER_DOC,
    _TEST,
    {"mmrs-world-a2": ("2, 4 or 8 ranks", "use a group of one of these sizes")},
    Scope(chips=("910B",)),
)
declare(
    "npu_mm_reduce_scatter_base",
    _SCATTER_DOC,
    _TEST,
    {"mmrs-world-a3": ("2, 4, 8, 16 or 32 ranks", "use a group of one of these sizes")},
    Scope(chips=("910C",)),
)
note("npu_mm_all_reduce_base", "for 910B alone", _REDUCE_DOC, "taken on every chip: engines call it on others too")
note("npu_mm_reduce_scatter_base", "ai_cpu: for training alone", _SCATTER_DOC, "taken: engines call it for inference")
note("npu_mm_reduce_scatter_base", "x2_scale (1, n)", _SCATTER_DOC, "(n,) is taken too, as engines pass it: " + _TEST)
note(
    "npu_mm_reduce_scatter_base",
    "an int64 x2_scale gives float16; a table says: as output_dtype says",
    _SCATTER_DOC,
    "float16, as in the Meta kernel: " + _TEST,
)
note(
    "npu_mm_all_reduce_base",
    "comm_quant_scale_1, _2; comm_quant_mode, comm_mode, group_sizes, y_dtype and the dtypes of single arguments",
    _REDUCE_DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    "npu_mm_all_reduce_base, npu_mm_reduce_scatter_base",
    "(not documented) where sums are rounded",
    "—",
    "each rank's product to the output's dtype, their sum in float32 and once more",
)


def _group(op: str, hcom: str) -> dist.ProcessGroup:
    group = group_named(hcom)
    if group is None:
        refuse(op, "mmc-group", "hcom", repr(hcom))
    return group


def _check(op: str, x1: torch.Tensor, x2: torch.Tensor, bias: torch.Tensor | None, reduce_op: str, turn: int) -> None:
    if reduce_op != "sum":
        refuse(op, "mmc-op", "reduce_op", repr(reduce_op))
    if turn:
        refuse(op, "mmc-turn", "comm_turn", turn)
    ranks = (2, 3) if op == OP_REDUCE else (2,)
    fits = x1.dim() in ranks and x2.dim() == 2 and x1.is_contiguous() and x1.numel() and x2.numel()
    if not fits or x1.size(-1) != x2.size(0):
        refuse(op, "mmc-shape", "x1", f"{tuple(x1.shape)}, strides {x1.stride()}, x2 {tuple(x2.shape)}")
    wanted = torch.int32 if x1.dtype == torch.int8 else x1.dtype
    if bias is not None and (bias.dtype != wanted or tuple(bias.shape) != (x2.size(1),)):
        refuse(op, "mmc-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)} beside {x1.dtype}")


def _gathered(group: dist.ProcessGroup, part: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks of equal tensors. float32."""
    rows = part.reshape(1, -1).expand(group.size(), -1)
    return exchange(group, rows).view(group.size(), *part.shape).float().sum(0)


def _row_of(scale: torch.Tensor, n: int) -> bool:
    return tuple(scale.shape) in ((1,), (n,), (1, n))


def _widened(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None, size: int
) -> torch.Tensor:
    """float32 weights of an int8 x2 beside a float x1."""
    k, n = x2.shape
    if scale is None or scale.dtype != x1.dtype:
        refuse(OP_REDUCE, "mmc-dtype", "antiquant_scale", None if scale is None else scale.dtype)
    if size and not (32 <= size <= k - 1 and size % 32 == 0):
        refuse(OP_REDUCE, "mmar-group-size", "antiquant_group_size", f"{size} for k = {k}")
    for name, tensor in (("antiquant_scale", scale), ("antiquant_offset", offset)):
        fits = tensor is None or (tuple(tensor.shape) == (-(-k // size), n) if size else _row_of(tensor, n))
        if tensor is not None and (not fits or tensor.dtype != scale.dtype or tensor.shape != scale.shape):
            refuse(OP_REDUCE, "mmar-antiquant", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    factor, shift = scale.float(), torch.zeros(1) if offset is None else offset.float()
    if size:
        factor = factor.repeat_interleave(size, 0)[:k]
        shift = shift.repeat_interleave(size, 0)[:k] if offset is not None else shift
    return (x2.float() + shift) * factor


def npu_mm_all_reduce_base(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    comm_quant_scale_1: torch.Tensor | None = None,
    comm_quant_scale_2: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: Sequence[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
) -> torch.Tensor:
    """Sum over the ranks of ``x1 @ x2 + bias + x3``.

    Args:
        x1: Shape: [m, k] or [b, s, k]; float16, bfloat16 or int8.
        x2: Shape: [k, n]; dtype of x1, or int8.
        hcom: name of the group.
        reduce_op: sum.
        bias: None, or added on every rank. Shape: [n]; dtype of x1, for int8 products int32.
        antiquant_scale: for an int8 x2 beside a float x1. Shape: [1], [n], [1, n] or [ceil(k / group), n].
        antiquant_offset: added to x2 before scaling; shaped as the scale.
        x3: None, or added on every rank. Shape: the output's.
        dequant_scale: for int8 products. Shape: [1], [n] or [1, n]; int64, bfloat16 or float32.
        pertoken_scale: Shape: [rows of x1]; float32.
        comm_quant_scale_1: not computed.
        comm_quant_scale_2: not computed.
        antiquant_group_size: rows of x2 that share a scale; 0 for all.
        comm_turn: 0.
        group_sizes: not computed.
        y_dtype: not computed.
        x1_dtype: not computed.
        x2_dtype: not computed.
        dequant_scale_dtype: not computed.
        pertoken_scale_dtype: not computed.
        comm_quant_mode: 0.
        comm_mode: not computed.

    Returns:
        Shape: [m, n] or [b, s, n]; dtype of x1; of int8 products bfloat16 beside a bfloat16 scale, else float16.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_mm_all_reduce_base.md.
    """
    given: dict[str, object] = {"comm_quant_scale_1": comm_quant_scale_1, "comm_quant_scale_2": comm_quant_scale_2}
    given |= {"group_sizes": group_sizes, "y_dtype": y_dtype, "x1_dtype": x1_dtype, "x2_dtype": x2_dtype}
    given |= {"dequant_scale_dtype": dequant_scale_dtype, "pertoken_scale_dtype": pertoken_scale_dtype}
    for name, value in (given | {"comm_quant_mode": comm_quant_mode or None, "comm_mode": comm_mode}).items():
        if value is not None:
            raise KernelNotCovered(OP_REDUCE, name, "a value")
    _check(OP_REDUCE, x1, x2, bias, reduce_op, comm_turn)
    n, count = x2.size(1), x1.numel() // x1.size(-1)
    dtype = x1.dtype
    if x1.dtype == x2.dtype == torch.int8:
        scale = dequant_scale
        kinds = (torch.int64, torch.bfloat16) if pertoken_scale is None else (torch.bfloat16, torch.float32)
        if scale is None or scale.dtype not in kinds or not _row_of(scale, n):
            shown = None if scale is None else f"{scale.dtype}, shape {tuple(scale.shape)}"
            refuse(OP_REDUCE, "mmar-scales", "dequant_scale", shown)
        if pertoken_scale is not None and (
            pertoken_scale.dtype != torch.float32 or tuple(pertoken_scale.shape) != (count,)
        ):
            refuse(
                OP_REDUCE, "mmar-pertoken", "pertoken_scale", f"{pertoken_scale.dtype}, {tuple(pertoken_scale.shape)}"
            )
        dtype = torch.bfloat16 if scale.dtype == torch.bfloat16 else torch.float16
        total = product(x1.view(count, -1), x2)
        part = (total if bias is None else total + bias).float() * unpacked_scale(scale)
        part = part if pertoken_scale is None else part * pertoken_scale.unsqueeze(-1)
    else:
        if dequant_scale is not None or pertoken_scale is not None:
            refuse(OP_REDUCE, "mmar-scales", "dequant_scale", f"scales beside {x1.dtype}")
        if x1.dtype not in _HALVES or x2.dtype not in (x1.dtype, torch.int8):
            refuse(OP_REDUCE, "mmc-dtype", "x2", f"{x2.dtype} beside {x1.dtype}")
        weight = x2.float()
        if x2.dtype == torch.int8:
            weight = _widened(x1, x2, antiquant_scale, antiquant_offset, antiquant_group_size)
        elif antiquant_scale is not None or antiquant_offset is not None:
            refuse(OP_REDUCE, "mmc-dtype", "antiquant_scale", f"a tensor beside x2 of {x2.dtype}")
        part = x1.view(count, -1).float() @ weight
        part = part if bias is None else part + bias.float()
    shape = (*x1.shape[:-1], n)
    if x3 is not None:
        if x3.dtype != dtype or tuple(x3.shape) != shape:
            refuse(OP_REDUCE, "mmar-x3", "x3", f"{x3.dtype}, shape {tuple(x3.shape)}")
        part = part + x3.float().view(count, n)
    group = _group(OP_REDUCE, hcom)
    if group.size() not in (1, 2, 4, 8):
        refuse(OP_REDUCE, "mmar-world", "hcom", f"{group.size()} ranks")
    return _gathered(group, part.to(dtype)).to(dtype).view(shape)


def _scaled(
    total: torch.Tensor, scales: tuple[torch.Tensor | None, torch.Tensor | None], output: int | torch.dtype | None
) -> tuple[torch.Tensor, torch.dtype]:
    """An int8 product with its scales, float32, and the output's dtype."""
    first, second = scales
    m, n = total.shape
    fits = second is not None and tuple(second.shape) in ((1, n), (n,))
    if second is None or not fits or second.dtype not in (torch.float32, torch.int64):
        shown = None if second is None else f"{second.dtype}, shape {tuple(second.shape)}"
        refuse(OP_SCATTER, "mmrs-scales", "x2_scale", shown)
    if first is not None and (first.dtype != torch.float32 or tuple(first.shape) != (m, 1)):
        refuse(OP_SCATTER, "mmrs-scales", "x1_scale", f"{first.dtype}, shape {tuple(first.shape)}")
    dtype = torch.float16
    if second.dtype == torch.float32:
        dtype = dtype_of(OP_SCATTER, "output_dtype", output, torch.bfloat16)
    if dtype not in _HALVES or (output is not None and second.dtype == torch.int64):
        refuse(OP_SCATTER, "mmrs-output", "output_dtype", f"{output} beside x2_scale of {second.dtype}")
    part = total.float() * unpacked_scale(second)
    return part if first is None else part * first, dtype


def npu_mm_reduce_scatter_base(
    input: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: int | torch.dtype | None = None,
    comm_mode: str | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of ``input @ x2``.

    Args:
        input: Shape: [m, k], m a multiple of the ranks; float16, bfloat16 or int8.
        x2: Shape: [k, n]; dtype of the input.
        hcom: name of the group.
        world_size: its ranks.
        reduce_op: sum.
        bias: None, or zeros. Shape: [n].
        x1_scale: None, or for int8 products Shape: [m, 1]; float32.
        x2_scale: for int8 products. Shape: [1, n] or [n]; float32, or int64 of npu_trans_quant_param.
        comm_turn: 0.
        output_dtype: with float32 scales bfloat16 (None too) or float16.
        comm_mode: ai_cpu (None too) or aiv; int8 products: aiv.

    Returns:
        Shape: [m / world_size, n]; dtype of the input; of int8 products output_dtype, with int64 scales float16.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_mm_reduce_scatter_base.md.
    """
    _check(OP_SCATTER, input, x2, bias, reduce_op, comm_turn)
    if input.dtype != x2.dtype or input.dtype not in (*_HALVES, torch.int8):
        refuse(OP_SCATTER, "mmc-dtype", "x2", f"{x2.dtype} beside {input.dtype}")
    if not 256 <= input.size(1) < 65535:
        refuse(OP_SCATTER, "mmrs-k", "input", f"k = {input.size(1)}")
    if bias is not None and bool(bias.any()):
        refuse(OP_SCATTER, "mmrs-zero", "bias", "numbers other than 0")
    if comm_mode not in (None, "ai_cpu", "aiv") or (input.dtype == torch.int8 and comm_mode != "aiv"):
        refuse(OP_SCATTER, "mmrs-mode", "comm_mode", f"{comm_mode!r} with {input.dtype}")
    if input.dtype == torch.int8:
        part, dtype = _scaled(product(input, x2), (x1_scale, x2_scale), output_dtype)
    else:
        if x1_scale is not None or x2_scale is not None:
            refuse(OP_SCATTER, "mmrs-scales", "x2_scale", f"scales beside {input.dtype}")
        if output_dtype is not None:
            refuse(OP_SCATTER, "mmrs-output", "output_dtype", f"{output_dtype} beside {input.dtype}")
        part, dtype = product(input, x2), input.dtype
    group = _group(OP_SCATTER, hcom)
    if group.size() != world_size or input.size(0) % world_size:
        refuse(OP_SCATTER, "mmrs-world", "world_size", f"{world_size} of {group.size()} ranks, m = {input.size(0)}")
    for rule, sizes in (("mmrs-world-a2", (2, 4, 8)), ("mmrs-world-a3", (2, 4, 8, 16, 32))):
        if world_size not in sizes and holds(rule):
            refuse(OP_SCATTER, rule, "world_size", world_size)
    rows = part.to(dtype).view(world_size, -1)
    total = exchange(group, rows).float().sum(0)
    return total.to(dtype).view(input.size(0) // world_size, x2.size(1))


KERNELS = {OP_REDUCE: npu_mm_all_reduce_base, OP_SCATTER: npu_mm_reduce_scatter_base}
