"""A model with a full and a sliding layer: SGLang's hybrid pool, allocator and Ascend backend, and the same rows here.

It owns the rows of K and V by request and position. Slots are SGLang's own, of both of its pools.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engines_reference import attend
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

__all__ = ["FULL", "KV_HEADS", "NPU", "PAGE", "Q_HEADS", "ROOM", "SLIDING", "WINDOW", "SlidingWorld"]

NPU, PAGE, Q_HEADS, KV_HEADS, CONTEXT = "npu:0", 128, 4, 2, 1024
FULL, SLIDING = 0, 1  # layer ids
WINDOW = 100  # SGLang's number: positions before a token's own that it sees
ROOM = 3 * PAGE + 40  # tokens that each request has slots for


class SlidingWorld:
    """Two layers and requests with slots in both pools; the sliding pool is the smaller one.

    Args:
        lengths: Tokens whose K and V are stored already, a request.
        dims: Width of K and V.
        window: Of the sliding layer.
    """

    def __init__(self, lengths: list[int], *, dims: int = 128, window: int = WINDOW) -> None:
        self.lengths, self.dims, self.window = lengths, dims, window
        self.generator = torch.Generator().manual_seed(6)
        self.layers = [
            RadixAttention(Q_HEADS, dims, dims**-0.5, KV_HEADS, layer, sliding_window_size=size)
            for layer, size in ((FULL, -1), (SLIDING, window))
        ]
        self.pool: Any = SWAKVPool(
            size=32 * PAGE, size_swa=20 * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=KV_HEADS, head_dim=dims,
            swa_attention_layer_ids=[SLIDING], full_attention_layer_ids=[FULL], device="npu",
            token_to_kv_pool_class=NPUMHATokenToKVPool,
        )  # fmt: skip
        self.allocator: Any = SWATokenToKVPoolAllocator(
            32 * PAGE, 20 * PAGE, PAGE, torch.bfloat16, "npu", self.pool, need_sort=False
        )
        self.allocator.full_attn_allocator.alloc(5 * PAGE)  # so that slots differ between the pools
        self.table: Any = ReqToTokenPool(len(lengths), CONTEXT, "npu", False)
        self.taken: list[torch.Tensor] = []
        for row in range(len(lengths)):
            self.taken.append(self._allocate())
            self.table.req_to_token[row + 1, :ROOM] = self.taken[-1].to(torch.int32)
        shape = (len(lengths), len(self.layers), ROOM, KV_HEADS, dims)
        self.key, self.value = self.random(*shape), self.random(*shape)
        for layer in self.layers:
            for row, length in enumerate(lengths):
                if length:
                    self._store(layer, row, length)
        self.backend = self._backend()

    def _allocate(self) -> torch.Tensor:
        none, all_ = torch.zeros(1, dtype=torch.int64), torch.tensor([ROOM])
        last = torch.tensor([-1], device=NPU)
        found: torch.Tensor = self.allocator.alloc_extend(none.to(NPU), none, all_.to(NPU), all_, last, ROOM)
        assert found is not None
        return found

    def _store(self, layer: Any, row: int, length: int) -> None:
        slots = self.taken[row][:length]
        location = KVWriteLoc(slots, self.pool.translate_loc_from_full_to_swa(slots))
        key, value = (side[row, layer.layer_id, :length].to(NPU) for side in (self.key, self.value))
        self.pool.set_kv_buffer(layer, location, key, value)

    def _backend(self) -> Any:
        config = SimpleNamespace(
            dtype=torch.bfloat16, attention_arch=AttentionArch.MHA, context_len=CONTEXT, num_attention_heads=Q_HEADS,
            hf_config=SimpleNamespace(architectures=["MiMoV2FlashForCausalLM"]),
        )  # fmt: skip
        runner = SimpleNamespace(
            device="npu", is_draft_worker=False, page_size=PAGE, model_config=config, kv_cache_dtype=torch.bfloat16,
            req_to_token_pool=self.table, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=self.allocator,
            use_mla_backend=False, dtype=torch.bfloat16, is_hybrid_swa=True, sliding_window_size=self.window,
            server_args=SimpleNamespace(dllm_algorithm=None), spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        )  # fmt: skip
        return ascend_backend.AscendAttnBackend(runner)

    def random(self, *shape: int) -> torch.Tensor:
        """Random bfloat16 on the CPU."""
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def fresh(self, layer: int, news: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of each request's next tokens, packed. Shape of each: [tokens, KV_HEADS, dims]; on the CPU."""
        spans = [(row, length, length + new) for row, (length, new) in enumerate(zip(self.lengths, news, strict=False))]
        key, value = (
            torch.cat([side[row, layer, start:stop] for row, start, stop in spans]) for side in (self.key, self.value)
        )
        return key, value

    def slots(self, news: list[int]) -> torch.Tensor:
        """Full slots of each request's next tokens, packed. Shape: [tokens]; int64, on the NPU."""
        return torch.cat(
            [
                self.taken[row][length : length + new]
                for row, (length, new) in enumerate(zip(self.lengths, news, strict=False))
            ]
        )

    def batch(self, mode: ForwardMode, news: list[int], **more: Any) -> ForwardBatch:
        """A batch in which request i brings `news[i]` tokens; lengths count them but in a verify step."""
        verify = mode == ForwardMode.TARGET_VERIFY
        lens = torch.tensor([length + (0 if verify else new) for length, new in zip(self.lengths, news, strict=True)])
        extend = {} if mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY) else {
            "extend_seq_lens": torch.tensor(news, device=NPU),
            "extend_prefix_lens": torch.tensor(self.lengths, device=NPU),
            "extend_prefix_lens_cpu": self.lengths,
        }  # fmt: skip
        return ForwardBatch(
            forward_mode=mode, batch_size=len(news), input_ids=torch.zeros(sum(news), dtype=torch.int64, device=NPU),
            req_pool_indices=torch.arange(1, len(news) + 1, device=NPU), seq_lens=lens.to(NPU), seq_lens_cpu=lens,
            out_cache_loc=self.slots(news), seq_lens_sum=int(lens.sum()), extend_seq_lens_cpu=news,
            global_num_token_non_padded_cpu=sum(news), **(extend | more),
        )  # fmt: skip

    def run(
        self, mode: ForwardMode, layer: int, news: list[int], *, sinks: torch.Tensor | None = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer of one step: (queries, what SGLang's backend gives for them). Shapes: [tokens, Q_HEADS, dims]."""
        batch = self.batch(mode, news, **more)
        query, (key, value) = self.random(sum(news), Q_HEADS, self.dims), self.fresh(layer, news)
        self.backend.init_forward_metadata(batch)
        call = self.backend.forward_decode if mode == ForwardMode.DECODE else self.backend.forward_extend
        on_device = None if sinks is None else sinks.to(NPU)
        found = call(query.to(NPU), key.to(NPU), value.to(NPU), self.layers[layer], batch, sinks=on_device)
        return query, found.cpu().view(query.shape).double()

    def expected(
        self, layer: int, query: torch.Tensor, news: list[int], *, sinks: torch.Tensor | None = None,
        back: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """By the formula. `back` is how far a query of the sliding layer sees; the window by default."""
        if layer == SLIDING and back is None:
            back = self.window
        outputs = []
        for row, piece in enumerate(torch.split(query, news)):
            stop = self.lengths[row] + news[row]
            key, value = self.key[row, layer, :stop], self.value[row, layer, :stop]
            outputs.append(
                attend(piece, key, value, scale=self.dims**-0.5, start=self.lengths[row], back=back, sinks=sinks)
            )
        return torch.cat(outputs)
