"""Owns the planned form of the draft-extend fill: one pinned host arena, one copy to the device, few launches.

For batches whose small arrays the host knows. The rows are filled in host memory by the op itself, so both forms mean
the same; hidden states stay on the device. The layout of the arena is the caller's, `kv_planner.RowLayout` for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from spec_kernels._checks import span
from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers, fill_draft_extend_buffers
from spec_kernels.errors import DeviceError, ShapeError, TokenCountError
from spec_kernels.native.draft_extend import copy_rows

__all__ = ["ArenaField", "ArenaLayout", "DraftExtendPlan", "draft_extend_fields"]

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_TOKENS = {"input_ids": "int64", "positions": "int64", "out_cache_loc": "int64"}
_ROWS = {
    "seq_lens": "int32",
    "req_pool_indices": "int64",
    "num_correct_drafts": "int32",
    "num_accept_tokens": "int32",
    "select_index": "int64",
    "temperatures": "float32",
}
_RANKS = {"global_num_tokens": "int32", "global_num_tokens_for_logprob": "int32"}


class ArenaField(Protocol):
    """A field of an arena; `kv_planner.RowField` is one."""

    @property
    def name(self) -> str:
        """Name of the buffer."""
        ...

    @property
    def dtype(self) -> Any:
        """Name of the dtype."""
        ...

    @property
    def offset(self) -> int:
        """First byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes."""
        ...


class ArenaLayout(Protocol):
    """Fields of one arena; `kv_planner.RowLayout` is one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        ...

    @property
    def fields(self) -> Sequence[ArenaField]:
        """Fields that do not overlap."""
        ...


def draft_extend_fields(max_rows: int, width: int, *, ranks: int = 0) -> list[dict[str, Any]]:
    """Return the fields of the arena, as keyword arguments of `kv_planner.RowField`.

    Args:
        max_rows: Rows of the largest bucket.
        width: Token rows of each request, front tokens included.
        ranks: Data-parallel ranks whose token counts are kept; 0 for none.
    """
    fields = [{"name": name, "dtype": dtype, "rows": max_rows * width} for name, dtype in _TOKENS.items()]
    fields += [{"name": name, "dtype": dtype, "rows": max_rows} for name, dtype in _ROWS.items()]
    fields += [{"name": name, "dtype": dtype, "rows": ranks} for name, dtype in _RANKS.items() if ranks]
    return fields


class DraftExtendPlan:
    """Host and device twins of the draft-extend buffers.

    Invariants: 1. both arenas have the layout's bytes and offsets; 2. a fill makes one copy from host to device; 3. the
    host arena is not rewritten before that copy was consumed; 4. a refused fill changes nothing on the device.

    Args:
        layout: Fields as `draft_extend_fields` names them.
        device: Where the captured graph reads.
        hidden_states: The graph's hidden states, on the device. Shape: [max_rows * width, hidden]. None: none here.

    Attributes:
        buffers: What the captured graph reads, at fixed addresses.

    Raises:
        ShapeError: The layout lacks a buffer, or has one that is unknown.
    """

    def __init__(
        self, layout: ArenaLayout, device: torch.device | str, *, hidden_states: torch.Tensor | None = None
    ) -> None:
        names = {field.name for field in layout.fields}
        wanted = set(_TOKENS) | set(_ROWS)
        if not wanted <= names or names - wanted - set(_RANKS):
            raise ShapeError(
                "layout",
                given=f"fields {sorted(names)}",
                expected=f"fields {sorted(wanted)}, and at most {sorted(_RANKS)}",
                consequence="a buffer of the graph would keep what an earlier batch left",
                remedy="build it from draft_extend_fields",
            )
        self._device = torch.device(device)
        on_host = self._device.type == "cpu"
        self._host = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=not on_host)
        self._arena = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        self._staged = DraftExtendBuffers(**_views(self._host, layout))
        self.buffers = DraftExtendBuffers(**_views(self._arena, layout), hidden_states=hidden_states)
        self._consumed: Any = None

    def fill(
        self, batch: DraftExtendBatch, *, bs: int, width: int, num_front_tokens: int = 0, seq_len_fill: int
    ) -> None:
        """As `fill_draft_extend_buffers`, for a batch whose tensors other than `hidden_states` are in host memory.

        Launches: one copy from the host; with hidden states two more (rows and tail), and one if they alias the buffer.

        Args:
            batch: Sources.
            bs: Rows of the captured graph.
            width: Token rows of each request, front tokens included.
            num_front_tokens: Leading context tokens of each request's window.
            seq_len_fill: Sequence length of a row without a request.

        Mutates: every tensor of `buffers`.

        Raises:
            TokenCountError: `hidden_states` has another number of rows than the batch has tokens.
            DeviceError: `hidden_states` lies on another device than the buffers.
            ShapeError: `hidden_states` has another width or dtype, or the buffers have none.
            SpecKernelsError: See `fill_draft_extend_buffers`.
        """
        hidden = batch.hidden_states
        self._check_hidden(hidden, int(batch.input_ids.shape[0]))
        if self._consumed is not None:
            self._consumed.synchronize()
            self._consumed = None
        fill_draft_extend_buffers(
            self._staged, replace(batch, hidden_states=None), bs=bs, width=width, num_front_tokens=num_front_tokens,
            seq_len_fill=seq_len_fill, backend="native",
        )  # fmt: skip
        self._arena.copy_(self._host, non_blocking=True)
        if self._device.type != "cpu":
            self._consumed = torch.get_device_module(self._device).Event()
            self._consumed.record()
        target = self.buffers.hidden_states
        if target is not None:
            if hidden is not None and hidden.numel():
                (start, end), (begin, stop) = span(hidden), span(target)
                hidden = hidden.clone() if start < stop and begin < end else hidden
            copy_rows(target, hidden, 0)

    def _check_hidden(self, hidden: torch.Tensor | None, tokens: int) -> None:
        target = self.buffers.hidden_states
        if hidden is None:
            return
        wanted = None if target is None else (target.dtype, target.shape[1:])
        if (hidden.dtype, hidden.shape[1:]) != wanted:
            raise ShapeError(
                "batch.hidden_states",
                given=f"{hidden.dtype} of shape {tuple(hidden.shape)}",
                expected="None, as the buffers have none" if wanted is None else f"{wanted[0]} rows of {wanted[1]}",
                consequence="rows would be cut or cast",
                remedy="pass the target's hidden states, or None when the widths differ",
            )
        if target is not None and hidden.device != target.device:
            raise DeviceError(
                "batch.hidden_states",
                given=hidden.device,
                expected=f"{target.device}, where the buffers are",
                consequence="the copy would wait for the host",
                remedy="move it first",
            )
        if hidden.shape[0] != tokens:
            raise TokenCountError(
                "batch.hidden_states",
                given=f"{hidden.shape[0]} token rows",
                expected=f"{tokens}, like batch.input_ids",
                consequence="requests would read each other's states",
                remedy="pass one row a token",
            )


def _views(arena: torch.Tensor, layout: ArenaLayout) -> dict[str, torch.Tensor]:
    return {
        field.name: arena[field.offset : field.offset + field.nbytes].view(_DTYPES[str(field.dtype)])
        for field in layout.fields
    }
