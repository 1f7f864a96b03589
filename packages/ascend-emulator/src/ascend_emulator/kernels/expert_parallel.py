"""What npu_moe_distribute_dispatch and _combine are documented to take, and the layout of experts over ranks.

This module owns the rules that the ops share. Experts lie on the ranks in order, each with equally many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import DeviceFault, KernelNotCovered
from .expert_groups import group_named
from .pose import Scope
from .rules import declare, holds, note, online, refuse

__all__ = ["Layout", "check_ids", "check_layout", "check_mask", "check_tokens", "refuse"]

NAME = "npu_moe_distribute_dispatch, _combine"
_V1 = online("torch_npu-npu_moe_distribute_dispatch")
_V2 = online("torch_npu-npu_moe_distribute_dispatch_v2")
_TEST = "test_kernels_expert_parallel.py"
_A2, _A3 = Scope(chips=("910B",)), Scope(chips=("910C",))
_ALGORITHMS = ("", "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy")

declare(
    NAME,
    _V2,
    _TEST,
    {
        "ep-group": (
            "group_ep: 1 to 127 characters, the name of a group of ep_world_size ranks; ep_rank_id: this rank in it",
            "name the group: ascend_emulator.kernels.expert_groups.name_group(name, group)",
        ),
        "ep-experts": (
            "1 to 1024 experts (v1: 512), a multiple of the ranks",
            "pad the experts",
        ),
        "ep-each": ("1 to 16 experts a token (v1 and fullmesh_v2: less), at most all", "choose fewer experts"),
        "ep-x": ("x (BS, H) of bfloat16 or float16", "cast and reshape x"),
        "ep-ids": ("int32 expert_ids (BS, K)", "cast and reshape them"),
        "ep-ids-twice": ("no expert twice for one token", "choose distinct experts"),
        "ep-mask": ("a bool x_active_mask (BS,), v2: or (BS, K)", "reshape it"),
        "ep-mask-order": ("x_active_mask (BS,): true before false", "move the padded tokens to the end"),
        "ep-mask-uneven": ("ranks with unequal BS: every token active", "pad every rank to one BS"),
        "ep-quant": (
            "quant_mode 0 without scales, or 2; float32 scales (experts, H), contiguous",
            "pass quant_mode=2 to quantise",
        ),
        "ep-expert-scales": ("float32 expert_scales (BS, K)", "cast and reshape them"),
        "ep-tp": ("tp_world_size 0 or 1", "leave it out"),
        "ep-nums-type": ("expert_token_nums_type 0 or 1", "pass 1"),
        "ep-algorithm": ("comm_alg '', fullmesh, fullmesh_v1, fullmesh_v2 or hierarchy", "leave it out"),
        "ep-agree": (
            "ep_world_size, moe_expert_num and global_bs alike on all ranks, as are H, K, x's dtype and quant_mode",
            "pass the same everywhere",
        ),
        "ep-global-bs": (
            "global_bs 0 if BS is alike everywhere; else the largest BS * ep_world_size",
            "pass the largest BS * ep_world_size",
        ),
        "ep-rows": ("expand_x (A, H) of bfloat16 or float16", "cast the experts' results to x's dtype"),
        "ep-counts": ("int32 ep_send_counts (ep_world_size * experts a rank, …)", "pass what dispatch returned"),
        "ep-index": ("int32 expand_idx (BS * K,), v2: assist_info_for_combine (A * 128,)", "pass what dispatch gave"),
        "ep-shared-x": ("shared_expert_x of expand_x's dtype with BS * H elements", "cast and reshape it"),
        "ep-ori-x": ("copied and constant experts: ori_x (BS, H) of expand_x's dtype", "pass ori_x"),
    },
)
declare(
    NAME, _V2, _TEST,
    {
        "ep-world-a2": ("v2: 2 to 8, 16, 32, 64, 128 or 256 ranks", "use one of these sizes"),
        "ep-hidden-a2": ("H of at most 7168 (hierarchy: 10240), a multiple of 32", "pad the tokens"),
        "ep-tokens-a2": ("BS of 1 to 256 (hierarchy: 512)", "split the tokens"),
    },
    _A2,
)  # fmt: skip
declare(
    NAME, _V2, _TEST,
    {
        "ep-world-a3": ("v2: 2 to 768 ranks", "use one of these sizes"),
        "ep-hidden-a3": ("v2: H of 1024 to 8192", "pad the tokens"),
        "ep-tokens-a3": ("BS of 1 to 512 (fullmesh_v2, hierarchy: 256)", "split the tokens"),
    },
    _A3,
)  # fmt: skip
declare(NAME, _V1, _TEST, {"ep-world-v1-a2": ("v1: 16, 32 or 64 ranks", "use v2")}, _A2)
declare(
    NAME, _V1, _TEST,
    {
        "ep-world-v1-a3": ("v1: 8, 16, 32, 64, 128, 144, 256 or 288 ranks", "use v2"),
        "ep-hidden-v1-a3": ("v1: H of 7168", "use v2"),
        "ep-each-v1-a3": ("v1: 1 to 8 experts a token", "use v2"),
    },
    _A3,
)  # fmt: skip
note(NAME, "expert ids within the experts", _V2, "others are a `DeviceFault` (507015): " + _TEST)
note(
    NAME,
    "ep_send_counts, expand_idx and assist_info_for_combine are what dispatch returned",
    _V2,
    "others are a `DeviceFault` (507015): " + _TEST,
)
note(
    NAME,
    "shared experts' ranks, tensor-parallel groups, elastic_info, performance_info, int32 tokens, comm_quant_mode 2",
    _V2,
    "not computed: `KernelNotCovered`, a NotImplementedError",
)
note(NAME, "a buffer of HCCL large enough", _V2, "not emulated: gloo has none")
note(NAME, "(not documented) combine's rows of tokens that are not active", "—", "zeros here")
note(
    NAME,
    "v1, A2: 2 * global_bs * K * server_num numbers behind ep_recv_counts",
    _V1,
    "zeros; their number is the Meta kernel's; the documents forbid to rely on them",
)


@dataclass(frozen=True)
class Layout:
    """How a call's experts lie on the ranks of its group.

    Attributes:
        group: process group.
        ranks: number of ranks.
        rank: this rank.
        experts: number of experts over all ranks.
        special: number of experts that no rank holds: zero, copy and constant experts, with the ids after the others.
        local: experts a rank.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int
    experts: int
    special: int
    local: int


def check_layout(
    op: str, group_ep: str, ranks: int, rank: int, experts: int, options: dict[str, int | str], special: int = 0
) -> Layout:
    """Checks a call's group, ranks and experts.

    Args:
        op: full op name.
        group_ep: name of the group.
        ranks: ep_world_size.
        rank: ep_rank_id.
        experts: moe_expert_num.
        options: tp_world_size, expert_shard_type, shared_expert_rank_num, comm_quant_mode and comm_alg.
        special: number of zero, copy and constant experts.

    Raises:
        OpRefused: a documented constraint is broken.
        KernelNotCovered: a form that is not computed.
    """
    first = not op.endswith(("_v2", "_norm"))
    if options.get("tp_world_size", 0) not in (0, 1):
        refuse(op, "ep-tp", "tp_world_size", options["tp_world_size"])
    for name in ("expert_shard_type", "shared_expert_rank_num", "comm_quant_mode"):
        if options.get(name):
            raise KernelNotCovered(op, name, options[name])
    if options.get("comm_alg", "") not in _ALGORITHMS:
        refuse(op, "ep-algorithm", "comm_alg", options["comm_alg"])
    suffix = "-v1" if first else ""
    if not (ranks in (16, 32, 64) if first else 2 <= ranks <= 8 or ranks in (16, 32, 64, 128, 256)):
        _refuse_on(op, f"ep-world{suffix}-a2", "ep_world_size", ranks)
    if not (ranks in (8, 16, 32, 64, 128, 144, 256, 288) if first else 2 <= ranks <= 768):
        _refuse_on(op, f"ep-world{suffix}-a3", "ep_world_size", ranks)
    if not 1 <= experts <= (512 if first else 1024) or experts % ranks:
        refuse(op, "ep-experts", "moe_expert_num", f"{experts} over {ranks} ranks")
    group = group_named(group_ep) if 0 < len(group_ep) < 128 else None
    if group is None:
        refuse(op, "ep-group", "group_ep", repr(group_ep))
    if (group.size(), group.rank()) != (ranks, rank):
        refuse(op, "ep-group", "ep_rank_id", f"{rank} of {ranks}, the group says {group.rank()} of {group.size()}")
    return Layout(group, ranks, rank, experts, special, experts // ranks)


def _refuse_on(op: str, rule: str, argument: str, value: object) -> None:
    if holds(rule):
        refuse(op, rule, argument, value)


def check_tokens(op: str, tokens: int, hidden: int, algorithm: str) -> None:
    """Refuses numbers of tokens and widths that no chip, or not the one that the emulator stands for, takes."""
    wide = algorithm == "hierarchy"
    if not 0 < hidden <= (10240 if wide else 7168) or hidden % 32:
        _refuse_on(op, "ep-hidden-a2", "x", f"H = {hidden}")
    if op.endswith(("_v2", "_norm")):
        if not 1024 <= hidden <= 8192:
            _refuse_on(op, "ep-hidden-a3", "x", f"H = {hidden}")
    elif hidden != 7168:
        _refuse_on(op, "ep-hidden-v1-a3", "x", f"H = {hidden}")
    if not 1 <= tokens <= (512 if wide else 256):
        _refuse_on(op, "ep-tokens-a2", "x", f"BS = {tokens}")
    if not 1 <= tokens <= (256 if algorithm in ("fullmesh_v2", "hierarchy") else 512):
        _refuse_on(op, "ep-tokens-a3", "x", f"BS = {tokens}")


def check_mask(op: str, mask: torch.Tensor | None, tokens: int, each: int) -> torch.Tensor:
    """Which choices take part. Shape: [BS, K]; bool."""
    if mask is None:
        return torch.ones(tokens, each, dtype=torch.bool)
    shapes = [(tokens,), (tokens, each)] if op.endswith(("_v2", "_norm")) else [(tokens,)]
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        refuse(op, "ep-mask", "x_active_mask", f"{mask.dtype}, shape {tuple(mask.shape)} for BS = {tokens}")
    if mask.dim() == 2:
        return mask
    if bool((mask[1:] & ~mask[:-1]).any()):
        refuse(op, "ep-mask-order", "x_active_mask", mask.tolist())
    return mask[:, None].expand(tokens, each)


def check_ids(
    op: str, layout: Layout, ids: torch.Tensor, tokens: int, mask: torch.Tensor | None, algorithm: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks the chosen experts and brings the choices into the order in which rows travel.

    Returns:
        The expert of each travelling choice, ascending, and its place in ``ids.view(-1)``; of one expert's choices, the
        earlier token is first. int64 both.

    Raises:
        OpRefused: a documented constraint is broken.
        DeviceFault: an id outside the experts.
    """
    if ids.dtype != torch.int32 or ids.dim() != 2 or ids.size(0) != tokens:
        refuse(op, "ep-ids", "expert_ids", f"{ids.dtype}, shape {tuple(ids.shape)} for BS = {tokens}")
    each, known = ids.size(1), layout.experts + layout.special
    if not 1 <= each <= min(12 if algorithm == "fullmesh_v2" else 16, known):
        refuse(op, "ep-each", "expert_ids", f"K = {each} of {known} experts")
    if each > 8 and not op.endswith(("_v2", "_norm")):
        _refuse_on(op, "ep-each-v1-a3", "expert_ids", f"K = {each}")
    active = check_mask(op, mask, tokens, each)
    outside = active & ((ids < 0) | (ids >= known))
    if bool(outside.any()):
        token, number = (int(n) for n in outside.nonzero()[0])
        raise DeviceFault(op, f"expert_ids[{token}, {number}] = {int(ids[token, number])} of {known} experts")
    ordered = ids.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any(-1).logical_and(active.all(-1)).any()):
        refuse(op, "ep-ids-twice", "expert_ids", "one expert twice in a row")
    places = (active & (ids < layout.experts)).reshape(-1).nonzero()[:, 0]
    experts = ids.reshape(-1)[places].long()
    order = experts.argsort(stable=True)
    return experts[order], places[order]
