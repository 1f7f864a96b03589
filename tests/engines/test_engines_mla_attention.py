"""AscendAttnBackend over NPUMLATokenToKVPool against a plain loop: latent decode, ND and NZ, FIA and atb.

The latent is key and value at once, the rope part key only. We have no attention of this kind to compare with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_pool import slots_for
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

NPU, PAGE, LATENT, ROPE, PAGES, CONTEXT = "npu:0", 128, 512, 64, 12, 1024
LENGTHS = [1, PAGE, 2 * PAGE + 3]
SCALE = (LATENT + ROPE) ** -0.5


@pytest.fixture(autouse=True)
def no_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))
    ascend_backend.is_fia_nz.cache_clear()  # it reads its switch once in a process; the pool reads it again and again


def make_backend(heads: int, table: Any, pool: Any) -> Any:
    config = SimpleNamespace(
        dtype=torch.bfloat16, attention_arch=AttentionArch.MLA, context_len=CONTEXT, num_attention_heads=heads,
        kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=128,
        hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
    )  # fmt: skip
    runner = SimpleNamespace(
        device="npu", is_draft_worker=False, page_size=PAGE, model_config=config, kv_cache_dtype=torch.bfloat16,
        req_to_token_pool=table, token_to_kv_pool=pool, token_to_kv_pool_allocator=None, use_mla_backend=True,
        dtype=torch.bfloat16, is_hybrid_swa=False, server_args=SimpleNamespace(dllm_algorithm=None),
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
    )  # fmt: skip
    return ascend_backend.AscendAttnBackend(runner)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One request and token. Shapes: query [heads, width], keys [tokens, width], values [tokens, LATENT]."""
    weights = torch.softmax(query.float() @ keys.float().T * SCALE, dim=-1)
    return weights @ values.float()


@pytest.mark.parametrize(
    ("fia", "nz", "heads"),
    [("0", "0", 4), ("0", "0", 16), ("1", "0", 4), ("1", "0", 16), ("1", "1", 16), ("1", "1", 24)],
)
def test_decode(monkeypatch: pytest.MonkeyPatch, fia: str, nz: str, heads: int) -> None:
    """FIA from 8 heads on (24 are padded to 32), ND and NZ; atb's operator below 8 heads and without FIA."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", nz)
    pool: Any = NPUMLATokenToKVPool(
        size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        layer_num=1, device="npu", enable_memory_saver=False, start_layer=0, end_layer=0,
    )  # fmt: skip
    table: Any = ReqToTokenPool(len(LENGTHS), CONTEXT, "npu", False)
    layer = RadixAttention(heads, LATENT + ROPE, SCALE, 1, 0, v_head_dim=LATENT)
    draw = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(torch.bfloat16)

    pages = (torch.randperm(PAGES - 1, generator=draw) + 1).view(-1)[:9].view(3, 3).tolist()
    latents, ropes, new_slots = [], [], []
    for row, length in enumerate(LENGTHS):
        slots = torch.from_numpy(slots_for(pages[row], 0, length + 1, PAGE))
        table.req_to_token[row + 1, : length + 1] = slots.to(torch.int32).to(NPU)
        latents.append(random(length + 1, 1, LATENT))
        ropes.append(random(length + 1, 1, ROPE))
        pool.set_kv_buffer(layer, slots[:-1].to(NPU), latents[-1][:-1].to(NPU), ropes[-1][:-1].to(NPU))
        new_slots.append(int(slots[-1]))
    lens = torch.tensor(LENGTHS) + 1
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=3, input_ids=torch.zeros(3, dtype=torch.int64, device=NPU),
        req_pool_indices=torch.arange(1, 4, device=NPU), seq_lens=lens.to(NPU), seq_lens_cpu=lens,
        out_cache_loc=torch.tensor(new_slots, device=NPU), seq_lens_sum=int(lens.sum()), extend_seq_lens_cpu=[1] * 3,
    )  # fmt: skip
    query, query_rope = random(3, heads, LATENT), random(3, heads, ROPE)
    backend = make_backend(heads, table, pool)
    backend.init_forward_metadata(batch)
    last = [torch.stack([part[-1] for part in parts]).to(NPU) for parts in (latents, ropes)]
    found = backend.forward_decode(
        query.to(NPU), last[0], last[0], layer, batch, q_rope=query_rope.to(NPU), k_rope=last[1]
    )
    for row in range(3):
        keys = torch.cat([latents[row], ropes[row]], dim=-1)[:, 0]
        expected = attend(torch.cat([query[row], query_rope[row]], dim=-1), keys, latents[row][:, 0])
        torch.testing.assert_close(found[row].cpu().view(heads, LATENT).float(), expected, atol=1.5e-2, rtol=1.5e-2)
