"""npu_prompt_flash_attention: dense attention of prompts, computed by what fused_infer_attention_score shares.

This module owns the op's signature and the refusals that its page alone has; for the rest both pages say the same, and
the rules of fused_infer_attention_score hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .fia_call import LAYOUTS, UNBOUNDED, V1_NAMES, FiaCall, heads_first
from .fia_run import not_covered, run
from .rules import declare, note, online, refuse

OP = "npu::npu_prompt_flash_attention"
_NAME = "npu_prompt_flash_attention"
_DOC = online("torch_npu-npu_prompt_flash_attention")
_TEST = "test_kernels_prompt_attention.py"
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "prompt-layout": ("input_layout BSH, BSND, BNSD, BNSD_BSND or TND", "reorder the axes"),
        "prompt-value": ("value shaped as key, unless TND", "pad the value heads"),
    },
)
note(
    _NAME,
    "dtypes, heads, lengths, masks and sparse modes",
    _DOC,
    "the rules of npu_fused_infer_attention_score with the same words: " + _TEST,
)
note(
    _NAME,
    "TND, which the page names beside the lengths alone",
    _DOC,
    "taken, with the rules that npu_fused_infer_attention_score has for it: " + _TEST,
)
note(
    _NAME,
    "head dims that are no multiple of 16: up to 128 in one sentence, not at all in another",
    _DOC,
    "the sentences contradict each other: refused (`head-dim-align`): " + _TEST,
)
note(
    _NAME,
    "one query token with a mask, with lengths of queries or in BNSD_BSND",
    _DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(_NAME, "pse_shift; quantised inputs and outputs", _DOC, "not computed: `KernelNotCovered`: " + _TEST)


def npu_prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    deq_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    deq_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> torch.Tensor:
    """Attention of prompts over dense keys and values.

    Args:
        query: as ``input_layout`` spells; float16 or bfloat16.
        key: as the query.
        value: as the key.
        padding_mask: not used.
        atten_mask: None, or what is hidden. Shape: [Q, KV], [B or 1, Q, KV] or [B or 1, 1, Q, KV]; for sparse_mode 2
            to 4 the triangle of 2048; bool, int8 or uint8.
        pse_shift: not computed.
        actual_seq_lengths: query tokens of each request; TND: running sums.
        deq_scale1: not computed.
        quant_scale1: not computed.
        deq_scale2: not computed.
        quant_scale2: not computed.
        quant_offset2: not computed.
        num_heads: query heads.
        scale_value: factor of the scores.
        pre_tokens: tokens before its own that a query token sees (sparse_mode 0 with a mask, and 4).
        next_tokens: tokens after it, likewise.
        input_layout: BSH, BSND, BNSD, BNSD_BSND or TND.
        num_key_value_heads: key and value heads; 0 for as many as query heads.
        actual_seq_lengths_kv: key and value tokens of each request; TND: running sums.
        sparse_mode: 0 to 4.

    Returns:
        Attention output in the output layout; dtype of the query. Tokens past a request's length are poison.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_prompt_flash_attention.md.
    """
    not_covered(OP, pse_shift=pse_shift, deq_scale1=deq_scale1, quant_scale1=quant_scale1, deq_scale2=deq_scale2)
    not_covered(OP, quant_scale2=quant_scale2, quant_offset2=quant_offset2)
    if input_layout not in _LAYOUTS:
        refuse(OP, "prompt-layout", "input_layout", repr(input_layout))
    layout = LAYOUTS[input_layout]
    if not layout.packed and value.shape != key.shape:
        refuse(OP, "prompt-value", "value", f"shape {tuple(value.shape)} beside a key of {tuple(key.shape)}")
    whole = (
        query.dim() == len(layout.query) and num_heads > 0 and (layout.query != "BSH" or not query.size(-1) % num_heads)
    )
    if not layout.packed and whole and heads_first(query, layout.query, num_heads).size(2) == 1:
        not_covered(OP, atten_mask=atten_mask, actual_seq_lengths=actual_seq_lengths)
        if input_layout == "BNSD_BSND":
            raise KernelNotCovered(OP, "input_layout", "BNSD_BSND with one query token")
    return run(
        FiaCall(
            op=OP,
            names=V1_NAMES,
            query=query,
            key=key,
            value=value,
            query_rope=None,
            key_rope=None,
            mask=atten_mask.unsqueeze(1) if atten_mask is not None and atten_mask.dim() == 3 else atten_mask,
            q_lens=actual_seq_lengths,
            kv_lens=actual_seq_lengths_kv,
            block_table=None,
            sink=None,
            heads=num_heads,
            kv_heads_given=num_key_value_heads,
            scale=scale_value,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            input_layout=input_layout,
            sparse_mode=sparse_mode,
            block_size=0,
            inner_precise=0,
            want_lse=False,
        )
    )[0]


KERNELS = {OP: npu_prompt_flash_attention}
