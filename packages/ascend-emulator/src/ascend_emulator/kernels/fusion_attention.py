"""npu_fusion_attention: dense attention without a cache, with the largest scores and sums that a backward pass wants.

This module owns the op's refusals, layouts and lengths; which tokens a query token sees is in ``fia_visibility.py``.
Position encodings, dropout and prefix modes are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import KernelNotCovered
from .fia_visibility import Visible
from .rules import declare, note, online, refuse

OP = "npu::npu_fusion_attention"
_NAME = "npu_fusion_attention"
_DOC = online("torch_npu-npu_fusion_attention")
_TEST = "test_kernels_fusion_attention.py"
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COMPRESSED = 2048
_ALL = 2147483647

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "fusion-dtype": ("query, key and value all float16, all bfloat16 or all float32", "cast them"),
        "fusion-layout": ("input_layout BSH, SBH, BSND, BNSD or TND", "reorder the axes"),
        "fusion-shape": (
            "the layout's rank, one batch, nothing empty; key and value of one length and one "
            "number of heads; Dk = Dq of 1 to 768, Dv at most Dk",
            "reshape them",
        ),
        "fusion-heads": (
            "head_num of 1 to 256, the query's heads, a multiple of the key's",
            "pass the query's number of heads",
        ),
        "fusion-lens": (
            "TND: actual_seq_qlen and actual_seq_kvlen, equally many, 1 to 1024, rising to at most T; zeros at the end "
            "leave requests out",
            "pass running sums",
        ),
        "fusion-mode": ("sparse_mode 0 to 6, in TND 0 to 4 and 6 to 8", "pass a supported mode"),
        "fusion-mask": (
            "a bool or uint8 atten_mask: (2048, 2048) in modes 2, 3 and 4; else (Sq, Skv), and but in TND (1, 1, Sq, "
            "Skv), (B, 1, Sq, Skv) or (B, N, Sq, Skv)",
            "cast and reshape the mask",
        ),
        "fusion-padding": ("no padding_mask", "leave it None"),
        "fusion-keep": ("a keep_prob above 0, at most 1", "pass 1"),
        "fusion-softmax-layout": ("softmax_layout '', or TND beside input_layout TND", "leave it empty"),
        "fusion-sink": ("a float32 sink (head_num,)", "cast and reshape it"),
    },
)
note(_NAME, "key and value shaped alike; Dk at least Dv", _DOC, "Dv below Dk is taken: " + _TEST)
note(_NAME, "(not documented) the output's width where Dv is below Dk", "—", "Dv, as op-plugin has it; Meta says Dk")
note(_NAME, "for training only; not in graphs", _DOC, "not refused: engines call it for prefill, eagerly")
note(_NAME, "pse, dropout, prefix; sparse_mode 5 to 8", _DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(
    _NAME,
    "sparse modes without a mask see everything",
    _DOC,
    "as written, pre_tockens and next_tockens too: " + _TEST,
)
note(
    _NAME,
    "TND: largest scores and sums lie in the order NTD unless softmax_layout is TND",
    _DOC,
    "so the memory of a result of shape (T, N, 8): " + _TEST,
)
note(_NAME, "(not documented) a token that sees nothing", "—", "zeros; largest score -inf, sum 0: " + _TEST)
note(_NAME, "seed, offset and length of the dropout mask", _DOC, "0, as without dropout")


@dataclass(frozen=True)
class _Parts:
    """Requests one by one.

    Attributes:
        query: each [N, Sq, D].
        key: each [Nkv, Skv, D].
        value: each [Nkv, Skv, Dv].
    """

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]


def _heads_first(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[B, N, S, D], TND: [N, T, D]; a view."""
    if layout == "TND":
        return tensor.transpose(0, 1)
    if layout in ("BSH", "SBH"):
        tensor = tensor.view(*tensor.shape[:2], heads, -1)
        return tensor.permute(0, 2, 1, 3) if layout == "BSH" else tensor.permute(1, 2, 0, 3)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def _spans(lens: Sequence[int], total: int, argument: str) -> list[tuple[int, int]]:
    ends = list(lens)
    while ends and ends[-1] == 0 and any(ends):
        ends.pop()
    if ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= total):
        refuse(OP, "fusion-lens", argument, f"{list(lens)} for T = {total}")
    return list(zip([0, *ends], ends, strict=False))


def _split(tensors: dict[str, torch.Tensor], layout: str, q_lens: list[int], kv_lens: list[int]) -> _Parts:
    if layout != "TND":
        return _Parts(*(list(tensor) for tensor in tensors.values()))
    out: list[list[torch.Tensor]] = []
    for name, tensor in tensors.items():
        argument = "actual_seq_qlen" if name == "query" else "actual_seq_kvlen"
        spans = _spans(q_lens if name == "query" else kv_lens, tensor.size(1), argument)
        spans += [(0, 0)] * (len(q_lens) - len(spans))
        out.append([tensor[:, start:end] for start, end in spans])
    return _Parts(*out)


def _check(tensors: dict[str, torch.Tensor], heads: int, layout: str) -> dict[str, torch.Tensor]:
    """Heads first, checked."""
    query, key, value = tensors.values()
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS or tensor.dtype != query.dtype:
            refuse(OP, "fusion-dtype", name, tensor.dtype)
        if tensor.dim() != len(layout) or not tensor.numel():
            refuse(OP, "fusion-shape", name, f"shape {tuple(tensor.shape)} in {layout}")
    if not 1 <= heads <= 256:
        refuse(OP, "fusion-heads", "head_num", heads)
    kv_heads = heads
    if layout in ("BSH", "SBH"):
        width, rest = divmod(query.size(2), heads)
        if rest or key.size(2) % width or value.size(2) % (key.size(2) // width or 1):
            refuse(
                OP, "fusion-heads", "head_num", f"{heads} for widths {query.size(2)}, {key.size(2)}, {value.size(2)}"
            )
        kv_heads = key.size(2) // width
    else:
        axis = layout.index("N")
        if query.size(axis) != heads:
            refuse(OP, "fusion-heads", "head_num", f"{heads} for {query.size(axis)} heads")
        kv_heads = key.size(axis)
    if not kv_heads or heads % kv_heads:
        refuse(OP, "fusion-heads", "head_num", f"{heads} beside {kv_heads} key heads")
    out = {name: _heads_first(t, layout, heads if name == "query" else kv_heads) for name, t in tensors.items()}
    first, second, third = out.values()
    fits = second.shape[:-1] == third.shape[:-1] and first.size(-1) == second.size(-1) <= 768
    if not fits or third.size(-1) > second.size(-1) or (layout != "TND" and first.size(0) != second.size(0)):
        given = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        refuse(OP, "fusion-shape", "key", given)
    return out


def _masks(mask: torch.Tensor, mode: int, parts: _Parts, heads: int, packed: bool) -> list[torch.Tensor | None]:
    """What each request hides: bool [1 or N, >= Sq, >= Skv]; None where the mode's interval says all of it."""
    lengths = [(q.size(1), k.size(1)) for q, k in zip(parts.query, parts.key, strict=True)]
    rows, columns = max(q for q, _ in lengths), max(k for _, k in lengths)
    count = len(lengths)
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if mode in (2, 3, 4):
        shapes = [(_COMPRESSED, _COMPRESSED)]
    elif not packed:
        shapes += [(1, 1, rows, columns), (count, 1, rows, columns), (count, heads, rows, columns)]
    if mask.dtype not in (torch.bool, torch.uint8) or tuple(mask.shape) not in shapes:
        refuse(OP, "fusion-mask", "atten_mask", f"{mask.dtype}, shape {tuple(mask.shape)} in mode {mode}")
    if mode in (2, 3, 4):
        return [None] * count
    whole = mask.bool().reshape(-1, mask.shape[-3] if mask.dim() == 4 else 1, *mask.shape[-2:])
    return [whole[min(row, whole.size(0) - 1)] for row in range(count)]


def _interval(mode: int, shift: int, pre: int, following: int) -> tuple[int | None, int | None]:
    """Bounds (low, high) relative to a query token's number, as ``Visible`` has them."""
    if mode in (1, 2):
        return None, 1 if mode == 2 else None
    if mode == 3:
        return None, shift + 1
    at = shift if mode == 4 else 0
    return None if pre >= _ALL else at - pre, None if following >= _ALL else at + following + 1


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [N, Sq, Dv], largest scores and sums [N, Sq] of one request, float32. The query is scaled."""
    group = query.size(0) // key.size(0)
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2)
    scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1) if scores.size(-1) else torch.full(scores.shape[:2], float("-inf"))
    if sink is not None:
        top = torch.maximum(top, sink.unsqueeze(-1))
    weights = torch.exp(scores - torch.where(top.isinf(), 0.0, top).unsqueeze(-1))
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink.unsqueeze(-1) - top)
    out = weights @ value.repeat_interleave(group, 0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, top, total


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ALL,
    next_tockens: int = _ALL,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention of whole sequences.

    Args:
        query: as ``input_layout`` spells; float16, bfloat16 or float32.
        key: likewise, with a divisor of the query's heads.
        value: as the key; its heads may be narrower.
        head_num: query heads.
        input_layout: BSH, SBH, BSND, BNSD or TND.
        pse: not computed.
        padding_mask: None.
        atten_mask: None to see everything, or what is hidden: [Sq, Skv], [1, 1, Sq, Skv], [B, 1, Sq, Skv] or [B, N, Sq,
            Skv]; in sparse_mode 2 to 4 the triangle of 2048; bool or uint8.
        scale: factor of the scores.
        keep_prob: 1.
        pre_tockens: tokens before its own that a query token sees (sparse_mode 0 and 4).
        next_tockens: tokens after it, likewise.
        inner_precise: no effect.
        prefix: not computed.
        actual_seq_qlen: TND: running sums of the queries' lengths.
        actual_seq_kvlen: TND: running sums of the keys' lengths.
        sparse_mode: 0 the mask and the band, 1 the mask, 2 causal from the first tokens, 3 causal to the last, 4 band.
        gen_mask_parallel: no effect.
        sync: no effect.
        softmax_layout: order of largest scores and sums in memory, in TND: '' for NTD, or TND.
        sink: None, or a score of each head that only adds to the sum. Shape: [head_num]; float32.
        dropout_mask: not computed.
        seed: no effect.
        offset: no effect.

    Returns:
        Output in the query's layout and dtype; largest scores and sums, float32, [B, N, Sq, 8] or [T, N, 8], the same
        number eight times; an empty tensor; three zeros. Tokens of no request are zero.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_fusion_attention.md.
    """
    for name, given in (("pse", pse), ("prefix", prefix), ("dropout_mask", dropout_mask)):
        if given is not None:
            raise KernelNotCovered(OP, name, "a value")
    layout = input_layout.upper()
    if layout not in _LAYOUTS:
        refuse(OP, "fusion-layout", "input_layout", repr(input_layout))
    packed = layout == "TND"
    if padding_mask is not None:
        refuse(OP, "fusion-padding", "padding_mask", f"a tensor of shape {tuple(padding_mask.shape)}")
    if not 0 < keep_prob <= 1:
        refuse(OP, "fusion-keep", "keep_prob", keep_prob)
    if keep_prob < 1:
        raise KernelNotCovered(OP, "keep_prob", keep_prob)
    if softmax_layout not in ("", "TND") or (softmax_layout and not packed):
        refuse(OP, "fusion-softmax-layout", "softmax_layout", repr(softmax_layout))
    if sparse_mode not in ((0, 1, 2, 3, 4, 6, 7, 8) if packed else range(7)):
        refuse(OP, "fusion-mode", "sparse_mode", sparse_mode)
    if sparse_mode > 4:
        raise KernelNotCovered(OP, "sparse_mode", sparse_mode)
    tensors = _check({"query": query, "key": key, "value": value}, head_num, layout)
    if sink is not None and (sink.dtype != torch.float32 or tuple(sink.shape) != (head_num,)):
        refuse(OP, "fusion-sink", "sink", f"{sink.dtype}, shape {tuple(sink.shape)}")
    q_lens, kv_lens = list(actual_seq_qlen or ()), list(actual_seq_kvlen or ())
    if packed and not (1 <= len(q_lens) <= 1024 and len(q_lens) == len(kv_lens)):
        refuse(OP, "fusion-lens", "actual_seq_qlen", f"{len(q_lens)} lengths, actual_seq_kvlen {len(kv_lens)}")
    parts = _split(tensors, layout, q_lens, kv_lens)
    masks: list[torch.Tensor | None] = [None] * len(parts.query)
    if atten_mask is not None:
        masks = _masks(atten_mask, sparse_mode, parts, head_num, packed)
    tokens = tensors["query"].shape[-2]
    outer = () if packed else (tensors["query"].size(0),)
    width = tensors["value"].size(-1)
    out = torch.zeros((*outer, head_num, tokens, width))
    top = torch.full((*outer, head_num, tokens), float("-inf"))
    total = torch.zeros_like(top)
    start = 0
    for row, (q, k, v) in enumerate(zip(parts.query, parts.key, parts.value, strict=True)):
        bounds: tuple[int | None, int | None] = (None, None)
        if atten_mask is not None:
            bounds = _interval(sparse_mode, k.size(1) - q.size(1), pre_tockens, next_tockens)
        see = Visible(q.size(1), k.size(1), *bounds, None)
        hidden = torch.ones(1, q.size(1), k.size(1), dtype=torch.bool)
        first, last = see.rows()
        low, high = see.columns(first, last)
        if first < last:
            inside = see.hidden(first, last)
            hidden[:, first:last, low:high] = False if inside is None else inside
        mask = masks[row]
        if mask is not None:
            hidden = hidden | mask[:, : q.size(1), : k.size(1)]
        where: tuple[int | slice, ...] = (slice(None), slice(start, start + q.size(1))) if packed else (row,)
        start += q.size(1)
        out[where], top[where], total[where] = _attend(q.float() * scale, k.float(), v.float(), hidden, sink)
    shape = (*query.shape[:-1], width * head_num if layout in ("BSH", "SBH") else width)
    result = torch.empty(shape, dtype=query.dtype)
    _heads_first(result, layout, head_num).copy_(out)
    extra = [part.unsqueeze(-1).expand(*part.shape, 8) for part in (top, total)]
    if packed:
        extra = [part.transpose(0, 1) if softmax_layout else part.reshape(tokens, head_num, 8) for part in extra]
    return result, extra[0].contiguous(), extra[1].contiguous(), torch.empty(0, dtype=query.dtype), 0, 0, 0


KERNELS = {OP: npu_fusion_attention}
