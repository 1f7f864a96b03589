"""mla_preprocess of sgl_kernel_npu and of vLLM-Ascend: from hidden states to latent queries and a written cache.

This module owns both ops' definitions (torch_npu has none), their refusals, and the forms of their caches. Norms,
rotary parts and scales are float32; products of int8 are exact. Long because each of two schemas names its thirty
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .caches import check_slots, write_slots
from .definitions import define
from .errors import DeviceFault, KernelNotCovered
from .quantising import quantise_rows, to_integer
from .rules import declare, note, refuse

OP, OP_VLLM = "npu::mla_preprocess", "_C_ascend::mla_preprocess"
SCHEMA = (
    "mla_preprocess(Tensor hiddenState, Tensor gamma0, Tensor beta0, Tensor wdqkv, Tensor descale0, Tensor gamma1, "
    "Tensor beta1, Tensor wuq, Tensor descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, "
    "Tensor kv_cache_rope, Tensor slotmapping, Tensor quant_scale0, Tensor quant_offset0, Tensor bias0, "
    "Tensor quant_scale1, Tensor quant_offset1, Tensor bias1, *, Tensor? ctkv_scale=None, Tensor? q_nope_scale=None, "
    "str? cache_mode=None, str? quant_mode=None, Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, "
    "Tensor(d!) kv_cache_out1) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))"
)
SCHEMA_VLLM = (
    "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, Tensor wuq, "
    "Tensor? descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope, "
    "Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, Tensor? quant_scale1, "
    "Tensor? quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, str? cache_mode, "
    "str? quant_mode, bool? enable_inner_out, Tensor! q_out0, Tensor! kv_cache_out0, Tensor! q_out1, "
    "Tensor! kv_cache_out1, Tensor! inner_out) -> (Tensor q_out0, Tensor kv_cache_out0, Tensor q_out1, "
    "Tensor kv_cache_out1, Tensor inner_out)"
)
PER_TENSOR, PER_TOKEN, NONE = "per_tensor_quant_asymm", "per_token_quant_symm", "no_quant"
_CACHE_MODES = ("krope_ctkv", "int8_nzcache", "nzcache")
_QUANT_MODES = (PER_TENSOR, PER_TOKEN, NONE, "per_token_quant_asymm")
_BLOCK = 128
_EPSILON = 1e-6
_FAMILY = "npu::mla_preprocess, _C_ascend::mla_preprocess"
_SOURCE = (
    "sgl-kernel-npu f425bdf, csrc/mla_preprocess (README.md, op_host); vllm-ascend v0.23.0, csrc/mla_preprocess/op_host"
)
_TEST = "test_kernels_mla_preprocess.py"

declare(
    _FAMILY,
    _SOURCE,
    _TEST,
    {
        "mlapre-dtype": (
            "hiddenState, gamma1, beta1, gamma2, cos, sin and wuk of float16 or bfloat16 alike, an int32 slotmapping",
            "cast them",
        ),
        "mlapre-tokens": (
            "hiddenState (1 to 1024 tokens, 2048 to 8192), one slot and one row of cos and sin each",
            "split the batch",
        ),
        "mlapre-contiguous": ("contiguous tensors: the kernels read addresses alone", "call .contiguous()"),
        "mlapre-mode": (
            "cache_mode krope_ctkv, int8_nzcache or nzcache; quant_mode per_tensor_quant_asymm, per_token_quant_symm, "
            "per_token_quant_asymm or no_quant",
            "pass one of them",
        ),
        "mlapre-weights": (
            "wdqkv (1, hidden / c0, latent + rope + low, c0) and wuq (1, low / c0, heads * (nope + rope), c0), a c0 of "
            "32 (int8), 16 (else), wuk (heads, nope, latent); gamma1 and beta1 (low,), gamma2 (latent,)",
            "pass weights in blocks of c0, as transdata gives them: latent, rope, low",
        ),
        "mlapre-sizes": (
            "npu: a latent of 512, rope parts of 64, nope parts of 128, a low rank of 1536",
            "use the unfused way for other models",
        ),
        "mlapre-quant": (
            "int8 weights: float32 descales (int64 beside float16), one a column; per tensor also int32 biases, scales "
            "of hiddenState's dtype and int8 offsets, one each",
            "pass the numbers of the quantised layers",
        ),
        "mlapre-cache": (
            "contiguous caches of whole pages, hiddenState's dtype (int8 latents for int8_nzcache); NZ: pages of 128",
            "pass the layer's pools",
        ),
        "mlapre-out": (
            "q_out0 (tokens, heads, latent), int8 for int8_nzcache, and q_out1 (tokens, heads, rope); inner_out "
            "(tokens, low) when it is wanted; hiddenState's dtype, contiguous",
            "allocate them so",
        ),
    },
)
note(
    _FAMILY,
    "gamma0 and beta0, an epsilon",
    _SOURCE,
    "without effect: hiddenState is quantised as it is, and the epsilon is 1e-6 whatever the model says",
)
note(_FAMILY, "per_token_quant_asymm", _SOURCE, "not computed: `KernelNotCovered`: " + _TEST)
note(_FAMILY, "a slot of -1", _SOURCE, "is not written: " + _TEST)
note(_FAMILY, "(not documented) slots below -1, or past the cache", "—", "are a `DeviceFault` (507015): " + _TEST)
note(
    "_C_ascend::mla_preprocess",
    "results that its schema does not name as the arguments that they are",
    "vllm-ascend v0.23.0, csrc/torch_binding.cpp",
    "through the dispatcher copies of them; engines use the arguments",
)


@dataclass(frozen=True)
class _Quantised:
    """A product of int8 weights: how its input is quantised and its result scaled back."""

    descale: torch.Tensor | None
    scale: torch.Tensor | None
    offset: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class _Call:
    """One call, whichever op it came by."""

    op: str
    hidden: torch.Tensor
    wdqkv: torch.Tensor
    gamma1: torch.Tensor
    beta1: torch.Tensor | None
    wuq: torch.Tensor
    gamma2: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    wuk: torch.Tensor
    slots: torch.Tensor
    first: _Quantised
    second: _Quantised
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    cache_mode: str
    quant_mode: str
    outs: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the kernel reads, by name."""
        named: dict[str, torch.Tensor | None] = {"hiddenState": self.hidden, "wdqkv": self.wdqkv, "wuq": self.wuq}
        named |= {"gamma1": self.gamma1, "beta1": self.beta1, "gamma2": self.gamma2, "cos": self.cos, "sin": self.sin}
        named |= {"wuk": self.wuk, "slotmapping": self.slots}
        for number, part in enumerate((self.first, self.second)):
            named |= {f"descale{number}": part.descale, f"quant_scale{number}": part.scale}
            named |= {f"quant_offset{number}": part.offset, f"bias{number}": part.bias}
        named |= {"ctkv_scale": self.scales[0], "q_nope_scale": self.scales[1]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Heads, nope, latent, rope, low rank."""
        heads, nope, latent = self.wuk.shape
        return heads, nope, latent, self.cos.size(-1), self.gamma1.numel()


def _check_inputs(call: _Call) -> None:
    op, hidden = call.op, call.hidden
    if call.cache_mode not in _CACHE_MODES or call.quant_mode not in _QUANT_MODES:
        refuse(op, "mlapre-mode", "cache_mode", f"{call.cache_mode}, quant_mode {call.quant_mode}")
    if call.quant_mode == "per_token_quant_asymm":
        raise KernelNotCovered(op, "quant_mode", call.quant_mode)
    alike = {"hiddenState": hidden, "gamma1": call.gamma1, "gamma2": call.gamma2, "cos": call.cos, "sin": call.sin}
    alike |= {"wuk": call.wuk} | ({} if call.beta1 is None else {"beta1": call.beta1})
    for name, tensor in alike.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != hidden.dtype:
            refuse(op, "mlapre-dtype", name, tensor.dtype)
    if call.slots.dtype != torch.int32:
        refuse(op, "mlapre-dtype", "slotmapping", call.slots.dtype)
    for name, tensor in call.inputs.items():
        if not tensor.is_contiguous():
            refuse(op, "mlapre-contiguous", name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    if call.cos.dim() != 2:
        refuse(op, "mlapre-tokens", "cos", f"shape {tuple(call.cos.shape)}")
    if hidden.dim() != 2 or not 1 <= hidden.size(0) <= 1024 or not 2048 <= hidden.size(1) <= 8192:
        refuse(op, "mlapre-tokens", "hiddenState", f"shape {tuple(hidden.shape)}")
    for name, tensor in (("cos", call.cos), ("sin", call.sin), ("slotmapping", call.slots)):
        wanted = (hidden.size(0),) if name == "slotmapping" else (hidden.size(0), call.cos.size(-1))
        if tuple(tensor.shape) != wanted:
            refuse(op, "mlapre-tokens", name, f"shape {tuple(tensor.shape)}, wanted {wanted}")


def _check_weights(call: _Call) -> None:
    op = call.op
    if call.wuk.dim() != 3:
        refuse(op, "mlapre-weights", "wuk", f"shape {tuple(call.wuk.shape)}")
    heads, nope, latent, rope, low = call.sizes
    if op == OP and (nope, latent, rope, low) != (128, 512, 64, 1536):
        refuse(op, "mlapre-sizes", "wuk", f"nope {nope}, latent {latent}, rope {rope}, low rank {low}")
    quantised = call.quant_mode != NONE
    c0 = 32 if quantised else 16
    down, up = latent + rope + low, heads * (nope + rope)
    wanted = {
        "wdqkv": (call.wdqkv, (1, call.hidden.size(1) // c0, down, c0)),
        "wuq": (call.wuq, (1, low // c0, up, c0)),
        "gamma1": (call.gamma1, (low,)),
        "gamma2": (call.gamma2, (latent,)),
    }
    wanted |= {} if call.beta1 is None else {"beta1": (call.beta1, (low,))}
    for name, (tensor, shape) in wanted.items():
        fits = tuple(tensor.shape) == shape
        if name.startswith("w"):
            fits = fits and tensor.dtype == (torch.int8 if quantised else call.hidden.dtype)
        if not fits:
            refuse(op, "mlapre-weights", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}, wanted {shape}")
    for number, (part, columns) in enumerate(((call.first, down), (call.second, up)) if quantised else ()):
        descale = torch.int64 if call.hidden.dtype == torch.float16 else torch.float32
        parts = {f"descale{number}": (part.descale, descale, columns)}
        if call.quant_mode == PER_TENSOR:
            parts |= {f"bias{number}": (part.bias, torch.int32, columns)}
            parts |= {f"quant_scale{number}": (part.scale, call.hidden.dtype, 1)}
            parts |= {f"quant_offset{number}": (part.offset, torch.int8, 1)}
        for name, (numbers, dtype, count) in parts.items():
            if numbers is None or numbers.dtype != dtype or numbers.numel() != count:
                shown = None if numbers is None else f"{numbers.dtype}, shape {tuple(numbers.shape)}"
                refuse(op, "mlapre-quant", name, f"{shown}, wanted {dtype}, {count} numbers")


def _by_token(call: _Call, name: str, wide: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache as [blocks, block_size, ...], from its memory alone, as the kernel takes it."""
    cache = call.outs[name]
    blocked = call.cache_mode != "krope_ctkv"
    page = wide * (_BLOCK if blocked else 1)
    if cache.dtype != dtype or not cache.is_contiguous() or cache.numel() == 0 or cache.numel() % page:
        refuse(call.op, "mlapre-cache", name, f"{cache.dtype}, shape {tuple(cache.shape)}, strides {cache.stride()}")
    if not blocked:
        return cache.view(-1, 1, wide)
    c0 = 32 // dtype.itemsize
    return cache.view(-1, wide // c0, _BLOCK, c0).permute(0, 2, 1, 3)


def _check_outs(call: _Call) -> None:
    heads, _, latent, rope, low = call.sizes
    tokens, dtype = call.hidden.size(0), call.hidden.dtype
    narrow = torch.int8 if call.cache_mode == "int8_nzcache" else dtype
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]
    wanted = {"q_out0": ((tokens, heads, latent), narrow), "q_out1": ((tokens, heads, rope), dtype)}
    wanted |= {"inner_out": ((tokens, low), dtype)} if "inner_out" in call.outs else {}
    for name, (shape, kind) in wanted.items():
        out = call.outs[name]
        if tuple(out.shape) != shape or out.dtype != kind or not out.is_contiguous():
            refuse(call.op, "mlapre-out", name, f"{out.dtype}, shape {tuple(out.shape)}, wanted {kind}, {shape}")
    latent_scale, query_scale = call.scales
    for name, scale, count in (("ctkv_scale", latent_scale, 1), ("q_nope_scale", query_scale, heads)):
        if narrow == torch.int8 and (scale is None or scale.dtype != dtype or scale.numel() != count):
            refuse(call.op, "mlapre-quant", name, None if scale is None else f"{scale.dtype}, {tuple(scale.shape)}")


def _product(call: _Call, x: torch.Tensor, weight: torch.Tensor, part: _Quantised) -> torch.Tensor:
    """``x`` (float32) times a weight in blocks, rounded to the model's dtype."""
    plain = weight[0].transpose(0, 1).flatten(1)
    if call.quant_mode == NONE:
        return (x.to(call.hidden.dtype).float() @ plain.float().T).to(call.hidden.dtype)
    assert part.descale is not None
    descale = part.descale.float()
    if part.descale.dtype == torch.int64:
        descale = part.descale.to(torch.int32).view(torch.float32)
    if call.quant_mode == PER_TOKEN:
        rows, scale = quantise_rows(x)
        return ((rows.double() @ plain.double().T).float() * descale * scale.unsqueeze(1)).to(call.hidden.dtype)
    assert part.scale is not None and part.offset is not None and part.bias is not None
    rows = to_integer((x / part.scale.float() + part.offset.float()).half().float())
    sums = rows.double() @ plain.double().T + part.bias.double()
    return (sums.float() * descale).to(call.hidden.dtype)


def _norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON) * gamma.float()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat([-two, one], -1) * sin.float()).to(x.dtype)


def _run(call: _Call) -> None:
    _check_inputs(call)
    _check_weights(call)
    _check_outs(call)
    heads, nope, latent, rope, _ = call.sizes
    dtype, narrow = call.hidden.dtype, call.outs["q_out0"].dtype
    caches = [_by_token(call, "kv_cache_out0", latent, narrow), _by_token(call, "kv_cache_out1", rope, dtype)]
    slots = call.slots.long()
    if int(slots.min()) < -1:
        token = int((slots < -1).nonzero()[0])
        raise DeviceFault(call.op, f"slotmapping[{token}] = {int(slots[token])}", slot=int(slots[token]))
    for cache in caches:
        check_slots(call.op, slots, cache, cache.size(1), "slotmapping")
    joint = _product(call, call.hidden.float(), call.wdqkv, call.first)
    keys = _norm(joint[:, :latent], call.gamma2)
    low = _norm(joint[:, latent + rope :], call.gamma1)
    low = low if call.beta1 is None else low + call.beta1.float()
    high = _product(call, low, call.wuq, call.second).view(-1, heads, nope + rope)
    query = torch.einsum("tnd,ndh->tnh", high[..., :nope].float(), call.wuk.float()).to(dtype)
    if narrow == torch.int8:
        latent_scale, query_scale = call.scales
        assert latent_scale is not None and query_scale is not None
        call.outs["q_out0"].copy_(to_integer((query.float() * query_scale.float().view(-1, 1)).half().float()))
        keys = to_integer((keys / latent_scale.float()).half().float())
    else:
        call.outs["q_out0"].copy_(query)
    call.outs["q_out1"].copy_(_turn(high[..., nope:], call.cos.unsqueeze(1), call.sin.unsqueeze(1)))
    if "inner_out" in call.outs:
        call.outs["inner_out"].copy_(low)
    write_slots(caches[0], slots, keys.to(narrow))
    write_slots(caches[1], slots, _turn(joint[:, latent : latent + rope], call.cos, call.sin))


def mla_preprocess(
    hiddenState: torch.Tensor,
    gamma0: torch.Tensor,
    beta0: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor,
    gamma1: torch.Tensor,
    beta1: torch.Tensor,
    wuq: torch.Tensor,
    descale1: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor,
    quant_offset0: torch.Tensor,
    bias0: torch.Tensor,
    quant_scale1: torch.Tensor,
    quant_offset1: torch.Tensor,
    bias1: torch.Tensor,
    *,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
    cache_mode: str | None = None,
    quant_mode: str | None = None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projects hidden states down and up, turns their rotary parts, and writes latents and rotary keys to the cache.

    Args:
        hiddenState: Shape: [tokens, hidden]; float16 or bfloat16.
        gamma0, beta0: no effect.
        wdqkv: rows of latent, rotary key and low-rank query. Shape: [1, hidden / c0, 512 + 64 + low, c0].
        descale0: factor of each column. Shape: [512 + 64 + low]; float32, int64 beside float16.
        gamma1, beta1: norm of the low-rank query. Shape: [low].
        wuq: Shape: [1, low / c0, heads * (128 + 64), c0].
        descale1: Shape: [heads * (128 + 64)]; as ``descale0``.
        gamma2: norm of the latent. Shape: [512].
        cos, sin: Shape: [tokens, 64].
        wuk: Shape: [heads, 128, 512].
        kv_cache, kv_cache_rope: the caches that ``kv_cache_out0`` and ``kv_cache_out1`` are.
        slotmapping: slot of each token, -1 for none. Shape: [tokens]; int32.
        quant_scale0, quant_offset0, bias0: for per_tensor_quant_asymm. Shape: [1], [1], [columns].
        quant_scale1, quant_offset1, bias1: the same of ``wuq``.
        ctkv_scale, q_nope_scale: for int8_nzcache. Shape: [1], [heads].
        cache_mode: krope_ctkv (None: ND), nzcache, int8_nzcache.
        quant_mode: per_tensor_quant_asymm, per_token_quant_symm (None), no_quant.
        q_out0: queries in the latent space. Shape: [tokens, heads, 512]. *Mutated*, as the next three.
        kv_cache_out0: latents.
        q_out1: rotary parts of the queries. Shape: [tokens, heads, 64].
        kv_cache_out1: rotary keys.

    Returns:
        The four outputs.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``; nothing is written then.

    Source:
        sgl-kernel-npu f425bdf, csrc/mla_preprocess.
    """
    outs = {"q_out0": q_out0, "kv_cache_out0": kv_cache_out0, "q_out1": q_out1, "kv_cache_out1": kv_cache_out1}
    first = _Quantised(descale0, quant_scale0, quant_offset0, bias0)
    second = _Quantised(descale1, quant_scale1, quant_offset1, bias1)
    modes = cache_mode or "krope_ctkv", quant_mode or PER_TOKEN
    _run(
        _Call(
            OP, hiddenState, wdqkv, gamma1, beta1, wuq, gamma2, cos, sin, wuk, slotmapping, first, second,
            (ctkv_scale, q_nope_scale), *modes, outs,
        )
    )  # fmt: skip
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1


def mla_preprocess_vllm(
    hiddenState: torch.Tensor,
    wdqkv: torch.Tensor,
    descale0: torch.Tensor | None,
    gamma1: torch.Tensor,
    beta1: torch.Tensor | None,
    wuq: torch.Tensor,
    descale1: torch.Tensor | None,
    gamma2: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wuk: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_cache_rope: torch.Tensor,
    slotmapping: torch.Tensor,
    quant_scale0: torch.Tensor | None,
    quant_offset0: torch.Tensor | None,
    bias0: torch.Tensor | None,
    quant_scale1: torch.Tensor | None,
    quant_offset1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    ctkv_scale: torch.Tensor | None,
    q_nope_scale: torch.Tensor | None,
    cache_mode: str | None,
    quant_mode: str | None,
    enable_inner_out: bool | None,
    q_out0: torch.Tensor,
    kv_cache_out0: torch.Tensor,
    q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor,
    inner_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for any sizes, and with the normalised low-rank query as an output.

    Args:
        enable_inner_out: whether it is wanted.
        inner_out: Shape: [tokens, low]; or anything. *Mutated* when it is wanted.

    The other arguments: see ``mla_preprocess``.
    """
    outs = {"q_out0": q_out0, "kv_cache_out0": kv_cache_out0, "q_out1": q_out1, "kv_cache_out1": kv_cache_out1}
    outs |= {"inner_out": inner_out} if enable_inner_out else {}
    first = _Quantised(descale0, quant_scale0, quant_offset0, bias0)
    second = _Quantised(descale1, quant_scale1, quant_offset1, bias1)
    modes = cache_mode or "krope_ctkv", quant_mode or PER_TOKEN
    _run(
        _Call(
            OP_VLLM, hiddenState, wdqkv, gamma1, beta1, wuq, gamma2, cos, sin, wuk, slotmapping, first, second,
            (ctkv_scale, q_nope_scale), *modes, outs,
        )
    )  # fmt: skip
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out


define(SCHEMA)
define(SCHEMA_VLLM, "_C_ascend", lambda *args: tuple(torch.empty_like(out) for out in args[-5:]))
KERNELS = {OP: mla_preprocess, OP_VLLM: mla_preprocess_vllm}
