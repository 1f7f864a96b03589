"""The front: hands requests to the workers and collects what comes back, with the times at which it came.

It computes nothing itself and imports no torch.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .config import (
    ROLES,
    Arrived,
    Connect,
    Connected,
    Counters,
    Emitted,
    Prefilled,
    Ready,
    Request,
    ServeConfig,
    Shutdown,
)
from .launcher import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class Served:
    """One request and what became of it.

    Attributes:
        submitted: monotonic clock in seconds when the front sent it.
        clocks: monotonic clock of every emitted token.
        prefilled: prompt tokens that prefill has finished so far.
        nbytes / blocks / pages: KV moved for it, summed over the prefill stages.
    """

    room: int
    prompt: tuple[int, ...]
    submitted: float = 0.0
    output: list[int] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    prefilled: int = 0
    nbytes: int = 0
    blocks: int = 0
    pages: int = 0

    @property
    def first_token_seconds(self) -> float:
        """Time from submission to the first token."""
        return self.clocks[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [after - before for before, after in zip(self.clocks, self.clocks[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float:
        """Decode rate after the first token; 0 for a single token."""
        return len(self.gaps) / sum(self.gaps) if self.gaps else 0.0

    @property
    def median_gap(self) -> float:
        """Median inter-token time in seconds; 0 for a single token."""
        return statistics.median(self.gaps) if self.gaps else 0.0


@dataclass(frozen=True)
class ServeResult:
    """Everything that a run gives."""

    requests: list[Served]
    counters: Counters
    device: str
    seconds: float


def serve(
    config: ServeConfig,
    prompts: Sequence[Sequence[int]],
    *,
    on_start: Callable[[Workers], None] = lambda workers: None,
    on_stage: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[Served], None] = lambda served: None,
    timeout: float = 180.0,
) -> ServeResult:
    """Serve all `prompts` at once and return when every one has `config.new_tokens` tokens.

    Args:
        config: the run.
        prompts: token ids of each prompt.
        on_start: called with the workers as soon as their processes exist.
        on_stage: called with a short text when the run enters another phase.
        on_progress: called with a request whenever something about it has changed.
        timeout: seconds of silence of all workers after which the run is given up.

    Raises:
        WorkerFailed: a worker ended or reported an error; all others are stopped.
        TimeoutError: nothing was heard for `timeout` seconds.
    """
    requests = {room: Served(room, tuple(prompt)) for room, prompt in enumerate(prompts)}
    with Workers(config) as workers:
        on_start(workers)
        events = workers.events(timeout=timeout)
        on_stage("starting three processes and loading the model")
        ready: dict[str, Ready] = {}
        while len(ready) < len(ROLES):
            role, message = next(events)
            ready[role] = message
        on_stage("agreeing on the KV layout and capturing graphs")
        receiver = ready["decode"].endpoint
        assert receiver is not None
        for role in ROLES:
            next_stage = ready["prefill-1"].endpoint if role == "prefill-0" else None
            workers.send(role, Connect(receiver=receiver, next_stage=next_stage))
        connected: set[str] = set()
        while len(connected) < len(ROLES):
            role, message = next(events)
            assert isinstance(message, Connected), message
            connected.add(role)
        on_stage("serving")
        began = time.monotonic()
        for served in requests.values():
            request = Request(room=served.room, prompt=served.prompt, new_tokens=config.new_tokens)
            served.submitted = time.monotonic()
            workers.send("decode", request)
            workers.send("prefill-0", request)
        left = set(requests)
        while left:
            _, message = next(events)
            served = requests[message.room]
            if isinstance(message, Prefilled):
                served.prefilled += message.tokens
            elif isinstance(message, Arrived):
                served.nbytes, served.blocks, served.pages = message.nbytes, message.blocks, message.pages
            elif isinstance(message, Emitted):
                served.output.append(message.token)
                served.clocks.append(message.clock)
                if len(served.output) == config.new_tokens:
                    left.discard(served.room)
            on_progress(served)
        seconds = time.monotonic() - began
        workers.send("decode", Shutdown())
        counters = next(message for _, message in events if isinstance(message, Counters))
        workers.shutdown()
    return ServeResult(list(requests.values()), counters, ready["decode"].device, seconds)
