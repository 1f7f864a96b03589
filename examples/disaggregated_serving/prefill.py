"""A prefill stage: finds what its cache has of a prompt, computes the rest in chunks, and sends KV as it is done.

Stage 0 leads: it asks stage 1 for its hit, both take the smaller one, and it hands hidden states over ZeroMQ. Stage 1
also chooses the first token, which travels with the end of its transfer.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import kv_planner
import kv_transfer
import numpy as np
import spec_kernels
import torch
import zmq
from kv_pool import MhaPool, OutOfPages, PageAllocator, slots_for
from kv_pool.hicache import Acquired, HiCacheController, HostPool

from .config import Connect, Connected, Lost, Prefilled, Ready, Request, Shutdown, Span
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .setup import Link, Setup

STAGES = 2
REFUSED = -1  # in place of a hit: this stage cannot take the prompt


@dataclass
class _Room:
    """One request on this stage."""

    prompt: Sequence[int]
    acquired: Acquired
    session: kv_transfer.SenderSession
    done: int = 0
    sent_pages: int = 0


class PrefillStage:
    """The layers of one stage, their pool and cache, and the transfer sessions of the prompts under way."""

    def __init__(self, setup: Setup, stage: int) -> None:
        config, layers = setup.config, setup.shape.layers
        layer_ids = list(range(layers * stage // STAGES, layers * (stage + 1) // STAGES))
        self.setup, self.config, self.name = setup, config, f"prefill-{stage}"
        self.last = stage == STAGES - 1
        parts: dict[kv_planner.Part, list[int]] = {"target": layer_ids}
        if setup.shape.draft_layers:
            parts["draft"] = setup.shape.draft_ids if self.last else []
        self.pool = MhaPool(
            setup.layout,
            size=config.prefill_pool,
            device=setup.device,
            layer_ids=parts,
            placement=kv_planner.Placement(pp_rank=stage, pp_size=STAGES),
            zero=False,  # the emulated device then reports attention over a slot that nobody wrote
        )
        host = HostPool(self.pool, pages=config.host_pool // config.page_size + 1)
        self.cache = HiCacheController(
            self.pool,
            PageAllocator(self.pool.num_pages, config.page_size),
            host,
            kv_planner.PrefixIndex(config.page_size, device_pages=self.pool.num_pages, host_pages=host.num_pages),
        )
        self.model = Stage(setup.weights(layer_ids), self.pool, device=setup.device, kv_dtype=setup.kv_dtype)
        self.rooms: dict[int, _Room] = {}
        self.sender: kv_transfer.Sender | None = None
        self.lost = False

    def connect(self, endpoint: str) -> None:
        """Agree with the decode process that listens at `endpoint`, also with one that took the place of a lost one."""
        for room in list(self.rooms):
            self.drop(room)
        if self.sender is None:
            engine = kv_transfer.create_engine(self.config.engine)
            timeouts = kv_transfer.Timeouts(peer_lost_after=self.config.peer_lost_after)
            self.sender = kv_transfer.Sender(self.pool.manifest(), engine, endpoint=endpoint, timeouts=timeouts)
        self.sender.connect()
        self.lost = False

    def lose(self, link: Link, error: kv_transfer.PeerLost) -> None:
        """Tell the front, once, that decode is gone."""
        if not self.lost:
            self.lost = True
            link.send(Lost(message=str(error)))

    def close(self) -> None:
        """End the transfer side."""
        if self.sender is not None:
            self.sender.close()

    def begin(self, link: Link, room: int, prompt: Sequence[int], *, use_cache: bool) -> int:
        """Take pages for a prompt; the tokens that this stage need not compute, or `REFUSED`."""
        assert self.sender is not None
        try:
            acquired = self.cache.acquire(np.asarray(prompt, np.int64))
        except OutOfPages as error:
            try:
                self.sender.reject(room, f"{self.name}: {error}")
            except kv_transfer.PeerLost as lost:
                self.lose(link, lost)
            return REFUSED
        try:
            self.rooms[room] = _Room(prompt, acquired, self.sender.open(room))
        except (kv_transfer.TransferAborted, kv_transfer.TransferTimeout):  # decode does not want it any more
            self.cache.abort(acquired)
            return REFUSED
        except kv_transfer.PeerLost as lost:
            self.cache.abort(acquired)
            self.lose(link, lost)
            return REFUSED
        return acquired.hit_tokens if use_cache else 0

    def drop(self, room: int) -> None:
        """Forget a request that has ended elsewhere."""
        state = self.rooms.pop(room, None)
        if state is not None:
            state.session.abort("the request has ended")
            self.cache.abort(state.acquired)

    def start(self, link: Link, room: int, hit: int) -> None:
        """Settle on the hit that both stages have, and start to load what of it is on the host."""
        state = self.rooms[room]
        self.cache.limit(state.acquired, hit)
        began = time.monotonic()
        self.cache.load(state.acquired)
        if state.acquired.host_hit_tokens:
            link.send(Span(lane=f"hicache {self.name}", name=f"room {room}", begin=began, end=time.monotonic()))
        state.done = hit

    def chunk(self, link: Link, room: int, rows: torch.Tensor) -> torch.Tensor:
        """Compute the next `rows` (ids on stage 0, hidden states on stage 1) of a room and send their KV.

        Returns:
            The hidden states after this stage. Shape: [tokens, hidden]; float32.
        """
        began = time.monotonic()
        state, device, page_size = self.rooms[room], self.setup.device, self.config.page_size
        start, stop = state.done, state.done + rows.shape[0]
        pages = state.acquired.pages
        metadata = spec_kernels.build_paged_metadata(
            [pages], q_lens=[stop - start], kv_lens=[stop], page_size=page_size, device=device
        )
        hidden = rows.to(device) if self.model.first_layer else self.model.embed(rows.to(device))
        place: dict[str, Any] = {
            "positions": torch.arange(start, stop, device=device),
            "slots": torch.from_numpy(slots_for(pages, start, stop, page_size)).to(device),
            "metadata": metadata,
        }
        hidden = self.model.run(hidden, **place, before_layer=state.acquired.wait_layer)
        finished = stop == len(state.prompt)
        tokens = list(state.prompt)
        if finished and self.last:
            tokens.append(int(self.model.next_tokens(hidden[-1:]).item()))
        drafted = hidden
        for step in range(len(self.model.drafts)):  # their rows end with tokens of the prompt, or those just drawn
            ids = torch.tensor(tokens[start + 1 + step : stop + 1 + step], device=device)
            drafted = self.model.draft(step, ids, drafted, **place)
            if finished:
                tokens.append(int(self.model.next_tokens(drafted[-1:]).item()))
        drawn = tokens[len(state.prompt) :]
        result = hidden.cpu()  # the loads and writes of these pages are done when this returns
        computed = time.monotonic()
        link.send(Span(lane=self.name, name=f"room {room}", begin=began, end=computed))
        last_page = kv_planner.page_count(stop, page_size)
        try:
            state.session.send(pages[state.sent_pages : last_page], start=state.sent_pages)
            if finished:
                state.session.finish({"first_token": drawn[0], "drafts": [*drawn[1:]]} if drawn else {})
        except kv_transfer.TransferAborted:
            self.drop(room)
            return result
        except kv_transfer.PeerLost as error:
            self.drop(room)
            self.lose(link, error)
            return result
        state.done, state.sent_pages = stop, last_page
        if finished:
            self.cache.finish(state.acquired, np.asarray(state.prompt, np.int64))
            del self.rooms[room]
        link.send(Span(lane=f"transfer {self.name}", name=f"room {room}", begin=computed, end=time.monotonic()))
        return result


def chunk_borders(first: int, end: int, chunk: int, *, ahead: int) -> list[int]:
    """Where chunks begin and end; draft layers need `ahead` tokens of the prompt after every chunk but the last.

    Returns:
        `first`, the borders, `end`.
    """
    borders = list(range(first, end, chunk))
    if len(borders) > 1 and end - borders[-1] < ahead:
        borders.pop()
    return [*borders, end]


def run_prefill(link: Link, setup: Setup, *, stage: int) -> None:
    """Serve as prefill stage `stage` until the front says Shutdown."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = context.socket(zmq.PAIR)
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


def _tell(line: zmq.Socket[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    line.send_multipart([json.dumps(header).encode(), body])


def _lead(link: Link, worker: PrefillStage, line: zmq.Socket[bytes]) -> None:
    """Stage 0: requests from the front, one after the other, in chunks."""
    waiting: deque[Request] = deque()
    while True:
        message = link.receive(wait=None if not waiting else 0)
        if isinstance(message, Shutdown):
            return
        if isinstance(message, Connect):
            waiting.clear()  # the front asks again for what it still wants
            worker.connect(message.receiver)
            link.send(Connected())
            continue
        if message is not None:
            waiting.append(message)
            continue
        request = waiting.popleft()
        room, prompt = request.room, request.prompt
        _tell(line, {"do": "begin", "room": room, "prompt": list(prompt), "use_cache": request.use_cache})
        own = worker.begin(link, room, prompt, use_cache=request.use_cache)
        hit = min(own, int(json.loads(line.recv_multipart()[0])["hit"]))
        if hit == REFUSED:
            _tell(line, {"do": "drop", "room": room})
            worker.drop(room)
            continue
        _tell(line, {"do": "start", "room": room, "hit": hit})
        worker.start(link, room, hit)
        borders = chunk_borders(hit, len(prompt), worker.config.chunk, ahead=worker.setup.shape.draft_layers)
        for start, stop in pairwise(borders):
            if room not in worker.rooms:  # aborted while the last chunk was sent
                break
            hidden = worker.chunk(link, room, torch.tensor(prompt[start:stop]))
            _tell(line, {"do": "chunk", "room": room, "shape": list(hidden.shape)}, hidden.numpy().tobytes())


def _follow(link: Link, worker: PrefillStage, line: zmq.Socket[bytes]) -> None:
    """Stage 1: what stage 0 says."""
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(line, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if link.socket in ready:
            message = link.receive()
            if isinstance(message, Shutdown):
                return
            worker.connect(message.receiver)
            link.send(Connected())
        if line not in ready:
            continue
        head, body = line.recv_multipart()
        header = json.loads(head)
        room = header["room"]
        if header["do"] == "begin":
            _tell(line, {"hit": worker.begin(link, room, header["prompt"], use_cache=header["use_cache"])})
        elif header["do"] == "drop":
            worker.drop(room)
        elif room not in worker.rooms:
            continue  # aborted while stage 0 was computing
        elif header["do"] == "start":
            worker.start(link, room, header["hit"])
            link.send(Prefilled(room=room, computed=0, hit=header["hit"]))
        else:
            hidden = torch.from_numpy(np.frombuffer(body, np.float32).reshape(header["shape"]).copy())
            worker.chunk(link, room, hidden)
            link.send(Prefilled(room=room, computed=hidden.shape[0], hit=0))
