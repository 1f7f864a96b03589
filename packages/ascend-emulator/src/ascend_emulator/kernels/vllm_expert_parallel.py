"""vLLM-Ascend's ops over ranks: experts with their dispatch and combine in one, and a product with its all-reduce.

This module owns the ops' definitions (torch_npu has none), their refusals, and the way of a row: to the rank of its
expert, through two products, back to its token. Groups and their names are in ``expert_groups.py``. Quantised rows have
a scale each, products of int8 are exact, everything else is float32 and rounded to the dtype of ``x`` once a row.
Long because the two ops over experts have thirty arguments, and one way of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .definitions import define
from .errors import DeviceFault, KernelNotCovered
from .expert_groups import exchange, gather, group_named
from .faults import fill_poison_
from .quant_params import unpacked_scale
from .quantising import quantise_rows
from .rules import declare, note, refuse

OP_FUSED = "_C_ascend::dispatch_ffn_combine"
OP_DECODE = "_C_ascend::dispatch_gmm_combine_decode"
OP_REDUCE = "_C_ascend::matmul_allreduce_add_rmsnorm"
SCHEMAS = (
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, "
    "Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out, "
    "Tensor! expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0) -> (Tensor out, "
    "Tensor expert_token_nums)",
    "dispatch_gmm_combine_decode(Tensor x, Tensor expert_ids, Tensor[] gmm1_permuted_weight, "
    "Tensor[] gmm1_permuted_weight_scale, Tensor[] gmm2_weight, Tensor[] gmm2_weight_scale, Tensor expert_scales, "
    "Tensor? expert_smooth_scales=None, Tensor? x_active_mask=None, str group_ep='', int ep_rank_size=0, "
    "int ep_rank_id=0, int moe_expert_num=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, "
    "int global_bs=0) -> (Tensor output, Tensor expert_token_nums)",
    "matmul_allreduce_add_rmsnorm(Tensor x1, Tensor x2, Tensor residual, Tensor gamma, str groupTp, int tpRankSize, "
    "int tpRankId, float epsilon, bool isTransB, bool isGatherAddOut) -> (Tensor output, Tensor add_out)",
)
_EXPERTS = "_C_ascend::dispatch_ffn_combine, dispatch_gmm_combine_decode"
_SOURCE = "vllm-ascend v0.23.0, csrc/mc2"
_TEST = "test_kernels_vllm_expert_parallel.py"
_HALVES = (torch.float16, torch.bfloat16)

declare(
    _EXPERTS + ", matmul_allreduce_add_rmsnorm",
    _SOURCE,
    _TEST,
    {
        "fused-group": (
            "the name of a process group",
            "name the group: ascend_emulator.kernels.expert_groups.name_group(name, group)",
        ),
    },
)
declare(
    _EXPERTS,
    _SOURCE,
    _TEST,
    {
        "fused-x": ("x (tokens, H) of float16 or bfloat16 (decode: bfloat16)", "cast and reshape it"),
        "fused-choice": ("int32 experts and float32 weights of one shape (tokens, k)", "cast and reshape them"),
        "fused-weight": (
            "the first product (H, 2n) and the second (n, H) of each expert, in one tensor or a list; int8, or of the "
            "dtype of x",
            "pass the rank's own experts",
        ),
        "fused-scale": (
            "int8: one scale a column of both products: int64 (decode: float32 or bfloat16)",
            "pass the scales of the quantised layers",
        ),
        "fused-mask": ("an x_active_mask of bool, one a token", "pass None, or one flag a token"),
    },
)
declare(
    OP_FUSED,
    _SOURCE + "/dispatch_ffn_combine",
    _TEST,
    {"fused-out": ("an out like x and int32 expert_token_nums, one an expert of the rank", "allocate them so")},
)
declare(
    OP_DECODE,
    _SOURCE + "/dispatch_gmm_combine_decode/op_host",
    _TEST,
    {
        "decode-sizes": (
            "1 to 256 tokens, H of 512 to 7168, 2n of 1024 to 6144, at most 12 experts a token",
            "use the unfused way",
        ),
        "decode-layout": (
            "ep_rank_size the size of the group, a rank in it, 1 to 512 experts in equal parts, shared_expert_num 1, "
            "a global_bs of 0 or a multiple of the ranks",
            "pass the group's numbers",
        ),
    },
)
declare(
    OP_REDUCE,
    _SOURCE + "/matmul_allreduce_add_rmsnorm/op_host",
    _TEST,
    {
        "reduce-norm-dtype": ("four tensors of float16 or bfloat16 alike", "cast them"),
        "reduce-norm-shape": (
            "x1 (m, k) or (b, s, k), x2 (k, n), isTransB (n, k), a residual of the product's shape, gamma (n,)",
            "reshape them",
        ),
        "reduce-norm-ranks": ("tpRankSize the size of the group, tpRankId a rank of it", "pass the group's numbers"),
    },
)
note(
    OP_FUSED,
    "at most max_output_size rows for a rank",
    _SOURCE + "/dispatch_ffn_combine/op_kernel",
    "the kernel leaves out the rest without a word, and their tokens get what memory holds; here a `DeviceFault` "
    "(507015): " + _TEST,
)
note(
    OP_FUSED,
    "a clamp_limit of 0 or less",
    _SOURCE,
    "is none; else the gate is cut above, the other half twice: " + _TEST,
)
note(OP_FUSED, "bias1, bias2, and int4 weights (int32)", _SOURCE, "without effect; `KernelNotCovered`: " + _TEST)
note(
    OP_DECODE,
    "expert_smooth_scales; shared_expert_rank_num and quant_mode other than 0",
    _SOURCE + "/dispatch_gmm_combine_decode",
    "without effect, as in the kernel; `KernelNotCovered`: " + _TEST,
)
note(
    OP_REDUCE,
    "isGatherAddOut False",
    _SOURCE + "/matmul_allreduce_add_rmsnorm",
    "add_out is poison: a device fills the rows of its own part alone, and which these are is not documented: " + _TEST,
)
note(_EXPERTS, "(not documented) experts outside the group", "—", "are a `DeviceFault` (507015): " + _TEST)


@dataclass(frozen=True)
class _Experts:
    """A rank's experts: both products of each, and their scales (None beside floating-point weights)."""

    first: list[torch.Tensor]
    second: list[torch.Tensor]
    first_scale: list[torch.Tensor] | None
    second_scale: list[torch.Tensor] | None
    limit: float

    def run(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Shape: [rows, H] of the model's dtype, in and out."""
        high = self._product(rows.float(), rows.dtype, self.first, self.first_scale, expert)
        gate, linear = high.chunk(2, -1)
        if self.limit > 0:
            gate, linear = gate.clamp(max=self.limit), linear.clamp(-self.limit, self.limit)
        inner = torch.nn.functional.silu(gate) * linear
        return self._product(inner, rows.dtype, self.second, self.second_scale, expert).to(rows.dtype)

    @staticmethod
    def _product(
        rows: torch.Tensor,
        dtype: torch.dtype,
        weights: list[torch.Tensor],
        scales: list[torch.Tensor] | None,
        expert: int,
    ) -> torch.Tensor:
        if scales is None:
            return rows.to(dtype).float() @ weights[expert].float()
        narrow, step = quantise_rows(rows)
        sums = (narrow.double() @ weights[expert].double()).float()
        return sums * scales[expert] * step.unsqueeze(1)


def _parts(tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """One tensor an expert, from a list of them or from one tensor of all."""
    if len(tensors) == 1 and tensors[0].dim() == rank + 1:
        return list(tensors[0].unbind(0))
    return list(tensors)


def _experts(
    op: str,
    x: torch.Tensor,
    weights: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    scales: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    limit: float,
) -> _Experts:
    first, second = (_parts(group, 2) for group in weights)
    if any(weight.dtype == torch.int32 for weight in first):
        raise KernelNotCovered(op, "weight1", "a tensor of dtype int32 (int4 packed)")
    kind = first[0].dtype if first else torch.int8
    wide = first[0].size(-1) if first and first[0].dim() else 0
    for name, group, shape in (("first", first, (x.size(1), wide)), ("second", second, (wide // 2, x.size(1)))):
        for weight in group:
            if weight.dtype != kind or kind not in (torch.int8, x.dtype) or tuple(weight.shape) != shape or wide % 2:
                refuse(op, "fused-weight", name, f"{weight.dtype}, shape {tuple(weight.shape)}, wanted {shape}")
    if not first or len(second) != len(first):
        refuse(op, "fused-weight", "second", f"{len(second)} beside {len(first)} experts")
    if kind != torch.int8:
        return _Experts(first, second, None, None, limit)
    plain: list[list[torch.Tensor]] = []
    dtypes = (torch.int64,) if op == OP_FUSED else (torch.float32, torch.bfloat16)
    for given, columns in zip(scales, (wide, x.size(1)), strict=True):
        parts = _parts(given, 1)
        for scale in parts:
            if scale.dtype not in dtypes or tuple(scale.shape) != (columns,):
                refuse(op, "fused-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)}, wanted ({columns},)")
        if len(parts) != len(first):
            refuse(op, "fused-scale", "scale", f"{len(parts)} for {len(first)} experts")
        plain.append([unpacked_scale(scale) for scale in parts])
    return _Experts(first, second, plain[0], plain[1], limit)


def _check_tokens(
    op: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Which tokens take part."""
    if x.dim() != 2 or x.dtype not in (_HALVES if op == OP_FUSED else (torch.bfloat16,)):
        refuse(op, "fused-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    fits = ids.dim() == 2 and ids.size(0) == x.size(0) and ids.shape == weights.shape
    if ids.dtype != torch.int32 or weights.dtype != torch.float32 or not fits:
        given = f"{ids.dtype}, shape {tuple(ids.shape)}, weights {weights.dtype}, shape {tuple(weights.shape)}"
        refuse(op, "fused-choice", "expert_idx", given)
    if mask is None:
        return torch.ones(x.size(0), dtype=torch.bool)
    if mask.dtype != torch.bool or tuple(mask.shape) != (x.size(0),):
        refuse(op, "fused-mask", "x_active_mask", f"{mask.dtype}, shape {tuple(mask.shape)}")
    return mask


def _run(
    op: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    active: torch.Tensor,
    experts: _Experts,
    group: dist.ProcessGroup,
    most: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the experts' rows by token, and rows of each expert of this rank."""
    own, ranks = len(experts.first), group.size()
    choices = ids.masked_fill(~active.unsqueeze(1), -1).flatten().long()
    inside = bool(((choices < own * ranks) & ((choices >= 0) | ~active.repeat_interleave(ids.size(1)))).all())
    counts = torch.bincount(choices[(choices >= 0) & (choices < own * ranks)], minlength=own * ranks)
    every = gather(group, [*counts.tolist(), int(inside)])
    if not bool(every[:, -1].all()):
        raise DeviceFault(op, f"expert_idx of a rank names an expert outside of {own * ranks}")
    totals = every[:, :-1].view(ranks, ranks, own)
    for rank, arriving in enumerate(totals.sum((0, 2)).tolist()):
        if most is not None and arriving > most:
            raise DeviceFault(op, f"{arriving} rows for rank {rank}, max_output_size is {most}")
    places = choices.argsort(stable=True)[int((choices < 0).sum()) :]
    send, receive = totals[group.rank()].sum(1).tolist(), totals[:, group.rank()].sum(1).tolist()
    rows = exchange(group, x[places // ids.size(1)], send, receive)
    owner = torch.cat([torch.arange(own).repeat_interleave(part) for part in totals[:, group.rank()]])
    done = torch.empty_like(rows)
    for expert in range(own):
        mine = owner == expert
        if bool(mine.any()):
            done[mine] = experts.run(expert, rows[mine])
    back = exchange(group, done, receive, send)
    out = torch.zeros(x.shape, dtype=torch.float32)
    out.index_add_(0, places // ids.size(1), back.float() * weights.flatten()[places].unsqueeze(1))
    return out.to(x.dtype), totals[:, group.rank()].sum(0)


def _group(op: str, argument: str, name: str) -> dist.ProcessGroup:
    group = group_named(name)
    if group is None:
        refuse(op, "fused-group", argument, repr(name))
    return group


def dispatch_ffn_combine(
    x: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    weight2: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    scale1: Sequence[torch.Tensor],
    scale2: Sequence[torch.Tensor],
    bias1: Sequence[torch.Tensor],
    bias2: Sequence[torch.Tensor],
    probs: torch.Tensor,
    group: str,
    max_output_size: int,
    out: torch.Tensor,
    expert_token_nums: torch.Tensor,
    x_active_mask: torch.Tensor | None = None,
    swiglu_limit: float = 1000000.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to the ranks of their experts, runs the experts, and sums what comes back; every rank calls it.

    Args:
        x: Shape: [tokens, H]; float16 or bfloat16.
        weight1: Shape: [H, 2n] an expert of this rank, or one [experts, H, 2n]; int8 or dtype of ``x``; gate first.
        weight2: Shape: [n, H] an expert, or one [experts, n, H].
        expert_idx: experts over all ranks. Shape: [tokens, k]; int32.
        scale1: with int8: factor of each column, packed as npu_trans_quant_param does. Shape: [2n] an expert; int64.
        scale2: the same. Shape: [H] an expert; int64.
        bias1: no effect, as ``bias2``.
        probs: weight of each choice. Shape: [tokens, k]; float32.
        group: name of the group; see ``expert_groups``.
        max_output_size: most rows for a rank.
        out: shape and dtype of ``x``. *Mutated*.
        expert_token_nums: rows of each expert of this rank. Shape: [experts] or [1, experts]; int32. *Mutated*.
        x_active_mask: tokens that take part. Shape: [tokens]; bool. Others are 0.
        swiglu_limit: cuts the gate above, the other half on both sides; 0 for none.

    Returns:
        ``out`` and ``expert_token_nums``; through the dispatcher copies of them.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``. When one rank alone raises, the others wait for it.

    Source:
        vllm-ascend v0.23.0, csrc/mc2/dispatch_ffn_combine.
    """
    active = _check_tokens(OP_FUSED, x, expert_idx, probs, x_active_mask)
    experts = _experts(OP_FUSED, x, (weight1, weight2), (scale1, scale2), swiglu_limit)
    if out.shape != x.shape or out.dtype != x.dtype:
        refuse(OP_FUSED, "fused-out", "out", f"{out.dtype}, shape {tuple(out.shape)}")
    if expert_token_nums.dtype != torch.int32 or expert_token_nums.numel() != len(experts.first):
        given = f"{expert_token_nums.dtype}, shape {tuple(expert_token_nums.shape)}"
        refuse(OP_FUSED, "fused-out", "expert_token_nums", given)
    ranks = _group(OP_FUSED, "group", group)
    sums, counts = _run(OP_FUSED, x, expert_idx, probs, active, experts, ranks, max_output_size)
    out.copy_(sums)
    expert_token_nums.copy_(counts.view(expert_token_nums.shape))
    return out, expert_token_nums


def dispatch_gmm_combine_decode(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    gmm1_permuted_weight: Sequence[torch.Tensor],
    gmm1_permuted_weight_scale: Sequence[torch.Tensor],
    gmm2_weight: Sequence[torch.Tensor],
    gmm2_weight_scale: Sequence[torch.Tensor],
    expert_scales: torch.Tensor,
    expert_smooth_scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    group_ep: str = "",
    ep_rank_size: int = 0,
    ep_rank_id: int = 0,
    moe_expert_num: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for decoding, with plain scales and a new output; every rank calls it.

    Args:
        x: Shape: [tokens, H]; bfloat16.
        expert_ids, gmm1_permuted_weight, gmm2_weight, expert_scales, x_active_mask, group_ep: as ``expert_idx``,
            ``weight1``, ``weight2``, ``probs``, ``x_active_mask`` and ``group`` there.
        gmm1_permuted_weight_scale, gmm2_weight_scale: factor of each column; float32 or bfloat16.
        expert_smooth_scales: no effect.
        ep_rank_size: ranks of the group.
        ep_rank_id: this rank.
        moe_expert_num: experts over all ranks.
        shared_expert_num: 1.
        shared_expert_rank_num: 0.
        quant_mode: 0.
        global_bs: 0, or the tokens of all ranks.

    Returns:
        Shape and dtype of ``x``, and rows of each expert of this rank (int64).

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/mc2/dispatch_gmm_combine_decode.
    """
    for name, number in (("shared_expert_rank_num", shared_expert_rank_num), ("quant_mode", quant_mode)):
        if number:
            raise KernelNotCovered(OP_DECODE, name, number)
    active = _check_tokens(OP_DECODE, x, expert_ids, expert_scales, x_active_mask)
    scales = gmm1_permuted_weight_scale, gmm2_weight_scale
    experts = _experts(OP_DECODE, x, (gmm1_permuted_weight, gmm2_weight), scales, 0.0)
    wide = experts.first[0].size(1)
    sizes = 1 <= x.size(0) <= 256 and 512 <= x.size(1) <= 7168 and 1024 <= wide <= 6144 and expert_ids.size(1) <= 12
    if not sizes:
        given = f"x {tuple(x.shape)}, 2n {wide}, {expert_ids.size(1)} experts a token"
        refuse(OP_DECODE, "decode-sizes", "x", given)
    group = _group(OP_DECODE, "group_ep", group_ep)
    fits = ep_rank_size == group.size() and ep_rank_id == group.rank() and shared_expert_num == 1
    fits = fits and 1 <= moe_expert_num <= 512 and moe_expert_num == ep_rank_size * len(experts.first)
    if not fits or global_bs < 0 or global_bs % ep_rank_size:
        given = f"rank {ep_rank_id} of {ep_rank_size}, {moe_expert_num} experts, global_bs {global_bs}"
        refuse(OP_DECODE, "decode-layout", "ep_rank_size", given)
    return _run(OP_DECODE, x, expert_ids, expert_scales, active, experts, group, None)


def matmul_allreduce_add_rmsnorm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    groupTp: str,
    tpRankSize: int,
    tpRankId: int,
    epsilon: float,
    isTransB: bool,
    isGatherAddOut: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the ranks' products, adds the residual and normalises; every rank calls it.

    Args:
        x1: Shape: [m, k] or [b, s, k]; float16 or bfloat16.
        x2: Shape: [k, n], or [n, k] with ``isTransB``; dtype of ``x1``.
        residual: Shape: [m, n] or [b, s, n]; dtype of ``x1``.
        gamma: Shape: [n]; dtype of ``x1``.
        groupTp: name of the group; see ``expert_groups``.
        tpRankSize: ranks of the group.
        tpRankId: this rank.
        epsilon: added to the mean square.
        isTransB: whether ``x2`` is transposed.
        isGatherAddOut: whether the sum is wanted whole on every rank.

    Returns:
        The normalised sum, and the sum (poison when it is not wanted); shape and dtype of ``residual``.

    Raises:
        OpRefused: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/mc2/matmul_allreduce_add_rmsnorm.
    """
    for name, tensor in (("x1", x1), ("x2", x2), ("residual", residual), ("gamma", gamma)):
        if tensor.dtype not in _HALVES or tensor.dtype != x1.dtype:
            refuse(OP_REDUCE, "reduce-norm-dtype", name, tensor.dtype)
    weight = x2.T if isTransB and x2.dim() == 2 else x2
    fits = x1.dim() in (2, 3) and weight.dim() == 2 and x1.size(-1) == weight.size(0)
    if not fits or tuple(residual.shape) != (*x1.shape[:-1], weight.size(1)) or gamma.shape != residual.shape[-1:]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x1, x2, residual, gamma))
        refuse(OP_REDUCE, "reduce-norm-shape", "x1", f"shapes {shapes}, isTransB {isTransB}")
    group = _group(OP_REDUCE, "groupTp", groupTp)
    if tpRankSize != group.size() or tpRankId != group.rank():
        refuse(OP_REDUCE, "reduce-norm-ranks", "tpRankSize", f"rank {tpRankId} of {tpRankSize}")
    product = (x1.float() @ weight.float()).to(x1.dtype)
    flat = product.reshape(1, -1).expand(group.size(), -1)
    summed = exchange(group, flat).float().sum(0).view(product.shape).to(x1.dtype)
    total = summed + residual
    wide = total.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    return out.to(x1.dtype), total if isGatherAddOut else fill_poison_(torch.empty_like(total))


def _named(kernel: Callable[..., Any], args: Any, options: Any) -> dict[str, Any]:
    call = inspect.signature(kernel).bind(*args, **options)
    call.apply_defaults()
    return call.arguments


def _fused_meta(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _named(dispatch_ffn_combine, args, options)
    return torch.empty_like(given["out"]), torch.empty_like(given["expert_token_nums"])


def _decode_meta(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = _named(dispatch_gmm_combine_decode, args, options)
    ranks = given["ep_rank_size"] - given["shared_expert_rank_num"]
    counts = given["expert_ids"].new_empty(given["moe_expert_num"] // max(ranks, 1), dtype=torch.int64)
    return torch.empty_like(given["x"]), counts


_METAS: tuple[Callable[..., Any], ...] = (
    _fused_meta,
    _decode_meta,
    lambda x1, x2, residual, *rest: (torch.empty_like(residual), torch.empty_like(residual)),
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
KERNELS: dict[str, Callable[..., Any]] = {
    OP_FUSED: dispatch_ffn_combine,
    OP_DECODE: dispatch_gmm_combine_decode,
    OP_REDUCE: matmul_allreduce_add_rmsnorm,
}
