"""Owns the proof of attention in all its modes against float64: windows, sinks, rope parts, ragged queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels.dispatch import load

cases = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Batch:
    """A batch over permuted pages; pages and slots that hold no token hold large numbers."""

    query: torch.Tensor  # [tokens, heads, dims]
    query_rope: torch.Tensor | None
    caches: list[torch.Tensor]
    pages: list[list[int]]
    q_lens: list[int]
    kv_lens: list[int]
    window: int | None
    sinks: torch.Tensor | None
    causal: bool
    scale: float
    tiled: bool

    def expected(self) -> torch.Tensor:
        """One query token at a time, in float64; zeros past the last request."""
        heads, page_size = self.query.shape[1], self.caches[0].shape[1]
        group = heads // self.caches[0].shape[2]
        out = torch.zeros(*self.query.shape[:2], self.caches[1].shape[3], dtype=torch.float64)
        start = 0
        for pages, q_len, kv_len in zip(self.pages, self.q_lens, self.kv_lens, strict=True):
            for index in range(q_len if kv_len else 0):
                last = kv_len - q_len + index if self.causal else kv_len - 1
                first = 0 if self.window is None else max(0, last - self.window + 1)
                slots = [pages[p // page_size] * page_size + p % page_size for p in range(first, last + 1)]
                keys, values, *rope = (cache.flatten(0, 1)[slots].double() for cache in self.caches)
                vector = self.query[start + index].double()
                if self.query_rope is not None:
                    keys = torch.cat((keys, rope[0]), -1)
                    vector = torch.cat((vector, self.query_rope[start + index].double()), -1)
                for head in range(heads):
                    scores = keys[:, head // group] @ vector[head] * self.scale
                    extra = scores[:0] if self.sinks is None else self.sinks[head : head + 1].double()
                    weights = torch.softmax(torch.cat((scores, extra)), 0)[: len(slots)]
                    out[start + index, head] = weights @ values[:, head // group]
            start += q_len
        return out


def make(
    numbers: Any, sizes: tuple[int, int, int], heads: tuple[int, int], dtype: torch.dtype, page: int, takes_tiles: bool
) -> Batch:
    dims, value_dims, rope = sizes
    random = torch.Generator().manual_seed(numbers.randrange(2**31))
    mode = numbers.choice(("decode", "verify", "extend", "mixed"))
    rows = numbers.randrange(0, 4)
    width = 1 if mode == "decode" else numbers.randrange(2, 5)
    longest = 8 if rope else 40
    q_lens = [
        width if mode in ("decode", "verify") else numbers.choice((0, 1, 2, numbers.randrange(1, longest)))
        for _ in range(rows)
    ]
    kv_lens = [0 if numbers.random() < 0.2 else max(n, 1) + numbers.randrange(0, 3 * page // 2) for n in q_lens]
    counts = [-(-n // page) for n in kv_lens]
    order = (torch.randperm(sum(counts) + 2, generator=random) + 1).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    caches = []
    for width_of in [dims, value_dims] + [rope] * bool(rope):
        cache = torch.full((sum(counts) + 3, page, heads[1], width_of), 300.0).to(dtype)
        for listed, kv_len in zip(pages, kv_lens, strict=True):
            held = torch.randn(kv_len, heads[1], width_of, generator=random).to(dtype)
            for number, name in enumerate(listed):
                part = held[number * page : (number + 1) * page]
                cache[name, : part.shape[0]] = part
        caches.append(cache)
    tokens = sum(q_lens) + (0 if mode in ("decode", "verify") else numbers.randrange(0, 3))
    query = torch.randn(tokens, heads[0], dims, generator=random).to(dtype)
    query_rope = torch.randn(tokens, heads[0], rope, generator=random).to(dtype) if rope else None
    window = None if rope or numbers.random() < 0.4 else numbers.choice((1, 2, 5, page, 3 * page))
    takes_sinks = not rope and (
        (dtype == torch.bfloat16 and value_dims == 128) or dtype in (torch.float32, torch.float64)
    )
    sinks = (
        torch.randn(heads[0], generator=random).to(torch.bfloat16) if takes_sinks and numbers.random() < 0.5 else None
    )
    causal = window is not None or bool(rope) or numbers.random() < 0.8
    tiled = not (dims % 16 or value_dims % 16 or rope % 16) and (bool(rope) or takes_tiles) and numbers.random() < 0.5
    scale = (dims + rope) ** -0.5
    return Batch(query, query_rope, caches, pages, q_lens, kv_lens, window, sinks, causal, scale, tiled)


def in_tiles(cache: torch.Tensor) -> torch.Tensor:
    """The same tokens with their dims in pieces of 16, each beside the same piece of the page's other tokens."""
    pages, page, heads, dims = cache.shape
    return cache.view(pages, page, heads, dims // 16, 16).permute(0, 2, 3, 1, 4).contiguous()


def attend(batch: Batch, place: Any, *, uniform: bool) -> torch.Tensor:
    def on(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(place.device)

    page = batch.caches[0].shape[1]
    metadata = sk.build_paged_metadata(
        batch.pages, [min(q, n) if n else q for q, n in zip(batch.q_lens, batch.kv_lens, strict=True)], batch.kv_lens,
        page_size=page, columns=max(map(len, batch.pages), default=0) + 1, device=place.device,
    )  # fmt: skip
    caches = [(in_tiles(cache) if batch.tiled else cache).to(place.device) for cache in batch.caches]
    query, query_rope = on(batch.query), on(batch.query_rope)
    assert query is not None
    options: dict[str, Any] = {
        "scale": batch.scale, "page_size": page, "causal": batch.causal, "window": batch.window,
        "sinks": on(batch.sinks), "key_rope_cache": caches[2] if batch.query_rope is not None else None,
        "backend": place.backend,
    }  # fmt: skip
    if not uniform:
        return sk.ragged_paged_attention(query, caches[0], caches[1], metadata, query_rope=query_rope, **options)
    rows = len(batch.q_lens)
    shaped = [None if part is None else part.view(rows, -1, *part.shape[1:]) for part in (query, query_rope)]
    assert shaped[0] is not None
    return sk.paged_attention(shaped[0], caches[0], caches[1], metadata, query_rope=shaped[1], **options).flatten(0, 1)


@cases
@given(seed=st.integers(0, 2**32))
def test_all_modes_equal_float64(attention_place: Any, seed: int) -> None:
    numbers = attention_place.case(seed)
    sizes, heads, dtype, page = attention_place.sizes(numbers)
    batch = make(numbers, sizes, heads, dtype, page, attention_place.backend != "npu")
    expected = batch.expected()
    one_width = len(set(batch.q_lens)) == 1 and batch.q_lens[0] > 0 and sum(batch.q_lens) == batch.query.shape[0]
    before = batch.query.clone(), [cache.clone() for cache in batch.caches]
    for uniform in (False, True)[: 1 + one_width]:
        found = attend(batch, attention_place, uniform=uniform)
        assert found.dtype == dtype and found.shape == expected.shape
        error = float((found.cpu().double() - expected).abs().max()) if expected.numel() else 0.0
        assert error <= LIMIT[dtype], (uniform, error)
    assert torch.equal(batch.query, before[0])
    assert all(torch.equal(one, two) for one, two in zip(batch.caches, before[1], strict=True))


@pytest.mark.parametrize("width", [1, 3])
def test_a_window_of_four_shows_four(attention_place: Any, width: int) -> None:
    """Values tell their position; with equal scores the mean tells which were seen (contracts.md A-17)."""
    dtype, page = attention_place.dtype, max(attention_place.page, 16)
    query = torch.zeros(1, width, 2, 64, dtype=dtype, device=attention_place.device)
    cache = torch.zeros(2, page, 1, 64, dtype=dtype)
    cache[1, :, 0] = torch.arange(page, dtype=dtype).unsqueeze(1)
    cache = cache.to(attention_place.device)
    kv_len = 12
    metadata = sk.build_paged_metadata([[1]], [width], [kv_len], page_size=page, device=attention_place.device)
    options: dict[str, Any] = {"scale": 1.0, "page_size": page, "backend": attention_place.backend}
    found = sk.paged_attention(query, cache, cache, metadata, window=4, **options)
    lens = torch.tensor([kv_len], device=attention_place.device)
    mask = sk.exact_length_mask(lens, q_len=width, columns=1, page_size=page, window=4)
    masked = sk.PagedAttentionMetadata(metadata.block_table, metadata.q_lens, metadata.kv_lens, mask)
    again = sk.paged_attention(query, cache, cache, masked, causal=False, **options)
    for token in range(width):
        last = kv_len - width + token
        wanted = sum(range(last - 3, last + 1)) / 4
        assert torch.allclose(found[0, token].cpu().float(), torch.tensor(wanted), atol=0.05)
    assert torch.allclose(found.cpu().float(), again.cpu().float(), atol=0.05)


def test_refusals(attention_place: Any) -> None:
    place, page, dtype = attention_place, max(attention_place.page, 16), attention_place.dtype
    query = torch.zeros(3, 2, 64, dtype=dtype, device=place.device)
    cache = torch.zeros(2, page, 1, 64, dtype=dtype, device=place.device)
    metadata = sk.build_paged_metadata([[1], [1]], [2, 1], [5, 5], page_size=page, device=place.device)
    options: dict[str, Any] = {"scale": 1.0, "page_size": page, "backend": place.backend}
    for window, causal in ((0, True), (2, False), (True, True)):
        with pytest.raises(sk.LengthError, match="window"):
            sk.ragged_paged_attention(query, cache, cache, metadata, window=window, causal=causal, **options)
    with pytest.raises(sk.ShapeError, match="sinks"):
        sinks = torch.zeros(3, dtype=dtype, device=place.device)
        sk.ragged_paged_attention(query, cache, cache, metadata, sinks=sinks, **options)
    with pytest.raises(sk.ShapeError, match="both or neither"):
        sk.ragged_paged_attention(query, cache, cache, metadata, query_rope=query, **options)
    with pytest.raises(sk.LengthError, match="cumulative"):
        sk.ragged_paged_attention(query[:2], cache, cache, metadata, **options)
    with pytest.raises(sk.LengthError, match=r"q_lens|kv_lens"):
        longer = sk.PagedAttentionMetadata(metadata.block_table, [2, 1], [1, 5])
        sk.ragged_paged_attention(query, cache, cache, longer, **options)
    with pytest.raises(sk.MetadataError, match="mask"):
        hidden = torch.zeros(2, 2, page, dtype=torch.bool, device=place.device)
        masked = sk.PagedAttentionMetadata(metadata.block_table, [2, 1], [5, 5], hidden)
        sk.ragged_paged_attention(query, cache, cache, masked, **options)
    with pytest.raises(sk.ShapeError, match="query"):
        sk.ragged_paged_attention(query.unsqueeze(0), cache, cache, metadata, **options)


def test_the_custom_op_is_sound(host_backend: sk.BackendName) -> None:
    query, cache = torch.randn(4, 2, 8), torch.randn(3, 4, 1, 8)
    table = torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
    load("ragged_paged_attention", host_backend)  # registers it
    names = {"native": "ragged_paged_attention", "triton": "paged_attention_triton"}
    torch.library.opcheck(
        getattr(torch.ops.spec_kernels, names[host_backend]),
        (query, cache, cache, table, None, torch.randn(2), query, cache),
        {"q_lens": [3, 1], "kv_lens": [6, 2], "scale": 0.5, "causal": True, "window": 3},
    )
