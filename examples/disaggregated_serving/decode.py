"""The decode process: receives KV, and generates for several requests at once from captured graphs.

Requests enter the running batch when their KV is complete and leave it when they have all their tokens. Tokens go to
the front as they are made.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import graph_runtime
import kv_planner
import kv_transfer
import numpy as np
import spec_kernels
import torch
from kv_pool import MhaPool, PageAllocator, slots_for

from .config import Arrived, Connect, Connected, Counters, Emitted, Ready, Request, Shutdown
from .prefill import STAGES
from .setup import KV_DTYPE
from .stage import Stage

if TYPE_CHECKING:
    from .setup import Link, Setup


@dataclass
class _Running:
    """One request, from the offer of its pages to its last token."""

    request: Request
    pages: np.ndarray[tuple[int], np.dtype[np.int64]]
    session: kv_transfer.ReceiverSession
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens whose KV is in the pool after the next step."""
        return len(self.request.prompt) + len(self.tokens)


class Decoder:
    """Model, pool, receiver and graphs of the decode process."""

    def __init__(self, setup: Setup) -> None:
        config, layer_ids = setup.config, list(range(setup.shape.layers))
        self.setup, self.config = setup, config
        self.pool = MhaPool(setup.layout, size=config.decode_pool, device=setup.device, zero=False)
        self.pages = PageAllocator(self.pool.num_pages, config.page_size)
        self.model = Stage(setup.weights(layer_ids), self.pool, device=setup.device, kv_dtype=KV_DTYPE)
        self.receiver = kv_transfer.Receiver(
            self.pool.manifest(),
            kv_transfer.create_engine(config.engine),
            prefill_ranks=STAGES,
            timeouts=kv_transfer.Timeouts(peer_lost_after=config.peer_lost_after),
        )
        self.table_width = kv_planner.page_count(min(setup.shape.context, config.decode_pool), config.page_size)
        largest = max(config.buckets)
        rows = kv_planner.RowLayout(
            [
                kv_planner.RowField("input_ids", "int64", rows=largest),
                kv_planner.RowField("positions", "int64", rows=largest),
                kv_planner.RowField("slots", "int64", rows=largest),
                kv_planner.RowField("block_table", "int32", rows=largest, width=self.table_width),
            ]
        )
        keys = spec_kernels.paged_attention_update_keys("npu" if config.device == "npu" else "native")
        options = {} if config.device == "npu" else {"updatable": {"spec_kernels::paged_attention": tuple(keys)}}
        device = graph_runtime.get_device(str(setup.device), **options)
        self.buffers = graph_runtime.StaticBuffers(rows, device)
        self.runner = graph_runtime.DecodeRunner(
            device=device,
            forward=self._forward,
            buffers=self.buffers,
            buckets=graph_runtime.Buckets(config.buckets),
            # The query length of every row is the window, 1: what was captured stays true.
            update=graph_runtime.UpdateSpec(keys, constant=["actual_seq_qlen"]),
        )
        self.arriving: dict[int, _Running] = {}
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.steps: Counter[int] = Counter()
        self.most_in_flight = 0

    def _forward(self, step: graph_runtime.StepInputs) -> torch.Tensor:
        tensors = step.tensors
        metadata = spec_kernels.PagedAttentionMetadata(
            block_table=tensors["block_table"], q_lens=[1] * step.bs, kv_lens=step.host["kv_lens"]
        )
        hidden = self.model.run(
            self.model.embed(tensors["input_ids"]),
            positions=tensors["positions"],
            slots=tensors["slots"],
            metadata=metadata,
        )
        return self.model.next_tokens(hidden)

    def offer(self, request: Request) -> None:
        """Reserve pages for the whole request and tell the prefill stages where its prompt goes."""
        page_size = self.config.page_size
        pages = self.pages.alloc(kv_planner.page_count(len(request.prompt) + request.new_tokens, page_size))
        prompt_pages = pages[: kv_planner.page_count(len(request.prompt), page_size)]
        session = self.receiver.open(request.room, prompt_pages, tokens=len(request.prompt))
        self.arriving[request.room] = _Running(request, pages, session)

    def collect(self, link: Link) -> None:
        """Move requests whose KV has arrived to the waiting line, and fill the batch from there."""
        for room, entry in list(self.arriving.items()):
            result = entry.session.poll()
            if result is None:
                continue
            del self.arriving[room]
            first = next(item["first_token"] for item in result.metadata.values() if "first_token" in item)
            link.send(Arrived(room=room, nbytes=result.nbytes, blocks=result.blocks, pages=result.pages))
            self._emit(link, entry, int(first))
            self.waiting.append(entry)
        while self.waiting and len(self.running) < max(self.config.buckets):
            self.running.append(self.waiting.popleft())
        self.most_in_flight = max(self.most_in_flight, len(self.running))

    @staticmethod
    def _emit(link: Link, entry: _Running, token: int) -> None:
        entry.tokens.append(token)
        link.send(Emitted(room=entry.request.room, token=token, clock=time.monotonic()))

    def step(self, link: Link) -> None:
        """One token for every running request."""
        batch = self.running
        tables = np.zeros((len(batch), self.table_width), np.int32)
        for row, entry in enumerate(batch):
            tables[row, : len(entry.pages)] = entry.pages
        page_size = self.config.page_size
        result = self.runner.run(
            {
                "input_ids": np.array([entry.tokens[-1] for entry in batch], np.int64),
                "positions": np.array([entry.length - 1 for entry in batch], np.int64),
                "slots": np.concatenate(
                    [slots_for(entry.pages, entry.length - 1, entry.length, page_size) for entry in batch]
                ),
                "block_table": tables,
            },
            {"kv_lens": [entry.length for entry in batch]},
            raw_bs=len(batch),
        )
        self.steps[result.bucket or len(batch)] += 1
        for entry, token in zip(batch, result.output.tolist(), strict=True):
            self._emit(link, entry, int(token))
        for entry in [entry for entry in batch if len(entry.tokens) >= entry.request.new_tokens]:
            self.running.remove(entry)
            self.pages.release(entry.pages)

    def counters(self) -> Counters:
        """What was counted over the run."""
        return Counters(
            graph_replays=self.runner.counters.graph_replays,
            eager_steps={str(reason): count for reason, count in self.runner.counters.eager_steps.items()},
            steps_by_bucket=dict(self.steps),
            most_in_flight=self.most_in_flight,
        )

    def close(self) -> None:
        """Release graphs and transfer."""
        self.runner.close()
        self.receiver.close()


def run_decode(link: Link, setup: Setup) -> None:
    """Serve as the decode process until the front says Shutdown."""
    decoder = Decoder(setup)
    link.send(Ready(endpoint=decoder.receiver.endpoint, device=setup.device_text))
    link.expect(Connect)
    decoder.runner.capture(progress=False)
    decoder.receiver.wait_ready()
    link.send(Connected())
    try:
        while True:
            idle = not decoder.running
            message = link.receive(wait=0.002 if idle else 0)
            if isinstance(message, Shutdown):
                link.send(decoder.counters())
                return
            if isinstance(message, Request):
                decoder.offer(message)
                continue
            decoder.collect(link)
            if decoder.running:
                decoder.step(link)
    finally:
        decoder.close()
