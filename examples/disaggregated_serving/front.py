"""The front: hands rounds of requests to the workers and collects what comes back, with the times at which it came.

It computes nothing itself and imports no torch.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import (
    ROLES,
    Abort,
    Arrived,
    Connect,
    Connected,
    Counters,
    Emitted,
    Ended,
    Mode,
    Prefilled,
    Ready,
    Request,
    Role,
    ServeConfig,
    Span,
    Tally,
)
from .launcher import WorkerFailed, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class Served:
    """One request and what became of it.

    Attributes:
        submitted: monotonic clock in seconds when the front sent it.
        clocks: monotonic clock of every emitted token.
        computed / hit: prompt tokens that prefill has computed, and found in its cache; together the prompt.
        ended: why it ended without all its tokens, if it did.
        nbytes / blocks / pages: KV moved for it, summed over the prefill stages.
    """

    room: int
    prompt: tuple[int, ...]
    submitted: float = 0.0
    output: list[int] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    computed: int = 0
    hit: int = 0
    ended: str | None = None
    nbytes: int = 0
    blocks: int = 0
    pages: int = 0

    @property
    def first_token_seconds(self) -> float:
        """Time from submission to the first token."""
        return self.clocks[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens; tokens of one step come together."""
        return [after - before for before, after in zip(self.clocks, self.clocks[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float:
        """Decode rate after the first token; 0 for a single token."""
        seconds = sum(self.gaps)
        return len(self.gaps) / seconds if seconds > 0 else 0.0

    @property
    def median_gap(self) -> float:
        """Median inter-token time in seconds; 0 for a single token."""
        return statistics.median(self.gaps) if self.gaps else 0.0


@dataclass(frozen=True)
class ServeResult:
    """Everything that a round gives; spans are the lanes of the timeline."""

    requests: list[Served]
    counters: Counters
    device: str
    seconds: float
    spans: list[Span]


class Serving:
    """Running workers that serve one round of requests after the other; use as a context manager."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        on_start: Callable[[Workers], None] = lambda workers: None,
        on_stage: Callable[[str], None] = lambda text: None,
        timeout: float = 180.0,
        restart_decode: bool = False,
    ) -> None:
        """Start the workers and wait until they have agreed.

        Args:
            config: the run.
            on_start: called with the workers as soon as their processes exist.
            on_stage: called with a short text when the run enters another phase.
            timeout: seconds of silence of all workers after which the run is given up.
            restart_decode: start the decode process again when it ends. Requests that it had given tokens for end
                with the reason, the others are served by the new one.

        Raises:
            WorkerFailed: a worker ended or reported an error; all others are stopped.
            TimeoutError: nothing was heard for `timeout` seconds.
        """
        self.config = config
        self._rooms, self._timeout, self._restart_decode = 0, timeout, restart_decode
        on_stage("starting three processes and loading the model")
        self.workers = Workers(config)
        try:
            on_start(self.workers)
            self._events = self.workers.events(timeout=timeout)
            ready: dict[str, Ready] = self._from_all(Ready)
            on_stage("agreeing on the KV layout and capturing graphs")
            receiver = ready["decode"].endpoint
            assert receiver is not None
            self.device, self._receiver = ready["decode"].device, receiver
            for role in ROLES:
                next_stage = ready["prefill-1"].endpoint if role == "prefill-0" else None
                self.workers.send(role, Connect(receiver=receiver, next_stage=next_stage))
            self._from_all(Connected)
        except BaseException:
            self.workers.close()
            raise

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()

    def _from_all(self, kind: type[Any], roles: Sequence[Role] = ROLES) -> dict[str, Any]:
        """One message of `kind` from every worker; others are of no interest meanwhile."""
        heard: dict[str, Any] = {}
        while len(heard) < len(roles):
            role, message = next(self._events)
            if isinstance(message, kind):
                heard[role] = message
        return heard

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int | None = None,
        mode: Mode | None = None,
        use_cache: bool = True,
        on_progress: Callable[[Served], None] = lambda served: None,
    ) -> ServeResult:
        """Serve all `prompts` at once and return when every one has its tokens.

        Args:
            prompts: token ids of each prompt.
            new_tokens: tokens for every request; None: what the config says.
            mode: how decode steps run; None: drafts as in the config, graphs, EAGLE's length rule.
            use_cache: whether prefill may use what its cache holds.
            on_progress: called with a request whenever something about it has changed.

        Raises:
            ValueError: overlap with a model that has draft layers.
            WorkerFailed: a worker ended or reported an error; all others are stopped on leaving the context.
            TimeoutError: nothing was heard for the time-out.
        """
        wanted = self.config.new_tokens if new_tokens is None else new_tokens
        mode = mode or Mode(drafts=self.config.drafts)
        if mode.overlap and self.config.model is not None and self.config.model.draft_layers:
            raise ValueError("overlap: the layout that takes sinks takes no mask over bounds; serve with overlap=False")
        self.workers.send("decode", mode)
        requests = {self._rooms + at: Served(self._rooms + at, tuple(prompt)) for at, prompt in enumerate(prompts)}
        self._rooms += len(requests)
        began = time.monotonic()
        for served in requests.values():
            served.submitted = time.monotonic()
            self._submit(served, wanted, use_cache)
        left, spans, ended = set(requests), [], began
        while left:
            try:
                _, message = next(self._events)
            except WorkerFailed as error:
                cause = error.causes[0]
                if not self._restart_decode or cause.role != "decode" or cause.rank:
                    raise
                self._replace_decode(mode)
                for served in [requests[room] for room in sorted(left)]:
                    if served.output:
                        served.ended = f"decode {cause.reason}, and was started again"
                        left.discard(served.room)
                    else:
                        served.computed = served.hit = 0
                        self._submit(served, wanted, use_cache)
                    on_progress(served)
                continue
            if isinstance(message, Span):
                spans.append(message)
                continue
            served = requests[message.room]
            if served.ended is not None:
                continue  # what was on its way when the request ended
            if isinstance(message, Prefilled):  # may come after the room's last token
                served.computed += message.computed
                served.hit += message.hit
            elif isinstance(message, Arrived):
                served.nbytes, served.blocks, served.pages = message.nbytes, message.blocks, message.pages
            elif isinstance(message, Emitted):
                served.output.append(message.token)
                served.clocks.append(message.clock)
            elif isinstance(message, Ended):
                served.ended = message.reason
                left.discard(served.room)
            if len(served.output) == wanted and served.computed + served.hit == len(served.prompt):
                left.discard(served.room)
            on_progress(served)
            ended = time.monotonic()
        self.workers.send("decode", Tally())
        while True:
            _, message = next(self._events)
            if isinstance(message, Counters):
                return ServeResult(list(requests.values()), message, self.device, ended - began, spans)
            if isinstance(message, Span):
                spans.append(message)

    def _submit(self, served: Served, new_tokens: int, use_cache: bool) -> None:
        request = Request(room=served.room, prompt=served.prompt, new_tokens=new_tokens, use_cache=use_cache)
        self.workers.send("decode", request)
        self.workers.send("prefill-0", request)

    def _replace_decode(self, mode: Mode) -> None:
        """Start the decode process again where the old one listened, and have all agree anew."""
        self.workers.restart("decode", self.config.model_copy(update={"decode_bind": self._receiver}))
        self._events = self.workers.events(timeout=self._timeout)
        self._from_all(Ready, ["decode"])
        for role in ROLES:
            self.workers.send(role, Connect(receiver=self._receiver))
        self._from_all(Connected)
        self.workers.send("decode", mode)

    def abort(self, room: int) -> None:
        """Give a request of the running round up; it ends with a reason, or has ended already."""
        self.workers.send("decode", Abort(room=room))

    def close(self) -> None:
        """Ask the workers to leave, and see that they do."""
        self.workers.shutdown()
        self.workers.close()


def largest_output(config: ServeConfig, prompts: Sequence[Sequence[int]]) -> int:
    """The most new tokens for every one of `prompts` that the decode pool holds at once; 0 when not even one fits."""
    pages = config.decode_pool // config.page_size

    def fits(count: int) -> bool:
        lengths = [len(prompt) + count + 2 * config.drafts for prompt in prompts]
        return sum(-(-length // config.page_size) for length in lengths) <= pages

    low, high = 0, config.decode_pool
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def serve(
    config: ServeConfig,
    prompts: Sequence[Sequence[int]],
    *,
    on_start: Callable[[Workers], None] = lambda workers: None,
    on_progress: Callable[[Served], None] = lambda served: None,
    mode: Mode | None = None,
) -> ServeResult:
    """One round with workers of its own; see `Serving`."""
    with Serving(config, on_start=on_start) as serving:
        result = serving.serve(prompts, mode=mode, on_progress=on_progress)
        serving.close()
    return result
