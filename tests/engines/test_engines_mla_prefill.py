"""AscendAttnBackend's latent prefill against a float64 loop: with and without cached prefixes, ND and NZ.

A prefill attends in the wide form: every head has a key of its own (`nope` and the shared rope) and a value, made from
the latents by the model's projection, which is the tests' here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engines_latent import LATENT, NPU, PAGE, ROPE, LatentWorld
from engines_reference import attend
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

NEWS = [5, 70, PAGE]
BOUND = 2e-2


@pytest.fixture(autouse=True)
def no_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    ascend_backend.is_fia_nz.cache_clear()


class Prefill:
    """One prefill step in the wide form.

    Args:
        prefixes: Cached tokens, a request.
        heads: Of queries, keys and values.
        nope: Width of a head's key without the rope part.
        value_dims: Width of a head's value.
    """

    def __init__(self, prefixes: list[int], heads: int, nope: int, value_dims: int) -> None:
        self.world = world = LatentWorld(prefixes, heads, nope=nope, value_dims=value_dims, scale=(nope + ROPE) ** -0.5)
        # What the model would have made of its weights: [heads * (nope + value_dims), LATENT].
        self.weight = (world.random(heads * (nope + value_dims), LATENT).float() * LATENT**-0.5).to(torch.bfloat16)
        self.layer = RadixAttention(heads, nope + ROPE, world.scale, heads, 0, v_head_dim=value_dims)
        on_device = self.weight.to(NPU)
        self.layer.kv_b_proj = lambda rows: (rows @ on_device.T, None)

    def wide(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's tokens. Shapes: [tokens, heads, nope + ROPE], [tokens, heads, value_dims]."""
        world = self.world
        latent, rope = world.stored(row, start, stop)
        both = (latent[:, 0] @ self.weight.T).view(stop - start, world.heads, -1)
        nope, value = both.split([world.nope, world.value_dims], dim=-1)
        return torch.cat([nope, rope.expand(-1, world.heads, -1)], dim=-1), value

    def run(self, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the backend returned, what the formula gives for the rows that are no padding)."""
        world = self.world
        batch = world.batch(ForwardMode.EXTEND, NEWS)
        query = world.random(sum(NEWS) + padding, world.heads, world.nope + ROPE)
        new = [self.wide(row, length, length + NEWS[row]) for row, length in enumerate(world.lengths)]
        key, value = (torch.cat([part[index] for part in new]) for index in (0, 1))
        if padding:
            key, value = (torch.cat([part, part[:padding]]) for part in (key, value))
        world.backend.init_forward_metadata(batch)
        found = world.backend.forward_extend(query.to(NPU), key.to(NPU), value.to(NPU), self.layer, batch)
        outputs = []
        for row, piece in enumerate(torch.split(query[: sum(NEWS)], NEWS)):
            keys, values = self.wide(row, 0, world.lengths[row] + NEWS[row])
            outputs.append(attend(piece, keys, values, scale=world.scale, start=world.lengths[row]))
        return found.cpu().view(len(query), world.heads, -1), torch.cat(outputs)


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("nz", ["0", "1"])
@pytest.mark.parametrize("prefixes", [[0, 0, 0], [PAGE, 0, 2 * PAGE], [PAGE, 2 * PAGE, PAGE]])
def test_packed(monkeypatch: pytest.MonkeyPatch, prefixes: list[int], nz: str) -> None:
    """Keys of 128 and 64: one call, or two whose results are joined by their log-sums where anything is cached."""
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", nz)
    compare(*Prefill(prefixes, 8, 128, 128).run())


@pytest.mark.parametrize("nz", ["0", "1"])
@pytest.mark.parametrize("prefixes", [[0, 0, 0], [PAGE, 0, 2 * PAGE]])
def test_a_request_at_a_time(monkeypatch: pytest.MonkeyPatch, prefixes: list[int], nz: str) -> None:
    """Values as wide as keys with their rope part."""
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", nz)
    compare(*Prefill(prefixes, 5, 128, 192).run())


@pytest.mark.parametrize("prefixes", [[0, 0, 0], [PAGE, 0, 2 * PAGE]])
def test_rows_that_pad_the_batch_are_zero(prefixes: list[int]) -> None:
    found, expected = Prefill(prefixes, 8, 128, 128).run(padding=3)
    compare(found[:-3], expected)
    assert not found[-3:].any()
