"""Multi-token prediction on the emulated NPU: verify and draft-extend graphs give the tokens of plain greedy decoding.

Lengths and tokens are known on the device; the host gives exact lengths, or, with overlap, upper bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_runtime import (
    HostResults,
    MultiStepDraftExtendRunner,
    Rotation,
    StaticBuffers,
    StepInputs,
    TargetVerifyRunner,
    get_device,
)
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

NEW, CAPACITY, ROWS = 10, 384, 4
PROMPTS = {"band": (23, 24, 25, 26), "page": (126, 127, 128, 129)}  # the last token's KV is written by the first step


class Engine:
    """Prefill, then steps of verify and draft; requests are rows of tables on the device, row 0 is padding."""

    def __init__(self, mimo: Any, *, overlap: bool, kind: Any = "eagle") -> None:
        self.mimo, self.overlap, self.kind, self.width = mimo, overlap, kind, mimo.WINDOW
        self.device = RecordingDevice(get_device("npu:0"))
        weights = mimo.random_weights()
        self.plain = mimo.Plain(weights)
        self.model = mimo.OnDevice(weights)
        width, hidden = self.width, mimo.HIDDEN

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device="npu:0")

        self.tokens, self.sizes = zeros(ROWS + 1, CAPACITY), zeros(ROWS + 1)
        self.drafts, self.truth = zeros(ROWS + 1, mimo.DRAFTS), zeros(ROWS + 1, CAPACITY)
        common = [RowField("request", "int64", rows=ROWS), RowField("table", "int32", rows=ROWS, width=mimo.COLUMNS)]
        self.verify = TargetVerifyRunner(
            window=width,
            kind=kind,
            device=self.device,
            forward=self._verify,
            buffers=StaticBuffers(RowLayout([*common, RowField("force", "int64", rows=ROWS, fill=-1)]), self.device),
            buckets=[1, 2, 4],
            output_rows_per_request=(1, width, width, 1),
        )
        layout = RowLayout(
            [
                *common,
                RowField("ids", "int64", rows=ROWS * width),
                RowField("hidden", "float32", rows=ROWS * width, width=hidden),
                RowField("where", "int64", rows=ROWS, width=2),
            ]
        )
        self.extend = MultiStepDraftExtendRunner(
            device=self.device,
            forwards=[self._draft(step) for step in range(mimo.DRAFTS)],
            layout=layout,
            buckets=[1, 2, 4],
            window=width,
            rotate=self._rotate,
            rotated=["ids", "hidden"],
            token_fields=["ids", "hidden"],
            output_rows_per_request=(1, width),
        )
        self.results = HostResults(self.device, rows=ROWS, width=width + 1)

    def capture(self) -> None:
        reports = [self.verify.capture(progress=False), *self.extend.capture(progress=False)]
        assert all(report.captured == (1, 2, 4) for report in reports), reports
        self.device.events.clear()

    def close(self) -> None:
        self.verify.close()
        self.extend.close()

    def _at(self, step: StepInputs, start: torch.Tensor) -> SimpleNamespace:
        positions = start.unsqueeze(1) + torch.arange(self.width, device=start.device)
        return SimpleNamespace(positions=positions, table=step.tensors["table"], kv_lens=step.host["kv_lens"])

    def _verify(self, step: StepInputs) -> tuple[torch.Tensor, ...]:
        request, force = step.tensors["request"], step.tensors["force"].unsqueeze(1)
        size = self.sizes[request]
        start = (size - 1).clamp(min=0)
        at = self._at(step, start)
        ahead = torch.arange(self.width - 1, device=size.device)
        right = self.truth[request.unsqueeze(1), size.unsqueeze(1) + ahead]
        forced = torch.where(ahead < force, right, (right + 1) % self.mimo.VOCAB)
        drafts = torch.where(force < 0, self.drafts[request], forced)
        ids = torch.cat([self.tokens[request].gather(1, start.unsqueeze(1)), drafts], 1)
        hidden = self.model.target(ids, at, exact=not self.overlap)
        predicted = self.model.tokens(hidden).view(step.bs, self.width)
        correct = (drafts == predicted[:, :-1]).long().cumprod(1).sum(1)
        live = (request > 0).long()
        self.tokens[request.unsqueeze(1), at.positions + 1] = predicted * live.unsqueeze(1)
        self.sizes[request] = (size + correct + 1) * live
        shown = torch.cat([predicted, correct.unsqueeze(1)], 1)
        return shown, predicted.flatten(), hidden, torch.stack([start, correct], 1)

    def _draft(self, number: int) -> Callable[[StepInputs], tuple[torch.Tensor, torch.Tensor]]:
        def forward(step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
            start, last = step.tensors["where"].unbind(1)
            ids, at = step.tensors["ids"], self._at(step, start)
            hidden = self.model.draft(number, ids, step.tensors["hidden"], at, exact=not self.overlap)
            chosen = torch.arange(step.bs, device=ids.device) * self.width + last
            drawn = self.model.tokens(hidden[chosen])
            request = step.tensors["request"]
            self.drafts[request, number] = drawn * (request > 0).long()
            return drawn, hidden

        return forward

    def _rotate(self, rotation: Rotation) -> None:
        drawn, hidden = rotation.output
        count, live = drawn.shape[0], hidden.shape[0]
        ids = rotation.previous.tensors["ids"][:live].view(count, self.width).roll(-1, 1)
        last = rotation.inputs.tensors["where"][:count, 1:]
        rotation.inputs.tensors["ids"][:live] = ids.scatter(1, last, drawn.unsqueeze(1)).flatten()
        rotation.inputs.tensors["hidden"][:live] = hidden

    def admit(self, row: int, prompt: list[int], truth: list[int]) -> None:
        """Prefills a request eagerly, its first token and drafts included."""
        n = len(prompt)
        table = torch.tensor([self.table(row)], dtype=torch.int32, device="npu:0")
        at = SimpleNamespace(positions=torch.arange(n, device="npu:0").unsqueeze(0), table=table, kv_lens=[n])
        hidden = self.model.target(torch.tensor(prompt, device="npu:0"), at, exact=True)
        first = int(self.model.tokens(hidden[-1:]))
        ids, drawn = [*prompt[1:], first], []
        for step in range(self.mimo.DRAFTS):
            hidden = self.model.draft(step, torch.tensor(ids, device="npu:0"), hidden, at, exact=True)
            drawn.append(int(self.model.tokens(hidden[-1:])))
            ids = [*ids[1:], drawn[-1]]
        self.tokens[row, : n + 1] = torch.tensor([*prompt, first], device="npu:0")
        self.sizes[row] = n + 1
        self.drafts[row] = torch.tensor(drawn, device="npu:0")
        self.truth[row, n : n + len(truth)] = torch.tensor(truth, device="npu:0")

    def table(self, row: int) -> list[int]:
        return [row, row + 4, row + 8]

    def launch(self, rows: list[int], prefix: list[int], force: list[int], *, eager: bool = False) -> Any:
        """Enqueues a verify step and the draft steps after it; nothing waits for them."""
        extra = self.width if self.kind == "dflash" else 0
        common = {"request": rows, "table": [self.table(row) for row in rows]}
        lens = {"kv_lens": [length + extra for length in prefix]}
        result = self.verify.run({**common, "force": force}, lens, len(rows), eager=eager)
        shown, predicted, hidden, where = result.output
        pending = self.results.fetch(shown)
        later = {**common, "ids": predicted, "hidden": hidden, "where": where}
        self.extend.run(later, {"kv_lens": [length + self.width for length in prefix]}, len(rows), eager=eager)
        return pending

    def generate(self, sizes: list[int], force: Callable[[int, int], int], *, eager: bool = False) -> list[list[int]]:
        """NEW tokens of requests 1, 2, … whose prompts have been admitted; `force(step, request)` may be -1."""
        rows = list(range(1, len(sizes) + 1))
        known = list(sizes)  # tokens, exact up to the last step that was read
        found: list[list[int]] = [[] for _ in rows]
        flight: list[Any] = []
        step = 0
        while flight or min(len(tokens) for tokens in found) < NEW:
            if min(len(tokens) for tokens in found) < NEW:
                bound = [size - 1 + self.width * len(flight) for size in known]
                flight.append(self.launch(rows, bound, [force(step, row) for row in rows], eager=eager))
                step += 1
            if len(flight) == (2 if self.overlap else 1) or min(len(tokens) for tokens in found) >= NEW:
                for at, row in enumerate(flight.pop(0).read().tolist()):
                    found[at].extend(row[: row[-1] + 1])
                    known[at] += row[-1] + 1
        self.steps = step
        return [tokens[:NEW] for tokens in found]


@pytest.fixture(scope="module")
def reference(mimo: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt length to prompt and greedy tokens."""
    plain = mimo.Plain(mimo.random_weights())
    made = {}
    for length in (*PROMPTS["band"], *PROMPTS["page"]):
        generator = torch.Generator().manual_seed(length)
        prompt = torch.randint(0, mimo.VOCAB, (length,), generator=generator).tolist()
        made[length] = (prompt, plain.greedy(prompt, NEW + 1 + 3 * mimo.WINDOW))
    return made


@pytest.fixture(scope="module", params=["exact", "overlap"])
def engine(mimo: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(mimo, overlap=request.param == "overlap")
    made.capture()
    yield made
    made.close()


def _run(engine: Engine, reference: Any, lengths: Any, force: Callable[[int, int], int], **options: Any) -> Any:
    for row, length in enumerate(lengths, 1):
        engine.admit(row, *reference[length])
    return engine.generate([length + 1 for length in lengths], force, **options)


def _expected(reference: Any, lengths: Any) -> list[list[int]]:
    return [reference[length][1][1 : NEW + 1] for length in lengths]


def test_the_model_is_sensitive(mimo: Any, reference: Any) -> None:
    """Else equal tokens would show nothing: many distinct tokens; every K and V row changes a later logit."""
    for _, tokens in reference.values():
        assert len(set(tokens)) >= len(tokens) / 4
    engine = Engine(mimo, overlap=False)
    engine.admit(1, *reference[26])
    rows, lens = {"request": [1], "table": [engine.table(1)], "force": [0]}, {"kv_lens": [26]}
    size, row = engine.sizes.clone(), engine.tokens.clone()

    def last_hidden() -> torch.Tensor:
        engine.sizes.copy_(size)
        engine.tokens.copy_(row)
        hidden: torch.Tensor = engine.verify.run(rows, lens, 1, eager=True).output[2].cpu()
        return hidden[-1].clone()

    right = last_hidden()
    assert torch.equal(right, last_hidden())
    for cache, wrong in ((engine.model.keys, -4.0), (engine.model.values, 1e15)):
        for layer in (0, 2):
            for position in range(26):
                old = cache[layer][1, position].clone()
                cache[layer][1, position] = old * wrong
                assert not torch.equal(last_hidden(), right)
                cache[layer][1, position] = old
    engine.close()


def test_drafts_after_a_prompt_are_those_of_plain_layers(mimo: Any, reference: Any, engine: Engine) -> None:
    for row, length in enumerate((127, 128, 129), 1):  # no draft of these is a close choice
        engine.admit(row, *reference[length])
        prompt, tokens = reference[length]
        assert engine.drafts[row].tolist() == engine.plain.drafts([*prompt, tokens[0]])


@pytest.mark.parametrize("lengths", [*PROMPTS.values(), (128,)], ids=str)
@pytest.mark.parametrize("accepted", ["0", "1", "2", "3", "mixed", "own"])
def test_tokens_are_those_of_greedy_decoding(
    reference: Any, engine: Engine, lengths: tuple[int, ...], accepted: str
) -> None:
    patterns = {"mixed": lambda step, row: (step * 2 + row) % 4, "own": lambda step, row: -1}
    force = patterns.get(accepted) or (lambda step, row: int(accepted))
    replays = engine.verify.counters.graph_replays
    assert _run(engine, reference, lengths, force) == _expected(reference, lengths)
    assert engine.verify.counters.graph_replays - replays == engine.steps
    if accepted.isdigit():
        late = 1 if engine.overlap else 0  # the step in flight when the last token was read
        assert engine.steps == -(-NEW // (int(accepted) + 1)) + late


def test_replayed_drafts_are_those_of_eager_steps(mimo: Any, reference: Any, engine: Engine) -> None:
    proposed = []
    for eager in (False, True):
        assert _run(engine, reference, (24, 127, 26), lambda step, row: -1, eager=eager) == _expected(
            reference, (24, 127, 26)
        )
        proposed.append(engine.drafts[:4].tolist())
    assert proposed[0] == proposed[1]


def test_dflash_gives_the_same_tokens(mimo: Any, reference: Any) -> None:
    """It publishes lengths with the block: counted twice, attention would read slots that nobody wrote."""
    engine = Engine(mimo, overlap=False, kind="dflash")
    engine.capture()
    assert _run(engine, reference, (25, 128), lambda step, row: step % 4) == _expected(reference, (25, 128))
    engine.close()


def test_bounds_without_a_mask_give_other_tokens(mimo: Any, reference: Any) -> None:
    """The naive overlap: host bounds where exact lengths belong."""
    engine = Engine(mimo, overlap=True)
    naive = engine.model.layer
    engine.model.layer = lambda *given, exact: naive(*given, exact=True)
    try:
        tokens = _run(engine, reference, (25, 128), lambda step, row: 1, eager=True)
    except RuntimeError as error:  # or the device finds the slots that nobody wrote
        assert "507015" in str(error) or "never" in str(error)
    else:
        assert tokens != _expected(reference, (25, 128))
    engine.close()


def test_nothing_waits_between_the_graphs_of_a_step(reference: Any, engine: Engine) -> None:
    """Counted: one copy to the device a load, no synchronise; the host waits for steps that it has left behind."""
    _run(engine, reference, (25, 24), lambda step, row: 3)
    events = engine.device.events
    events.clear()
    _run(engine, reference, (25, 24), lambda step, row: 3)
    loads = engine.steps * (1 + engine.mimo.DRAFTS)
    assert events.count("synchronize") == events.count("capture") == 0
    assert events.count("replay") == events.count("update") == loads
    assert events.count("copy") == loads + engine.steps  # and one result to the host
