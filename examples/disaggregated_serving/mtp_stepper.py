"""Steps of a model with draft layers: verify their drafts, then run every layer over the window for the next ones.

Both halves are replayed from captured graphs, and nothing waits in between: tokens and hidden states pass from one to
the other on the device. The host knows the lengths exactly, for sinks and windows take no mask on this hardware. It
chooses nothing about requests; `decode.py` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import graph_runtime
import kv_planner
import spec_kernels
import torch

from .stepper import Launched, Stepper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .request_table import RequestTable
    from .setup import Setup
    from .stage import Stage
    from .stepper import Row


class MtpStepper(Stepper):
    """Steps of `window` tokens a request; with one token nothing is drafted."""

    def __init__(self, setup: Setup, model: Stage, table: RequestTable, *, window: int, columns: int) -> None:
        super().__init__(setup, model, table, window=window, columns=columns)
        largest = max(setup.config.buckets)
        tokens = largest * window
        layout = kv_planner.RowLayout(
            [
                *self.fields,
                kv_planner.RowField("ids", "int64", rows=tokens),
                kv_planner.RowField("hidden", "float32", rows=tokens, width=setup.shape.hidden),
                kv_planner.RowField("where", "int64", rows=largest, width=2),
            ]
        )
        self.extend = None
        if window > 1:
            self.extend = graph_runtime.MultiStepDraftExtendRunner(
                device=self.device,
                forwards=[self._draft(step) for step in range(setup.shape.draft_layers)],
                layout=layout,
                buckets=graph_runtime.Buckets(setup.config.buckets),
                window=window,
                rotate=self._rotate,
                rotated=["ids", "hidden"],
                token_fields=["ids", "hidden"],
                update=self.update,
                output_rows_per_request=(1, window),
            )

    @property
    def output_rows(self) -> int | tuple[int, ...]:
        """Output rows a request."""
        return 1, self.window, self.window, 1

    @property
    def draft_replays(self) -> int:
        """Steps of draft layers replayed from graphs so far."""
        return sum(runner.counters.graph_replays for runner in self.extend.steps) if self.extend else 0

    def capture(self) -> None:
        """Capture the graphs of both halves."""
        super().capture()
        if self.extend:
            self.extend.capture(progress=False)

    def close(self) -> None:
        """Release them."""
        super().close()
        if self.extend:
            self.extend.close()

    def launch(self, batch: Sequence[Row], *, kv_lens: list[int], graphs: bool) -> Launched:
        """Enqueue one step; see `Stepper.launch`. The lengths are exact."""
        values, lists = self._values(batch), {"kv_lens": kv_lens}
        result = self.runner.run(values, lists, raw_bs=len(batch), eager=not graphs)
        shown, predicted, hidden, where = result.output
        pending = self._results.fetch(shown)
        if self.extend:
            values.update(ids=predicted, hidden=hidden, where=where)
            self.extend.run(values, lists, raw_bs=len(batch), eager=not graphs)
        return Launched(pending, result.bucket or len(batch))

    def _mask(self, kv_lens: torch.Tensor) -> torch.Tensor | None:
        return None

    def _forward(self, step: graph_runtime.StepInputs) -> Any:
        return self._verify(step)

    def _draft(self, number: int) -> Callable[[graph_runtime.StepInputs], tuple[torch.Tensor, torch.Tensor]]:
        def forward(step: graph_runtime.StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
            requests, table = step.tensors["request"], step.tensors["block_table"]
            start, last = step.tensors["where"].unbind(1)
            positions = start.unsqueeze(1) + torch.arange(self.window, device=start.device)
            hidden = self.model.draft(
                number,
                step.tensors["ids"],
                step.tensors["hidden"],
                positions=positions.flatten(),
                slots=self._slots(table, positions),
                metadata=spec_kernels.PagedAttentionMetadata(
                    table, [self.window] * step.bs, step.host["kv_lens"], None
                ),
            )
            drawn = self.model.next_tokens(hidden[torch.arange(step.bs, device=start.device) * self.window + last])
            self.table.drafts[requests, number] = drawn * (requests > 0)
            return drawn, hidden

        return forward

    def _rotate(self, rotation: graph_runtime.Rotation) -> None:
        """Give the next layer each row's next token: the drawn one follows the last accepted row."""
        drawn, hidden = rotation.output
        requests, tokens = drawn.shape[0], hidden.shape[0]
        ids = rotation.previous.tensors["ids"][:tokens].view(requests, self.window).roll(-1, 1)
        last = rotation.inputs.tensors["where"][:requests, 1:]
        rotation.inputs.tensors["ids"][:tokens] = ids.scatter(1, last, drawn.unsqueeze(1)).flatten()
        rotation.inputs.tensors["hidden"][:tokens] = hidden
