"""Draft decode in one graph on the emulated NPU: an update an operator, counted where torch_npu re-issues them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import mtp_deepseek
import pytest
import torch
from graph_runtime import DerivedUpdate, step_list
from graph_runtime.errors import UpdateCountMismatch
from mtp_drafts import RecurrentEngine
from torch_npu.npu import graphs

PROMPTS = (13, 20, 27)
STEPS = mtp_deepseek.DRAFTS - 1


class Reissued:
    """What reaches torch_npu: the lists of each update, and how many operators it issues again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists: list[list[dict[str, list[int]]]] = []
        self.operators = 0
        self.update = graphs._GraphDispatchMode.update_capture_record
        self.begin = graphs.graph_task_update_begin
        monkeypatch.setattr(graphs._GraphDispatchMode, "update_capture_record", lambda *given: self._update(*given))
        monkeypatch.setattr(graphs, "graph_task_update_begin", lambda *given: self._begin(*given))

    def _update(self, mode: Any, lists: list[dict[str, list[int]]]) -> Any:
        self.lists.append(lists)
        return self.update(mode, lists)

    def _begin(self, *given: Any) -> Any:
        self.operators += 1
        return self.begin(*given)


@pytest.fixture
def engine() -> Iterator[RecurrentEngine]:
    made = RecurrentEngine(overlap=False)
    yield made
    made.close()


@cache
def prompt_and_tokens(length: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(0, mtp_deepseek.VOCAB, (length,), generator=generator).tolist()
    plain = mtp_deepseek.Plain(mtp_deepseek.random_weights())
    return prompt, plain.greedy(prompt, mtp_deepseek.WINDOW + 1)


def drafts_after(engine: RecurrentEngine, accepted: int) -> list[list[int]]:
    """The drafts after a step that accepts so many; prefixes are those of a batch just admitted."""
    for row, length in enumerate(PROMPTS, 1):
        engine.admit(row, *prompt_and_tokens(length))
    engine.launch([1, 2, 3], list(PROMPTS), [accepted] * 3).read()
    drawn: list[list[int]] = engine.drafts[1:4].tolist()
    return drawn


def test_one_update_an_operator_each_with_its_own_lengths(
    engine: RecurrentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = engine.decode.capture(progress=False)
    assert report.updatable_ops == {bucket: STEPS for bucket in engine.buckets}
    engine.verify.capture(progress=False)
    engine.extend.capture(progress=False)
    reissued = Reissued(monkeypatch)
    drafts_after(engine, 1)
    verify, extend, decode = reissued.lists
    assert (len(verify), len(extend), len(decode)) == (1, 1, STEPS)  # the dense operators of each graph
    assert reissued.operators == 2 + STEPS
    for step, lists in enumerate(decode):  # 2 committed by the step, 1 for each draft, 0 for the padded row
        assert lists == {"actual_seq_kvlen": [*(length + 2 + step + 1 for length in PROMPTS), 0]}


def test_drafts_are_those_of_plain_layers_whatever_was_accepted(engine: RecurrentEngine) -> None:
    engine.capture()
    for accepted in range(engine.width):
        drawn = drafts_after(engine, accepted)
        for row, size in enumerate(engine.sizes[1:4].tolist()):
            assert drawn[row] == engine.plain.drafts(engine.tokens[row + 1, :size].tolist())


def first_for_all(host: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """The naive version: the first step's lengths for all steps, as torch_npu broadcasts a single dict."""
    return [{"actual_seq_kvlen": host[step_list("kv_lens", 0)]}] * STEPS


def test_one_list_for_all_steps_gives_other_drafts(engine: RecurrentEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """E13: the later steps would not see the drafts before them."""
    engine.capture()
    right = [drafts_after(engine, accepted) for accepted in range(engine.width)]
    for held in engine.decode._graphs._held.values():
        monkeypatch.setattr(held.bound, "values", first_for_all)
    naive = [drafts_after(engine, accepted) for accepted in range(engine.width)]
    assert naive != right


def test_a_wrong_number_of_operators_is_refused(engine: RecurrentEngine) -> None:
    engine.decode._update = DerivedUpdate("kv_lens", steps=STEPS, ops_per_step=2)
    with pytest.raises(UpdateCountMismatch, match=f"{STEPS} steps of 2"):
        engine.decode.capture(progress=False)
