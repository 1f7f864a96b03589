"""A prefill stage: computes prompts chunk by chunk and sends each chunk's KV to the decode process as it is done.

Stage 0 embeds and hands hidden states to stage 1 over ZeroMQ; stage 1 also chooses the first token, which travels with
the end of its transfer.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kv_planner
import kv_transfer
import numpy as np
import spec_kernels
import torch
import zmq
from kv_pool import MhaPool, PageAllocator, slots_for

from .config import Connect, Connected, Prefilled, Ready, Request, Shutdown
from .setup import KV_DTYPE
from .stage import Stage

if TYPE_CHECKING:
    from .setup import Link, Setup

STAGES = 2


@dataclass
class _Room:
    """One request on this stage."""

    prompt_tokens: int
    pages: np.ndarray[tuple[int], np.dtype[np.int64]]
    session: kv_transfer.SenderSession
    done: int = 0


class PrefillStage:
    """The layers of one stage, their pool, and the transfer sessions of the prompts under way."""

    def __init__(self, setup: Setup, stage: int) -> None:
        layers = setup.shape.layers
        layer_ids = list(range(layers * stage // STAGES, layers * (stage + 1) // STAGES))
        self.setup, self.config = setup, setup.config
        self.last = stage == STAGES - 1
        self.pool = MhaPool(
            setup.layout,
            size=setup.config.prefill_pool,
            device=setup.device,
            layer_ids=layer_ids,
            placement=kv_planner.Placement(pp_rank=stage, pp_size=STAGES),
            zero=False,  # the emulated device then reports attention over a slot that nobody wrote
        )
        self.pages = PageAllocator(self.pool.num_pages, setup.config.page_size)
        self.model = Stage(setup.weights(layer_ids), self.pool, device=setup.device, kv_dtype=KV_DTYPE)
        self.rooms: dict[int, _Room] = {}

    def connect(self, endpoint: str) -> None:
        """Agree with the decode process that listens at `endpoint`."""
        engine = kv_transfer.create_engine(self.config.engine)
        timeouts = kv_transfer.Timeouts(peer_lost_after=self.config.peer_lost_after)
        self.sender = kv_transfer.Sender(self.pool.manifest(), engine, endpoint=endpoint, timeouts=timeouts)
        self.sender.connect()

    def close(self) -> None:
        """End the transfer side."""
        self.sender.close()

    def chunk(self, room: int, prompt_tokens: int, rows: torch.Tensor) -> torch.Tensor:
        """Compute the next `rows` (ids on stage 0, hidden states on stage 1) of a room and send their KV.

        Returns:
            The hidden states after this stage. Shape: [tokens, hidden]; float32.
        """
        if room not in self.rooms:
            pages = self.pages.alloc(kv_planner.page_count(prompt_tokens, self.config.page_size))
            self.rooms[room] = _Room(prompt_tokens, pages, self.sender.open(room))
        state = self.rooms[room]
        start, stop = state.done, state.done + rows.shape[0]
        device, page_size = self.setup.device, self.config.page_size
        slots = slots_for(state.pages, start, stop, page_size)
        metadata = spec_kernels.build_paged_metadata(
            [state.pages], q_lens=[stop - start], kv_lens=[stop], page_size=page_size, device=device
        )
        hidden = self.model.embed(rows.to(device)) if self.model.embedding is not None else rows.to(device)
        hidden = self.model.run(
            hidden,
            positions=torch.arange(start, stop, device=device),
            slots=torch.from_numpy(slots).to(device),
            metadata=metadata,
        )
        finished = stop == state.prompt_tokens
        first_token = int(self.model.next_tokens(hidden[-1:]).item()) if finished and self.last else None
        result = hidden.cpu()  # the writes of this chunk are done when this returns
        first_page, last_page = start // page_size, kv_planner.page_count(stop, page_size)
        state.session.send(state.pages[first_page:last_page], start=first_page)
        state.done = stop
        if finished:
            state.session.finish({} if first_token is None else {"first_token": first_token})
            self.pages.release(state.pages)
            del self.rooms[room]
        return result


def run_prefill(link: Link, setup: Setup, *, stage: int) -> None:
    """Serve as prefill stage `stage` until the front says Shutdown."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = context.socket(zmq.PULL if stage else zmq.PUSH)
    endpoint = None
    if stage:
        endpoint = f"tcp://127.0.0.1:{line.bind_to_random_port('tcp://127.0.0.1')}"
    worker = PrefillStage(setup, stage)
    link.send(Ready(endpoint=endpoint, device=setup.device_text))
    connect = link.expect(Connect)
    worker.connect(connect.receiver)
    if not stage:
        assert connect.next_stage is not None
        line.connect(connect.next_stage)
    link.send(Connected())
    try:
        if stage:
            _follow(link, worker, line)
        else:
            _lead(link, worker, line)
    finally:
        worker.close()
        line.close(linger=0)
        context.term()


def _lead(link: Link, worker: PrefillStage, line: zmq.Socket[bytes]) -> None:
    """Stage 0: requests from the front, one after the other, in chunks."""
    waiting: deque[Request] = deque()
    while True:
        message = link.receive(wait=None if not waiting else 0)
        if isinstance(message, Shutdown):
            return
        if message is not None:
            waiting.append(message)
            continue
        request = waiting.popleft()
        for start in range(0, len(request.prompt), worker.config.chunk):
            ids = torch.tensor(request.prompt[start : start + worker.config.chunk])
            hidden = worker.chunk(request.room, len(request.prompt), ids)
            header = {"room": request.room, "prompt_tokens": len(request.prompt), "shape": list(hidden.shape)}
            line.send_multipart([json.dumps(header).encode(), hidden.numpy().tobytes()])


def _follow(link: Link, worker: PrefillStage, line: zmq.Socket[bytes]) -> None:
    """Stage 1: hidden states from stage 0."""
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(line, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if link.socket in ready and isinstance(link.receive(), Shutdown):
            return
        if line in ready:
            head, body = line.recv_multipart()
            header = json.loads(head)
            hidden = torch.from_numpy(np.frombuffer(body, np.float32).reshape(header["shape"]).copy())
            worker.chunk(header["room"], header["prompt_tokens"], hidden)
            link.send(Prefilled(room=header["room"], tokens=hidden.shape[0]))
