"""npu_mla_prolog_v2 and v3 against float64 loops over tokens and heads, and their refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, pose

V2 = "npu::npu_mla_prolog_v2"
V3 = "npu::npu_mla_prolog_v3"
FUNCTIONAL = f"{V3}_functional"
B = torch.bfloat16
WEIGHTS = "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv"
Row = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(B)


def inputs(*outer: int, he: int = 1024, hcq: int = 1536, heads: int = 2, dim: int = 128) -> dict[str, torch.Tensor]:
    return {
        "token_x": draw(*outer, he, seed=1),
        "weight_dq": draw(he, hcq, seed=2, scale=he**-0.5),
        "weight_uq_qr": draw(hcq, heads * (dim + 64), seed=3, scale=hcq**-0.5),
        "weight_uk": draw(heads, dim, 512, seed=4, scale=dim**-0.5),
        "weight_dkv_kr": draw(he, 576, seed=5, scale=he**-0.5),
        "rmsnorm_gamma_cq": draw(hcq, seed=6),
        "rmsnorm_gamma_ckv": draw(512, seed=7),
        "rope_sin": draw(*outer, 64, seed=8),
        "rope_cos": draw(*outer, 64, seed=9),
    }


def exact(tensor: torch.Tensor) -> Row:
    out: Row = tensor.double().numpy()
    return out


def normed(row: Row, gamma: Row, epsilon: float) -> Row:
    out: Row = row / np.sqrt((row * row).mean() + epsilon) * gamma
    return out


def turned(row: Row, cos: Row, sin: Row) -> Row:
    out = np.empty(64)
    for d in range(32):
        even, odd = row[2 * d], row[2 * d + 1]
        out[d] = even * cos[d] - odd * sin[d]
        out[d + 32] = odd * cos[d + 32] + even * sin[d + 32]
    return out


def reference(given: dict[str, torch.Tensor], alpha: float = 1.0, beta: float = 1.0) -> list[list[Any]]:
    """A token: queries and rope parts head by head, norm, latent key, rope key."""
    weights = {name: exact(given[name]) for name in WEIGHTS}
    dim = weights["weight_uk"].shape[1]
    rows = zip(
        *(exact(given[n]).reshape(-1, given[n].shape[-1]) for n in ("token_x", "rope_cos", "rope_sin")), strict=True
    )
    out = []
    for x, cos, sin in rows:
        low = normed(x @ weights["weight_dq"], weights["rmsnorm_gamma_cq"], 1e-5) * alpha
        high = low @ weights["weight_uq_qr"]
        queries, ropes = [], []
        for head, up in enumerate(weights["weight_uk"]):
            part = high[head * (dim + 64) : (head + 1) * (dim + 64)]
            queries.append(part[:dim] @ up)
            ropes.append(turned(part[dim:], cos, sin))
        joint = x @ weights["weight_dkv_kr"]
        latent = normed(joint[:512], weights["rmsnorm_gamma_ckv"], 1e-5) * beta
        out.append([queries, ropes, low, latent, turned(joint[512:], cos, sin)])
    return out


def close(got: torch.Tensor, want: Any) -> None:
    want = np.asarray(want)
    np.testing.assert_allclose(
        exact(got).reshape(want.shape), want, rtol=0.03, atol=0.03 * max(1.0, np.abs(want).max() / 4)
    )


def caches(*outer: int) -> dict[str, torch.Tensor]:
    return {"kv_cache": torch.full((*outer, 1, 512), -7, dtype=B), "kr_cache": torch.full((*outer, 1, 64), -7, dtype=B)}


def expected(before: torch.Tensor, slots: list[int], rows: list[Row], mode: str) -> Row:
    """A cache after the writes, element by element."""
    out: Row = exact(before).copy().reshape(-1)
    wide = before.shape[-1]
    size = before.shape[1] if mode.startswith("PA") else 1
    for slot, row in zip(slots, rows, strict=True):
        for d, value in enumerate(row if slot >= 0 else ()):
            if mode.endswith("NZ"):
                place = slot // size * size * wide + d // 16 * size * 16 + slot % size * 16 + d % 16
            else:
                place = slot * wide + d
            out[place] = value
    return out


CASES: list[tuple[str, tuple[int, ...], list[Any] | None, list[int] | None, list[int]]] = [
    # mode, outer axes of the tokens, index, running sums, slot of each token
    ("PA_BSND", (3,), [17, -1, 40], None, [17, -1, 40]),
    ("PA_BSND", (2, 2), [[5, 6], [33, 0]], None, [5, 6, 33, 0]),
    ("PA_NZ", (3,), [17, 3, 40], None, [17, 3, 40]),
    ("PA_BLK_BSND", (20,), [2, 0, 1], [17, 20], [*range(32, 48), 0, 16, 17, 18]),
    ("PA_BLK_NZ", (2, 17), [[2, -1], [0, 1]], None, [*range(32, 48), -1, *range(17)]),
    ("TND", (3,), None, None, [0, 1, 2]),
    ("BSND", (2, 2), None, None, [0, 1, 2, 3]),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}-{CASES[n][0]}")
def test_version_3_in_every_mode(number: int) -> None:
    mode, outer, index, ends, slots = CASES[number]
    given = inputs(*outer)
    stored = caches(3, 16) if mode.startswith("PA") else caches(*outer)
    before = {name: cache.clone() for name, cache in stored.items()}
    options: dict[str, Any] = {"cache_mode": mode, "query_norm_flag": True, "qc_qr_scale": 1.5, "kc_scale": 0.5}
    options["cache_index"] = None if index is None else torch.tensor(index)
    options["actual_seq_len"] = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    copies = REGISTRY[FUNCTIONAL](*given.values(), *stored.values(), **options)
    assert all(torch.equal(cache, before[name]) for name, cache in stored.items())
    results = REGISTRY[V3](**given, **stored, **options)
    want = reference(given, 1.5, 0.5)
    close(results[0], [row[0] for row in want])
    close(results[1], [row[1] for row in want])
    close(results[3], [row[2] for row in want])
    assert results[0].shape == (*outer, 2, 512) and results[1].shape == (*outer, 2, 64)
    assert results[3].shape == (*outer, 1536) and results[2].shape == results[4].shape == (1,)
    for number, (name, cache) in enumerate(stored.items()):
        close(cache, expected(before[name], slots, [row[3 + number] for row in want], mode))
        assert torch.equal(cache, copies[5 + number])
    assert all(torch.equal(results[part], copies[part]) for part in (0, 1, 3))


@pytest.mark.parametrize("heads", [1, 4])
def test_version_3_with_other_sizes(heads: int) -> None:
    given = inputs(2, he=2048, hcq=2048, heads=heads, dim=192)
    results = REGISTRY[V3](**given, **caches(1, 32), cache_index=torch.tensor([1, 0]))
    want = reference(given)
    close(results[0], [row[0] for row in want])
    close(results[1], [row[1] for row in want])
    assert results[3].shape == (1,) and bool(results[3].isnan())
    pose.set_pose(cann="8.5")
    assert all(part.shape == (0,) for part in REGISTRY[V3](**v3()[1])[2:])


def test_version_2() -> None:
    given, stored = inputs(1, 3, he=7168, heads=2), caches(2, 16)
    before = {name: cache.clone() for name, cache in stored.items()}
    results = REGISTRY[V2](**given, cache_index=torch.tensor([[9, 31, 0]]), **stored, cache_mode="PA_NZ")
    want = reference(given)
    close(results[0], [row[0] for row in want])
    close(results[1], [row[1] for row in want])
    assert results[2] is stored["kv_cache"] and results[3] is stored["kr_cache"]
    assert results[4].shape == (1,) and bool(results[4].isnan())
    for number, (name, cache) in enumerate(stored.items()):
        close(cache, expected(before[name], [9, 31, 0], [row[3 + number] for row in want], "PA_NZ"))


def test_empty_caches_are_left_alone() -> None:
    given = inputs(2)
    results = REGISTRY[V3](**given, **caches(0, 16), cache_index=torch.tensor([3, 4]))
    close(results[0], [row[0] for row in reference(given)])
    none = inputs(0)
    assert REGISTRY[V3](**none, **caches(1, 16), cache_index=torch.tensor([]).long())[0].shape == (0, 2, 512)


SMALL = inputs(3)
WIDE = inputs(3, he=7168, heads=1)


def v3(**over: Any) -> tuple[str, dict[str, Any]]:
    return V3, SMALL | caches(2, 16) | {"cache_index": torch.tensor([0, 1, 2])} | over


def v2(**over: Any) -> tuple[str, dict[str, Any]]:
    return V2, WIDE | caches(2, 16) | {"cache_index": torch.tensor([0, 1, 2])} | over


REFUSED: list[tuple[str, Callable[[], tuple[str, dict[str, Any]]]]] = [
    ("prolog-dtype", lambda: v3(token_x=SMALL["token_x"].half())),
    ("prolog-dtype", lambda: v2(cache_index=torch.arange(3).int())),
    ("prolog-token", lambda: v3(token_x=SMALL["token_x"][0])),
    ("prolog-token", lambda: v3(rope_cos=SMALL["rope_cos"][:2])),
    ("prolog-weights", lambda: v3(weight_uk=draw(2, 128, 256))),
    ("prolog-weights", lambda: v3(weight_uq_qr=draw(1536, 256))),
    ("prolog-heads", lambda: v3(weight_uk=draw(3, 128, 512), weight_uq_qr=draw(1536, 576))),
    ("prolog-index", lambda: v3(cache_index=torch.tensor([0, 1]))),
    ("prolog-index", lambda: v3(cache_index=None)),
    ("prolog-index", lambda: v3(cache_mode="TND", **caches(3))),
    ("prolog-index", lambda: v3(cache_mode="PA_BLK_NZ", actual_seq_len=torch.tensor([3]).int())),
    ("prolog-cache", lambda: v3(kr_cache=torch.zeros(1, 16, 1, 64, dtype=B))),
    ("prolog-cache", lambda: v3(cache_mode="TND", cache_index=None)),
    ("prolog-sizes", lambda: v2(**SMALL)),
    ("prolog-sizes", lambda: v2(**inputs(1, 17, he=7168, heads=1))),
    ("prolog-block", lambda: v2(**caches(2, 32))),
    ("prolog-mode", lambda: v2(cache_mode="PA_BLK_NZ")),
    ("prolog-v3-sizes", lambda: v3(**inputs(3, he=1536))),
    ("prolog-v3-block", lambda: v3(**caches(2, 8))),
    ("prolog-v3-mode", lambda: v3(cache_mode="BSND")),
    ("prolog-v3-lengths", lambda: v3(cache_mode="PA_BLK_NZ")),
    ("prolog-v3-lengths", lambda: v3(actual_seq_len=torch.tensor([3]).int())),
    ("prolog-v3-lengths", lambda: v3(cache_mode="PA_BLK_NZ", actual_seq_len=torch.tensor([3]))),
    ("prolog-v3-contiguous", lambda: v3(weight_dq=draw(1536, 1024).T)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "call",
    [
        v3(weight_quant_mode=1),
        v3(kv_cache_quant_mode=2),
        v3(quant_scale_ckv=torch.ones(1)),
        v3(weight_uq_qr=torch.zeros(1536, 384, dtype=torch.int8)),
        v3(kv_cache_dtype=290),
        v2(smooth_scales_cq=torch.ones(1, 1536)),
    ],
)
def test_quantised_forms_say_so(call: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize(
    "call",
    [
        v3(cache_index=torch.tensor([0, 32, 1])),
        v3(cache_mode="PA_BLK_NZ", cache_index=torch.tensor([2]), actual_seq_len=torch.tensor([3]).int()),
        v3(cache_mode="PA_BLK_NZ", cache_index=torch.tensor([0]), actual_seq_len=torch.tensor([4]).int()),
        v3(cache_mode="PA_BLK_NZ", cache_index=torch.tensor([0]), actual_seq_len=torch.tensor([3, 2]).int()),
    ],
)
def test_tokens_outside_fault_and_write_nothing(call: tuple[str, dict[str, Any]]) -> None:
    op, options = call
    with pytest.raises(DeviceFault):
        REGISTRY[op](**options)
    assert bool((options["kv_cache"] == -7).all()) and bool((options["kr_cache"] == -7).all())
