"""Owns the draft-extend buffer fill in plain torch, as the custom operator `spec_kernels::fill_draft_extend_buffers`.

Each buffer is written twice at most, source rows and fill, with static shapes and no host synchronisation. Sources do
not alias destinations here (see `spec_kernels.draft_extend`, which owns the contract and the checks).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers

__all__ = ["OUTPUTS", "SOURCES", "Body", "as_op", "copy_rows", "entry", "fill_draft_extend_buffers", "run"]

OUTPUTS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "seq_lens",
    "req_pool_indices",
    "num_correct_drafts",
    "num_accept_tokens",
    "select_index",
    "temperatures",
    "hidden_states",
    "global_num_tokens",
    "global_num_tokens_for_logprob",
)
_OPTIONAL = OUTPUTS[8:]
SOURCES = (*OUTPUTS[:7], *OUTPUTS[8:10])


def _schema() -> str:
    outputs = [f"Tensor(a{i}!){'?' if name in _OPTIONAL else ''} {name}" for i, name in enumerate(OUTPUTS)]
    sources = [f"Tensor{'?' if name in _OPTIONAL else ''} src_{name}" for name in SOURCES]
    return f"({', '.join(outputs + sources)}, *, SymInt bs, SymInt width, SymInt front, SymInt fill) -> ()"


class Body(Protocol):
    """What a backend does with a batch that was checked."""

    def __call__(
        self, buffers: DraftExtendBuffers, batch: DraftExtendBatch, *, bs: int, width: int, front: int, fill: int
    ) -> None:
        """Write every buffer."""
        ...


def as_op(name: str, body: Body) -> Any:
    """Register a backend's body as a custom operator over the single tensors; it mutates the buffers and no source."""

    @torch.library.custom_op(f"spec_kernels::{name}", mutates_args=OUTPUTS, schema=_schema())
    def op(*tensors: Any, bs: int, width: int, front: int, fill: int) -> None:
        buffers, batch = tensors[: len(OUTPUTS)], tensors[len(OUTPUTS) :]
        body(DraftExtendBuffers(*buffers), DraftExtendBatch(*batch), bs=bs, width=width, front=front, fill=fill)

    @op.register_fake
    def _fake(*tensors: Any, bs: int, width: int, front: int, fill: int) -> None:
        return None

    return op


def entry(op: Any) -> Body:
    """Return the backend entry of such an operator."""

    def run(
        buffers: DraftExtendBuffers, batch: DraftExtendBatch, *, bs: int, width: int, front: int, fill: int
    ) -> None:
        outputs = [getattr(buffers, name) for name in OUTPUTS]
        sources = [getattr(batch, name) for name in SOURCES]
        op(*outputs, *sources, bs=bs, width=width, front=front, fill=fill)

    return run


def _fill(buffers: DraftExtendBuffers, batch: DraftExtendBatch, *, bs: int, width: int, front: int, fill: int) -> None:
    copy_rows(buffers.input_ids, batch.input_ids, 0)
    copy_rows(buffers.positions, batch.positions, 0)
    copy_rows(buffers.out_cache_loc, batch.out_cache_loc, 0)
    copy_rows(buffers.seq_lens, batch.seq_lens, fill)
    copy_rows(buffers.req_pool_indices, batch.req_pool_indices, 0)
    copy_rows(buffers.num_correct_drafts, batch.num_correct_drafts, 0)
    copy_rows(buffers.num_accept_tokens, batch.num_accept_tokens, -1)
    select = buffers.select_index
    stop = front + width * select.shape[0]
    torch.arange(front, stop, width, dtype=select.dtype, device=select.device, out=select)
    select.add_(buffers.num_correct_drafts)
    if buffers.temperatures is not None:
        copy_rows(buffers.temperatures.view(-1), batch.temperatures, 1.0)
    if buffers.hidden_states is not None:
        copy_rows(buffers.hidden_states, batch.hidden_states, 0)
    for counts in (buffers.global_num_tokens, buffers.global_num_tokens_for_logprob):
        if counts is not None:
            counts.fill_(bs * width)


def copy_rows(target: torch.Tensor, source: torch.Tensor | None, fill: float) -> None:
    """Copy the rows of a source, and give the other rows the fill."""
    rows = 0 if source is None else source.shape[0]
    if source is not None and rows:
        target[:rows].copy_(source)
    if rows < target.shape[0]:
        target[rows:].fill_(fill)


fill_draft_extend_buffers = as_op("fill_draft_extend_buffers", _fill)
run = entry(fill_draft_extend_buffers)
