"""Owns block drafting (DFlash, DSPARK): preparing a block of masks, accepting its prefix, and the facts about it.

Each fact has one predicate here, over a `BlockMethod` that is data: nobody asks for an algorithm's name. It does not
run models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from spec_kernels._checks import check_number, check_tensor
from spec_kernels.cache_locs import check_table
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import DeviceError, ShapeError

__all__ = ["DFLASH", "DSPARK", "BlockAccept", "BlockMethod", "DraftBlock", "accept_block", "prepare_block"]


@dataclass(frozen=True)
class BlockMethod:
    """What is fixed about a method that drafts a block at once.

    Attributes:
        name: Its name in messages.
        device_types: Types of devices that serve it; an index does not matter.
        topk: Branches.
        default_block: Tokens of a block, the committed one included.
        host_lengths_include_block: Whether the host's KV lengths of a verify step already count the block.
    """

    name: str
    device_types: tuple[str, ...] = ("cuda", "npu", "xpu")
    topk: int = 1
    default_block: int = 16
    host_lengths_include_block: bool = True

    def serves(self, device: torch.device | str) -> bool:
        """Whether a device serves the method: `npu`, `npu:0` and `cuda:1` do, where `npu` and `cuda` do."""
        name = device.type if isinstance(device, torch.device) else device
        return name.partition(":")[0] in self.device_types

    def check_device(self, device: torch.device | str) -> None:
        """Refuse a device that does not serve the method.

        Raises:
            DeviceError: Its type is not among `device_types`.
        """
        if not self.serves(device):
            raise DeviceError(
                "device",
                given=device,
                expected=f"one of {list(self.device_types)} for {self.name}, with or without an index",
                consequence="the method has no kernels there",
                remedy="run it on another device, or draft token by token",
            )

    def verify_kv_len(self, host_len: int, block: int) -> int:
        """KV tokens of a verify step, from the length that the host publishes: the block is counted once.

        Raises:
            ShapeError: The length is shorter than the block that it includes.
        """
        check_number("block", block, least=1)
        least = block if self.host_lengths_include_block else 0
        if host_len < least:
            raise ShapeError(
                "host_len",
                given=host_len,
                expected=f"at least {least} for {self.name}",
                consequence="attention would read before the request's start",
                remedy="publish committed tokens plus the block" if least else "clamp lengths at 0",
            )
        return host_len if self.host_lengths_include_block else host_len + block


DFLASH = BlockMethod("DFLASH")
DSPARK = BlockMethod("DSPARK")


class DraftBlock(NamedTuple):
    """Inputs of the step that drafts a block; every tensor has shape [bs * block].

    Attributes:
        input_ids: The committed token, then masks; dtype int64.
        positions: dtype int64.
        locs: KV slots; dtype of the table.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    locs: torch.Tensor


class BlockAccept(NamedTuple):
    """What a verify step accepts of each block.

    Attributes:
        num_correct_drafts: Shape: [bs]; dtype int64.
        commit_lens: Accepted drafts and the bonus. Shape: [bs]; dtype int64.
        bonus: Shape: [bs]; dtype int64.
        seq_lens: Committed tokens after the step. Shape: [bs]; dtype int64.
        out_tokens: Drafts shifted left by one, the bonus after the accepted ones, 0 in the last column unless it is the
            bonus. Shape: [bs, block]; dtype int64.
    """

    num_correct_drafts: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor
    seq_lens: torch.Tensor
    out_tokens: torch.Tensor


def prepare_block(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    bonus: torch.Tensor,
    *,
    block: int,
    mask_token: int,
    backend: BackendName | None = None,
) -> DraftBlock:
    """Prepare the inputs of the step that drafts a block: `[bonus, mask, mask, ...]` after each prefix.

    Args:
        req_to_token: Shape: [requests, positions]; dtype int32 or int64; any strides.
        req_pool_indices: Shape: [bs]; dtype int32 or int64.
        prefix_lens: Committed tokens before the block. Shape: [bs]; dtype int32 or int64. Never mutated.
        bonus: The committed token that each block begins with; a negative one becomes 0. Shape: [bs].
        block: Tokens of a block.
        mask_token: Token that stands for a draft to be made.
        backend: Insist on a backend.

    Returns:
        New tensors; position `prefix + k`.

    Padding: what lies outside the table gives slot 0; zero requests give empty tensors.

    Mutates: nothing.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.

    Source: contracts.md §1.5, `_prepare_dflash_draft_block`.
    """
    bs = check_table(req_to_token, req_pool_indices, prefix_lens=prefix_lens, bonus=bonus)
    check_number("block", block, least=1)
    check_number("mask_token", mask_token, least=0)
    device = req_to_token.device
    rows = torch.empty((2, bs * block), dtype=torch.int64, device=device)
    locs = torch.empty((bs * block,), dtype=req_to_token.dtype, device=device)
    chosen = choose("prepare_block", device, backend)
    if bs:
        load("prepare_block", chosen)(
            req_to_token, req_pool_indices, prefix_lens, bonus, rows[0], rows[1], locs, mask_token
        )
    return DraftBlock(rows[0], rows[1], locs)


def accept_block(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    backend: BackendName | None = None,
) -> BlockAccept:
    """Accept the longest prefix of each block that the target would have chosen itself.

    Args:
        candidates: Column 0 the committed token, then the drafts; a negative one is never accepted. Shape: [bs, block];
            dtype int32 or int64; any strides.
        target_predict: The target's greedy token after each. Shape: [bs, block]; dtype int32 or int64; any strides.
        prefix_lens: Committed tokens before the block. Shape: [bs]; dtype int32 or int64. Never mutated.
        backend: Insist on a backend.

    Returns:
        New tensors: draft `k + 1` stands when all before it do and it equals prediction `k`; the bonus is what is
        predicted after the last accepted token.

    Padding: zero requests give empty tensors.

    Mutates: nothing.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.

    Source: contracts.md §1.5, `_compute_dflash_accept_bonus`.
    """
    check_tensor("candidates", candidates, ("bs", "block"))
    bs, block = (int(size) for size in candidates.shape)
    check_number("candidates.shape[1]", block, least=1)
    check_tensor("target_predict", target_predict, (bs, block), device=candidates.device)
    check_tensor("prefix_lens", prefix_lens, (bs,), device=candidates.device)
    rows = torch.empty((4, bs), dtype=torch.int64, device=candidates.device)
    tokens = torch.empty((bs, block), dtype=torch.int64, device=candidates.device)
    chosen = choose("accept_block", candidates.device, backend)
    if bs:
        load("accept_block", chosen)(candidates, target_predict, prefix_lens, rows, tokens)
    return BlockAccept(rows[0], rows[1], rows[2], rows[3], tokens)
