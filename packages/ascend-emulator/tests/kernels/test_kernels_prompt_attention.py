"""npu_prompt_flash_attention against plain loops, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

OP = "npu::npu_prompt_flash_attention"
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LOOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FORMS = ["Q", "1Q", "BQ", "B1Q", "11Q"]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: list[int]) -> list[float]:
    """One query token of one head over the tokens that it sees."""
    if not seen:
        return [0.0] * value.size(-1)
    q, k, v = (x.double().tolist() for x in (query, key, value))
    scores = [math.fsum(a * b for a, b in zip(q, k[j], strict=True)) * 0.3 for j in seen]
    weights = [math.exp(s - max(scores)) for s in scores]
    return [
        math.fsum(w * v[j][d] for w, j in zip(weights, seen, strict=True)) / math.fsum(weights)
        for d in range(len(v[0]))
    ]


def sees(mode: int, i: int, j: int, q_len: int, kv_len: int, pre: int, following: int, masked: bool) -> bool:
    shift = kv_len - q_len
    return {
        0: i - pre <= j <= i + following if masked else True,
        1: True,
        2: j <= i,
        3: j <= i + shift,
        4: i + shift - pre <= j <= i + shift + following,
    }[mode]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] to the layout of the inputs."""
    if layout.startswith("BNSD"):
        return x.contiguous()
    x = x.transpose(1, 2)
    return x.flatten(2).contiguous() if layout == "BSH" else x.contiguous()


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(["BSH", "BSND", "BNSD", "BNSD_BSND"]),
    dtype=st.sampled_from(list(LOOSE)),
    sizes=st.tuples(st.integers(2, 5), st.integers(1, 6)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2)]),
    mode=st.integers(0, 4),
    form=st.sampled_from(["", *FORMS]),
    band=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    short=st.booleans(),
)
def test_prompts(
    layout: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    mode: int,
    form: str,
    band: tuple[int, int],
    short: bool,
) -> None:
    (q_seq, kv_seq), (many, few) = sizes, heads
    q = draw(2, many, q_seq, 16, seed=1, dtype=dtype)
    k, v = (draw(2, few, kv_seq, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    q_lens, kv_lens = ([q_seq - 1, q_seq], [kv_seq, kv_seq - 1]) if short else ([q_seq] * 2, [kv_seq] * 2)
    options: dict[str, Any] = {"num_heads": many, "num_key_value_heads": few, "input_layout": layout}
    options |= {"scale_value": 0.3, "sparse_mode": mode, "pre_tokens": band[0], "next_tokens": band[1]}
    if short:
        options |= {"actual_seq_lengths": q_lens, "actual_seq_lengths_kv": kv_lens}
    hidden = torch.zeros(2, q_seq, kv_seq, dtype=torch.bool)
    if mode > 1:
        options["atten_mask"] = TRIANGLE
    elif form or mode == 1:
        hidden = torch.rand(2, q_seq, kv_seq, generator=torch.Generator().manual_seed(4)) < 0.3
        hidden = hidden if form.startswith("B") else hidden[:1].expand(2, -1, -1)
        given_mask = hidden if form.startswith("B") else hidden[:1]
        shape = {"B1Q": (2, 1), "11Q": (1, 1), "BQ": (2,), "1Q": (1,)}.get(form, ())
        options["atten_mask"] = given_mask.reshape(*shape, q_seq, kv_seq).contiguous()
    out = REGISTRY[OP](*(laid_out(x, layout) for x in (q, k, v)), **options)
    assert out.dtype == dtype
    assert out.shape == (2, q_seq, many, 16) if layout == "BNSD_BSND" else out.shape == laid_out(q, layout).shape
    by_head = out if layout == "BNSD" else out.view(2, q_seq, many, 16).transpose(1, 2)
    for b in range(2):
        for i in range(q_lens[b]):
            seen = [
                j
                for j in range(kv_lens[b])
                if sees(mode, i, j, q_lens[b], kv_lens[b], *band, "atten_mask" in options) and not hidden[b, i, j]
            ]
            for n in range(many):
                mine = n // (many // few)
                want = attention(q[b, n, i], k[b, mine], v[b, mine], seen)
                assert by_head[b, n, i].double().tolist() == pytest.approx(want, rel=LOOSE[dtype], abs=LOOSE[dtype])


def test_packed_prompts() -> None:
    q, k, v = (draw(5, n, 128, seed=n, dtype=torch.bfloat16) for n in (4, 2, 2))
    out = REGISTRY[OP](
        *(q, k, v), input_layout="TND", num_heads=4, num_key_value_heads=2, scale_value=0.3, sparse_mode=3,
        atten_mask=TRIANGLE, actual_seq_lengths=[2, 5], actual_seq_lengths_kv=[2, 5],
    )  # fmt: skip
    for first, end in ((0, 2), (2, 5)):
        for i in range(first, end):
            for n in range(4):
                want = attention(q[i, n], k[:, n // 2], v[:, n // 2], list(range(first, i + 1)))
                assert out[i, n].double().tolist() == pytest.approx(want, rel=3e-2, abs=3e-2)


def test_one_token_and_no_keys() -> None:
    q, k, v = (draw(1, 1, n, 16, seed=n, dtype=torch.float16) for n in (1, 3, 3))
    out = REGISTRY[OP](q, k, v, input_layout="BNSD", scale_value=0.3)
    want = attention(q[0, 0, 0], k[0, 0], v[0, 0], [0, 1, 2])
    assert out.flatten().double().tolist() == pytest.approx(want, rel=4e-3, abs=4e-3)
    none = REGISTRY[OP](q.expand(1, 1, 2, 16).contiguous(), k[:, :, :0], v[:, :, :0], input_layout="BNSD")
    assert none.shape == (1, 1, 2, 16) and not none.any()


X = torch.zeros(2, 3, 32, dtype=torch.float16)


def call(**over: Any) -> dict[str, Any]:
    return {"query": X, "key": X, "value": X, "num_heads": 2} | over


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("prompt-layout", call(input_layout="SBH")),
    ("prompt-layout", call(input_layout="BSH_BNSD")),
    ("prompt-value", call(value=X[..., :16])),
    ("query-dtype", call(query=X.float())),
    ("kv-dtype", call(key=X.bfloat16())),
    ("heads-multiple", call(num_key_value_heads=4)),
    ("q-lens-value", call(actual_seq_lengths=[4, 3])),
    ("kv-lens-value", call(actual_seq_lengths_kv=[4, 3])),
    ("sparse-mode", call(sparse_mode=5)),
    ("mask-missing", call(sparse_mode=3)),
    ("mask-full", call(atten_mask=torch.zeros(2, 3, dtype=torch.bool))),
    ("mask-dtype", call(atten_mask=torch.zeros(3, 3))),
    ("mask-compressed", call(sparse_mode=2, atten_mask=torch.zeros(3, 3, dtype=torch.bool))),
    ("head-dim-align", call(num_heads=4)),
    ("tnd-q-lens", call(input_layout="TND", num_heads=3, actual_seq_lengths_kv=[2])),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    own = {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}
    assert own <= {rule for rule, _ in REFUSED}


ONE = X[:, :1].contiguous()
MASK = torch.zeros(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        call(pse_shift=torch.zeros(1, 2, 3, 3, dtype=torch.float16)),
        call(quant_scale2=torch.ones(1)),
        call(query=X.to(torch.int8)),
        call(query=ONE, atten_mask=MASK),
        call(query=ONE, actual_seq_lengths=[1, 0]),
        call(
            query=ONE.view(2, 2, 1, 16), key=X.view(2, 2, 3, 16), value=X.view(2, 2, 3, 16), input_layout="BNSD_BSND",
        ),
    ],
)  # fmt: skip
def test_forms_that_are_not_computed_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](**options)
