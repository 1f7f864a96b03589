"""The rounds of the demo: which prompts are served, in which ways, and what becomes of them.

It starts no process and judges no token; `demo.py` does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .config import MIMO, Mode, Span
from .prompts import SHORT, ask, first_round, later_rounds, long_texts
from .report import Round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from .front import Served, ServeResult, Serving

COLUMNS = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class Rounds:
    """The rounds of one demo, with their progress bars."""

    def __init__(self, console: Console, serving: Serving, encode: Callable[[str], list[int]]) -> None:
        self.console, self.serving, self.encode = console, serving, encode
        self.rounds: list[Round] = []
        self.borders: list[tuple[str, float]] = []

    def round(
        self,
        name: str,
        prompts: Sequence[str],
        new_tokens: int,
        *,
        mode: Mode | None = None,
        use_cache: bool = True,
        compared: bool = False,
        also: Callable[[Served], None] = lambda served: None,
    ) -> ServeResult:
        """Serve one round and keep it."""
        ids = [self.encode(prompt) for prompt in prompts]
        mode = mode or Mode(drafts=self.serving.config.drafts)
        self.borders.append((name, time.monotonic()))
        with Progress(*COLUMNS, console=self.console) as progress:
            prefill = progress.add_task(f"{name}: prompt tokens", total=sum(map(len, ids)))
            decode = progress.add_task(f"{name}: new tokens", total=len(ids) * new_tokens)
            seen: dict[int, Served] = {}

            def on_progress(served: Served) -> None:
                seen[served.room] = served
                progress.update(prefill, completed=sum(item.computed + item.hit for item in seen.values()))
                progress.update(decode, completed=sum(len(item.output) for item in seen.values()))
                also(served)

            result = self.serving.serve(
                ids, new_tokens=new_tokens, mode=mode, use_cache=use_cache, on_progress=on_progress
            )
        self.rounds.append(Round(name, mode, result, compared))
        return result

    @property
    def rooms(self) -> int:
        """Rooms of all rounds before the one that runs."""
        return sum(len(item.result.requests) for item in self.rounds)

    @property
    def spans(self) -> list[Span]:
        """What all lanes did."""
        return [span for item in self.rounds for span in item.result.spans]


def serve_smollm2(run: Rounds, new_tokens: int, quick: bool) -> None:
    """Short and long prompts, past and through the cache, then every way to decode."""
    drafts = run.serving.config.drafts
    if quick:
        run.round("first", [*SHORT, first_round()[-1]], new_tokens)
        run.round("again, cached", [later_rounds()[1][-1]], new_tokens)
        return
    run.round("first", first_round(), new_tokens)
    uncached, cached = later_rounds()
    run.round("again, uncached", uncached, new_tokens, use_cache=False)
    run.round("again, cached", cached, new_tokens)
    for mode in (
        Mode(drafts=drafts),
        Mode(drafts=0),
        Mode(drafts=drafts, graphs=False),
        Mode(drafts=0, graphs=False),
        Mode(drafts=drafts, length_rule="dflash"),
        Mode(drafts=drafts, overlap=True),
        Mode(drafts=0, overlap=True),
    ):
        rule = f", {mode.length_rule} rule" if mode.length_rule != "eagle" else ""
        overlap = ", overlap" if mode.overlap else ""
        name = f"{mode.drafts} drafts, {'graph' if mode.graphs else 'eager'}{rule}{overlap}"
        run.round(name, list(SHORT), min(new_tokens, 32), mode=mode, compared=True)


def serve_faults(run: Rounds, new_tokens: int) -> None:
    """Requests that end early, among others that must not notice.

    In the first round the first one is given up while it decodes, the second is refused because no prefill pool holds
    it, the fourth is given up in the middle of its prefill. In the second round the decode process is killed when the
    first one decodes, and started again.
    """
    first, second = long_texts()
    prompts = [SHORT[0], ask(f"{first} {second}", "What is this?"), SHORT[1], ask(first, "Who wrote this?"), SHORT[2]]
    given_up: set[int] = set()

    def on_progress(served: Served) -> None:
        place = served.room - run.rooms
        enough = (place == 0 and len(served.output) >= 3) or (place == 3 and served.computed > 0)
        if enough and place not in given_up:
            given_up.add(place)
            run.serving.abort(served.room)

    run.round("faults", prompts, new_tokens, use_cache=False, also=on_progress)
    ended = [request.ended is not None for request in run.rounds[-1].result.requests]
    if ended != [True, True, False, True, False]:
        raise RuntimeError(f"requests ended early: {ended}; expected the first, second and fourth to")
    killed: set[int] = set()

    def kill_decode(served: Served) -> None:
        if served.room == run.rooms and len(served.output) >= 3 and not killed:
            killed.add(run.serving.workers.processes["decode"])
            run.serving.workers.kill("decode")

    prompts = [SHORT[0], ask(first, "Who wrote this?"), SHORT[1]]
    run.round("decode restarted", prompts, new_tokens, use_cache=False, also=kill_decode)
    ended = [request.ended is not None for request in run.rounds[-1].result.requests]
    if ended != [True, False, False]:
        raise RuntimeError(f"requests ended early: {ended}; expected the first, which the old decode process had begun")


def serve_mtp(run: Rounds, new_tokens: int, quick: bool) -> None:
    """A model with draft layers: prompts around the edges of its window and of pages, then every way to decode."""
    window = next(size for size in MIMO.windows if size)
    edges = [str(length) for length in (window - 1, window + 1, 127, 128, 129, 259)]
    drafts = run.serving.config.drafts
    run.round("first", edges, new_tokens)
    if quick:
        return
    run.round("again, cached", edges[2:], new_tokens)
    for mode in (
        Mode(drafts=drafts),
        Mode(drafts=0),
        Mode(drafts=drafts, graphs=False),
        Mode(drafts=drafts, length_rule="dflash"),
    ):
        rule = f", {mode.length_rule} rule" if mode.length_rule != "eagle" else ""
        name = f"{mode.drafts} drafts, {'graph' if mode.graphs else 'eager'}{rule}"
        run.round(name, edges[:4], min(new_tokens, 32), mode=mode, compared=True)
