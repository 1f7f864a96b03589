"""The models of the multi-token prediction tests are sensitive; else equal tokens would show nothing."""

from __future__ import annotations

from typing import Any

import mtp_deepseek
import mtp_mimo
import pytest
import torch
from mtp_drafts import LayeredEngine, RecurrentEngine
from mtp_engine import Engine

LENGTH = 26


def prompt(shape: Any, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    drawn: list[int] = torch.randint(0, shape.VOCAB, (length,), generator=generator).tolist()
    return drawn


class Probe:
    """One verify step after a prompt, again and again from the same state."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        tokens = prompt(engine.shape)
        engine.admit(1, tokens, engine.plain.greedy(tokens, 2 * engine.width))
        self.size, self.tokens = engine.sizes.clone(), engine.tokens.clone()
        self.right = self.logits()
        assert torch.equal(self.right, self.logits())

    def logits(self) -> torch.Tensor:
        engine = self.engine
        engine.sizes.copy_(self.size)
        engine.tokens.copy_(self.tokens)
        values = {"request": [1], "table": [engine.table(1)], "force": [engine.width - 1]}
        hidden = engine.verify.run(values, {"kv_lens": [LENGTH]}, 1, eager=True).output[2]
        logits: torch.Tensor = engine.shape.norm(hidden) @ engine.model.weights.head
        return logits.cpu()

    def changes(self, cache: torch.Tensor, position: int, *wrong: torch.Tensor) -> bool:
        """Whether one of the wrong rows in place of the right one changes a logit."""
        row = cache[1, position]
        old = row.clone()
        changed = False
        for other in wrong:
            row.copy_(other)
            changed = changed or not torch.equal(self.logits(), self.right)
        row.copy_(old)
        return changed

    def scaled(self, cache: torch.Tensor, position: int, factor: float) -> bool:
        return self.changes(cache, position, cache[1, position] * factor)


@pytest.mark.parametrize("shape", [mtp_mimo, mtp_deepseek])
@pytest.mark.parametrize("length", [LENGTH, 128])
def test_greedy_decoding_gives_many_distinct_tokens(shape: Any, length: int) -> None:
    tokens = shape.Plain(shape.random_weights()).greedy(prompt(shape, length), 24)
    assert len(set(tokens)) >= len(tokens) / 4


def test_every_key_and_value_row_of_mimo_changes_a_later_logit() -> None:
    engine = LayeredEngine(overlap=False)
    probe = Probe(engine)
    for cache, wrong in ((engine.model.keys, -4.0), (engine.model.values, 1e15)):
        for layer in (0, 2):
            assert all(probe.scaled(cache[layer], position, wrong) for position in range(LENGTH))
    engine.close()


def test_every_row_of_deepseek_that_is_attended_to_changes_a_later_logit() -> None:
    """All rows of the dense layer; of a sparse one those that its indexer picks, and no others."""
    engine = RecurrentEngine(overlap=False)
    model = engine.model
    model.chosen = {}
    probe = Probe(engine)
    chosen = {layer: set(picked.flatten().tolist()) for layer, picked in model.chosen.items()}
    assert len(chosen) == 2
    for layer, indexed in enumerate(mtp_deepseek.TARGET_INDEXED):
        seen = chosen[layer] & set(range(LENGTH)) if indexed else set(range(LENGTH))
        assert not indexed or 12 <= len(seen) < LENGTH
        for cache, wrong in ((model.latents[layer], -4.0), (model.ropes[layer], -4.0)):
            assert {position for position in range(LENGTH) if probe.scaled(cache, position, wrong)} == seen
    engine.close()


def test_every_index_key_of_deepseek_changes_what_is_picked() -> None:
    """A row that is picked is hidden by turning it round, another one brought in by the key that scores best."""
    engine = RecurrentEngine(overlap=False)
    engine.model.chosen = {}
    probe = Probe(engine)
    for layer in (0, 2):
        cache = engine.model.indices[layer]
        best = cache[1, int(engine.model.chosen[layer][0, 0, 0, 0])] * 64
        for position in range(LENGTH):
            own = cache[1, position]
            assert probe.changes(cache, position, own * 64, own * -64, best, best * -1), (layer, position)
    engine.close()
