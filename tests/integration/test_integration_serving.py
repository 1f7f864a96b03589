"""End to end on a small random model: prefill over two stages, KV moved, decode from captured graphs.

K and V have unequal widths and the head is untied, so that a wrong row, a wrong layer or a swapped buffer shows in the
tokens; the first two tests show that it would.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from disaggregated_serving.config import Mode, RandomModel, ServeConfig
from disaggregated_serving.front import Served, ServeResult, Serving
from disaggregated_serving.reference import hidden_states, judge
from disaggregated_serving.setup import model_shape
from disaggregated_serving.weights import Weights, random_weights

MODEL = RandomModel()
NEW_TOKENS = 12
# One token, around a page edge, around a chunk edge, several chunks; more requests than the largest bucket.
PROMPT_LENGTHS = (1, 127, 128, 129, 255, 300)


def config(device: Literal["npu", "cpu"]) -> ServeConfig:
    return ServeConfig(model=MODEL, device=device, chunk=128, new_tokens=NEW_TOKENS, prefill_pool=768, decode_pool=2048)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(model_shape(config("cpu")), seed=MODEL.seed)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, MODEL.vocabulary, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def greedy(weights: Weights, prompt: list[int], count: int) -> list[int]:
    output: list[int] = []
    assert weights.head is not None
    for _ in range(count):
        hidden = hidden_states(weights, [*prompt, *output], torch.float16)
        output.append(int((hidden[-1] @ weights.head.T).argmax()))
    return output


def test_the_model_does_not_repeat_itself(weights: Weights, prompts: list[list[int]]) -> None:
    output = greedy(weights, prompts[1], 32)
    assert len(set(output)) >= 8, "fewer than a quarter of the tokens are distinct: the tests below would show little"


@pytest.mark.parametrize("part", ["key", "value"])
def test_any_damaged_row_changes_a_later_logit(weights: Weights, part: str) -> None:
    ids = torch.randint(0, MODEL.vocabulary, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    assert weights.head is not None
    sound = hidden_states(weights, ids, torch.float16) @ weights.head.T
    for layer in range(MODEL.layers):
        for position in range(len(ids)):

            def tamper(
                number: int, k: torch.Tensor, v: torch.Tensor, layer: int = layer, position: int = position
            ) -> None:
                if number == layer:
                    row = (k if part == "key" else v)[:, position]
                    row.copy_(row.roll(1, -1))

            damaged = hidden_states(weights, ids, torch.float16, tamper) @ weights.head.T
            assert torch.equal(damaged[:position], sound[:position])
            # A key that only its own query sees has no effect on the first position: softmax over one score is 1.
            if part == "value" or position > 0:
                assert (damaged[position:] - sound[position:]).abs().max() > 1e-3, (layer, position)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_every_served_token_is_the_one_of_a_plain_forward(
    weights: Weights, prompts: list[list[int]], device: Literal["npu", "cpu"]
) -> None:
    """Rounds in one run: cold, from the cache, past the cache, without drafts, eager, and by the other length rule."""
    drafts = config(device).drafts
    ways: dict[str, dict[str, Any]] = {
        "cold": {},
        "cached": {},
        "uncached": {"use_cache": False},
        "no drafts": {"mode": Mode(drafts=0)},
        "eager": {"mode": Mode(drafts=drafts, graphs=False)},
        "dflash": {"mode": Mode(drafts=drafts, length_rule="dflash")},
    }
    results: dict[str, ServeResult] = {}
    with Serving(config(device)) as serving:
        for name, options in ways.items():
            results[name] = serving.serve(prompts, **options)
        serving.close()
    checked = in_margin = 0
    for served in results["cold"].requests:
        verdict = judge(weights, served.prompt, served.output, kv_dtype=torch.float16)
        assert not verdict.wrong, (len(served.prompt), verdict.wrong)
        assert len(served.output) == NEW_TOKENS
        assert served.pages == -(-len(served.prompt) // 128)
        token_bytes = MODEL.layers * MODEL.kv_heads * (MODEL.key_dim + MODEL.value_dim) * 2
        assert served.nbytes == served.pages * 128 * token_bytes
        checked, in_margin = checked + len(served.output), in_margin + verdict.in_margin
    assert checked == NEW_TOKENS * len(prompts)
    assert in_margin <= 0.01 * checked
    outputs = {name: [served.output for served in result.requests] for name, result in results.items()}
    for name, result in results.items():
        assert outputs[name] == outputs["cold"], name
        for served in result.requests:
            assert served.computed + served.hit == len(served.prompt)
            # Whole pages before the last token can be found; the device pool is smaller than all prompts together.
            most = (len(served.prompt) - 1) // 128 * 128 if name not in {"cold", "uncached"} else 0
            assert served.hit == most, (name, len(served.prompt))
        counters = result.counters
        assert counters.row_tokens == (NEW_TOKENS - 1) * len(prompts)
        if name == "eager":
            assert counters.graph_replays == 0 and set(counters.eager_steps) == {"forced"}
        else:
            assert counters.graph_replays and not counters.eager_steps
            assert set(counters.steps_by_bucket) <= {1, 2, 4}
    assert results["cold"].counters.row_steps <= results["no drafts"].counters.row_steps == 6 * (NEW_TOKENS - 1)
    assert max(result.counters.most_in_flight for result in results.values()) == 4


def test_requests_that_end_early_leave_the_others_alone(weights: Weights) -> None:
    """One given up while it decodes, one no prefill pool holds, one given up in its prefill; several times over."""
    generator = torch.Generator().manual_seed(11)
    lengths = (300, 900, 128, 400, 129)
    prompts = [torch.randint(0, MODEL.vocabulary, (n,), generator=generator).tolist() for n in lengths]
    with Serving(config("cpu")) as serving:
        for turn in range(3):
            first, given_up = turn * len(prompts), set[int]()

            def on_progress(served: Served, first: int = first, given_up: set[int] = given_up) -> None:
                place = served.room - first
                enough = (place == 0 and len(served.output) >= 3) or (place == 3 and served.computed > 0)
                if enough and place not in given_up:
                    given_up.add(place)
                    serving.abort(served.room)

            result = serving.serve(prompts, new_tokens=40, use_cache=False, on_progress=on_progress)
            reasons = [served.ended for served in result.requests]
            assert reasons[2] is None and reasons[4] is None
            assert "gave" in str(reasons[0])
            assert "free pages" in str(reasons[1]) and "prefill" in str(reasons[1])
            assert "gave" in str(reasons[3])
            for served in result.requests:
                assert len(served.output) == 40 or served.ended is not None
                if served.output:
                    assert not judge(weights, served.prompt, served.output, kv_dtype=torch.float16).wrong
        serving.close()
