"""Owns the contract of `fill_draft_extend_buffers`: a draft-extend batch into the buffers that a captured graph reads.

Every row of every buffer is written on every call, so a result never depends on an earlier batch. The same checks run
before every backend. It does not own how a backend writes, and it allocates no buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NoReturn

import torch

from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import (
    AliasError,
    BucketError,
    DeviceError,
    DtypeError,
    IndexWidthError,
    ShapeError,
    TokenCountError,
)

__all__ = ["DraftExtendBatch", "DraftExtendBuffers", "fill_draft_extend_buffers"]

_INT32_MAX = 2**31 - 1
_TOKEN_FIELDS = ("input_ids", "positions", "out_cache_loc")
_ROW_FIELDS = ("seq_lens", "req_pool_indices", "num_correct_drafts", "num_accept_tokens")
# Lengths and counts may be narrowed; identifiers and addresses never are.
_NARROWING_FIELDS = ("seq_lens", "num_correct_drafts", "num_accept_tokens")
_NEVER_NEGATIVE = ("seq_lens", "req_pool_indices", "out_cache_loc")
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class DraftExtendBuffers:
    """Persistent buffers of a captured draft-extend step; `max_tokens >= max_rows * width`.

    Attributes:
        input_ids: Shape: [max_tokens]; dtype int32 or int64.
        positions: Shape: [max_tokens]; dtype int32 or int64.
        out_cache_loc: Slots that the step writes. Shape: [max_tokens]; dtype int32 or int64.
        seq_lens: Shape: [max_rows]; dtype int32 or int64.
        req_pool_indices: Shape: [max_rows]; dtype int32 or int64.
        num_correct_drafts: Shape: [max_rows]; dtype int32 or int64.
        num_accept_tokens: Shape: [max_rows]; dtype int32 or int64.
        select_index: Token row that continues each request. Shape: [max_rows]; dtype int32 or int64.
        temperatures: Shape: [max_rows, 1] or [max_rows]; floating point.
        hidden_states: Shape: [max_tokens, hidden]; dtype of the model. Leave out when somebody else owns it.
        global_num_tokens: Token counts over data-parallel ranks. Shape: [ranks]; integer.
        global_num_tokens_for_logprob: Likewise.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    num_correct_drafts: torch.Tensor
    num_accept_tokens: torch.Tensor
    select_index: torch.Tensor
    temperatures: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    global_num_tokens: torch.Tensor | None = None
    global_num_tokens_for_logprob: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class DraftExtendBatch:
    """One draft-extend batch: `raw_bs` requests of `width` tokens each.

    Attributes:
        input_ids: Shape: [raw_bs * width]; integer.
        positions: Shape: [raw_bs * width]; integer.
        out_cache_loc: Shape: [raw_bs * width]; integer.
        seq_lens: Shape: [raw_bs]; integer.
        req_pool_indices: Shape: [raw_bs]; integer.
        num_correct_drafts: Accepted drafts of each request, below `width - num_front_tokens`. Shape: [raw_bs]; integer.
        num_accept_tokens: Shape: [raw_bs]; integer.
        temperatures: Shape: [raw_bs, 1] or [raw_bs]; floating point. `None` means 1.0.
        hidden_states: Shape: [raw_bs * width, hidden]; any strides. `None` leaves zeros in the buffer.
        raw_bs: Live requests, where the row tensors are longer; their length when `None`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    num_correct_drafts: torch.Tensor
    num_accept_tokens: torch.Tensor
    temperatures: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    raw_bs: int | None = None


def fill_draft_extend_buffers(
    buffers: DraftExtendBuffers,
    batch: DraftExtendBatch,
    *,
    bs: int,
    width: int,
    num_front_tokens: int = 0,
    seq_len_fill: int,
    backend: BackendName | None = None,
) -> None:
    """Copy a batch into the buffers of a captured graph and give every other row its fill.

    With `i` the row, `T = raw_bs * width` and `F = num_front_tokens`:

    | buffer | i < raw_bs | raw_bs <= i < max_rows |
    | --- | --- | --- |
    | seq_lens | source | seq_len_fill |
    | req_pool_indices | source | 0 |
    | num_correct_drafts | source | 0 |
    | num_accept_tokens | source | -1 |
    | temperatures | source, or 1.0 | 1.0 |
    | select_index | i * width + F + num_correct_drafts[i] | i * width + F |

    Token rows from `T` on are 0 in all three token buffers (slot 0 belongs to the reserved page 0), and zeros in
    `hidden_states`. Every element of `global_num_tokens*` becomes `bs * width`.

    Args:
        buffers: Destinations.
        batch: Sources. May alias the buffers in any way; they are read as they were before the call.
        bs: Rows of the captured graph.
        width: Token rows of each request, front tokens included.
        num_front_tokens: Leading context tokens of each request's window.
        seq_len_fill: Sequence length of a row without a request, as the attention backend wants it (0 on Ascend).
        backend: Insist on a backend; the first eligible one when `None`.

    Mutates: every tensor of `buffers`; nothing else.

    Raises:
        BackendError: The backend is not eligible here.
        BucketError: Not `0 <= raw_bs <= bs <= max_rows`, or `width` and `num_front_tokens` do not fit.
        TokenCountError: The sources do not have `raw_bs * width` token rows, or the buffers fewer than `max_rows *
            width`.
        ShapeError: A shape does not fit its role.
        DtypeError: A dtype does not fit its role, or an identifier would be narrowed.
        DeviceError: A tensor lies on another device.
        AliasError: Two buffers share memory, or two elements of one buffer do.
        IndexWidthError: `seq_len_fill` is negative or does not fit; in host memory also: a length does not fit int32, a
            length, slot or pool index is negative, or a draft count leaves its request's window.
    """
    chosen = choose("fill_draft_extend_buffers", buffers.input_ids.device, backend)
    raw_bs = int(batch.seq_lens.shape[0]) if batch.raw_bs is None else batch.raw_bs
    max_rows, max_tokens = int(buffers.seq_lens.shape[0]), int(buffers.input_ids.shape[0])
    _check_bucket(raw_bs, bs, max_rows, width, num_front_tokens)
    _check_tokens(batch, raw_bs * width, max_rows * width, max_tokens)
    _check_buffers(buffers, max_rows, max_tokens)
    batch = _check_batch(buffers, batch, raw_bs)
    _check_fill(buffers, seq_len_fill)
    _check_values(buffers, batch, width - num_front_tokens)
    load("fill_draft_extend_buffers", chosen)(
        buffers, _snapshot(buffers, batch), bs=bs, width=width, front=num_front_tokens, fill=seq_len_fill
    )


def _check_bucket(raw_bs: int, bs: int, max_rows: int, width: int, front: int) -> None:
    if not 0 <= raw_bs <= bs <= max_rows:
        raise BucketError(
            "raw_bs, bs",
            given=(raw_bs, bs),
            expected=f"0 <= raw_bs <= bs <= {max_rows} buffer rows",
            consequence="requests would be dropped or written beyond the buffers",
            remedy="pick a bucket that holds the batch",
        )
    if not 0 <= front < width:
        raise BucketError(
            "num_front_tokens, width",
            given=(front, width),
            expected="0 <= num_front_tokens < width",
            consequence="select_index would leave the request's own window",
            remedy="the width includes the front tokens",
        )


def _check_tokens(batch: DraftExtendBatch, tokens: int, needed: int, max_tokens: int) -> None:
    if needed > max_tokens:
        raise TokenCountError(
            "buffers.input_ids",
            given=f"{max_tokens} token rows",
            expected=f"at least {needed} (buffer rows times width)",
            consequence="padded requests would select rows beyond the buffer",
            remedy="size token buffers for the largest bucket and width",
        )
    sources = [(name, getattr(batch, name)) for name in _TOKEN_FIELDS]
    if batch.hidden_states is not None:
        sources.append(("hidden_states", batch.hidden_states))
    for name, source in sources:
        if source.shape[0] != tokens:
            raise TokenCountError(
                f"batch.{name}",
                given=f"{source.shape[0]} token rows",
                expected=f"{tokens} (raw_bs times width)",
                consequence="requests would read each other's tokens, or lose some",
                remedy="pass width tokens a request; ragged batches need padding first",
            )


def _check_buffers(buffers: DraftExtendBuffers, max_rows: int, max_tokens: int) -> None:
    named = {item.name: tensor for item in fields(buffers) if (tensor := getattr(buffers, item.name)) is not None}
    for name, tensor in named.items():
        if name.startswith("global_num_tokens"):
            expected: tuple[tuple[int, ...], ...] = ((tensor.shape[0],) if tensor.ndim else (-1,),)
        elif name == "hidden_states":
            expected = ((max_tokens, tensor.shape[1] if tensor.ndim == 2 else -1),)
        elif name == "temperatures":
            expected = ((max_rows, 1), (max_rows,))
        else:
            expected = ((max_tokens if name in _TOKEN_FIELDS else max_rows,),)
        if tuple(tensor.shape) not in expected:
            _refuse_shape(f"buffers.{name}", tensor, " or ".join(map(str, expected)))
        floating = name in ("hidden_states", "temperatures")
        if tensor.dtype.is_floating_point != floating or (not floating and tensor.dtype not in _INTEGERS):
            _refuse_dtype(f"buffers.{name}", tensor.dtype, "a floating-point dtype" if floating else "int32 or int64")
        if tensor.device != buffers.input_ids.device:
            _refuse_device(f"buffers.{name}", tensor, buffers.input_ids)
        if _overlaps_itself(tensor):
            raise AliasError(
                f"buffers.{name}",
                given=f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                expected="memory of its own for every element",
                consequence="the last row written would stand in other rows too",
                remedy="allocate the buffer, or clone the expanded tensor",
            )
    spans = sorted((*_span(tensor), name) for name, tensor in named.items() if tensor.numel())
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise AliasError(
                f"buffers.{first}, buffers.{second}",
                given="buffers that share memory",
                expected="disjoint buffers",
                consequence="one fill would overwrite the other",
                remedy="give each its own memory",
            )


def _check_batch(buffers: DraftExtendBuffers, batch: DraftExtendBatch, raw_bs: int) -> DraftExtendBatch:
    """Check the sources and cut row tensors to the live rows."""
    rows: dict[str, Any] = {}
    for name in (*_ROW_FIELDS, "temperatures"):
        source: torch.Tensor | None = getattr(batch, name)
        if source is None:
            continue
        flat = source.squeeze(1) if name == "temperatures" and source.ndim == 2 and source.shape[1] == 1 else source
        enough = flat.ndim == 1 and (flat.shape[0] == raw_bs or (batch.raw_bs is not None and flat.shape[0] > raw_bs))
        if not enough:
            _refuse_shape(f"batch.{name}", source, f"[{raw_bs}], one row a live request")
        rows[name] = flat[:raw_bs]
    for name in (*_TOKEN_FIELDS, *_ROW_FIELDS):
        source, target = getattr(batch, name), getattr(buffers, name)
        if source.ndim != 1:
            _refuse_shape(f"batch.{name}", source, "one axis")
        if source.dtype not in _INTEGERS:
            _refuse_dtype(f"batch.{name}", source.dtype, "int32 or int64")
        if source.dtype.itemsize > target.dtype.itemsize and name not in _NARROWING_FIELDS:
            _refuse_dtype(f"batch.{name}", source.dtype, f"at most {target.dtype}: identifiers are never narrowed")
        if source.device != target.device:
            _refuse_device(f"batch.{name}", source, target)
    for name in ("temperatures", "hidden_states"):
        source, buffer = getattr(batch, name), getattr(buffers, name)
        if source is None:
            continue
        if buffer is None:
            _refuse_shape(f"batch.{name}", source, "None, as the buffers have none")
        if name == "hidden_states" and (source.ndim != 2 or source.shape[1] != buffer.shape[1]):
            _refuse_shape(f"batch.{name}", source, f"[tokens, {buffer.shape[1]}]")
        if not source.dtype.is_floating_point or (name == "hidden_states" and source.dtype != buffer.dtype):
            _refuse_dtype(f"batch.{name}", source.dtype, str(buffer.dtype))
        if source.device != buffer.device:
            _refuse_device(f"batch.{name}", source, buffer)
    return replace(batch, raw_bs=raw_bs, **rows)


def _check_fill(buffers: DraftExtendBuffers, fill: int) -> None:
    most = torch.iinfo(buffers.seq_lens.dtype).max
    if not 0 <= fill <= most:
        raise IndexWidthError(
            "seq_len_fill",
            given=fill,
            expected=f"0..{most}, what buffers.seq_lens holds",
            consequence="padded rows would have a length that attention misreads",
            remedy="pass the attention backend's fill: 0 on Ascend, 1 on most others",
        )


def _check_values(buffers: DraftExtendBuffers, batch: DraftExtendBatch, window: int) -> None:
    """Checks that need the values; in host memory only, where reading them waits for nobody."""
    if buffers.input_ids.device.type != "cpu" or not batch.raw_bs:
        return
    for name in _NARROWING_FIELDS:
        source, target = getattr(batch, name), getattr(buffers, name)
        low, high = int(source.min()), int(source.max())  # abs() would keep -2**63 negative
        if target.dtype == torch.int32 and (low < -_INT32_MAX or high > _INT32_MAX):
            raise IndexWidthError(
                f"batch.{name}",
                given=f"values from {low} to {high}",
                expected=f"at most {_INT32_MAX} in size for an int32 buffer",
                consequence="the value would wrap",
                remedy="check the length where it is computed",
            )
    for name in _NEVER_NEGATIVE:
        source = getattr(batch, name)
        if source.numel() and int(source.min()) < 0:
            raise IndexWidthError(
                f"batch.{name}",
                given=int(source.min()),
                expected="no negative value",
                consequence="it would become an address before the pool, or a length that attention misreads",
                remedy="padding goes to slot and pool index 0; pass live rows only",
            )
    low, high = int(batch.num_correct_drafts.min()), int(batch.num_correct_drafts.max())
    if low < 0 or high >= window:
        raise IndexWidthError(
            "batch.num_correct_drafts",
            given=f"values from {low} to {high}",
            expected=f"values in 0..{window - 1} (width less front tokens, less one)",
            consequence="select_index would pick another request's token",
            remedy="count accepted drafts without the bonus token",
        )


def _snapshot(buffers: DraftExtendBuffers, batch: DraftExtendBatch) -> DraftExtendBatch:
    """Clone every source that shares memory with a destination, so that the order of writes cannot matter."""
    targets = [
        _span(tensor)
        for item in fields(buffers)
        if (tensor := getattr(buffers, item.name)) is not None and tensor.numel()
    ]
    clones: dict[str, Any] = {}
    for item in fields(batch):
        source = getattr(batch, item.name)
        if not isinstance(source, torch.Tensor) or not source.numel():
            continue
        start, end = _span(source)
        if any(start < stop and begin < end for begin, stop in targets):
            clones[item.name] = source.clone()
    return replace(batch, **clones) if clones else batch


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: some axis steps no further than the smaller axes together reach."""
    reach = 0
    for stride, size in sorted((abs(step), size) for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (size - 1) * stride
    return False


def _refuse_shape(name: str, tensor: torch.Tensor, expected: str) -> NoReturn:
    raise ShapeError(
        name,
        given=f"shape {tuple(tensor.shape)}",
        expected=expected,
        consequence="rows would be copied to wrong places",
        remedy="see the shapes of DraftExtendBuffers and DraftExtendBatch",
    )


def _refuse_dtype(name: str, dtype: torch.dtype, expected: str) -> NoReturn:
    raise DtypeError(
        name,
        given=dtype,
        expected=expected,
        consequence="values would be rounded or wrapped",
        remedy="convert it where its range is known",
    )


def _refuse_device(name: str, tensor: torch.Tensor, target: torch.Tensor) -> NoReturn:
    raise DeviceError(
        name,
        given=tensor.device,
        expected=f"{target.device}, where the buffers are",
        consequence="the copy would wait for the host",
        remedy="move it first",
    )
