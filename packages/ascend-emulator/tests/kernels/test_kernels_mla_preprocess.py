"""mla_preprocess of both libraries against plain loops over tokens and heads, its schemas, refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, mla_preprocess

OP, OP_VLLM = mla_preprocess.KERNELS
H, B, F = torch.float16, torch.bfloat16, torch.float32
HIDDEN = 2048
OUTS = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1")


def draw(*shape: int, dtype: torch.dtype = F, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def blocks(weight: torch.Tensor, c0: int) -> torch.Tensor:
    """[columns, k] as [1, k / c0, columns, c0]."""
    return weight.view(weight.size(0), -1, c0).transpose(0, 1).unsqueeze(0).contiguous()


class Case:
    """Arguments by name, and the plain weights that they hold."""

    def __init__(self, op: str, dtype: torch.dtype, quant: str, mode: str, low: int = 64) -> None:
        self.op, self.dtype, self.quant, self.mode = op, dtype, quant, mode
        self.heads, self.nope, self.latent, self.rope, self.low = 2, 32, 64, 16, low
        if op == OP:
            self.nope, self.latent, self.rope, self.low = 128, 512, 64, 1536
        down, up = self.latent + self.rope + self.low, self.heads * (self.nope + self.rope)
        self.plain = {"wdqkv": draw(down, HIDDEN, seed=1, scale=0.03), "wuq": draw(up, self.low, seed=2, scale=0.05)}
        c0 = 16
        if quant != "no_quant":
            c0 = 32
            self.plain = {name: (w * 400).round().clamp(-128, 127).to(torch.int8) for name, w in self.plain.items()}
        else:
            self.plain = {name: w.to(dtype) for name, w in self.plain.items()}
        narrow = torch.int8 if mode == "int8_nzcache" else dtype
        self.given: dict[str, Any] = {
            "hiddenState": draw(3, HIDDEN, dtype=dtype), "wdqkv": blocks(self.plain["wdqkv"], c0),
            "gamma1": draw(self.low, dtype=dtype, seed=3), "beta1": draw(self.low, dtype=dtype, seed=4),
            "wuq": blocks(self.plain["wuq"], c0), "gamma2": draw(self.latent, dtype=dtype, seed=5),
            "cos": draw(3, self.rope, dtype=dtype, seed=6), "sin": draw(3, self.rope, dtype=dtype, seed=7),
            "wuk": draw(self.heads, self.nope, self.latent, dtype=dtype, seed=8, scale=0.1),
            "slotmapping": torch.tensor([130, -1, 5], dtype=torch.int32), "cache_mode": mode, "quant_mode": quant,
            "q_out0": torch.zeros(3, self.heads, self.latent, dtype=narrow),
            "q_out1": torch.zeros(3, self.heads, self.rope, dtype=dtype),
            "kv_cache_out0": torch.zeros(2, 128, 1, self.latent, dtype=narrow),
            "kv_cache_out1": torch.zeros(2, 128, 1, self.rope, dtype=dtype), "ctkv_scale": None, "q_nope_scale": None,
        }  # fmt: skip
        if narrow == torch.int8:
            self.given |= {
                "ctkv_scale": torch.full((1,), 0.05, dtype=dtype),
                "q_nope_scale": draw(self.heads, dtype=dtype) * 30,
            }
        for i, columns in enumerate((down, up)):
            self.given |= dict.fromkeys((f"descale{i}", f"quant_scale{i}", f"quant_offset{i}", f"bias{i}"))
            if quant != "no_quant":
                descale = draw(columns, seed=9 + i).abs() * 0.002
                if dtype == H:
                    descale = descale.view(torch.int32).to(torch.int64) | 1 << 46
                self.given[f"descale{i}"] = descale
            if quant == "per_tensor_quant_asymm":
                self.given |= {
                    f"quant_scale{i}": torch.tensor([0.05], dtype=dtype),
                    f"quant_offset{i}": torch.tensor([3], dtype=torch.int8),
                    f"bias{i}": draw(columns, seed=11 + i, scale=50).to(torch.int32),
                }
        self.given |= {"kv_cache": self.given["kv_cache_out0"], "kv_cache_rope": self.given["kv_cache_out1"]}
        if op == OP:
            self.given |= {"gamma0": torch.zeros(1), "beta0": torch.zeros(1)}
        else:
            self.given |= {"enable_inner_out": True, "inner_out": torch.zeros(3, self.low, dtype=dtype)}

    def product(self, x: list[float], name: str, number: int) -> list[float]:
        weight = self.plain[name].double()
        if self.quant == "no_quant":
            sums = (weight @ torch.tensor(x).to(self.dtype).double()).tolist()
        else:
            descale = self.given[f"descale{number}"]
            factors = (descale.to(torch.int32).view(F) if descale.dtype == torch.int64 else descale).tolist()
            if self.quant == "per_token_quant_symm":
                step = max(map(abs, x)) / 127
                sums = (weight @ torch.tensor([float(round(v / step)) for v in x]).double()).tolist()
                sums = [s * f * step for s, f in zip(sums, factors, strict=True)]
            else:
                scale = float(self.given[f"quant_scale{number}"])
                rows = [max(-128, min(127, round(v / scale + 3))) for v in x]
                bias = self.given[f"bias{number}"].tolist()
                sums = (weight @ torch.tensor(rows).double()).tolist()
                sums = [(s + b) * f for s, b, f in zip(sums, bias, factors, strict=True)]
        return torch.tensor(sums).to(self.dtype).tolist()

    def norm(self, x: list[float], gamma: str) -> list[float]:
        factor = 1 / math.sqrt(sum(v * v for v in x) / len(x) + 1e-6)
        return [v * factor * g for v, g in zip(x, self.given[gamma].tolist(), strict=True)]

    def turn(self, x: list[float], token: int) -> list[float]:
        half = len(x) // 2
        pairs = zip(self.given["cos"][token].tolist(), self.given["sin"][token].tolist(), strict=True)
        turned = [-v for v in x[half:]] + x[:half]
        return [v * c + w * s for v, w, (c, s) in zip(x, turned, pairs, strict=True)]

    def wanted(self, token: int) -> dict[str, torch.Tensor]:
        joint = self.product(self.given["hiddenState"][token].tolist(), "wdqkv", 0)
        low = self.norm(joint[self.latent + self.rope :], "gamma1")
        low = [v + b for v, b in zip(low, self.given["beta1"].tolist(), strict=True)]
        high = self.product(low, "wuq", 1)
        wide = self.nope + self.rope
        heads = [high[i * wide : (i + 1) * wide] for i in range(self.heads)]
        query = [(torch.tensor(head[: self.nope]) @ self.given["wuk"][i].float()) for i, head in enumerate(heads)]
        keys = torch.tensor(self.norm(joint[: self.latent], "gamma2"))
        return {
            "q_out0": torch.stack(query), "q_out1": torch.tensor([self.turn(h[self.nope :], token) for h in heads]),
            "latent": keys, "rope": torch.tensor(self.turn(joint[self.latent : self.latent + self.rope], token)),
            "inner_out": torch.tensor(low),
        }  # fmt: skip


def of_slot(cache: torch.Tensor, slot: int, nz: bool) -> torch.Tensor:
    if not nz:
        return cache.view(-1, cache.size(-1))[slot].float()
    wide, c0 = cache.size(-1), 32 // cache.element_size()
    page = cache.view(-1, 128 * wide)[slot // 128].tolist()
    return torch.tensor([float(page[(i // c0) * 128 * c0 + slot % 128 * c0 + i % c0]) for i in range(wide)])


def whole(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Quantised numbers alike, but for some that lie between two."""
    apart = (got.float() - wanted).abs()
    return float(apart.max()) <= 4 and float(apart.mean()) < 1 and float(wanted.abs().max()) > 3


def near(got: torch.Tensor, wanted: torch.Tensor, step: float) -> bool:
    return bool(((got.float() - wanted).abs() <= step * wanted.abs().max().clamp(min=1)).all())


FORMS = [
    (OP_VLLM, dtype, quant, mode)
    for dtype in (B, H)
    for quant in ("per_tensor_quant_asymm", "per_token_quant_symm", "no_quant")
    for mode in ("krope_ctkv", "nzcache", "int8_nzcache")
]


@pytest.mark.parametrize(("op", "dtype", "quant", "mode"), [*FORMS, (OP, B, "per_tensor_quant_asymm", "nzcache")])
def test_every_token_and_head(op: str, dtype: torch.dtype, quant: str, mode: str) -> None:
    case = Case(op, dtype, quant, mode)
    given, step = case.given, 3e-2
    results = REGISTRY[op](**given)
    assert all(out is given[name] for out, name in zip(results, OUTS, strict=False))
    nz, narrow = mode != "krope_ctkv", mode == "int8_nzcache"
    for token, slot in enumerate([130, -1, 5]):
        wanted = case.wanted(token)
        query, keys = wanted["q_out0"], wanted["latent"]
        if narrow:
            query = (query * given["q_nope_scale"].float().view(-1, 1)).round().clamp(-128, 127)
            keys = (keys / float(given["ctkv_scale"])).round().clamp(-128, 127)
        assert whole(given["q_out0"][token], query) if narrow else near(given["q_out0"][token], query, step)
        assert near(given["q_out1"][token], wanted["q_out1"], step)
        if "inner_out" in given:
            assert near(given["inner_out"][token], wanted["inner_out"], step)
        if slot >= 0:
            stored = of_slot(given["kv_cache_out0"], slot, nz)
            assert whole(stored, keys) if narrow else near(stored, keys, step)
            assert near(of_slot(given["kv_cache_out1"], slot, nz), wanted["rope"], step)
    for name in ("kv_cache_out0", "kv_cache_out1"):
        assert not any(of_slot(given[name], slot, nz).any() for slot in (0, 4, 6, 129, 131, 255))


def test_the_schemas_are_those_of_the_libraries() -> None:
    for op, text in ((OP, mla_preprocess.SCHEMA), (OP_VLLM, mla_preprocess.SCHEMA_VLLM)):
        namespace = op.partition("::")[0]
        registered = getattr(torch.ops, namespace).mla_preprocess.default._schema
        assert registered == torch._C.parse_schema(f"{namespace}::{text}")


def call(
    quant: str = "per_tensor_quant_asymm", mode: str = "krope_ctkv", op: str = OP_VLLM, **over: Any
) -> tuple[str, dict[str, Any]]:
    return op, Case(op, B, quant, mode).given | over


REFUSED: list[tuple[str, Callable[[], tuple[str, dict[str, Any]]]]] = [
    ("mlapre-dtype", lambda: call(hiddenState=draw(3, HIDDEN))),
    ("mlapre-dtype", lambda: call(cos=draw(3, 16, dtype=H))),
    ("mlapre-dtype", lambda: call(slotmapping=torch.tensor([1, 2, 3]))),
    ("mlapre-tokens", lambda: call(hiddenState=draw(3, 1024, dtype=B))),
    ("mlapre-tokens", lambda: call(hiddenState=torch.zeros(1025, HIDDEN, dtype=B))),
    ("mlapre-tokens", lambda: call(slotmapping=torch.tensor([1, 2], dtype=torch.int32))),
    ("mlapre-tokens", lambda: call(cos=torch.zeros((), dtype=B))),
    ("mlapre-contiguous", lambda: call(hiddenState=draw(3, 2 * HIDDEN, dtype=B)[:, ::2])),
    ("mlapre-contiguous", lambda: call(sin=draw(1, 16, dtype=B).expand(3, 16))),
    ("mlapre-contiguous", lambda: call(wuk=draw(2, 64, 32, dtype=B).transpose(1, 2))),
    ("mlapre-contiguous", lambda: call(slotmapping=torch.arange(6, dtype=torch.int32)[::2])),
    ("mlapre-mode", lambda: call(cache_mode="kvcache")),
    ("mlapre-mode", lambda: call(quant_mode="per_tensor")),
    ("mlapre-weights", lambda: call(wdqkv=torch.zeros(144, HIDDEN, dtype=torch.int8))),
    ("mlapre-weights", lambda: call("no_quant", wuq=torch.zeros(1, 4, 96, 16, dtype=H))),
    ("mlapre-weights", lambda: call(wuk=draw(2, 32, 64, 1, dtype=B))),
    ("mlapre-weights", lambda: call(beta1=draw(63, dtype=B))),
    ("mlapre-sizes", lambda: call(op=OP, wuk=draw(2, 64, 512, dtype=B))),
    ("mlapre-quant", lambda: call(descale0=None)),
    ("mlapre-quant", lambda: call(bias1=torch.zeros(96))),
    ("mlapre-quant", lambda: call(mode="int8_nzcache", ctkv_scale=None)),
    ("mlapre-cache", lambda: call(mode="nzcache", kv_cache_out0=torch.zeros(3, 64, 1, 64, dtype=B))),
    ("mlapre-cache", lambda: call(kv_cache_out1=torch.zeros(2, 128, 1, 16))),
    ("mlapre-out", lambda: call(q_out0=torch.zeros(3, 2, 63, dtype=B))),
    ("mlapre-out", lambda: call(inner_out=torch.zeros(0, dtype=B))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_sources_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, arguments = build()
    refuses(rule, op, **arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_what_is_not_computed_says_so() -> None:
    op, arguments = call(quant_mode="per_token_quant_asymm")
    with pytest.raises(KernelNotCovered, match="quant_mode"):
        REGISTRY[op](**arguments)


@pytest.mark.parametrize("slot", [256, -2])
def test_a_slot_outside_the_cache_faults_and_writes_nothing(slot: int) -> None:
    op, arguments = call(slotmapping=torch.tensor([1, 2, slot], dtype=torch.int32))
    with pytest.raises(DeviceFault, match="slotmapping"):
        REGISTRY[op](**arguments)
    assert not any(arguments[name].any() for name in OUTS)
