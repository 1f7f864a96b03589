"""Prefill, then steps of verify and draft from captured graphs, for any model of this folder.

It owns the target's half: tables of tokens on the device, the verify graph, and the loop with one step or two in
flight. How a model drafts is for a subclass: `mtp_drafts.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from graph_runtime import (
    DerivedUpdate,
    HostResults,
    PendingResult,
    StaticBuffers,
    StepInputs,
    TargetVerifyRunner,
    UpdateSpec,
    get_device,
)
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

__all__ = ["NEW", "ROWS", "Engine"]

NEW, CAPACITY, ROWS = 10, 384, 4


class Engine(ABC):
    """Requests are rows of tables on the device, row 0 is padding.

    Args:
        shape: The module of the model.
        weights: Its weights.
        overlap: Launch a step before the tokens of the one before it are read; host lengths are bounds then.
        kind: The speculative kind, whose rule says who counts the window.
        buckets: Captured sizes.
        poison: Buffers that find rows which nobody wrote.
    """

    lists = True
    """Whether the verify graph takes host lengths; a model whose operators all read device lengths takes none."""

    updates = 0
    """Graphs of a step that take an update."""

    def __init__(
        self,
        shape: Any,
        weights: Any,
        *,
        overlap: bool,
        kind: Any = "eagle",
        buckets: tuple[int, ...] = (1, 2, 4),
        poison: bool = False,
    ) -> None:
        self.shape, self.overlap, self.kind, self.width = shape, overlap, kind, shape.WINDOW
        self.buckets, self.poison = buckets, poison
        self.device = RecordingDevice(get_device("npu:0"))
        self.plain = shape.Plain(weights)
        self.model = shape.OnDevice(weights)

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(*size, dtype=torch.int64, device="npu:0")

        self.tokens, self.sizes = zeros(ROWS + 1, CAPACITY), zeros(ROWS + 1)
        self.drafts, self.truth = zeros(ROWS + 1, shape.DRAFTS), zeros(ROWS + 1, CAPACITY)
        self.common = [RowField("request", "int64", rows=ROWS), RowField("table", "int32", rows=ROWS, width=3)]
        layout = RowLayout([*self.common, RowField("force", "int64", rows=ROWS, fill=-1)])
        self.verify = TargetVerifyRunner(
            window=self.width,
            kind=kind,
            device=self.device,
            forward=self._verify,
            buffers=StaticBuffers(layout, self.device, poison=poison),
            buckets=list(buckets),
            output_rows_per_request=(1, self.width, self.width, 1),
            update=DerivedUpdate() if self.lists else UpdateSpec(),
        )
        self.results = HostResults(self.device, rows=ROWS, width=self.width + 1)
        self.steps = 0

    @property
    @abstractmethod
    def drafters(self) -> tuple[Any, ...]:
        """The runners of the drafts."""

    @abstractmethod
    def admit_drafts(self, ids: list[int], hidden: torch.Tensor, at: SimpleNamespace) -> list[int]:
        """The first drafts of a request, eagerly; the draft layers' KV of its prompt with them.

        Args:
            ids: The prompt without its first token, then the first new token.
            hidden: The target's. Shape: [prompt, hidden].
            at: Where the prompt's rows are.
        """

    @abstractmethod
    def run_drafts(
        self, common: dict[str, Any], result: Any, prefix: list[int], pending: PendingResult, eager: bool
    ) -> None:
        """Enqueues the draft steps after a verify step, whose output is `result`."""

    def capture(self) -> None:
        for runner in (self.verify, *self.drafters):
            report = runner.capture(progress=False)
            assert report.captured == self.buckets, report
        self.device.events.clear()

    def close(self) -> None:
        for runner in (self.verify, *self.drafters):
            runner.close()

    def at(self, step: StepInputs, start: torch.Tensor, width: int, kv: str = "kv_lens") -> SimpleNamespace:
        positions = start.unsqueeze(1) + torch.arange(width, device=start.device)
        live = (step.tensors["request"] > 0).long()
        return SimpleNamespace(positions=positions, table=step.tensors["table"], kv_lens=step.host.get(kv), live=live)

    def _verify(self, step: StepInputs) -> tuple[torch.Tensor, ...]:
        request, force = step.tensors["request"], step.tensors["force"].unsqueeze(1)
        size = self.sizes[request]
        start = (size - 1).clamp(min=0)
        at = self.at(step, start, self.width)
        ahead = torch.arange(self.width - 1, device=size.device)
        right = self.truth[request.unsqueeze(1), size.unsqueeze(1) + ahead]
        forced = torch.where(ahead < force, right, (right + 1) % self.shape.VOCAB)
        drafts = torch.where(force < 0, self.drafts[request], forced)
        ids = torch.cat([self.tokens[request].gather(1, start.unsqueeze(1)), drafts], 1)
        hidden = self.model.target(ids, at, exact=not self.overlap)
        predicted = self.model.tokens(hidden).view(step.bs, self.width)
        correct = (drafts == predicted[:, :-1]).long().cumprod(1).sum(1)
        self.tokens[request.unsqueeze(1), at.positions + 1] = predicted * at.live.unsqueeze(1)
        self.sizes[request] = (size + correct + 1) * at.live
        shown = torch.cat([predicted, correct.unsqueeze(1)], 1)
        return shown, predicted.flatten(), hidden, torch.stack([start, correct], 1)

    def admit(self, row: int, prompt: list[int], truth: list[int]) -> None:
        """Prefills a request eagerly, its first token and drafts included."""
        n = len(prompt)
        at = SimpleNamespace(
            positions=torch.arange(n, device="npu:0").unsqueeze(0),
            table=torch.tensor([self.table(row)], dtype=torch.int32, device="npu:0"),
            kv_lens=[n],
            live=torch.ones(1, dtype=torch.int64, device="npu:0"),
        )
        hidden = self.model.target(torch.tensor(prompt, device="npu:0"), at, exact=self.shape.PREFILL_EXACT)
        first = int(self.model.tokens(hidden[-1:]))
        drawn = self.admit_drafts([*prompt[1:], first], hidden, at)
        self.tokens[row, : n + 1] = torch.tensor([*prompt, first], device="npu:0")
        self.sizes[row] = n + 1
        self.drafts[row] = torch.tensor(drawn, device="npu:0")
        self.truth[row, n : n + len(truth)] = torch.tensor(truth, device="npu:0")

    def table(self, row: int) -> list[int]:
        return [row, row + 4, row + 8]

    def launch(self, rows: list[int], prefix: list[int], force: list[int], *, eager: bool = False) -> PendingResult:
        """Enqueues a verify step and the draft steps after it; with overlap nothing waits for them."""
        extra = self.width if self.kind == "dflash" else 0
        common = {"request": rows, "table": [self.table(row) for row in rows]}
        lens = {"kv_lens": [length + extra for length in prefix]} if self.lists else {}
        result = self.verify.run({**common, "force": force}, lens, len(rows), eager=eager)
        pending = self.results.fetch(result.output[0])
        self.run_drafts(common, result.output, prefix, pending, eager)
        return pending

    def generate(self, sizes: list[int], force: Callable[[int, int], int], *, eager: bool = False) -> list[list[int]]:
        """NEW tokens of requests 1, 2, … whose prompts have been admitted; `force(step, request)` may be -1."""
        rows = list(range(1, len(sizes) + 1))
        known = list(sizes)  # tokens, exact up to the last step that was read
        found: list[list[int]] = [[] for _ in rows]
        flight: list[PendingResult] = []
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
