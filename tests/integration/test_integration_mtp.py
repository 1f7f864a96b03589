"""The disaggregated demo with a model of window layers, sinks and draft layers: target and draft KV are transferred.

Drafts come from the draft layers, over KV that prefill has sent; they are verified, and drawn, from captured graphs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from disaggregated_serving.config import MIMO, Mode, ServeConfig
from disaggregated_serving.front import ServeResult, Serving
from disaggregated_serving.prefill import chunk_borders
from disaggregated_serving.reference import hidden_states, judge
from disaggregated_serving.setup import kv_dtype, model_shape
from disaggregated_serving.weights import Weights, random_weights
from pydantic import ValidationError

DRAFTS = MIMO.draft_layers
DTYPE = kv_dtype(ServeConfig(model=MIMO, drafts=DRAFTS))
NEW_TOKENS = 12
WINDOW = next(window for window in MIMO.windows if window)
# Around the window's edge, a page's, a chunk's, and one chunk with the tail that draft layers would lack.
PROMPT_LENGTHS = (WINDOW - 1, WINDOW + 1, 127, 128, 129, 258)


def config(device: Literal["npu", "cpu"]) -> ServeConfig:
    return ServeConfig(
        model=MIMO, device=device, chunk=128, buckets=(1, 2, 4), new_tokens=NEW_TOKENS, prefill_pool=768,
        decode_pool=2048, drafts=DRAFTS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(model_shape(config("cpu")), seed=MIMO.seed)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, MIMO.vocabulary, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def greedy(weights: Weights, prompt: list[int], count: int) -> list[int]:
    output: list[int] = []
    assert weights.head is not None
    for _ in range(count):
        hidden = hidden_states(weights, [*prompt, *output], DTYPE)
        output.append(int((hidden[-1] @ weights.head.T).argmax()))
    return output


def test_the_model_does_not_repeat_itself(weights: Weights, prompts: list[list[int]]) -> None:
    for prompt in prompts[:3]:
        assert len(set(greedy(weights, prompt, 24))) >= 6


@pytest.mark.parametrize("part", ["key", "value"])
def test_any_damaged_row_changes_a_later_logit(weights: Weights, part: str) -> None:
    ids = torch.randint(0, MIMO.vocabulary, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    assert weights.head is not None
    sound = hidden_states(weights, ids, DTYPE) @ weights.head.T
    for layer in range(MIMO.layers):
        for position in range(len(ids)):

            def tamper(
                number: int, k: torch.Tensor, v: torch.Tensor, layer: int = layer, position: int = position
            ) -> None:
                if number == layer:
                    row = (k if part == "key" else v)[:, position]
                    row.copy_(row.roll(1, -1))

            damaged = hidden_states(weights, ids, DTYPE, tamper) @ weights.head.T
            assert torch.equal(damaged[:position], sound[:position])
            if part == "value" or position > 0 or MIMO.windows[layer]:
                assert (damaged[position:] - sound[position:]).abs().max() > 1e-3, (layer, position)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_every_served_token_is_the_one_of_greedy_decoding(
    weights: Weights, prompts: list[list[int]], device: Literal["npu", "cpu"]
) -> None:
    """Rounds in one run: cold, cached, without drafts, eager, by the other length rule."""
    ways: dict[str, dict[str, Any]] = {
        "cold": {},
        "cached": {},
        "no drafts": {"mode": Mode(drafts=0), "use_cache": False},
        "eager": {"mode": Mode(drafts=DRAFTS, graphs=False)},
        "dflash": {"mode": Mode(drafts=DRAFTS, length_rule="dflash"), "use_cache": False},
    }
    results: dict[str, ServeResult] = {}
    with Serving(config(device)) as serving:
        for name, options in ways.items():
            results[name] = serving.serve(prompts, **options)
        with pytest.raises(ValueError, match="overlap"):
            serving.serve(prompts, mode=Mode(drafts=DRAFTS, overlap=True))
        serving.close()
    token_bytes = (MIMO.layers + DRAFTS) * MIMO.kv_heads * (MIMO.key_dim + MIMO.value_dim) * 2
    for served in results["cold"].requests:
        verdict = judge(weights, served.prompt, served.output, kv_dtype=DTYPE)
        assert not verdict.wrong and verdict.in_margin <= 1, (len(served.prompt), verdict)
        assert served.output == greedy(weights, list(served.prompt), NEW_TOKENS) or verdict.in_margin
        assert served.nbytes == served.pages * 128 * token_bytes  # target and draft
    outputs = {name: [served.output for served in result.requests] for name, result in results.items()}
    for name, result in results.items():
        assert outputs[name] == outputs["cold"], name
        counters = result.counters
        assert counters.row_tokens == (NEW_TOKENS - 1) * len(prompts)
        if name == "eager":
            assert counters.graph_replays == counters.draft_replays == 0
        else:
            steps = counters.graph_replays
            assert counters.draft_replays == (0 if name == "no drafts" else DRAFTS * steps)
            assert steps and not counters.eager_steps
    # Drafts are right often enough to show that the draft layers read the KV which prefill sent.
    assert results["cold"].counters.row_steps < 0.9 * results["no drafts"].counters.row_steps


def test_draft_layers_have_the_tokens_after_a_chunk() -> None:
    for length in range(1, 700):
        borders = chunk_borders(0, length, 256, ahead=DRAFTS)
        assert borders[0] == 0 and borders[-1] == length
        for start, stop in pairwise(borders):
            assert 0 < stop - start < 256 + DRAFTS
            assert stop == length or (stop % 256 == 0 and length - stop >= DRAFTS)


def test_drafts_are_as_many_as_draft_layers() -> None:
    with pytest.raises(ValidationError, match="3 draft layers"):
        ServeConfig(model=MIMO, drafts=4)
