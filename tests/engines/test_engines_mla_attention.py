"""AscendAttnBackend over NPUMLATokenToKVPool against a float64 loop: latent decode and verify, ND and NZ, FIA and atb.

We have no attention of this kind to compare with. Prefill is in `test_engines_mla_prefill.py`, graphs are in
`test_engines_mla_graphs.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ascend_emulator.kernels import OpRefused
from engines_attention import verify_input
from engines_latent import LATENT, NPU, PAGE, ROPE, LatentWorld
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

LENGTHS = [1, PAGE, 2 * PAGE + 3]
WIDTH = 4
BOUND = 1.5e-2


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's published configuration says of speculation."""
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH))
    ascend_backend.is_fia_nz.cache_clear()  # it reads its switch once in a process; the pool reads it again and again


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().view(expected.shape).double(), expected, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize(
    ("fia", "nz", "heads"),
    [("0", "0", 4), ("0", "0", 16), ("1", "0", 4), ("1", "0", 16), ("1", "1", 16), ("1", "1", 24)],
)
def test_decode(monkeypatch: pytest.MonkeyPatch, fia: str, nz: str, heads: int) -> None:
    """FIA from 8 heads on (24 are padded to 32), ND and NZ; atb's operator below 8 heads and without FIA."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", nz)
    world, news = LatentWorld(LENGTHS, heads), [1] * 3
    batch = world.batch(ForwardMode.DECODE, news)
    query, query_rope = world.random(3, heads, LATENT), world.random(3, heads, ROPE)
    latent, rope = (part.to(NPU) for part in world.fresh(news))
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_decode(
        query.to(NPU), latent, latent, world.layer, batch, q_rope=query_rope.to(NPU), k_rope=rope
    )
    compare(found, world.expected(query, query_rope, news))


@pytest.mark.parametrize(("nz", "heads"), [("0", 16), ("0", 24), ("1", 16), ("1", 24), ("0", 128)])
def test_verify(monkeypatch: pytest.MonkeyPatch, nz: str, heads: int) -> None:
    """WIDTH draft tokens a request over their prefixes; 24 heads are padded to 32."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", nz)
    world, news = LatentWorld(LENGTHS, heads), [WIDTH] * 3
    batch = world.batch(ForwardMode.TARGET_VERIFY, news, spec_info=verify_input(WIDTH))
    query, query_rope = world.random(3 * WIDTH, heads, LATENT), world.random(3 * WIDTH, heads, ROPE)
    latent, rope = (part.to(NPU) for part in world.fresh(news))
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_extend(
        query.to(NPU), latent, latent, world.layer, batch, q_rope=query_rope.to(NPU), k_rope=rope
    )
    compare(found, world.expected(query, query_rope, news))


@pytest.mark.parametrize("padding", [WIDTH, 3 * WIDTH])
def test_requests_that_pad_a_verify_step_are_zero(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """Data-parallel ranks pad their batch by whole requests; the backend cuts them off and puts zeros back."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    world, news, heads = LatentWorld(LENGTHS, 16), [WIDTH] * 3, 16
    batch = world.batch(ForwardMode.TARGET_VERIFY, news, spec_info=verify_input(WIDTH))
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(padding)])
    query, query_rope = (world.random(3 * WIDTH + padding, heads, width) for width in (LATENT, ROPE))
    latent, rope = (torch.cat([part, part[:padding]]).to(NPU) for part in world.fresh(news))
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_extend(
        query.to(NPU), latent, latent, world.layer, batch, q_rope=query_rope.to(NPU), k_rope=rope
    ).cpu()
    compare(found[:-padding], world.expected(query[:-padding], query_rope[:-padding], news))
    assert not found[-padding:].any()


def draft_extend(news: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft-extend step after a verify: (what the backend returned, what the formula gives); float64."""
    world, heads, count = LatentWorld([2, 40], 16), 16, sum(news)
    batch = world.batch(ForwardMode.DRAFT_EXTEND_V2, news, _original_batch_size=2)
    query, query_rope = world.random(count, heads, LATENT), world.random(count, heads, ROPE)
    latent, rope = (part.to(NPU) for part in world.fresh(news))
    world.backend.init_forward_metadata(batch)
    found = world.backend.forward_extend(
        query.to(NPU), latent, latent, world.layer, batch, q_rope=query_rope.to(NPU), k_rope=rope
    )
    return found.cpu().view(query.shape).double(), world.expected(query, query_rope, news)


def test_draft_extend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    compare(*draft_extend([WIDTH, WIDTH]))


def test_a_draft_window_of_another_width_is_cut_at_the_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-14: latent attention splits a draft-extend step every WIDTH rows, whatever each request brings."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    with pytest.raises(OpRefused, match="2 lengths for 3 requests"):
        draft_extend([WIDTH + 2, WIDTH + 2])
    found, expected = draft_extend([WIDTH - 1, WIDTH + 1])
    wrong = ((found - expected).abs() > 0.1).flatten(1).any(dim=1)
    assert wrong.tolist() == [True] * WIDTH + [False] * WIDTH
