"""Products summed over the ranks of a group, here threads with gloo, against plain loops; and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered, OpRefused, pose
from rank_threads import on_ranks

REDUCE = "npu::npu_mm_all_reduce_base"
SCATTER = "npu::npu_mm_reduce_scatter_base"
PACK = "npu::npu_trans_quant_param"
HALF, BF16, FLOAT, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
LOOSE = {HALF: 4e-3, BF16: 3e-2}


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(INT8)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
    rows, columns = x.double().tolist(), weight.double().T.tolist()
    return [[math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in rows]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("extra", ["", "bias", "x3", "both"])
def test_all_reduce(ranks: int, dtype: torch.dtype, extra: str) -> None:
    shape = (2, 3, 5) if extra == "x3" else (6, 5)
    inputs = [(draw(*shape, dtype=dtype, seed=r), draw(4, 5, dtype=dtype, seed=9 + r).T) for r in range(ranks)]
    bias = [draw(4, dtype=dtype, seed=20 + r) if extra in ("bias", "both") else None for r in range(ranks)]
    x3 = [draw(*shape[:-1], 4, dtype=dtype, seed=30 + r) if extra in ("x3", "both") else None for r in range(ranks)]
    outs = on_ranks(ranks, lambda r, name: REGISTRY[REDUCE](*inputs[r], name, bias=bias[r], x3=x3[r]))
    want = np.zeros((6, 4))
    for rank, (x, weight) in enumerate(inputs):
        want += np.array(multiply(x.view(6, 5), weight))
        for part in (bias[rank], x3[rank]):
            want += 0 if part is None else part.double().view(-1, 4).numpy()
    for out in outs:
        assert out.dtype == dtype and out.shape == (*shape[:-1], 4)
        np.testing.assert_allclose(out.double().view(6, 4), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] * 4)
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize(
    ("kind", "wanted"), [("int64", HALF), ("bfloat16", BF16), ("token bfloat16", BF16), ("token float32", HALF)]
)
def test_all_reduce_of_quantised_products(kind: str, wanted: torch.dtype) -> None:
    inputs = [(bytes8(3, 7, seed=r), bytes8(7, 4, seed=9 + r)) for r in range(2)]
    scales = [draw(4, dtype=FLOAT, seed=20 + r) / 1000 for r in range(2)]
    tokens = [draw(3, dtype=FLOAT, seed=30 + r).abs() if "token" in kind else None for r in range(2)]
    bias = torch.tensor([5, -900, 0, 70], dtype=torch.int32)
    given = [REGISTRY[PACK](s) if kind == "int64" else s.to(BF16) if "bfloat16" in kind else s for s in scales]
    exact = [(s.view(torch.int32) & ~0x1FFF).view(FLOAT) for s in scales] if kind == "int64" else given

    def body(rank: int, name: str) -> Any:
        return REGISTRY[REDUCE](*inputs[rank], name, bias=bias, dequant_scale=given[rank], pertoken_scale=tokens[rank])

    want = np.zeros((3, 4))
    for rank, (x, weight) in enumerate(inputs):
        part = (np.array(multiply(x, weight)) + bias.numpy()) * exact[rank].double().numpy()
        token = tokens[rank]
        want += part if token is None else part * token.double().numpy()[:, None]
    for out in on_ranks(2, body):
        assert out.dtype == wanted
        np.testing.assert_allclose(out.double(), want, rtol=LOOSE[wanted], atol=0.5)


@pytest.mark.parametrize("form", ["tensor", "channel", "row", "group"])
@pytest.mark.parametrize("shifted", [False, True])
def test_all_reduce_of_quantised_weights(form: str, shifted: bool) -> None:
    k = 70
    inputs = [(draw(3, k, dtype=BF16, seed=r), bytes8(k, 4, seed=9 + r)) for r in range(2)]
    shape = {"tensor": (1,), "channel": (4,), "row": (1, 4), "group": (3, 4)}[form]
    scale = draw(*shape, dtype=BF16, seed=3) / 100
    offset = draw(*shape, dtype=BF16, seed=4) if shifted else None
    options = {"antiquant_scale": scale, "antiquant_offset": offset}
    options |= {"antiquant_group_size": 32} if form == "group" else {}  # type: ignore[dict-item]
    want = np.zeros((3, 4))
    for x, weight in inputs:
        wide = torch.zeros(k, 4).double()
        for i in range(k):
            for j in range(4):
                at = (i // 32, j) if form == "group" else (0, j) if form == "row" else (0 if form == "tensor" else j,)
                shift = float(offset[at]) if offset is not None else 0.0
                wide[i, j] = (int(weight[i, j]) + shift) * float(scale[at])
        want += np.array(multiply(x, wide))
    for out in on_ranks(2, lambda r, name: REGISTRY[REDUCE](*inputs[r], name, **options)):
        np.testing.assert_allclose(out.double(), want, rtol=LOOSE[BF16], atol=0.5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "tokens", "float16 wanted", "int64", "flat"])
def test_reduce_scatter(ranks: int, kind: str) -> None:
    m, k, n = 2 * ranks, 256, 3
    plain = {"float16": HALF, "bfloat16": BF16}.get(kind)
    inputs = [
        (draw(m, k, dtype=plain, seed=r), draw(k, n, dtype=plain, seed=9 + r))
        if plain
        else (bytes8(m, k, seed=r), bytes8(k, n, seed=9 + r))
        for r in range(ranks)
    ]
    scales = [draw(1, n, dtype=FLOAT, seed=20 + r) / 1e4 for r in range(ranks)]
    tokens = draw(m, 1, dtype=FLOAT, seed=40).abs()
    dtype = plain or (HALF if kind in ("int64", "float16 wanted") else BF16)

    def body(rank: int, name: str) -> Any:
        options: dict[str, Any] = {}
        if not plain:
            options = {"comm_mode": "aiv", "x2_scale": scales[rank]}
            if kind == "tokens":
                options["x1_scale"] = tokens
            if kind == "float16 wanted":
                options["output_dtype"] = HALF
            if kind == "int64":
                options["x2_scale"] = REGISTRY[PACK](scales[rank])
            if kind == "flat":
                options["x2_scale"] = scales[rank].view(-1)
        return REGISTRY[SCATTER](*inputs[rank], name, ranks, **options)

    want = np.zeros((m, n))
    for rank, (x, weight) in enumerate(inputs):
        part = np.array(multiply(x, weight))
        if not plain:
            part = part * scales[rank].double().numpy()
        want += part * tokens.double().numpy() if kind == "tokens" else part
    outs = on_ranks(ranks, body)
    for rank, out in enumerate(outs):
        assert out.dtype == dtype and out.shape == (2, n)
        np.testing.assert_allclose(
            out.double(), want[2 * rank : 2 * rank + 2], rtol=LOOSE[dtype], atol=LOOSE[dtype] * 40
        )


X, W = draw(4, 256), draw(256, 3)
XI, WI = bytes8(4, 256), bytes8(256, 3)
SCALE = torch.ones(1, 3)
REFUSED: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("mmc-group", REDUCE, [X, W, "nobody"], {}),
    ("mmc-group", SCATTER, [X, W, "nobody", 2], {}),
    ("mmc-op", REDUCE, [X, W, ""], {"reduce_op": "max"}),
    ("mmc-turn", SCATTER, [X, W, "", 2], {"comm_turn": 1}),
    ("mmc-dtype", REDUCE, [X.float(), W.float(), ""], {}),
    ("mmc-dtype", REDUCE, [X, WI, ""], {}),
    ("mmc-dtype", REDUCE, [X, W, ""], {"antiquant_scale": SCALE.half()}),
    ("mmc-dtype", SCATTER, [X, WI, "", 2], {}),
    ("mmc-shape", REDUCE, [X, W[:5], ""], {}),
    ("mmc-shape", REDUCE, [W.T, X.T, ""], {}),
    ("mmc-shape", SCATTER, [X.unsqueeze(0), W, "", 2], {}),
    ("mmc-bias", REDUCE, [X, W, ""], {"bias": torch.zeros(3)}),
    ("mmc-bias", REDUCE, [XI, WI, ""], {"bias": torch.zeros(3).half()}),
    ("mmar-x3", REDUCE, [X, W, ""], {"x3": torch.zeros(3, 4).half()}),
    ("mmar-scales", REDUCE, [XI, WI, ""], {}),
    ("mmar-scales", REDUCE, [XI, WI, ""], {"dequant_scale": SCALE}),
    ("mmar-scales", REDUCE, [X, W, ""], {"dequant_scale": SCALE.bfloat16()}),
    ("mmar-pertoken", REDUCE, [XI, WI, ""], {"dequant_scale": SCALE, "pertoken_scale": torch.ones(3)}),
    ("mmar-antiquant", REDUCE, [X, WI, ""], {"antiquant_scale": torch.ones(2).half()}),
    (
        "mmar-antiquant",
        REDUCE,
        [X, WI, ""],
        {"antiquant_scale": SCALE.half(), "antiquant_offset": torch.ones(3).half()},
    ),
    ("mmar-group-size", REDUCE, [X, WI, ""], {"antiquant_scale": SCALE.half(), "antiquant_group_size": 33}),
    ("mmrs-k", SCATTER, [X[:, :64].contiguous(), W[:64], "", 2], {}),
    ("mmrs-zero", SCATTER, [X, W, "", 2], {"bias": torch.ones(3).half()}),
    ("mmrs-mode", SCATTER, [X, W, "", 2], {"comm_mode": "hccl"}),
    ("mmrs-mode", SCATTER, [XI, WI, "", 2], {"x2_scale": SCALE}),
    ("mmrs-scales", SCATTER, [XI, WI, "", 2], {"comm_mode": "aiv"}),
    ("mmrs-scales", SCATTER, [XI, WI, "", 2], {"comm_mode": "aiv", "x2_scale": SCALE, "x1_scale": torch.ones(4)}),
    ("mmrs-scales", SCATTER, [X, W, "", 2], {"x2_scale": SCALE}),
    ("mmrs-output", SCATTER, [XI, WI, "", 2], {"comm_mode": "aiv", "x2_scale": SCALE, "output_dtype": FLOAT}),
    ("mmrs-output", SCATTER, [X, W, "", 2], {"output_dtype": BF16}),
]
ON_RANKS: list[tuple[str, int, Callable[[str], Any]]] = [
    ("mmar-world", 3, lambda name: REGISTRY[REDUCE](X, W, name)),
    ("mmrs-world", 2, lambda name: REGISTRY[SCATTER](X, W, name, 4)),
    ("mmrs-world", 2, lambda name: REGISTRY[SCATTER](X[:3], W, name, 2)),
    ("mmrs-world-a2", 1, lambda name: REGISTRY[SCATTER](X, W, name, 1)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, op, arguments, options = REFUSED[number]
    refuses(rule, op, *arguments, **options)


@pytest.mark.parametrize("number", range(len(ON_RANKS)), ids=lambda n: f"{n}-{ON_RANKS[n][0]}")
def test_groups_outside_the_documents_are_refused(number: int) -> None:
    rule, ranks, call = ON_RANKS[number]
    with pytest.raises(OpRefused) as caught:
        on_ranks(ranks, lambda _, name: call(name))
    assert caught.value.rule is RULES[rule]


def test_ranks_that_an_a3_does_not_take() -> None:
    pose.set_pose(chip="A3")
    with pytest.raises(OpRefused) as caught:
        on_ranks(1, lambda _, name: REGISTRY[SCATTER](X, W, name, 1))
    assert caught.value.rule is RULES["mmrs-world-a3"]


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, *_ in REFUSED} | {rule for rule, *_ in ON_RANKS} | {"mmrs-world-a3"}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "extra", [{"comm_quant_scale_1": SCALE}, {"group_sizes": [1, 1, 1]}, {"y_dtype": 5}, {"comm_quant_mode": 1}]
)
def test_forms_that_are_not_computed_say_so(extra: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[REDUCE](X, W, "", **extra)
