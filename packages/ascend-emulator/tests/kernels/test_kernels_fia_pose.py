"""What fused_infer_attention_score takes under a named CANN release, and what the strictest setting refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, OpRefused, pose

OP = "npu::npu_fused_infer_attention_score_v2"
FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(
    dim: int = 128, dtype: torch.dtype = BF16, heads: int = 4, kv_heads: int = 4, block: int = 0
) -> dict[str, Any]:
    """Two requests of 3 and 2 query tokens on 9 and 7 keys, dense or in pages."""
    call: dict[str, Any] = {
        "query": random(5, heads, dim, dtype=dtype),
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "TND",
        "actual_seq_qlen": [3, 5],
        "softmax_scale": 0.1,
    }
    if not block:
        keys = random(16, kv_heads, dim, dtype=dtype)
        return call | {"key": keys, "value": keys.flip(0), "actual_seq_kvlen": [9, 16]}
    cache = random(2, block, kv_heads * dim, dtype=dtype)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    return call | {
        "key": cache, "value": cache.flip(1), "actual_seq_kvlen": [9, 7], "block_table": table, "block_size": block,
    }  # fmt: skip


def latent(block: int) -> dict[str, Any]:
    """Two requests of one query token on 9 and 7 latent rows."""
    cache = random(2, block, 512)
    return {
        "query": random(2, 4, 1, 512), "key": cache, "value": cache, "query_rope": random(2, 4, 1, 64),
        "key_rope": random(2, block, 64), "num_query_heads": 4, "num_key_value_heads": 1, "input_layout": "BNSD",
        "actual_seq_kvlen": [9, 7], "block_table": torch.tensor([[1], [0]], dtype=torch.int32), "block_size": block,
        "softmax_scale": 0.1,
    }  # fmt: skip


def dense_of(call: dict[str, Any]) -> torch.Tensor:
    """Attention of each request over the rows of its page, in float64."""
    width = call["query"].size(-1)
    parts = []
    for row, (page, kv_len) in enumerate(zip((1, 0), (9, 7), strict=True)):
        if "query_rope" in call:
            query = torch.cat([call["query"][row], call["query_rope"][row]], -1)
            key = torch.cat([call["key"][page, :kv_len], call["key_rope"][page, :kv_len]], -1)[None]
            value = call["value"][page, :kv_len][None]
        else:
            query = call["query"][slice(0, 3) if row == 0 else slice(3, 5)].transpose(0, 1)
            if "block_table" in call:
                key, value = (
                    call[n][page, :kv_len].unflatten(-1, (-1, width)).transpose(0, 1) for n in ("key", "value")
                )
            else:
                rows = slice(0, 9) if row == 0 else slice(9, 16)
                key, value = (call[n][rows].transpose(0, 1) for n in ("key", "value"))
        weights = (query.double() @ key.double().transpose(-1, -2) * call["softmax_scale"]).softmax(-1)
        parts.append(weights @ value.double())
    return torch.stack(parts) if "query_rope" in call else torch.cat([part.transpose(0, 1) for part in parts])


TAKEN_SINCE: list[tuple[str, dict[str, Any]]] = [
    ("block-size-mla", latent(48)),
    ("block-size-mla", latent(1024)),
    ("block-size-packed", packed(block=48)),
    ("block-size-packed", packed(block=1024)),
    ("tnd-dtype", packed(dtype=FP16)),
    ("tnd-dims-64", packed(64)),
]
REFUSED_SINCE: list[tuple[str, dict[str, Any]]] = [
    ("block-size-wide", latent(24)),
    ("block-size-wide", packed(block=1040)),
    ("tnd-dims-mha", packed(64, kv_heads=2)),
]


@pytest.mark.parametrize(("rule", "call"), TAKEN_SINCE)
def test_a_later_release_takes_more(rule: str, call: dict[str, Any]) -> None:
    for cann in (None, "8.3", "9.0"):
        pose.set_pose(cann=cann)
        with pytest.raises(OpRefused) as caught:
            REGISTRY[OP](**call)
        assert caught.value.rule is RULES[rule]
    pose.set_pose(cann="9.1")
    output, _ = REGISTRY[OP](**call)
    assert torch.allclose(output.double(), dense_of(call), atol=0.02)


@pytest.mark.parametrize(("rule", "call"), REFUSED_SINCE)
def test_and_no_more_than_its_document(rule: str, call: dict[str, Any]) -> None:
    pose.set_pose(cann="9.1")
    with pytest.raises(OpRefused) as caught:
        REGISTRY[OP](**call)
    assert caught.value.rule is RULES[rule]


def test_every_row_that_a_release_switches_has_a_call() -> None:
    mine = {rule.id for rule in RULES.values() if rule.test == "test_kernels_fia_pose.py"}
    assert {rule for rule, _ in (*TAKEN_SINCE, *REFUSED_SINCE)} == mine
