"""Owns expert-parallel MoE as one step: dispatch tokens to the ranks of their experts, grouped matmul, combine.

The native version says what the device's operators must give: which rows an expert sees, in which order, and how the
parts are summed. It does not route: expert ids and weights are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spec_kernels._checks import FLOATS, check_number, check_tensor
from spec_kernels.capabilities import Capabilities, detect
from spec_kernels.dispatch import BackendName, backends, choose, load
from spec_kernels.errors import LengthError, ShapeError, UnsupportedByOp

__all__ = ["ExpertLayout", "MoeResult", "expert_parallel_moe", "fused_moe_reason"]


@dataclass(frozen=True)
class ExpertLayout:
    """Which rank holds which experts: consecutive ones, equally many.

    Attributes:
        num_experts: Experts of the layer.
        ranks: Ranks over which they lie.
        rank: This one.
        max_tokens: Most tokens of a rank in one step, the same on all ranks; None for no limit.
        comm_name: HCCL's name of the ranks' group (`get_hccl_comm_name`), by which the device's operators address it.
            Giving it is the user's choice of those operators; None: they are not used.

    Raises:
        ShapeError: The ranks do not divide the experts, or the rank is none of them.
    """

    num_experts: int
    ranks: int = 1
    rank: int = 0
    max_tokens: int | None = None
    comm_name: str | None = None

    def __post_init__(self) -> None:
        check_number("ranks", self.ranks, least=1)
        check_number("rank", self.rank, least=0, most=self.ranks - 1)
        check_number("num_experts", self.num_experts, least=1)
        if self.num_experts % self.ranks:
            raise ShapeError(
                "num_experts, ranks",
                given=(self.num_experts, self.ranks),
                expected="a multiple of the ranks",
                consequence="an expert would lie on two ranks, or on none",
                remedy="add redundant experts, or use fewer ranks",
            )

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.ranks


class MoeResult(NamedTuple):
    """What the step gives.

    Attributes:
        hidden_states: Shape: [tokens, hidden]; dtype of the input.
        expert_counts: Rows that each expert of this rank saw, from all ranks. Shape: [local experts]; dtype int64.
    """

    hidden_states: torch.Tensor
    expert_counts: torch.Tensor


def fused_moe_reason(
    layout: ExpertLayout,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    hidden: int,
    choices: int,
    capabilities: Capabilities | None = None,
) -> str | None:
    """Say why a step cannot run on the device's dispatch and combine operators; None when it can.

    Nothing here differs between the ranks of a step, so that all of them decide alike.

    Args:
        layout: Experts and ranks.
        device: Where the tokens are.
        dtype: Of the hidden states.
        hidden: Their width.
        choices: Experts of a token.
        capabilities: What the machine has; detected when `None`. With an unknown chip, the limits of all chips hold.

    Source: contracts.md §7; op-plugin, torch_npu-npu_moe_distribute_dispatch_v2.md.
    """
    have = detect() if capabilities is None else capabilities
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    installed = next(s.reason for s in backends("expert_parallel_moe", kind, capabilities=have) if s.backend == "npu")
    ranks, tokens = layout.ranks, layout.max_tokens
    a2, a3 = have.chip in (None, "910B"), have.chip in (None, "910C")
    few = 2 <= ranks <= 8 or ranks in (16, 32, 64, 128, 256)
    reasons = (
        (kind != "npu", f"serves npu only, not {kind}"),
        (installed is not None, str(installed)),
        (layout.comm_name is None, "not asked for: the layout has no comm_name"),
        (not 2 <= ranks <= 768 or (a2 and not few), f"takes 2 to 8, 16, 32, 64, 128 or 256 ranks, not {ranks}"),
        (layout.num_experts > 1024, f"takes 1024 experts at most, not {layout.num_experts}"),
        (dtype not in (torch.bfloat16, torch.float16), f"takes bfloat16 and float16, not {dtype}"),
        (a3 and not 1024 <= hidden <= 8192, f"takes hidden widths of 1024 to 8192, not {hidden}"),
        (a2 and (hidden > 7168 or hidden % 32 != 0), f"takes hidden widths up to 7168, multiples of 32, not {hidden}"),
        (not 1 <= choices <= 16, f"takes 1 to 16 experts a token, not {choices}"),
        (tokens is None, "needs a limit of tokens a rank"),
        (tokens is not None and not 1 <= tokens <= (256 if a2 else 512), f"takes 256 tokens a rank, not {tokens}"),
    )
    return next((text for holds, text in reasons if holds), None)


def expert_parallel_moe(
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: ExpertLayout,
    *,
    group: Any = None,
    backend: BackendName | None = None,
) -> MoeResult:
    """Run each token through its experts, wherever they lie, and sum what comes back.

    An expert computes `w2 @ (silu(gate) * up)` with `gate, up` the halves of `w13 @ x`, in float32. It sees its rows in
    the order of source rank, token, choice. A token's parts are summed in float32 in the order of its choices.

    Args:
        hidden_states: Shape: [tokens, hidden]; floating point; any strides.
        expert_ids: Chosen experts; a negative one is padding. Shape: [tokens, choices]; dtype int32 or int64.
        expert_weights: Shape: [tokens, choices]; floating point.
        w13: Gate rows, then up rows, of this rank's experts. Shape: [local experts, 2 * inner, hidden].
        w2: Shape: [local experts, hidden, inner].
        layout: Experts and ranks.
        group: The `torch.distributed` group of the ranks; needed for more than one.
        backend: Insist on a backend. None takes the device's operators where `fused_moe_reason` has nothing against
            them, else native.

    Returns:
        New tensors.

    On npu the experts' products are rounded to the dtype of the input, the sums over choices are in float32; no token
    chooses an expert twice. Every rank sends `layout.max_tokens` rows, padding included, so the step can be captured.

    Padding: a padded choice counts nowhere and adds nothing; a token of padded choices only gives zeros. A rank without
        tokens takes part all the same.

    Mutates: nothing.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role, or the group the layout.
        LengthError: More tokens than the layout allows, or an expert id past the last expert (in host memory).
        UnsupportedByOp: (npu, when insisted on) See `fused_moe_reason`.
    """
    check_tensor("hidden_states", hidden_states, ("tokens", "hidden"), dtypes=FLOATS)
    (tokens, hidden), device = hidden_states.shape, hidden_states.device
    check_tensor("expert_ids", expert_ids, (tokens, "choices"), device=device)
    check_tensor("expert_weights", expert_weights, tuple(expert_ids.shape), dtypes=FLOATS, device=device)
    same = (hidden_states.dtype,)
    check_tensor("w2", w2, (layout.local, hidden, "inner"), dtypes=same, device=device)
    check_tensor("w13", w13, (layout.local, 2 * int(w2.shape[2]), hidden), dtypes=same, device=device)
    if layout.max_tokens is not None and tokens > layout.max_tokens:
        raise LengthError(
            "hidden_states",
            given=f"{tokens} tokens",
            expected=f"at most {layout.max_tokens} a rank",
            consequence="the receiving ranks have no room for them",
            remedy="split the step, or raise the limit on every rank",
        )
    if device.type == "cpu" and expert_ids.numel() and int(expert_ids.max()) >= layout.num_experts:
        raise LengthError(
            "expert_ids",
            given=int(expert_ids.max()),
            expected=f"below {layout.num_experts}",
            consequence="the token would be sent to a rank that does not exist",
            remedy="route over the experts of this layer",
        )
    if (group is None) != (layout.ranks == 1) or (group is not None and group.size() != layout.ranks):
        raise ShapeError(
            "group",
            given="none" if group is None else f"{group.size()} ranks",
            expected=f"a group of {layout.ranks} ranks" if layout.ranks > 1 else "none for one rank",
            consequence="ranks would wait for each other forever",
            remedy="pass the group over which the experts lie",
        )
    chosen = choose("expert_parallel_moe", device, backend)
    if chosen == "npu":
        choices = int(expert_ids.shape[1])
        reason = fused_moe_reason(layout, device=device, dtype=hidden_states.dtype, hidden=int(hidden), choices=choices)
        if reason is not None and backend is not None:
            raise UnsupportedByOp(
                "hidden_states, layout",
                given=reason,
                expected="what fused_moe_reason has nothing against",
                consequence="the device's operator refuses it, on one rank or on all",
                remedy="leave backend out",
            )
        chosen = "npu" if reason is None else "native"
    run = load("expert_parallel_moe", chosen)
    out, counts = run(hidden_states, expert_ids, expert_weights, w13, w2, layout, group)
    return MoeResult(out, counts)
