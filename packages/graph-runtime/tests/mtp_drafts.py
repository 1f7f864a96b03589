"""Two ways to draft: a layer a step over the whole window, or one layer that runs again on its own output.

It owns the draft runners and what lies between them; `mtp_engine.py` owns the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mtp_deepseek
import mtp_mimo
import torch
from graph_runtime import (
    DerivedUpdate,
    DraftDecodeRunner,
    DraftExtendRunner,
    MultiStepDraftExtendRunner,
    PendingResult,
    Rotation,
    StaticBuffers,
    StepInputs,
    UpdateSpec,
    step_list,
)
from kv_planner import RowField, RowLayout
from mtp_engine import ROWS, Engine

__all__ = ["LayeredEngine", "RecurrentEngine"]


def _window_layout(engine: Engine) -> RowLayout:
    return RowLayout(
        [
            *engine.common,
            RowField("ids", "int64", rows=ROWS * engine.width),
            RowField("hidden", "float32", rows=ROWS * engine.width, width=engine.shape.HIDDEN),
            RowField("where", "int64", rows=ROWS, width=2),
        ]
    )


class LayeredEngine(Engine):
    """MiMo-V2-Flash: three draft layers, each extended by the window, tokens rotated in between."""

    updates = 1 + mtp_mimo.DRAFTS

    def __init__(self, **options: Any) -> None:
        super().__init__(mtp_mimo, mtp_mimo.random_weights(), **options)
        self.extend = MultiStepDraftExtendRunner(
            device=self.device,
            forwards=[self._draft(step) for step in range(self.shape.DRAFTS)],
            layout=_window_layout(self),
            buckets=list(self.buckets),
            window=self.width,
            rotate=self._rotate,
            rotated=["ids", "hidden"],
            token_fields=["ids", "hidden"],
            output_rows_per_request=(1, self.width),
            poison=self.poison,
        )

    @property
    def drafters(self) -> tuple[Any, ...]:
        return self.extend.steps

    def close(self) -> None:
        super().close()
        self.extend.close()

    def admit_drafts(self, ids: list[int], hidden: torch.Tensor, at: SimpleNamespace) -> list[int]:
        drawn = []
        for step in range(self.shape.DRAFTS):
            hidden = self.model.draft(step, torch.tensor(ids, device="npu:0"), hidden, at, exact=True)
            drawn.append(int(self.model.tokens(hidden[-1:])))
            ids = [*ids[1:], drawn[-1]]
        return drawn

    def run_drafts(
        self, common: dict[str, Any], result: Any, prefix: list[int], pending: PendingResult, eager: bool
    ) -> None:
        _, predicted, hidden, where = result
        values = {**common, "ids": predicted, "hidden": hidden, "where": where}
        self.extend.run(values, {"kv_lens": [n + self.width for n in prefix]}, len(prefix), eager=eager)

    def _draft(self, number: int) -> Callable[[StepInputs], tuple[torch.Tensor, torch.Tensor]]:
        def forward(step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
            start, last = step.tensors["where"].unbind(1)
            ids, at = step.tensors["ids"], self.at(step, start, self.width)
            hidden = self.model.draft(number, ids, step.tensors["hidden"], at, exact=not self.overlap)
            drawn = self.model.tokens(hidden[torch.arange(step.bs, device=ids.device) * self.width + last])
            self.drafts[step.tensors["request"], number] = drawn * at.live
            return drawn, hidden

        return forward

    def _rotate(self, rotation: Rotation) -> None:
        drawn, hidden = rotation.output
        count, live = drawn.shape[0], hidden.shape[0]
        ids = rotation.previous.tensors["ids"][:live].view(count, self.width).roll(-1, 1)
        last = rotation.inputs.tensors["where"][:count, 1:]
        rotation.inputs.tensors["ids"][:live] = ids.scatter(1, last, drawn.unsqueeze(1)).flatten()
        rotation.inputs.tensors["hidden"][:live] = hidden


class RecurrentEngine(Engine):
    """DeepSeek: the draft layer is extended by the window, then decodes from its own hidden state, steps in one graph.

    With exact lengths the decode graph has an update an operator, and the host reads what was accepted first; with
    overlap, or an indexer on the draft layer, its operators read device lengths and it has none.
    """

    def __init__(self, *, overlap: bool, indexed_draft: bool = False, **options: Any) -> None:
        self.lists = not overlap
        self.listed_draft = not overlap and not indexed_draft
        self.updates = self.lists + 2 * self.listed_draft
        weights = mtp_deepseek.random_weights(indexed_draft=indexed_draft)
        super().__init__(mtp_deepseek, weights, overlap=overlap, **options)
        self.extend = DraftExtendRunner(
            window=self.width,
            token_fields=["ids", "hidden"],
            device=self.device,
            forward=self._extend,
            buffers=StaticBuffers(_window_layout(self), self.device, poison=self.poison),
            buckets=list(self.buckets),
            output_rows_per_request=1,
            update=DerivedUpdate() if self.listed_draft else UpdateSpec(),
        )
        layout = RowLayout(
            [
                *self.common,
                RowField("ids", "int64", rows=ROWS),
                RowField("hidden", "float32", rows=ROWS, width=self.shape.HIDDEN),
                RowField("where", "int64", rows=ROWS, width=2),
            ]
        )
        self.decode = DraftDecodeRunner(
            steps=self.shape.DRAFTS - 1,
            ops_per_step=1 if self.listed_draft else 0,
            device=self.device,
            forward=self._decode,
            buffers=StaticBuffers(layout, self.device, poison=self.poison),
            buckets=list(self.buckets),
        )

    @property
    def drafters(self) -> tuple[Any, ...]:
        return self.extend, self.decode

    def admit_drafts(self, ids: list[int], hidden: torch.Tensor, at: SimpleNamespace) -> list[int]:
        last = self.model.draft(torch.tensor(ids, device="npu:0"), hidden, at, exact=False)[-1:]
        drawn = [int(self.model.tokens(last))]
        while len(drawn) < self.shape.DRAFTS:
            at.positions = at.positions[:, -1:] + 1
            last = self.model.draft(torch.tensor(drawn[-1:], device="npu:0"), last, at, exact=False)
            drawn.append(int(self.model.tokens(last)))
        return drawn

    def run_drafts(
        self, common: dict[str, Any], result: Any, prefix: list[int], pending: PendingResult, eager: bool
    ) -> None:
        _, predicted, hidden, where = result
        rows = len(prefix)
        lens = {"kv_lens": [length + self.width for length in prefix]} if self.listed_draft else {}
        values = {**common, "ids": predicted, "hidden": hidden, "where": where}
        drawn, last = self.extend.run(values, lens, rows, eager=eager).output
        if self.listed_draft:  # the draft's KV, exactly: what was accepted, and the token after the prefix
            lens = {"kv_lens": [n + row[-1] + 1 for n, row in zip(prefix, pending.read().tolist(), strict=True)]}
        self.decode.run({**common, "ids": drawn, "hidden": last, "where": where}, lens, rows, eager=eager)

    def _extend(self, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        start, last = step.tensors["where"].unbind(1)
        ids, at = step.tensors["ids"], self.at(step, start, self.width)
        hidden = self.model.draft(ids, step.tensors["hidden"], at, exact=not self.overlap)
        chosen = hidden[torch.arange(step.bs, device=ids.device) * self.width + last]
        drawn = self.model.tokens(chosen)
        self.drafts[step.tensors["request"], 0] = drawn * at.live
        return drawn, chosen

    def _decode(self, step: StepInputs) -> torch.Tensor:
        start, last = step.tensors["where"].unbind(1)
        drawn, hidden = step.tensors["ids"], step.tensors["hidden"]
        found = []
        for number in range(self.shape.DRAFTS - 1):
            at = self.at(
                step, (start + last + 1 + number) * (step.tensors["request"] > 0), 1, step_list("kv_lens", number)
            )
            hidden = self.model.draft(drawn, hidden, at, exact=not self.overlap)
            drawn = self.model.tokens(hidden)
            self.drafts[step.tensors["request"], number + 1] = drawn * at.live
            found.append(drawn)
        return torch.stack(found, 1)
