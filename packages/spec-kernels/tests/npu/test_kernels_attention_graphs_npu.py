"""Owns the proof that captured attention with updates equals eager attention as lengths change: windows, sinks, rope
parts, tiled caches, unlike query lengths, and groups of layers with tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import spec_kernels as sk
import torch
import torch_npu

NPU, PAGE, COLUMNS = "npu:0", 128, 3
BF16 = torch.bfloat16
LENGTHS = ([140, 260, 0], [5, 129, 7], [0, 384, 0], [257, 4, 128])


class Step:
    """Caches, queries and what a model adds, for three rows."""

    def __init__(self, width: int, dims: int, value_dims: int, *, heads: int = 4, rope: int = 0, tiled: bool = False):
        noise = torch.Generator().manual_seed(width + dims)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=noise).to(BF16)

        kv_heads, pages = (1 if rope else 2), 3 * COLUMNS + 1
        self.width, self.rope = width, rope
        self.query = normal(3, width, heads, dims).to(NPU)
        caches = [normal(pages, PAGE, kv_heads, size) for size in (dims, value_dims, *[rope] * bool(rope))]
        if tiled:
            caches = [c.view(pages, PAGE, kv_heads, -1, 16).permute(0, 2, 3, 1, 4).contiguous() for c in caches]
        self.caches = [cache.to(NPU) for cache in caches]
        self.table = (torch.randperm(pages - 1, generator=noise) + 1).int().view(3, COLUMNS).to(NPU)
        self.options: dict[str, Any] = {"scale": (dims + rope) ** -0.5, "page_size": PAGE}
        if rope:
            self.options |= {"query_rope": normal(3, width, heads, rope).to(NPU), "key_rope_cache": self.caches[2]}

    def uniform(self, kv_lens: Sequence[int], **options: Any) -> torch.Tensor:
        metadata = sk.PagedAttentionMetadata(self.table, [self.width] * 3, list(kv_lens))
        key, value = self.caches[:2]
        return sk.paged_attention(self.query, key, value, metadata, **self.options, **options)


def capture(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[dict[str, list[int]]], None]]:
    """Warm up, capture; what the graph gives, and how to replay it with other lengths."""
    for _ in range(2):
        step()
    torch_npu.npu.synchronize()
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        out = step()

    def replay(lengths: dict[str, list[int]]) -> None:
        graph.update(cpu_update_input=[lengths])
        graph.replay()
        torch_npu.npu.synchronize()

    return out, replay


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dims": 128, "value_dims": 128}, {"window": 100}),
        ({"dims": 128, "value_dims": 128}, {"window": 1}),
        ({"dims": 128, "value_dims": 128}, {"sinks": True}),
        ({"dims": 192, "value_dims": 128}, {"sinks": True, "window": 130}),
        ({"dims": 512, "value_dims": 512, "heads": 3, "rope": 64}, {}),
        ({"dims": 512, "value_dims": 512, "rope": 64, "tiled": True}, {}),
    ],
)
def test_uniform_rows(sizes: dict[str, Any], options: dict[str, Any], width: int) -> None:
    step = Step(width, **sizes)
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(4).to(BF16).to(NPU)}
    out, replay = capture(lambda: step.uniform([width] * 3, **options))
    (key,) = sk.paged_attention_update_keys("npu")
    for lengths in LENGTHS:
        replay({key: lengths})
        eager = step.uniform(lengths, **options)
        assert torch.equal(out, eager)
        native = step.uniform(lengths, backend="native", **options)
        torch.testing.assert_close(out.float(), native.float(), atol=2e-2, rtol=2e-2)
        assert all(bool(out[row].any()) == bool(length) for row, length in enumerate(lengths))


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"sinks": True}])
def test_unlike_query_lengths(options: dict[str, Any]) -> None:
    """Six query tokens over three requests and a padded row, split otherwise at each replay."""
    step = Step(2, 128, 128)
    if options.get("sinks"):
        options = {"sinks": torch.randn(4).to(BF16).to(NPU)}
    query, (key, value) = step.query.view(6, 4, 128), step.caches[:2]
    table = torch.cat((step.table, torch.zeros_like(step.table[:1])))

    def attend(q_lens: Sequence[int], kv_lens: Sequence[int], **more: Any) -> torch.Tensor:
        metadata = sk.PagedAttentionMetadata(table, list(q_lens), list(kv_lens))
        return sk.ragged_paged_attention(query, key, value, metadata, **step.options, **options, **more)

    out, replay = capture(lambda: attend([2, 2, 1, 1], [2, 2, 1, 0]))
    keys = sk.paged_attention_update_keys("npu", ragged=True)
    splits = [[1, 4, 1, 0], [2, 1, 2, 1], [0, 3, 0, 3], [6, 0, 0, 0], [0, 0, 0, 6]]
    for q_lens, lengths in zip(splits, [*LENGTHS, LENGTHS[0]], strict=True):
        kv_lens = [length if q_len else 0 for q_len, length in zip(q_lens, [*lengths, 0], strict=True)]
        kv_lens = [max(length, q_len) if length else 0 for q_len, length in zip(q_lens, kv_lens, strict=True)]
        metadata = sk.PagedAttentionMetadata(table, q_lens, kv_lens)
        replay({name: getattr(metadata, field) for name, field in keys.items()})
        assert torch.equal(out, attend(q_lens, kv_lens))
        native = attend(q_lens, kv_lens, backend="native")
        torch.testing.assert_close(out.float(), native.float(), atol=2e-2, rtol=2e-2)


def test_query_tokens_without_a_request_are_refused_in_capture() -> None:
    step = Step(2, 128, 128)
    query, (key, value) = step.query.view(6, 4, 128), step.caches[:2]
    metadata = sk.PagedAttentionMetadata(step.table, [2, 2, 1], [2, 2, 1])
    sk.ragged_paged_attention(query, key, value, metadata, **step.options)
    torch_npu.npu.synchronize()
    with (
        pytest.raises(sk.CaptureError, match="padded row"),
        torch_npu.npu.graph(torch_npu.npu.NPUGraph(), auto_dispatch_capture=True),
    ):
        sk.ragged_paged_attention(query, key, value, metadata, **step.options)


def test_full_and_window_layers_read_tables_of_their_own() -> None:
    """One slot map gives a window pool its pages and write locations; the step writes, attends, and is replayed."""
    noise = torch.Generator().manual_seed(3)
    window, width, rows = 100, 1, 3
    order = torch.randperm(11, generator=noise) + 1
    swa_pages = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randperm(11, generator=noise) + 1))
    slot_map = (swa_pages.repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(12)).to(NPU)
    table = order[:9].view(rows, 3).repeat_interleave(PAGE, 1) * PAGE + torch.arange(PAGE).repeat(3)
    table = table.int().to(NPU)
    storage = sk.AttentionStorage(
        {"full": None, "window": slot_map}, rows=rows, tokens=rows, columns=3, page_size=PAGE, device=NPU
    )

    def cache() -> torch.Tensor:
        return torch.randn(12, PAGE, 2, 128, generator=noise).to(BF16).to(NPU)

    pools = {name: [cache(), cache()] for name in ("full", "window")}
    windows = {"full": None, "window": window}
    query, fresh = (torch.randn(rows, heads, 128, generator=noise).to(BF16).to(NPU) for heads in (4, 2))
    captured = {
        name: sk.PagedAttentionMetadata(storage.block_tables[name], [width] * rows, [width] * rows) for name in pools
    }

    def step(described: dict[str, sk.PagedAttentionMetadata], **on: Any) -> torch.Tensor:
        found = []
        for name, (key, value) in pools.items():
            sk.write_kv(fresh, -fresh, key, value, storage.write_locs[name], **on)
            metadata = described[name]
            shaped = query.view(rows, width, 4, 128)
            found.append(
                sk.paged_attention(shaped, key, value, metadata, scale=0.09, page_size=PAGE, window=windows[name], **on)
            )
        return torch.stack(found)

    out, replay = capture(lambda: step(captured))
    key_name = next(iter(sk.paged_attention_update_keys("npu")))
    for lengths in ([140, 260, 3], [141, 261], [384, 1, 129], []):
        count = len(lengths)
        locs = torch.tensor([int(table[row, n - 1]) for row, n in enumerate(lengths)], dtype=torch.int64, device=NPU)
        described = storage.fill(
            table, torch.arange(count, device=NPU), locs, q_lens=[1] * count, kv_lens=lengths, pad_q_len=1
        )
        assert storage.write_locs["window"].tolist()[:count] == slot_map[locs].tolist()
        kv_lens = described["full"].kv_lens
        replay({key_name: kv_lens})
        assert torch.equal(out, step(described)) and not out[:, count:].any()
        native = step(described, backend="native")
        torch.testing.assert_close(out.float(), native.float(), atol=2e-2, rtol=2e-2)
