"""A small decoder with a paged cache, replayed: equal to a plain loop for every order of batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner import RowField, RowLayout

PAGE, PAGES, DIM, VOCAB, LAYERS = 4, 13, 8, 31, 2


class Decoder:
    """Two layers of attention over caches that each step extends by one token a request."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.5

        self.embedding = weight(VOCAB, DIM)
        self.layers = [[weight(DIM, DIM) for _ in range(3)] + [weight(DIM + 2, DIM)] for _ in range(LAYERS)]
        self.value_width = [weight(DIM, DIM + 2) for _ in range(LAYERS)]
        self.head = weight(DIM, VOCAB)
        self.keys = torch.zeros(LAYERS, PAGES, PAGE, DIM)
        self.values = torch.zeros(LAYERS, PAGES, PAGE, DIM + 2)

    def forward(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [bs, VOCAB] and hidden states [bs, DIM]."""
        x = self.embedding[step.tensors["ids"]] + step.tensors["positions"][:, None] * 0.01
        slots = step.tensors["slots"]
        for index, (q, k, _, out) in enumerate(self.layers):
            self.keys[index].view(-1, DIM).index_copy_(0, slots, x @ k)
            self.values[index].view(-1, DIM + 2).index_copy_(0, slots, x @ self.value_width[index])
            attended = torch.ops.graph_test.attend(
                x @ q,
                self.keys[index],
                self.values[index],
                step.tensors["table"],
                [1] * step.bs,
                step.host["kv_lens"],
            )
            x = torch.tanh(x + attended @ out)
        return x @ self.head, x

    def plain(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the last of a sequence of tokens, computed from the whole sequence without any cache."""
        x = self.embedding[tokens] + torch.arange(len(tokens))[:, None] * 0.01
        for index, (q, k, _, out) in enumerate(self.layers):
            scores = (x @ q) @ (x @ k).t()
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            x = torch.tanh(x + scores.softmax(-1) @ (x @ self.value_width[index]) @ out)
        return x[-1] @ self.head


def _layout() -> RowLayout:
    return RowLayout(
        [
            RowField("ids", "int64", rows=4),
            RowField("positions", "int64", rows=4),
            RowField("slots", "int64", rows=4),
            RowField("table", "int32", rows=4, width=3),
        ]
    )


def _make(decoder: Decoder) -> DecodeRunner:
    device = get_device("cpu", updatable={"graph_test::attend": ("q_lens", "kv_lens")})
    return DecodeRunner(
        device=device,
        forward=decoder.forward,
        buffers=StaticBuffers(_layout(), device),
        buckets=Buckets([1, 2, 4]),
        update=UpdateSpec({"kv_lens": "kv_lens"}, constant=["q_lens"]),
    )


class Request:
    """Tokens so far, and the three pages of a request (in no particular order)."""

    def __init__(self, index: int) -> None:
        self.tokens: list[int] = [(index * 7 + 5) % VOCAB]
        self.pages = [1 + (index + 4 * part * 5) % 12 for part in range(3)]

    def step_values(self) -> dict[str, int | list[int]]:
        position = len(self.tokens) - 1
        slot = self.pages[position // PAGE] * PAGE + position % PAGE
        return {"ids": self.tokens[-1], "positions": position, "slots": slot, "table": self.pages}


def _step(runner: DecodeRunner, requests: list[Request], **keywords: Any) -> tuple[Any, list[str]]:
    rows = [request.step_values() for request in requests]
    values = {name: [row[name] for row in rows] for name in ("ids", "positions", "slots", "table")}
    result = runner.run(values, {"kv_lens": [len(request.tokens) for request in requests]}, len(requests), **keywords)
    return result, [result.mode]


def test_pages_of_the_requests_do_not_meet() -> None:
    pages = [page for index in range(4) for page in Request(index).pages]
    assert sorted(pages) == list(range(1, 13))


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.booleans()), min_size=1, max_size=11))
def test_replay_equals_a_plain_forward_for_every_order_of_batches(steps: list[tuple[set[int], bool]]) -> None:
    decoder = Decoder()
    runner = _make(decoder)
    runner.capture()
    requests = [Request(index) for index in range(4)]
    for chosen, eager in steps:
        batch = [requests[index] for index in sorted(chosen, reverse=eager)]
        result, _ = _step(runner, batch, eager=eager)
        logits, hidden = result.output
        assert result.mode == ("eager" if eager else "graph")
        assert logits.shape == (len(batch), VOCAB) and hidden.shape == (len(batch), DIM)
        for row, request in enumerate(batch):
            torch.testing.assert_close(logits[row], decoder.plain(request.tokens), rtol=1e-4, atol=1e-4)
            request.tokens.append(int(logits[row].argmax()))
    runner.close()


def test_the_decoder_tells_its_cache_rows_apart() -> None:
    """The comparison above could not pass on nothing: every K and V row reaches the logits."""
    decoder = Decoder()
    runner = _make(decoder)
    runner.capture()
    request = Request(2)
    for _ in range(9):
        result, _ = _step(runner, [request])
        request.tokens.append(int(result.output[0][0].argmax()))
    clean = _step(runner, [request])[0].output[0].clone()
    for cache in (decoder.keys, decoder.values):
        for position in range(9):
            row = cache[0, request.pages[position // PAGE], position % PAGE]
            saved = row.clone()
            row.add_(3.0)
            assert (_step(runner, [request])[0].output[0] - clean).abs().max() > 1e-4
            row.copy_(saved)
    torch.testing.assert_close(_step(runner, [request])[0].output[0], clean)
    runner.close()


@pytest.mark.parametrize("history", [[], [4], [4, 2], [4, 3, 2, 4], [0, 4, 0]])
def test_a_step_does_not_depend_on_the_steps_before(history: list[int]) -> None:
    """E01: 4, then 2, then 1: padded rows write to the reserved page and are read by nobody."""
    outputs: list[torch.Tensor] = []
    caches: list[torch.Tensor] = []
    for before in ([], history):
        decoder = Decoder()
        runner = _make(decoder)
        runner.capture()
        requests = [Request(index) for index in range(4)]
        for n in before:
            _step(runner, requests[:n])
        caches.append(decoder.keys[:, 1:].clone())
        for n in (2, 1):
            result, _ = _step(runner, requests[:n])
            outputs.append(result.output[0].clone())
        runner.close()
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    if history:
        written = {request.pages[0] for request in [Request(index) for index in range(max(history))]}
        untouched = [page - 1 for page in range(1, PAGES) if page not in written]
        assert not caches[1][:, untouched].any()


def test_every_replay_uses_the_lengths_of_its_own_step() -> None:
    """E13, E19: lengths of 100 steps are never those of the capture, nor of another step."""
    decoder = Decoder()
    runner = _make(decoder)
    runner.capture()
    request = Request(1)
    for _ in range(11):
        result, _ = _step(runner, [request])
        torch.testing.assert_close(result.output[0][0], decoder.plain(request.tokens), rtol=1e-4, atol=1e-4)
        request.tokens.append(int(result.output[0][0].argmax()))
    assert runner.counters.graph_replays == 11 and not runner.counters.eager_steps
    runner.close()
