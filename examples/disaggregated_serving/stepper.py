"""One window width of the decode process: static buffers, captured graphs, and the step that they run.

A step verifies a window for every row: one committed token, then guesses. It chooses nothing about requests;
`decode.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import graph_runtime
import kv_planner
import numpy as np
import spec_kernels
from kv_pool import slots_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .setup import Setup
    from .stage import Stage

PER_TOKEN = ("input_ids", "positions", "slots")


@dataclass(frozen=True)
class Row:
    """One request in a step.

    Attributes:
        tokens: the committed token whose KV is not in the pool yet, then the drafts.
        start: position of the first of them.
        pages: the request's pages.
    """

    tokens: Sequence[int]
    start: int
    pages: np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Stepped:
    """What a step gave: committed tokens a row, and how it ran."""

    committed: list[list[int]]
    size: int


class Stepper:
    """Steps of `window` tokens a request."""

    def __init__(self, setup: Setup, model: Stage, *, window: int, table_width: int) -> None:
        config = setup.config
        self.model, self.window, self.table_width = model, window, table_width
        self.page_size = config.page_size
        largest = max(config.buckets)
        rows = kv_planner.RowLayout(
            [
                *(kv_planner.RowField(name, "int64", rows=largest * window) for name in PER_TOKEN),
                kv_planner.RowField("num_drafts", "int64", rows=largest),
                kv_planner.RowField("block_table", "int32", rows=largest, width=table_width),
            ]
        )
        keys = spec_kernels.paged_attention_update_keys("npu" if config.device == "npu" else "native")
        options = {} if config.device == "npu" else {"updatable": {"spec_kernels::paged_attention": tuple(keys)}}
        device = graph_runtime.get_device(str(setup.device), **options)
        self.runner = graph_runtime.DecodeRunner(
            device=device,
            forward=self._forward,
            buffers=graph_runtime.StaticBuffers(rows, device),
            buckets=graph_runtime.Buckets(config.buckets),
            # The query length of every row is the window: what was captured stays true.
            update=graph_runtime.UpdateSpec(keys, constant=["actual_seq_qlen"]),
            rows_per_request=dict.fromkeys(PER_TOKEN, window),
            output_rows_per_request=(window, 1),
        )

    def _forward(self, step: graph_runtime.StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = step.tensors
        metadata = spec_kernels.PagedAttentionMetadata(
            block_table=tensors["block_table"], q_lens=[self.window] * step.bs, kv_lens=step.host["kv_lens"]
        )
        hidden = self.model.run(
            self.model.embed(tensors["input_ids"]),
            positions=tensors["positions"],
            slots=tensors["slots"],
            metadata=metadata,
        )
        predicted = self.model.next_tokens(hidden)
        shape = (step.bs, self.window)
        accepted = spec_kernels.accept_chain(
            tensors["input_ids"].view(shape), predicted.view(shape), num_drafts=tensors["num_drafts"]
        )
        return predicted, accepted.correct_drafts

    def step(self, batch: Sequence[Row], *, kv_lens: list[int], graphs: bool) -> Stepped:
        """Run one step.

        Args:
            batch: the live rows.
            kv_lens: KV length of each row, the window included.
            graphs: whether a captured graph may be used.
        """
        window = self.window
        tables = np.zeros((len(batch), self.table_width), np.int32)
        ids = np.zeros((len(batch), window), np.int64)
        positions, slots = np.zeros_like(ids), np.zeros_like(ids)
        num_drafts = np.zeros(len(batch), np.int64)
        for at, row in enumerate(batch):
            tables[at, : len(row.pages)] = row.pages
            num_drafts[at] = len(row.tokens) - 1
            ids[at, : len(row.tokens)] = row.tokens
            positions[at] = np.arange(row.start, row.start + window)
            slots[at] = slots_for(row.pages, row.start, row.start + window, self.page_size)
        result = self.runner.run(
            {
                "input_ids": ids.reshape(-1),
                "positions": positions.reshape(-1),
                "slots": slots.reshape(-1),
                "num_drafts": num_drafts,
                "block_table": tables,
            },
            {"kv_lens": kv_lens},
            raw_bs=len(batch),
            eager=not graphs,
        )
        predicted, correct = (part.tolist() for part in result.output)
        committed = [predicted[at * window : at * window + count + 1] for at, count in enumerate(correct)]
        return Stepped(committed, result.bucket or len(batch))
