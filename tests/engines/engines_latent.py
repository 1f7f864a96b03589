"""A small model's latent attention: SGLang's Ascend backend over its latent pool, and the same rows on the CPU.

The latent is key and value at once, the rope part key only. It owns which request holds which pages; what attention
over them must give is `engines_reference.attend`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engines_reference import attend
from kv_pool import slots_for
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

__all__ = ["LATENT", "NPU", "PAGE", "ROPE", "LatentWorld"]

NPU, PAGE, LATENT, ROPE, PAGES, CONTEXT = "npu:0", 128, 512, 64, 20, 1024
COLUMNS = 4


class LatentWorld:
    """One layer, its pool, and requests with pages of their own in shuffled order.

    Args:
        lengths: Tokens whose latents are stored already, a request.
        heads: Query heads.
        nope: Width of a head's key without its rope part, in prefill.
        value_dims: Width of a head's value, in prefill.
        scale: Of the scores; by default that of the latent form.
    """

    def __init__(
        self, lengths: list[int], heads: int, *, nope: int = 128, value_dims: int = 128, scale: float | None = None
    ) -> None:
        self.lengths, self.heads, self.nope, self.value_dims = lengths, heads, nope, value_dims
        self.scale = (LATENT + ROPE) ** -0.5 if scale is None else scale
        self.generator = torch.Generator().manual_seed(heads)
        self.layer = RadixAttention(heads, LATENT + ROPE, self.scale, 1, 0, v_head_dim=LATENT)
        self.pool: Any = NPUMLATokenToKVPool(
            size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE, layer_num=1, device="npu", enable_memory_saver=False, start_layer=0, end_layer=0,
        )  # fmt: skip
        self.table: Any = ReqToTokenPool(len(lengths), CONTEXT, "npu", False)
        order = torch.randperm(PAGES - 1, generator=self.generator) + 1
        self.pages = order[: COLUMNS * len(lengths)].view(-1, COLUMNS).tolist()
        self.latents = [self.random(COLUMNS * PAGE, 1, LATENT) for _ in lengths]
        self.ropes = [self.random(COLUMNS * PAGE, 1, ROPE) for _ in lengths]
        for row, length in enumerate(lengths):
            slots = self.slots(row, 0, COLUMNS * PAGE)
            self.table.req_to_token[row + 1, : len(slots)] = slots.to(torch.int32).to(NPU)
            latent, rope = self.stored(row, 0, length)
            self.pool.set_kv_buffer(self.layer, slots[:length].to(NPU), latent.to(NPU), rope.to(NPU))
        self.backend = self._backend()

    def _backend(self) -> Any:
        config = SimpleNamespace(
            dtype=torch.bfloat16, attention_arch=AttentionArch.MLA, context_len=CONTEXT,
            num_attention_heads=self.heads, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=self.nope,
            hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
        )  # fmt: skip
        runner = SimpleNamespace(
            device="npu", is_draft_worker=False, page_size=PAGE, model_config=config, kv_cache_dtype=torch.bfloat16,
            req_to_token_pool=self.table, token_to_kv_pool=self.pool, token_to_kv_pool_allocator=None,
            use_mla_backend=True, dtype=torch.bfloat16, is_hybrid_swa=False,
            server_args=SimpleNamespace(dllm_algorithm=None), spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        )  # fmt: skip
        return ascend_backend.AscendAttnBackend(runner)

    def random(self, *shape: int) -> torch.Tensor:
        """Random bfloat16 on the CPU."""
        return torch.randn(*shape, generator=self.generator).to(torch.bfloat16)

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Slots of a request's tokens. Shape: [stop - start]; int64."""
        return torch.from_numpy(slots_for(self.pages[row], start, stop, PAGE))

    def stored(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rope of a request's tokens. Shapes: [tokens, 1, LATENT] and [tokens, 1, ROPE]; on the CPU."""
        return self.latents[row][start:stop], self.ropes[row][start:stop]

    def fresh(self, news: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and ropes of each request's next tokens, packed; on the CPU."""
        parts = [self.stored(row, length, length + new) for row, length, new in self._rows(news)]
        return torch.cat([latent for latent, _ in parts]), torch.cat([rope for _, rope in parts])

    def _rows(self, news: list[int]) -> list[tuple[int, int, int]]:
        return [(row, length, new) for row, (length, new) in enumerate(zip(self.lengths, news, strict=False))]

    def batch(self, mode: ForwardMode, news: list[int], **more: Any) -> ForwardBatch:
        """A batch in which request i brings `news[i]` tokens; lengths count them but in a verify step."""
        lens = torch.tensor([length + new for _, length, new in self._rows(news)])
        if mode == ForwardMode.TARGET_VERIFY:
            lens = torch.tensor(self.lengths)
        slots = torch.cat([self.slots(row, length, length + new) for row, length, new in self._rows(news)])
        extend = {} if mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY) else {
            "extend_seq_lens": torch.tensor(news, device=NPU),
            "extend_prefix_lens": torch.tensor(self.lengths, device=NPU),
            "extend_prefix_lens_cpu": self.lengths,
        }  # fmt: skip
        return ForwardBatch(
            forward_mode=mode, batch_size=len(news), input_ids=torch.zeros(sum(news), dtype=torch.int64, device=NPU),
            req_pool_indices=torch.arange(1, len(news) + 1, device=NPU), seq_lens=lens.to(NPU), seq_lens_cpu=lens,
            out_cache_loc=slots.to(NPU), seq_lens_sum=int(lens.sum()), extend_seq_lens_cpu=news,
            global_num_token_non_padded_cpu=sum(news), **(extend | more),
        )  # fmt: skip

    def expected(self, query: torch.Tensor, query_rope: torch.Tensor, news: list[int]) -> torch.Tensor:
        """Attention in the latent form. Shapes: [tokens, heads, LATENT], [tokens, heads, ROPE]; result as the first."""
        outputs = []
        pieces = torch.split(torch.cat([query, query_rope], dim=-1), news)
        for (row, length, new), piece in zip(self._rows(news), pieces, strict=True):
            latent, rope = self.stored(row, 0, length + new)
            keys = torch.cat([latent, rope], dim=-1)
            outputs.append(attend(piece, keys, latent, scale=self.scale, start=length))
        return torch.cat(outputs)
