"""One window width of the decode process: static buffers, captured graphs, and the step that they run.

A step verifies a window for every row: the last known token, then guesses. Which tokens those are, and how long each
request is, is known on the device (`request_table.py`); the host gives bounds. It chooses nothing about requests;
`decode.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import graph_runtime
import kv_planner
import numpy as np
import spec_kernels
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request_table import RequestTable
    from .setup import Setup
    from .stage import Stage


@dataclass(frozen=True)
class Row:
    """One request in a step: its row of the request table, and its pages."""

    table_row: int
    pages: np.ndarray[tuple[int], np.dtype[np.int64]]


class Launched:
    """A step that was enqueued: how it runs, and what it will have committed."""

    def __init__(self, result: graph_runtime.PendingResult, size: int) -> None:
        """The host copy of predicted tokens and correct drafts; rows of the graph."""
        self._result = result
        self.size = size

    def committed(self) -> list[list[int]]:
        """Wait for the step; the tokens that each live row gained, at least one."""
        return [row[: row[-1] + 1] for row in self._result.read().tolist()]


class Stepper:
    """Steps of `window` tokens a request; at most two of them in flight."""

    @property
    def output_rows(self) -> int | tuple[int, ...]:
        """Output rows a request."""
        return 1

    def __init__(self, setup: Setup, model: Stage, table: RequestTable, *, window: int, columns: int) -> None:
        config = setup.config
        self.model, self.table, self.window, self.columns = model, table, window, columns
        self.page_size = config.page_size
        largest = max(config.buckets)
        self.fields = [
            kv_planner.RowField("request", "int64", rows=largest),
            kv_planner.RowField("block_table", "int32", rows=largest, width=columns),
        ]
        keys = spec_kernels.paged_attention_update_keys("npu" if config.device == "npu" else "native")
        # The query length of every row is the window: what was captured stays true.
        self.update = graph_runtime.UpdateSpec(keys, constant=["actual_seq_qlen"])
        options = {} if config.device == "npu" else {"updatable": {"spec_kernels::paged_attention": tuple(keys)}}
        self.device = graph_runtime.get_device(str(setup.device), **options)
        self.runner = graph_runtime.DecodeRunner(
            device=self.device,
            forward=self._forward,
            buffers=graph_runtime.StaticBuffers(kv_planner.RowLayout(self.fields), self.device),
            buckets=graph_runtime.Buckets(config.buckets),
            update=self.update,
            output_rows_per_request=self.output_rows,
        )
        self._results = graph_runtime.HostResults(self.device, rows=largest, width=window + 1)

    @property
    def draft_replays(self) -> int:
        """Steps of draft layers replayed from graphs so far."""
        return 0

    def capture(self) -> None:
        """Capture the graphs."""
        self.runner.capture(progress=False)

    def close(self) -> None:
        """Release the graphs."""
        self.runner.close()

    def _mask(self, kv_lens: torch.Tensor) -> torch.Tensor | None:
        """What hides the tokens between a request's length and its bound."""
        return spec_kernels.exact_length_mask(
            kv_lens, q_len=self.window, columns=self.columns, page_size=self.page_size
        )

    def _slots(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pages = block_table.gather(1, positions // self.page_size).long()
        return (pages * self.page_size + positions % self.page_size).flatten()

    def _forward(self, step: graph_runtime.StepInputs) -> Any:
        return self._verify(step)[0]

    def _verify(self, step: graph_runtime.StepInputs) -> tuple[torch.Tensor, ...]:
        """What the host wants to know; predicted tokens; hidden states; starts and accepted drafts."""
        requests, block_table = step.tensors["request"], step.tensors["block_table"]
        window = self.table.window(requests, self.window)
        q_lens, mask = [self.window] * step.bs, self._mask(window.kv_lens)
        metadata = spec_kernels.PagedAttentionMetadata(block_table, q_lens, step.host["kv_lens"], mask)
        hidden = self.model.run(
            self.model.embed(window.ids.flatten()),
            positions=window.positions.flatten(),
            slots=self._slots(block_table, window.positions),
            metadata=metadata,
        )
        predicted = self.model.next_tokens(hidden).view(step.bs, self.window)
        accepted = spec_kernels.accept_chain(window.ids, predicted, num_drafts=window.num_drafts)
        correct = accepted.correct_drafts.long()
        self.table.commit(requests, window, predicted, correct)
        where = torch.stack([window.positions[:, 0], correct], 1)
        return torch.cat([predicted, correct.unsqueeze(1)], 1), predicted.flatten(), hidden, where

    def launch(self, batch: Sequence[Row], *, kv_lens: list[int], graphs: bool) -> Launched:
        """Enqueue one step.

        Args:
            batch: the live rows.
            kv_lens: a bound of each row's KV length, the window included.
            graphs: whether a captured graph may be used.
        """
        values, lists = self._values(batch), {"kv_lens": kv_lens}
        result = self.runner.run(values, lists, raw_bs=len(batch), eager=not graphs)
        return Launched(self._results.fetch(result.output), result.bucket or len(batch))

    def _values(self, batch: Sequence[Row]) -> dict[str, Any]:
        tables = np.zeros((len(batch), self.columns), np.int32)
        for at, row in enumerate(batch):
            tables[at, : len(row.pages)] = row.pages
        return {"request": np.array([row.table_row for row in batch], np.int64), "block_table": tables}
