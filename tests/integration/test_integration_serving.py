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
    return ServeConfig(
        model=MODEL, device=device, chunk=128, buckets=(1, 2, 4), new_tokens=NEW_TOKENS, prefill_pool=768,
        decode_pool=2048,
    )  # fmt: skip


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
    """Rounds in one run: cold, cached, past the cache, without drafts, eager, by the other length rule, overlapped."""
    drafts = config(device).drafts
    ways: dict[str, dict[str, Any]] = {
        "cold": {},
        "cached": {},
        "uncached": {"use_cache": False},
        "no drafts": {"mode": Mode(drafts=0)},
        "eager": {"mode": Mode(drafts=drafts, graphs=False)},
        "dflash": {"mode": Mode(drafts=drafts, length_rule="dflash")},
        "overlap": {"mode": Mode(drafts=drafts, overlap=True)},
        "overlap, no drafts": {"mode": Mode(drafts=0, overlap=True)},
        "overlap, eager, dflash": {
            "mode": Mode(drafts=drafts, overlap=True, graphs=False, length_rule="dflash"),
            "use_cache": False,
        },
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
            cached = name != "cold" and ways[name].get("use_cache", True)
            most = (len(served.prompt) - 1) // 128 * 128 if cached else 0
            assert served.hit == most, (name, len(served.prompt))
        counters = result.counters
        assert counters.row_tokens == (NEW_TOKENS - 1) * len(prompts)
        if "eager" in name:
            assert counters.graph_replays == 0 and set(counters.eager_steps) == {"forced"}
        else:
            assert counters.graph_replays and not counters.eager_steps
            assert set(counters.steps_by_bucket) <= {1, 2, 4}
    assert results["cold"].counters.row_steps <= results["no drafts"].counters.row_steps == 6 * (NEW_TOKENS - 1)
    # A row may run one step more than it needs before the host knows that it has ended.
    most = results["no drafts"].counters.row_steps + len(prompts)
    assert results["no drafts"].counters.row_steps < results["overlap, no drafts"].counters.row_steps <= most
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


def test_a_request_that_is_given_up_in_the_queue_holds_nobody_up(weights: Weights) -> None:
    """The decode pool holds one request at a time: the second one waits for pages when it is given up."""
    small = config("cpu").model_copy(update={"decode_pool": 512, "new_tokens": 60})
    generator = torch.Generator().manual_seed(13)
    prompts = [torch.randint(0, MODEL.vocabulary, (n,), generator=generator).tolist() for n in (300, 310, 40)]
    given_up: set[int] = set()
    with Serving(small) as serving:

        def on_progress(served: Served) -> None:
            if served.room == 0 and served.output and not given_up:
                given_up.add(1)
                serving.abort(1)

        result = serving.serve(prompts, on_progress=on_progress)
        serving.close()
    assert [served.ended is None for served in result.requests] == [True, False, True]
    assert result.seconds < 30, "prefill waited for pages of a request that had ended"
    for served in (result.requests[0], result.requests[2]):
        assert len(served.output) == 60
        assert not judge(weights, served.prompt, served.output, kv_dtype=torch.float16).wrong


def test_decode_is_started_again_in_the_middle_of_a_round(weights: Weights) -> None:
    """What had tokens ends with the reason, everything else is served by the new process; twice over."""
    generator = torch.Generator().manual_seed(17)
    prompts = [torch.randint(0, MODEL.vocabulary, (n,), generator=generator).tolist() for n in (130, 400, 390, 5)]
    with Serving(config("cpu"), restart_decode=True) as serving:
        for turn in range(2):
            killed: set[int] = set()

            def on_progress(served: Served, killed: set[int] = killed, first: int = turn * len(prompts)) -> None:
                if served.room == first and len(served.output) >= 3 and not killed:
                    killed.add(serving.workers.processes["decode"])
                    serving.workers.kill("decode")

            result = serving.serve(
                prompts, new_tokens=200, mode=Mode(drafts=4, overlap=turn == 1), on_progress=on_progress
            )
            assert serving.workers.processes["decode"] not in killed and killed
            reasons = [served.ended for served in result.requests]
            assert reasons[0] == "decode was killed by signal SIGKILL, and was started again"
            assert None in reasons and set(reasons) == {None, reasons[0]}
            for served in result.requests:
                assert len(served.output) == 200 or served.ended
                assert served.ended or served.computed + served.hit == len(served.prompt)
                assert not judge(weights, served.prompt, served.output, kv_dtype=torch.float16).wrong
        serving.close()
