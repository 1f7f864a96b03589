"""vLLM-Ascend's attention metadata and dense attention backend on the emulated NPU, against ours.

The backend writes K and V into its cache and attends by the state of the batch. What it reads of vLLM's configuration
is given here; there is no model around it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_pool import block_table, slots_for
from spec_kernels import build_paged_metadata, paged_attention
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_ascend.attention import attention_mask, attention_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionState as State
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

NPU = torch.device("npu:0")
PAGE, DIMS, Q_HEADS, KV_HEADS, PAGES, COLUMNS = 128, 128, 4, 2, 24, 4
BOUND = 1.5e-2


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the two classes read of vLLM's configuration."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1024, runner_type="generate", use_mla=False, dtype=torch.bfloat16),
        compilation_config=None, speculative_config=None, kv_transfer_config=None, quant_config=None,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )  # fmt: skip
    monkeypatch.setattr(attention_v1, "get_current_vllm_config", lambda: made)
    monkeypatch.setattr(attention_v1, "needs_layer_aware_fia_graph_replay", lambda: False)
    monkeypatch.setattr(attention_v1, "is_enable_hamming_sparse", lambda: False)
    monkeypatch.setattr(attention_v1, "using_paged_attention", lambda tokens, config, width: made.paged)
    monkeypatch.setattr(attention_v1, "_EXTRA_CTX", SimpleNamespace(capturing=False))
    monkeypatch.setattr(attention_mask, "get_pcp_group", lambda: SimpleNamespace(world_size=1))
    made.paged = False
    return made


class Batch:
    """Requests with pages of their own, `news[i]` tokens of request i in this step, and their K and V on both sides."""

    def __init__(self, config: Any, lengths: list[int], news: list[int], state: State) -> None:
        draw = torch.Generator().manual_seed(8)
        self.lengths, self.news = lengths, news
        self.ends = [length + new for length, new in zip(lengths, news, strict=True)]
        order = (torch.randperm(PAGES - 1, generator=draw) + 1).tolist()
        self.pages = [order[COLUMNS * row : COLUMNS * row + COLUMNS] for row in range(len(lengths))]
        self.cache = torch.zeros(2, PAGES, PAGE, KV_HEADS, DIMS, dtype=torch.bfloat16)
        shape = (sum(news), KV_HEADS, DIMS)
        self.key, self.value = (torch.randn(*shape, generator=draw).to(torch.bfloat16) for _ in range(2))
        self.query = torch.randn(sum(news), Q_HEADS, DIMS, generator=draw).to(torch.bfloat16)
        spans = list(zip(lengths, self.ends, strict=True))
        for pages, length in zip(self.pages, lengths, strict=True):
            old = torch.randn(2, length, KV_HEADS, DIMS, generator=draw).to(torch.bfloat16)
            self.cache.flatten(1, 2)[:, torch.from_numpy(slots_for(pages, 0, length, PAGE))] = old
        self.device_cache = self.cache.to(NPU)
        slots = [torch.from_numpy(slots_for(p, *span, PAGE)) for p, span in zip(self.pages, spans, strict=True)]
        self.slots = torch.cat(slots)
        self.cache.flatten(1, 2)[:, self.slots] = torch.stack([self.key, self.value])
        starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(self.ends, dtype=torch.int32)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIMS, dtype=torch.bfloat16)
        builder = attention_v1.AscendAttentionMetadataBuilder(spec, ["layer"], config, NPU)
        common = AscendCommonAttentionMetadata(
            query_start_loc=starts.to(NPU), query_start_loc_cpu=starts, seq_lens=lens.to(NPU), seq_lens_cpu=lens,
            num_reqs=len(news), num_actual_tokens=sum(news), max_query_len=max(news), max_seq_len=max(self.ends),
            block_table_tensor=torch.from_numpy(block_table(self.pages, columns=COLUMNS)).to(NPU),
            slot_mapping=self.slots.to(torch.int32).to(NPU), attn_state=state, causal=True,
        )  # fmt: skip
        self.metadata: Any = builder.build(0, common)

    def run(self, sliding: int | None = None) -> torch.Tensor:
        """What the backend gives. Shape: [tokens, Q_HEADS, DIMS]; on the CPU."""
        backend: Any = attention_v1.AscendAttentionBackendImpl(
            Q_HEADS, DIMS, DIMS**-0.5, KV_HEADS, None, sliding, "auto", None, "decoder", None
        )
        layer = SimpleNamespace(layer_name="layer", _k_scale_float=1.0, _v_scale_float=1.0)
        given = (part.to(NPU) for part in (self.query, self.key, self.value))
        output = torch.empty(self.query.shape, dtype=torch.bfloat16, device=NPU)
        found: torch.Tensor = backend.forward(layer, *given, tuple(self.device_cache), self.metadata, output)
        return found.cpu()

    def expected(self) -> torch.Tensor:
        """Ours, request by request. Shape: [tokens, Q_HEADS, DIMS]; on the CPU."""
        outputs = []
        for pages, end, piece in zip(self.pages, self.ends, torch.split(self.query, self.news), strict=True):
            metadata = build_paged_metadata([pages], [len(piece)], [end], page_size=PAGE)
            outputs.append(
                paged_attention(piece[None], self.cache[0], self.cache[1], metadata, scale=DIMS**-0.5, page_size=PAGE)[
                    0
                ]
            )
        return torch.cat(outputs)


CASES: dict[str, tuple[State, list[int], list[int]]] = {
    "prefill": (State.PrefillNoCache, [0, 0, 0], [5, 70, 130]),
    "prefix": (State.PrefillCacheHit, [PAGE, 3, 200], [5, 70, 1]),
    "chunked": (State.ChunkedPrefill, [PAGE - 1, 0, 2 * PAGE], [1, 90, 1]),
    "decode": (State.DecodeOnly, [1, PAGE - 1, PAGE, 300], [1, 1, 1, 1]),
    "verify": (State.SpecDecoding, [1, PAGE - 1, PAGE, 300], [3, 3, 3, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(config: Any, name: str) -> None:
    """Outputs and the cache, in every state of a batch."""
    batch = Batch(config, *CASES[name][1:], CASES[name][0])
    torch.testing.assert_close(batch.run(), batch.expected(), atol=BOUND, rtol=BOUND)
    assert torch.equal(batch.device_cache.cpu(), batch.cache)


def test_decode_with_paged_attention(config: Any) -> None:
    """The switch that takes atb's operator for small batches."""
    config.paged = True
    state, lengths, news = CASES["decode"]
    batch = Batch(config, lengths, news, state)
    torch.testing.assert_close(batch.run(), batch.expected(), atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("name", CASES)
def test_metadata(config: Any, name: str) -> None:
    """Ends of queries, KV lengths, tables and slots are ours."""
    state, lengths, news = CASES[name]
    batch = Batch(config, lengths, news, state)
    ours = build_paged_metadata(batch.pages, news, batch.ends, page_size=PAGE)
    theirs = batch.metadata
    assert theirs.actual_seq_lengths_q == torch.tensor(ours.q_lens).cumsum(0).tolist()
    assert theirs.seq_lens_list == ours.kv_lens
    for row, end in enumerate(batch.ends):
        pages = -(-end // PAGE)
        assert torch.equal(theirs.block_tables[row, :pages].cpu(), ours.block_table[row, :pages])
    assert torch.equal(theirs.slot_mapping.cpu().long(), batch.slots)


def test_a_padding_request_gets_a_length_and_a_row(config: Any) -> None:
    """The runner adds a request of padding tokens to the ends alone: the builder gives it length 1 and page 0."""
    lengths, news = [9, 20], [1, 1]
    batch = Batch(config, lengths, news, State.DecodeOnly)
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIMS, dtype=torch.bfloat16)
    builder = attention_v1.AscendAttentionMetadataBuilder(spec, ["layer"], config, NPU)
    starts, lens = torch.tensor([0, 1, 2, 4], dtype=torch.int32), torch.tensor([10, 21], dtype=torch.int32)
    common = AscendCommonAttentionMetadata(
        query_start_loc=starts.to(NPU), query_start_loc_cpu=starts, seq_lens=lens.to(NPU), seq_lens_cpu=lens,
        num_reqs=3, num_actual_tokens=2, max_query_len=1, max_seq_len=21,
        block_table_tensor=batch.metadata.block_tables, slot_mapping=batch.metadata.slot_mapping,
        attn_state=State.DecodeOnly, causal=True,
    )  # fmt: skip
    made: Any = builder.build(0, common)
    assert made.actual_seq_lengths_q == [1, 2, 4] and made.seq_lens_list == [10, 21, 1]
    assert made.block_tables.shape[0] == 3 and not made.block_tables[2].cpu().any()
