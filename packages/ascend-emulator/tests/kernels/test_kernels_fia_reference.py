"""Attention against a plain-loop float64 reference, written from the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, fia_compute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
V1_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Case:
    """One problem in canonical form: per request arrays [heads, tokens, dims], laid out by ``arguments``."""

    version: str
    layout: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    q_lens: list[int]
    kv_lens: list[int]
    rope: bool = False
    block_size: int = 0
    block_rank: int = 3
    mode: int = 0
    pre: int = 2**31 - 1
    following: int = 2**31 - 1
    mask_form: str = ""
    sink: bool = False
    lse: bool = True
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = 1 / math.sqrt(self.dim)

    @property
    def packed(self) -> bool:
        return "T" in self.layout

    @property
    def q_seq(self) -> int:
        return max(self.q_lens)


class Data:
    """The tensors of a case, and the same numbers as float64 arrays."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        self.q = [self._draw(case.heads, n, case.dim) for n in case.q_lens]
        self.k = [self._draw(case.kv_heads, n, case.dim) for n in case.kv_lens]
        self.v = [self._draw(case.kv_heads, n, case.value_dim) for n in case.kv_lens]
        self.qr = [self._draw(case.heads, n, 64) for n in case.q_lens]
        self.kr = [self._draw(case.kv_heads, n, 64) for n in case.kv_lens]
        self.sink = self._draw(case.heads) * 2
        self.mask: torch.Tensor | None = None
        if case.mask_form:
            own = case.mask_form == "B1QK" or (case.mask_form == "2D" and case.q_seq == 1)
            rows = len(case.q_lens) if own else 1
            mask = torch.rand(rows, case.q_seq, self.kv_seq, generator=self.random) < 0.4
            self.mask = mask if own else mask.expand(len(case.q_lens), -1, -1)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.case.dtype)

    @property
    def table_width(self) -> int:
        return max(1, -(-max(self.case.kv_lens) // self.case.block_size))

    @property
    def kv_seq(self) -> int:
        case = self.case
        return self.table_width * case.block_size if case.block_size else max(1, max(case.kv_lens))

    def _fresh(self, *shape: int) -> torch.Tensor:
        return torch.full((*shape, 2), -1, dtype=torch.int8).view(self.case.dtype).squeeze(-1)

    def dense(self, parts: list[torch.Tensor], axes: str, seq: int) -> torch.Tensor:
        heads, dims = parts[0].size(0), parts[0].size(-1)
        if "T" in axes:
            joined = torch.cat(parts, 1)
            return (joined if axes == "NTD" else joined.transpose(0, 1)).contiguous()
        whole = self._fresh(len(parts), heads, seq, dims)
        for row, part in enumerate(parts):
            whole[row, :, : part.size(1)] = part
        if axes == "NSD":
            return whole[0].contiguous()
        if axes == "BNSD":
            return whole
        whole = whole.transpose(1, 2).contiguous()
        return whole if axes == "BSND" else whole.flatten(2)

    def paged(self, parts: list[torch.Tensor], table: torch.Tensor, pages: int) -> torch.Tensor:
        size = self.case.block_size
        heads, dims = parts[0].size(0), parts[0].size(-1)
        cache = self._fresh(pages, size, heads, dims)
        for row, part in enumerate(parts):
            for token in range(part.size(1)):
                cache[table[row, token // size], token % size] = part[:, token]
        if self.case.block_rank == 5:  # NZ
            return cache.view(pages, size, heads, -1, 16).permute(0, 2, 3, 1, 4).contiguous()
        return cache.transpose(1, 2).contiguous() if self.case.block_rank == 4 else cache.flatten(2)

    def arguments(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        case = self.case
        axes = case.layout.split("_")[0]
        options: dict[str, Any] = {
            "num_query_heads": case.heads,
            "num_key_value_heads": case.kv_heads,
            "softmax_scale": case.scale,
            "input_layout": case.layout,
            "sparse_mode": case.mode,
            "pre_tokens": case.pre,
            "next_tokens": case.following,
            "return_softmax_lse": case.lse,
            "actual_seq_qlen": np.cumsum(case.q_lens).tolist() if case.packed else case.q_lens,
            "actual_seq_kvlen": case.kv_lens,
        }
        tensors = [self.dense(self.q, axes, case.q_seq)]
        rope = [self.dense(self.qr, axes, case.q_seq)]
        if case.block_size:
            pages = len(case.kv_lens) * self.table_width + 2
            order = torch.randperm(pages - 1, generator=self.random) + 1
            table = order[: len(case.kv_lens) * self.table_width].view(len(case.kv_lens), -1)
            tensors += [self.paged(part, table, pages) for part in (self.k, self.v)]
            rope.append(self.paged(self.kr, table, pages))
            options |= {"block_table": table.int(), "block_size": case.block_size}
        else:
            tensors += [self.dense(part, axes, self.kv_seq) for part in (self.k, self.v)]
            rope.append(self.dense(self.kr, axes, self.kv_seq))
            if case.packed:
                options["actual_seq_kvlen"] = np.cumsum(case.kv_lens).tolist()
        if case.rope:
            options["query_rope"], options["key_rope"] = rope
        if case.sink:
            options["learnable_sink"] = self.sink
        if self.mask is not None:
            forms = {"B1QK": self.mask, "11QK": self.mask[:1], "1QK": self.mask[0], "2D": self.mask[0]}
            mask = self.mask[:, 0] if case.mask_form == "2D" and case.q_seq == 1 else forms[case.mask_form]
            options["atten_mask"] = (mask if case.mask_form == "2D" else mask.unsqueeze(-3)).contiguous()
        elif case.mode in (2, 3, 4):
            options["atten_mask"] = TRIANGLE
        if case.seed % 2:  # the query is a part of a wider one, as in models that split it
            tensors[0] = torch.cat([tensors[0]] * 2, dim=-1)[..., : tensors[0].shape[-1]]
            if case.rope:
                options["query_rope"] = torch.cat([rope[0]] * 2, dim=-1)[..., : rope[0].shape[-1]]
        if case.version == V1:
            options = {V1_NAMES.get(name, name): value for name, value in options.items()}
        return tensors, options

    def sees(self, row: int, i: int, j: int) -> bool:
        case = self.case
        shift = case.kv_lens[row] - case.q_lens[row]
        if self.mask is not None and self.mask[row, i, j]:
            return False
        if not case.packed and case.q_seq == 1 and not case.rope:
            return True
        if case.mode == 0 and self.mask is not None:
            return -case.pre <= j - i <= case.following
        if case.mode == 2:
            return j <= i
        if case.mode == 3:
            return j <= i + shift
        if case.mode == 4:
            return -case.pre <= j - i - shift <= case.following
        return True

    def expected(self, row: int) -> tuple[Array, Array]:
        """Output [heads, q_len, value_dim] and log-sum-exp [heads, q_len] of one request."""
        case = self.case
        q, k, v = (part[row].double().numpy() for part in (self.q, self.k, self.v))
        qr, kr = self.qr[row].double().numpy(), self.kr[row].double().numpy()
        out = np.zeros((case.heads, case.q_lens[row], case.value_dim))
        lse = np.full((case.heads, case.q_lens[row]), -np.inf)
        for h in range(case.heads):
            g = h // (case.heads // case.kv_heads)
            for i in range(case.q_lens[row]):
                scores: list[tuple[int, float]] = []
                for j in range(case.kv_lens[row]):
                    if self.sees(row, i, j):
                        product = float(np.dot(q[h, i], k[g, j]))
                        product += float(np.dot(qr[h, i], kr[g, j])) if case.rope else 0.0
                        scores.append((j, product * case.scale))
                if not scores:
                    continue
                total = sum(math.exp(score) for _, score in scores)
                lse[h, i] = math.log(total)
                if case.sink:
                    total += math.exp(float(self.sink[h]))
                for j, score in scores:
                    out[h, i] += math.exp(score) / total * v[g, j]
        return out, lse


def heads_first(tensor: torch.Tensor, axes: str, heads: int, row: int, start: int, count: int) -> torch.Tensor:
    if axes == "BSH":
        return tensor[row, :count].reshape(count, heads, tensor.size(-1) // heads).transpose(0, 1)
    if axes in ("TND", "NTD"):
        return (tensor.transpose(0, 1) if axes == "TND" else tensor)[:, start : start + count]
    if axes == "NSD":
        return tensor[:, :count]
    return {"BSND": tensor.transpose(1, 2), "BNSD": tensor, "NBSD": tensor.transpose(0, 1)}[axes][row, :, :count]


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == 0xFF).all())


def run_and_compare(case: Case) -> None:
    data = Data(case)
    tensors, options = data.arguments()
    before = [tensor.clone() for tensor in tensors]
    out, lse = REGISTRY[case.version](*tensors, **options)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16))
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    output_axes = case.layout.split("_")[-1]
    loose = 2e-2 if case.dtype == torch.bfloat16 else 3e-3
    start = 0
    for row, count in enumerate(case.q_lens):
        want, want_lse = data.expected(row)
        got = heads_first(out, output_axes, case.heads, row, start, count)
        np.testing.assert_allclose(got.double().numpy(), want, rtol=loose, atol=loose / 4)
        if case.lse:
            got_lse = lse[start : start + count, :, 0].T if case.packed else lse[row, :, :count, 0]
            np.testing.assert_allclose(got_lse.double().numpy(), want_lse, rtol=1e-4, atol=1e-4)
        if case.packed:
            start += count
        elif output_axes != "NSD" and count < case.q_seq:
            whole = heads_first(out, output_axes, case.heads, row, 0, case.q_seq)
            assert is_poison(whole[:, count:])
    if not case.lse:
        assert lse.shape == (0,)
    given = [torch.zeros_like(out), torch.zeros_like(lse)]
    REGISTRY[f"{case.version}.out"](*tensors, **options, out=given, workspace=None)
    start = 0
    for row, count in enumerate(case.q_lens):
        assert torch.equal(*(heads_first(x, output_axes, case.heads, row, start, count) for x in (out, given[0])))
        start += count if case.packed else 0


@st.composite
def plain_cases(draw: st.DrawFn) -> Case:
    """Layouts with a batch axis, dense or paged, every sparse mode."""
    layouts = ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "NSD"]
    layout = draw(st.sampled_from(layouts))
    batch = 1 if layout == "NSD" else draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 3))
    decode = layout != "BNSD_BSND" and draw(st.booleans())
    q_lens = [1] * batch if decode else [*draw(st.lists(st.integers(0, 4), min_size=batch - 1, max_size=batch - 1)), 4]
    block_size = draw(st.sampled_from([0, 16, 48] if decode else [0, 128]))
    longest = 60 if decode else 140
    kv_lens = draw(st.lists(st.integers(0, longest if block_size else 9), min_size=batch, max_size=batch))
    mode = draw(st.sampled_from([0, 1, 2, 3, 4]))
    dim, value_dim = draw(st.sampled_from([(16, 16), (32, 48), (64, 32)]))
    mask_form = ""
    if mode == 1 or (mode == 0 and draw(st.booleans())):
        plain = dim == value_dim and layout in ("BSH", "BSND", "BNSD", "BNSD_BSND")
        mask_form = draw(st.sampled_from(["B1QK", "11QK", "1QK", *["2D"] * plain]))
    if mask_form or mode == 4:
        pre, following = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
    else:
        pre = following = 2**31 - 1
    return Case(
        version=draw(st.sampled_from([V1, V2])),
        layout=layout,
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_size=block_size,
        block_rank=draw(st.sampled_from([3, 4])) if layout.startswith(("BNSD", "NSD")) else 3,
        mode=mode,
        pre=pre,
        following=following,
        mask_form=mask_form,
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def packed_cases(draw: st.DrawFn) -> Case:
    """TND and its pairs, dense or paged, with and without sinks; latent attention with rope."""
    kind = draw(st.sampled_from(["plain", "latent", "roped"]))
    batch = draw(st.integers(1, 3))
    paged = kind == "latent" or (kind == "plain" and draw(st.booleans()))
    mode = draw(st.sampled_from([0, 3] if kind == "latent" else [0, 3, 4]))
    q_lens = draw(st.lists(st.integers(1, 3), min_size=batch, max_size=batch))
    kv_lens = [draw(st.sampled_from([0, q + draw(st.integers(0, 150 if paged else 4))])) for q in q_lens]
    if not paged and not sum(kv_lens):
        kv_lens[-1] = q_lens[-1]
    dims = (512, 512) if kind == "latent" else (128, 128)
    layout = "TND"
    if kind == "plain":
        dims = draw(st.sampled_from([(128, 128), (192, 128), (192, 192)]))
        layout = draw(st.sampled_from(["TND", "NTD_TND"])) if not paged and dims != (192, 192) else "TND"
    elif kind == "latent":
        layout = draw(st.sampled_from(["TND", "TND_NTD"]))
    kv_heads = draw(st.integers(1, 2)) if kind == "plain" else 1
    version = draw(st.sampled_from([V1, V2]))
    return Case(
        version=version,
        layout=layout,
        dtype=torch.bfloat16,
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        dim=dims[0],
        value_dim=dims[1],
        q_lens=q_lens,
        kv_lens=kv_lens,
        rope=kind != "plain",
        block_size=128 if paged else 0,
        block_rank=draw(st.sampled_from([3, 4, *[5] * (kind == "latent")])),
        mode=mode,
        pre=draw(st.integers(0, 40)) if mode == 4 else 2**31 - 1,
        following=draw(st.integers(0, 3)) if mode == 4 else 2**31 - 1,
        sink=version == V2 and kind == "plain" and dims[1] == 128 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain_cases())
def test_layouts_with_a_batch_axis(case: Case) -> None:
    run_and_compare(case)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(packed_cases())
def test_packed_layouts(case: Case) -> None:
    run_and_compare(case)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_NBSD"])
@pytest.mark.parametrize("q", [1, 3])
def test_latent_attention_with_a_batch_axis(layout: str, q: int) -> None:
    mode = 0 if q == 1 else 3
    lens = [[20, 0], [40, 3]][q // 3]
    rank = {"BSH": 3, "BSND": 5}.get(layout, 4)
    sizes = (V2, layout, torch.float16, 4, 1, 512, 512, [q, q], lens)
    run_and_compare(Case(*sizes, rope=True, block_size=16, block_rank=rank, mode=mode))


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_queries_longer_than_a_block_of_scores(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fia_compute, "SCORES_AT_ONCE", 1)
    pre, following = (7, 2) if mode == 4 else (2**31 - 1, 2**31 - 1)
    case = Case(*(V2, "BSND", torch.float16, 4, 2, 16, 32, [37, 20], [50, 30]), mode=mode, pre=pre, following=following)
    run_and_compare(case)


def test_a_window_of_w_tokens_sees_w_plus_one() -> None:
    case = Case(*(V2, "BSND", torch.float16, 1, 1, 16, 16, [4], [9]), mode=4, pre=2, following=0)
    data = Data(case)
    assert [j for j in range(9) if data.sees(0, 3, j)] == [6, 7, 8]
    run_and_compare(case)


@pytest.mark.parametrize("mode", [2, 3, 4])
@pytest.mark.parametrize("kv", [1, 3])
def test_query_tokens_that_see_nothing_give_zeros(mode: int, kv: int) -> None:
    pre, following = (1, 0) if mode == 4 else (2**31 - 1, 2**31 - 1)
    case = Case(*(V2, "BNSD", torch.float16, 2, 1, 16, 16, [5, 5], [kv, 9]), mode=mode, pre=pre, following=following)
    run_and_compare(case)
    data = Data(case)
    hidden = [not any(data.sees(0, i, j) for j in range(kv)) for i in range(5)]
    assert any(hidden) == (mode != 2)


@pytest.mark.parametrize("form", ["B1QK", "11QK", "1QK", "2D"])
@pytest.mark.parametrize("q", [1, 4])
def test_every_form_of_a_full_mask(form: str, q: int) -> None:
    run_and_compare(Case(*(V2, "BSH", torch.float16, 4, 2, 16, 16, [q, q], [9, 7]), mode=q % 2, mask_form=form))
