"""Multi-token prediction on the emulated NPU: verify and draft graphs give the tokens of plain greedy decoding.

Lengths and tokens are known on the device; the host gives exact lengths, or, with overlap, upper bounds or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mtp_deepseek
import mtp_mimo
import pytest
import torch
from mtp_drafts import LayeredEngine, RecurrentEngine
from mtp_engine import NEW, Engine

LENGTHS = ["edge", "page", "one"]
ENGINES: dict[str, Callable[..., Engine]] = {
    "mimo-exact": lambda **options: LayeredEngine(overlap=False, **options),
    "mimo-overlap": lambda **options: LayeredEngine(overlap=True, **options),
    "deepseek-exact": lambda **options: RecurrentEngine(overlap=False, **options),
    "deepseek-overlap": lambda **options: RecurrentEngine(overlap=True, **options),
    "deepseek-indexed-draft": lambda **options: RecurrentEngine(overlap=False, indexed_draft=True, **options),
}


class Reference:
    """Prompts of a model, and what plain greedy decoding makes of them."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape
        self._plain = shape.Plain(shape.random_weights())
        self._made: dict[int, tuple[list[int], list[int]]] = {}

    def lengths(self, name: str) -> tuple[int, ...]:
        edge, page = self.shape.EDGES.values()
        lengths: dict[str, tuple[int, ...]] = {"edge": edge, "page": page, "one": page[-2:-1]}
        return lengths[name]

    def __getitem__(self, length: int) -> tuple[list[int], list[int]]:
        if length not in self._made:
            generator = torch.Generator().manual_seed(length)
            prompt = torch.randint(0, self.shape.VOCAB, (length,), generator=generator).tolist()
            self._made[length] = (prompt, self._plain.greedy(prompt, NEW + 1 + 3 * self.shape.WINDOW))
        return self._made[length]

    def expected(self, lengths: tuple[int, ...]) -> list[list[int]]:
        return [self[length][1][1 : NEW + 1] for length in lengths]


REFERENCES = {mtp_mimo: Reference(mtp_mimo), mtp_deepseek: Reference(mtp_deepseek)}


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = ENGINES[request.param]()
    made.capture()
    yield made
    made.close()


def run(engine: Engine, lengths: tuple[int, ...], force: Callable[[int, int], int], **options: Any) -> list[list[int]]:
    for row, length in enumerate(lengths, 1):
        engine.admit(row, *REFERENCES[engine.shape][length])
    return engine.generate([length + 1 for length in lengths], force, **options)


def test_drafts_after_a_prompt_are_those_of_plain_layers(engine: Engine) -> None:
    reference = REFERENCES[engine.shape]
    for row, length in enumerate((127, 128, 129), 1):  # no draft of these is a close choice
        prompt, tokens = reference[length]
        engine.admit(row, prompt, tokens)
        assert engine.drafts[row].tolist() == engine.plain.drafts([*prompt, tokens[0]])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("accepted", ["0", "1", "2", "3", "mixed", "own"])
def test_tokens_are_those_of_greedy_decoding(engine: Engine, lengths: str, accepted: str) -> None:
    """Four requests and one: batches of a full bucket; those between are the next test's."""
    patterns = {"mixed": lambda step, row: (step * 2 + row) % 4, "own": lambda step, row: -1}
    force = patterns.get(accepted) or (lambda step, row: int(accepted))
    reference = REFERENCES[engine.shape]
    prompts = reference.lengths(lengths)
    replays = engine.verify.counters.graph_replays
    assert run(engine, prompts, force) == reference.expected(prompts)
    assert engine.verify.counters.graph_replays - replays == engine.steps
    if accepted.isdigit():
        late = 1 if engine.overlap else 0  # the step in flight when the last token was read
        assert engine.steps == -(-NEW // (int(accepted) + 1)) + late


@pytest.mark.parametrize("rows", [2, 3])
def test_padded_and_middle_buckets_give_them_too(engine: Engine, rows: int) -> None:
    reference = REFERENCES[engine.shape]
    prompts = reference.lengths("edge")[:rows]
    run(engine, reference.lengths("page"), lambda step, row: 3)  # what padded rows must not see
    assert run(engine, prompts, lambda step, row: (step + row) % 4) == reference.expected(prompts)


def test_replayed_drafts_are_those_of_eager_steps(engine: Engine) -> None:
    reference = REFERENCES[engine.shape]
    prompts = (reference.lengths("edge")[1], 127, reference.lengths("edge")[3])
    proposed = []
    for eager in (False, True):
        assert run(engine, prompts, lambda step, row: -1, eager=eager) == reference.expected(prompts)
        proposed.append(engine.drafts[:4].tolist())
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize("name", [name for name in ENGINES if "overlap" not in name])
def test_dflash_gives_the_same_tokens(name: str) -> None:
    """It publishes lengths with the block: counted twice, attention would read slots that nobody wrote."""
    engine = ENGINES[name](kind="dflash")
    engine.capture()
    reference = REFERENCES[engine.shape]
    prompts = (reference.lengths("edge")[2], 128)
    assert run(engine, prompts, lambda step, row: step % 4) == reference.expected(prompts)
    engine.close()


def test_bounds_without_a_mask_give_other_tokens() -> None:
    """The naive overlap: host bounds where exact lengths belong."""
    engine = LayeredEngine(overlap=True)
    naive = engine.model.layer
    engine.model.layer = lambda *given, exact: naive(*given, exact=True)
    try:
        tokens = run(engine, (25, 128), lambda step, row: 1, eager=True)
    except RuntimeError as error:  # or the device finds the slots that nobody wrote
        assert "507015" in str(error) or "never" in str(error)
    else:
        assert tokens != REFERENCES[mtp_mimo].expected((25, 128))
    engine.close()


def test_nothing_waits_between_the_graphs_of_a_step(engine: Engine) -> None:
    """Counted: one copy to the device a load, no synchronise; the host waits for steps that it has left behind."""
    lengths = REFERENCES[engine.shape].lengths("edge")[:2]
    run(engine, lengths, lambda step, row: 3)
    events = engine.device.events
    events.clear()
    run(engine, lengths, lambda step, row: 3)
    loads = engine.steps * (1 + len(engine.drafters))
    assert events.count("synchronize") == events.count("capture") == 0
    assert events.count("replay") == loads
    assert events.count("update") == engine.steps * engine.updates
    assert events.count("copy") == loads + engine.steps  # and one result to the host
