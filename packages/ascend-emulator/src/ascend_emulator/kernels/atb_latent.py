"""atb's npu_multi_head_latent_attention: decoding over the latent and rope caches of multi-head latent attention.

This module owns the op in its four forms and its refusals; the attention is that of ``atb_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .atb_attention import LATENT, ROPE, attend_paged
from .errors import KernelNotCovered
from .faults import fill_poison_
from .rules import META, declare, note, refuse

OP_LATENT = "atb::npu_multi_head_latent_attention"
_DOC_LATENT = "torch_npu 2.12.0, op_plugin/atb/_atb_api_docs.py, npu_multi_head_latent_attention"
_TEST = "test_kernels_atb_attention.py"
_FLOATS = (torch.float16, torch.bfloat16)

declare(
    OP_LATENT,
    _DOC_LATENT,
    _TEST,
    {
        "latent-dtype": ("float16, bfloat16 (int8 in the cache mode int8_nzcache)", "cast queries and caches"),
        "latent-shapes": (
            "q_nope (tokens, heads, 512), q_rope (tokens, heads, 64), ctkv (blocks, block_size, 1, 512), k_rope "
            "(blocks, block_size, 1, 64)",
            "reshape queries or caches",
        ),
        "latent-block-size": ("a block size of at most 128", "use blocks of 128 tokens"),
        "latent-batch": ("at most 8192 requests, one length and table row each", "split the batch"),
        "latent-mode": (
            "mask_type undefined, calc_type calc_type_undefined, cache_mode krope_ctkv or int8_nzcache",
            "leave them None",
        ),
    },
)
note(OP_LATENT, "cache_mode int8_nzcache", _DOC_LATENT, "not computed: `KernelNotCovered`: " + _TEST)
note(
    OP_LATENT,
    "lse of dtype float16, bfloat16 or float32, shape (tokens, heads, 1)",
    META,
    "q_nope's dtype, as torch_npu's Meta kernel has it; it is poison when return_lse is False",
)


def _options(*values: object) -> dict[str, object]:
    names = ("mask", "qseqlen", "qk_descale", "pv_descale", "mask_type", "calc_type", "cache_mode")
    return dict(zip(names, values, strict=True))


def _latent(
    op: str,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    options: dict[str, object],
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    modes = {"mask_type": "undefined", "calc_type": "calc_type_undefined", "cache_mode": "krope_ctkv"}
    for name, usual in modes.items():
        if options[name] == "int8_nzcache" and name == "cache_mode":
            raise KernelNotCovered(op, name, options[name])
        if options[name] not in (None, usual):
            refuse(op, "latent-mode", name, repr(options[name]))
    for name in ("mask", "qseqlen", "qk_descale", "pv_descale"):
        if options[name] is not None:
            raise KernelNotCovered(op, name, "a value (only the unmasked decoding form is computed)")
    tensors = {"q_nope": q_nope, "q_rope": q_rope, "ctkv": ctkv, "k_rope": k_rope}
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS or tensor.dtype != q_nope.dtype:
            refuse(op, "latent-dtype", name, tensor.dtype)
    tokens, blocks, size = q_nope.size(0), ctkv.size(0), ctkv.size(1)
    wanted = {
        "q_nope": (tokens, q_headnum, LATENT),
        "q_rope": (tokens, q_headnum, ROPE),
        "ctkv": (blocks, size, kv_headnum, LATENT),
        "k_rope": (blocks, size, kv_headnum, ROPE),
    }
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name] or kv_headnum != 1:
            refuse(op, "latent-shapes", name, f"shape {tuple(tensor.shape)}, wanted {wanted[name]}, one kv head")
    if size > 128:
        refuse(op, "latent-block-size", "ctkv", f"shape {tuple(ctkv.shape)}")
    if tokens > 8192 or len(context_lens) != tokens or block_tables.size(0) < tokens:
        refuse(op, "latent-batch", "context_lens", f"{len(context_lens)} for {tokens} tokens")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2:
        refuse(op, "latent-batch", "block_tables", f"{block_tables.dtype}, shape {tuple(block_tables.shape)}")
    wide = None if lse is None else torch.empty(tokens, q_headnum, 1, 1, dtype=torch.float32)
    attend_paged(
        op,
        "BSND",
        q_nope.unsqueeze(1),
        [ctkv.flatten(2), ctkv.flatten(2)],
        (None, [int(n) for n in context_lens]),
        block_tables[:tokens],
        qk_scale,
        1,
        0,
        (output.unsqueeze(1), wide),
        (q_rope.unsqueeze(1), k_rope.flatten(2)),
    )
    if lse is not None and wide is not None:
        lse.copy_(wide.view(tokens, q_headnum, 1))


def npu_multi_head_latent_attention_out(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of one query token a request over its latent pages.

    Args:
        q_nope: Shape: [requests, heads, 512]; float16 or bfloat16.
        q_rope: Shape: [requests, heads, 64].
        ctkv: keys without rope, and values. Shape: [blocks, block_size, 1, 512].
        k_rope: Shape: [blocks, block_size, 1, 64].
        block_tables: Shape: [at least requests, blocks]; int32.
        context_lens: key/value tokens of each request. *Padding*: 0, which gives zeros.
        q_headnum: query heads.
        qk_scale: factor of the scores.
        kv_headnum: 1.
        mask: not computed.
        qseqlen: not computed.
        qk_descale: not computed.
        pv_descale: not computed.
        mask_type: None or 'undefined'.
        calc_type: None or 'calc_type_undefined'.
        cache_mode: None or 'krope_ctkv'.
        output: Shape: [requests, heads, 512]. *Mutated* and returned.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        _atb_api_docs.py of the torch_npu 2.12.0 wheel.
    """
    options = _options(mask, qseqlen, qk_descale, pv_descale, mask_type, calc_type, cache_mode)
    tensors = q_nope, q_rope, ctkv, k_rope, block_tables
    _latent(OP_LATENT, *tensors, context_lens, q_headnum, qk_scale, kv_headnum, options, output, None)
    return output


def npu_multi_head_latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
) -> torch.Tensor:
    """The same into a new tensor; see ``npu_multi_head_latent_attention_out``."""
    options = _options(mask, qseqlen, qk_descale, pv_descale, mask_type, calc_type, cache_mode)
    tensors = q_nope, q_rope, ctkv, k_rope, block_tables
    output = torch.empty(q_nope.shape, dtype=q_rope.dtype)
    _latent(OP_LATENT, *tensors, context_lens, q_headnum, qk_scale, kv_headnum, options, output, None)
    return output


def npu_multi_head_latent_attention_lse_out(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
    workspace: torch.Tensor | None = None,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the log-sum-exp; see ``npu_multi_head_latent_attention_out``. *Mutates* and returns both."""
    options = _options(mask, qseqlen, qk_descale, pv_descale, mask_type, calc_type, cache_mode)
    tensors = q_nope, q_rope, ctkv, k_rope, block_tables
    wanted = lse if return_lse else None
    _latent(OP_LATENT, *tensors, context_lens, q_headnum, qk_scale, kv_headnum, options, output, wanted)
    return output, lse


def npu_multi_head_latent_attention_lse(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the log-sum-exp, into new tensors; see ``npu_multi_head_latent_attention_out``."""
    options = _options(mask, qseqlen, qk_descale, pv_descale, mask_type, calc_type, cache_mode)
    tensors = q_nope, q_rope, ctkv, k_rope, block_tables
    output = torch.empty(q_nope.shape, dtype=q_rope.dtype)
    lse = fill_poison_(torch.empty(*q_nope.shape[:2], 1, dtype=q_nope.dtype))
    wanted = lse if return_lse else None
    _latent(OP_LATENT, *tensors, context_lens, q_headnum, qk_scale, kv_headnum, options, output, wanted)
    return output, lse


def get_workspace(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    ctkv: torch.Tensor,
    k_rope: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    *,
    mask: torch.Tensor | None = None,
    qseqlen: Sequence[int] | None = None,
    qk_descale: torch.Tensor | None = None,
    pv_descale: torch.Tensor | None = None,
    mask_type: str | None = None,
    calc_type: str | None = None,
    cache_mode: str | None = None,
) -> torch.Tensor:
    """Scratch memory of the forms with log-sum-exp: bytes for one float32 accumulator an output element."""
    return torch.empty(q_nope.numel() * 4, dtype=torch.uint8)


KERNELS = {
    OP_LATENT: npu_multi_head_latent_attention,
    f"{OP_LATENT}.out": npu_multi_head_latent_attention_out,
    f"{OP_LATENT}.lse": npu_multi_head_latent_attention_lse,
    f"{OP_LATENT}.lse_out": npu_multi_head_latent_attention_lse_out,
    "atb::_npu_multi_head_latent_attention_get_workspace.lse": get_workspace,
}
