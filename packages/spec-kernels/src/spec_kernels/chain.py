"""Owns greedy acceptance of a chain of drafts: the contract and the checks of `accept_chain`.

It compares tokens only. Trees, sampling and moving accepted KV are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import DeviceError, DtypeError, ShapeError

__all__ = ["ChainAccept", "accept_chain"]

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ChainAccept:
    """What was accepted, one row a request.

    Attributes:
        correct_drafts: Accepted drafts, the bonus token not counted. Shape: [bs]; dtype int32.
        bonus: The target's token after the last accepted draft. Shape: [bs]; dtype that of the predictions.
    """

    correct_drafts: torch.Tensor
    bonus: torch.Tensor


def accept_chain(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    *,
    num_drafts: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> ChainAccept:
    """Accept the longest prefix of drafts that the target would have chosen itself.

    Draft `k` (column `k + 1`) is accepted when all before it are and it equals the prediction in column `k`. The bonus
    token is the prediction after the last accepted draft, so every row commits `correct_drafts + 1` tokens.

    Args:
        candidates: Column 0 the committed token that the verify step began with, then the drafts; a negative draft is
            a placeholder and never accepted.
            Shape: [bs, width]; dtype int32 or int64.
        target_predict: The target's greedy token after each candidate. Shape: [bs, width]; dtype int32 or int64.
        num_drafts: Drafts in each row that are real; later columns are padding and never accepted. None: all.
            Shape: [bs]; dtype int32 or int64. Values below 0 count as 0.
        backend: Insist on a backend.

    Padding:
        A padded row with `num_drafts` 0 accepts nothing; its bonus is the prediction in column 0. `bs` may be 0.

    Returns:
        New tensors; no input is mutated.

    Raises:
        ShapeError: Shapes do not match, or the width is 0.
        DtypeError: A tensor does not hold int32 or int64.
        DeviceError: Tensors lie on different devices.
    """
    _check(candidates, target_predict, num_drafts)
    if num_drafts is None:
        num_drafts = torch.full_like(candidates[:, 0], candidates.shape[1] - 1)
    bs, device = int(candidates.shape[0]), candidates.device
    correct = torch.empty((bs,), dtype=torch.int32, device=device)
    bonus = torch.empty((bs,), dtype=target_predict.dtype, device=device)
    chosen = choose("accept_chain", device, backend)
    if bs:
        load("accept_chain", chosen)(candidates, target_predict, num_drafts, correct, bonus)
    return ChainAccept(correct, bonus)


def _check(candidates: torch.Tensor, target_predict: torch.Tensor, num_drafts: torch.Tensor | None) -> None:
    if candidates.ndim != 2 or candidates.shape[1] < 1:
        raise ShapeError(
            "candidates",
            given=f"shape {tuple(candidates.shape)}",
            expected="[bs, width] with a width of at least 1",
            consequence="there would be no committed token to start from",
            remedy="pass the tokens of the verify step, the committed one first",
        )
    wanted = {"target_predict": (target_predict, candidates.shape)}
    if num_drafts is not None:
        wanted["num_drafts"] = (num_drafts, candidates.shape[:1])
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ShapeError(
                name,
                given=f"shape {tuple(tensor.shape)}",
                expected=f"{tuple(shape)} for candidates of shape {tuple(candidates.shape)}",
                consequence="a draft would be compared with another request's prediction",
                remedy="pass one row a request",
            )
    for name, tensor in (("candidates", candidates), *((name, tensor) for name, (tensor, _) in wanted.items())):
        if tensor.dtype not in _INTEGERS:
            raise DtypeError(
                name,
                given=tensor.dtype,
                expected="int32 or int64",
                consequence="tokens would be compared after rounding",
                remedy="pass token ids",
            )
        if tensor.device != candidates.device:
            raise DeviceError(
                name,
                given=tensor.device,
                expected=f"{candidates.device} like candidates",
                consequence="the op would wait for a copy, and could not be captured",
                remedy="move it first",
            )
