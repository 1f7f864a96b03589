"""The demo: serves SmolLM2 with two prefill stages and one decode process, and checks every token.

It prints tables, and writes a report and a timeline. `__main__.py` starts it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from kv_transfer.isolation import current_isolation
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .config import Mode, ServeConfig, Span
from .front import Served, ServeResult, Serving, largest_output
from .launcher import WorkerFailed, Workers
from .prompts import SHORT, ask, first_round, later_rounds, long_texts
from .reference import Verdict, judge
from .report import Judgement, Round, as_json, show, write_json
from .timeline import draw
from .tokenizer import ChatTokenizer
from .weights import load_smollm2, open_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Run:
    """The rounds of one demo, with their progress bars."""

    def __init__(self, console: Console, serving: Serving, tokenizer: ChatTokenizer) -> None:
        self.console, self.serving, self.tokenizer = console, serving, tokenizer
        self.rounds: list[Round] = []
        self.borders: list[tuple[str, float]] = []

    def round(
        self,
        name: str,
        prompts: list[str],
        new_tokens: int,
        *,
        mode: Mode | None = None,
        use_cache: bool = True,
        compared: bool = False,
        also: Callable[[Served], None] = lambda served: None,
    ) -> ServeResult:
        """Serve one round and keep it."""
        ids = [self.tokenizer.chat(prompt) for prompt in prompts]
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


def _serve_all(run: _Run, new_tokens: int, quick: bool) -> None:
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


def _serve_faults(run: _Run, new_tokens: int) -> None:
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


def _check(console: Console, rounds: list[Round], margin: float) -> Judgement:
    """Judge every request; an output that begins one which stands in every token stands, too."""
    judgement = Judgement()
    sound: dict[tuple[int, ...], list[int]] = {}
    weights = load_smollm2()
    work = sorted(
        ((item.name, served) for item in rounds for served in item.result.requests), key=lambda at: -len(at[1].output)
    )
    with Progress(*COLUMNS, console=console) as progress:
        task = progress.add_task("check: requests", total=len(work))
        for name, served in work:
            output = served.output
            if not output:
                continue
            if sound.get(served.prompt, [])[: len(output)] == output:
                verdict = Verdict(len(output), 0, ())
            else:
                verdict = judge(weights, served.prompt, output, kv_dtype=torch.float16, margin=margin)
                if verdict.exact == len(output):
                    sound[served.prompt] = output
            judgement.verdicts[name, served.room] = verdict
            progress.advance(task)
    return judgement


def _writable(path: Path) -> Path:
    """Refuse an output path before anything starts."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise typer.BadParameter(f"{path}: the folder must exist and be writable")
    return path


def _say_stage(console: Console) -> Callable[[str], None]:
    began = time.monotonic()

    def say(stage: str) -> None:
        console.print(f"{time.monotonic() - began:5.1f} s  {stage}", highlight=False)

    return say


@app.command()
def run(
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for every request.")] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and tokens: under a minute.")] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Also give up, refuse, and kill decode.")] = False,
    check: Annotated[bool, typer.Option(help="Compare every token with a plain forward on the CPU.")] = True,
    margin: Annotated[float, typer.Option(help="Logits by which a token may miss the best and still count.")] = 0.05,
    text: Annotated[bool, typer.Option(help="Print the answers.")] = True,
    report: Annotated[Path, typer.Option(callback=_writable, help="Where the figures go.")] = Path("demo-report.json"),
    timeline: Annotated[Path, typer.Option(callback=_writable, help="Where the picture goes.")] = Path(
        "demo-timeline.png"
    ),
) -> None:
    """Serve a 135M-parameter model the disaggregated way on an emulated Ascend NPU, and check every token."""
    console = Console()
    if not console.is_terminal:  # a log file: the tables must not be cut
        console = Console(width=120)
    began = time.monotonic()
    console.print(f"network: {current_isolation()}")
    tokenizer = ChatTokenizer(open_gguf())
    config = ServeConfig(new_tokens=new_tokens)
    if quick:  # never more than four requests at once
        config = config.model_copy(update={"buckets": tuple(size for size in config.buckets if size <= 4)})
    most = largest_output(config, [tokenizer.chat(prompt) for prompt in first_round()])
    if new_tokens > most:
        raise typer.BadParameter(f"--new-tokens {new_tokens}: the decode pool holds at most {most} for every request")

    def on_start(workers: Workers) -> None:
        console.print("processes: " + ", ".join(f"{role} {pid}" for role, pid in workers.processes.items()))

    try:
        serving = Serving(config, on_start=on_start, on_stage=_say_stage(console), restart_decode=faults)
        with serving:
            rounds = _Run(console, serving, tokenizer)
            _serve_all(rounds, min(new_tokens, 16) if quick else new_tokens, quick)
            if faults:
                _serve_faults(rounds, min(new_tokens, 16))
            serving.close()
    except (WorkerFailed, TimeoutError) as error:
        console.print("[red]stopped:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        console.print("all other processes were ended")
        raise typer.Exit(1) from None
    judgement = _check(console, rounds.rounds, margin) if check else None
    figures = as_json(config, rounds.rounds, judgement)
    if text:
        questions = first_round()
        for served, question in zip(rounds.rounds[0].result.requests, questions, strict=False):
            console.print(f"[bold]{served.room}: {question.splitlines()[-1]}[/bold]", highlight=False)
            console.print(f"{tokenizer.decode(served.output)} …\n", markup=False, highlight=False)
    show(console, figures)
    write_json(report, figures)
    draw(timeline, rounds.spans, rounds.borders)
    console.print(f"written         {report}, {timeline} ({time.monotonic() - began:.0f} s in all)")
    if not figures["ok"]:
        console.print("[red]FAILED[/red]")
        for (name, room), verdict in judgement.verdicts.items() if judgement else ():
            for position, token, best, gap in verdict.wrong:
                console.print(f"{name}, {room}, token {position}: emitted {token}, best {best}, {gap:.3f} logits apart")
        raise typer.Exit(1)
    console.print("OK" if check else "done, unchecked")
