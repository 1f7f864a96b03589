"""A small model's attention twice: SGLang's Ascend backend on the emulated NPU, and ours (native, on the CPU).

It owns the batch: which request holds which pages and how many tokens. Numbers are random; both sides see the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from kv_pool import slots_for
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpecInputType
from spec_kernels import build_paged_metadata, paged_attention

__all__ = ["DIMS", "KV_HEADS", "NPU", "PAGE", "Q_HEADS", "World", "verify_input"]

NPU = "npu:0"
PAGE, DIMS, Q_HEADS, KV_HEADS, CONTEXT, PAGES = 128, 128, 4, 2, 1024, 24


def verify_input(width: int, kind: SpecInputType = SpecInputType.EAGLE_VERIFY) -> Any:
    """What the backend reads of a verify step's input."""
    return SimpleNamespace(draft_token_num=width, spec_input_type=kind)


class World:
    """One layer, its pool, and requests with pages of their own in shuffled order.

    Args:
        lengths: Tokens whose K and V are stored already, a request.
        dtype: Of the model and its cache.
        step: Draft step of the backend.
        dims: Width of K.
        value_dims: Width of V.
        cap: Of the scores (`cap * tanh(score / cap)`); 0 for none.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        step: int = 0,
        dims: int = DIMS,
        value_dims: int = DIMS,
        cap: float = 0.0,
    ) -> None:
        self.lengths, self.dtype, self.dims, self.value_dims = lengths, dtype, dims, value_dims
        self.generator = torch.Generator().manual_seed(5)
        self.layer = RadixAttention(Q_HEADS, dims, dims**-0.5, KV_HEADS, 0, logit_cap=cap, v_head_dim=value_dims)
        self.pool: Any = NPUMHATokenToKVPool(
            size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=self.dtype, head_num=KV_HEADS, head_dim=dims,
            v_head_dim=value_dims, layer_num=1, device="npu", enable_memory_saver=False, start_layer=0, end_layer=0,
        )  # fmt: skip
        self.table: Any = ReqToTokenPool(len(lengths), CONTEXT, "npu", False)
        order = (torch.randperm(PAGES - 1, generator=self.generator) + 1).tolist()
        per = -(-max([*lengths, 1]) // PAGE) + 1
        assert per * len(lengths) < PAGES
        self.pages = [order[row * per : (row + 1) * per] for row in range(len(lengths))]
        self.key = torch.zeros(PAGES, PAGE, KV_HEADS, dims, dtype=self.dtype)  # our side of the cache
        self.value = torch.zeros(PAGES, PAGE, KV_HEADS, value_dims, dtype=self.dtype)
        for row, pages in enumerate(self.pages):
            slots = torch.from_numpy(slots_for(pages, 0, per * PAGE, PAGE))
            self.table.req_to_token[row + 1, : per * PAGE] = slots.to(torch.int32).to(NPU)
        for row, length in enumerate(lengths):
            if length:
                self.store(self.slots(row, 0, length), *self.pair(length))
        self.backend = self._backend(step)

    def runner(self) -> Any:
        """What an attention backend reads of SGLang's model runner."""
        config = SimpleNamespace(
            dtype=self.dtype, attention_arch=AttentionArch.MHA, context_len=CONTEXT, num_attention_heads=Q_HEADS,
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        )  # fmt: skip
        return SimpleNamespace(
            device="npu", is_draft_worker=False, page_size=PAGE, model_config=config, kv_cache_dtype=self.dtype,
            req_to_token_pool=self.table, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=None,
            use_mla_backend=False, dtype=self.dtype, is_hybrid_swa=False,
            server_args=SimpleNamespace(dllm_algorithm=None),
            spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        )  # fmt: skip

    def _backend(self, step: int) -> Any:
        return ascend_backend.AscendAttnBackend(self.runner(), step)

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Slots of a request's tokens. Shape: [stop - start]; int64."""
        return torch.from_numpy(slots_for(self.pages[row], start, stop, PAGE))

    def rows(self, tokens: int, heads: int, *, count: int = 1) -> list[torch.Tensor]:
        """Random rows. Shape of each: [tokens, heads, dims]; on the CPU."""
        return [torch.randn(tokens, heads, self.dims, generator=self.generator).to(self.dtype) for _ in range(count)]

    def pair(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random K and V. Shapes: [tokens, KV_HEADS, dims] and [tokens, KV_HEADS, value_dims]; on the CPU."""
        value = torch.randn(tokens, KV_HEADS, self.value_dims, generator=self.generator).to(self.dtype)
        return self.rows(tokens, KV_HEADS)[0], value

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V on both sides."""
        self.pool.set_kv_buffer(self.layer, slots.to(NPU), key.to(NPU), value.to(NPU))
        self.mirror(slots, key, value)

    def mirror(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V on our side alone."""
        self.key.view(-1, KV_HEADS, self.dims)[slots] = key
        self.value.view(-1, KV_HEADS, self.value_dims)[slots] = value

    def batch(self, mode: ForwardMode, news: list[int], **more: Any) -> ForwardBatch:
        """A batch in which request i brings `news[i]` tokens of its own; lengths count them but in a verify step."""
        verify = mode == ForwardMode.TARGET_VERIFY
        ends = [length + new for length, new in zip(self.lengths, news, strict=True)]
        lens = torch.tensor(self.lengths if verify else ends)
        slots = torch.cat(
            [self.slots(row, end - new, end) for row, (new, end) in enumerate(zip(news, ends, strict=True))]
        )
        extend = {} if mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY) else {
            "extend_seq_lens": torch.tensor(news, device=NPU),
            "extend_prefix_lens": torch.tensor(self.lengths, device=NPU),
            "extend_prefix_lens_cpu": self.lengths,
        }  # fmt: skip
        return ForwardBatch(
            forward_mode=mode, batch_size=len(news), input_ids=torch.zeros(sum(news), dtype=torch.int64, device=NPU),
            req_pool_indices=torch.arange(1, len(news) + 1, device=NPU), seq_lens=lens.to(NPU), seq_lens_cpu=lens,
            out_cache_loc=slots.to(NPU), seq_lens_sum=int(lens.sum()), extend_seq_lens_cpu=news, **(extend | more),
        )  # fmt: skip

    def expected(self, query: torch.Tensor, news: list[int]) -> torch.Tensor:
        """Ours, request by request. Shapes: [tokens, Q_HEADS, dims] and [tokens, Q_HEADS, value_dims]; on the CPU."""
        outputs = []
        for row, piece in enumerate(torch.split(query, news)):
            metadata = build_paged_metadata(
                [self.pages[row]], [news[row]], [self.lengths[row] + news[row]], page_size=PAGE
            )
            outputs.append(
                paged_attention(piece[None], self.key, self.value, metadata, scale=self.dims**-0.5, page_size=PAGE)[0]
            )
        return torch.cat(outputs)
