"""The demo: serves a model with two prefill stages and one decode process, and checks every token.

It prints tables, and writes a report and a timeline. `__main__.py` starts it.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kv_transfer.isolation import current_isolation
from rich.console import Console
from rich.progress import Progress

from .config import MIMO, ServeConfig
from .front import Serving, largest_output
from .launcher import WorkerFailed, Workers
from .prompts import first_round, random_ids
from .reference import Verdict, judge
from .report import Judgement, Round, as_json, show, write_json
from .rounds import COLUMNS, Rounds, serve_faults, serve_mtp, serve_smollm2
from .setup import kv_dtype, model_shape
from .timeline import draw
from .tokenizer import ChatTokenizer
from .weights import Weights, load_smollm2, open_gguf, random_weights

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Model(str, Enum):
    """What the demo serves."""

    smollm2 = "smollm2"
    mtp = "mtp"


def _whole(config: ServeConfig) -> Weights:
    """The weights that the judge uses."""
    return load_smollm2() if config.model is None else random_weights(model_shape(config), seed=config.model.seed)


def _check(console: Console, config: ServeConfig, rounds: list[Round], margin: float) -> Judgement:
    """Judge every request; an output that begins one which stands in every token stands, too."""
    judgement = Judgement()
    sound: dict[tuple[int, ...], list[int]] = {}
    weights, dtype = _whole(config), kv_dtype(config)
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
                verdict = judge(weights, served.prompt, output, kv_dtype=dtype, margin=margin)
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
    model: Annotated[
        Model, typer.Option(help="SmolLM2, or a random model with multi-token prediction.")
    ] = Model.smollm2,
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
    """Serve a model the disaggregated way on an emulated Ascend NPU, and check every token."""
    console = Console()
    if not console.is_terminal:  # a log file: the tables must not be cut
        console = Console(width=120)
    began = time.monotonic()
    console.print(f"network: {current_isolation()}")
    mtp = model is Model.mtp
    if mtp and faults:
        raise typer.BadParameter("--faults: served with --model smollm2 only")
    tokenizer = None if mtp else ChatTokenizer(open_gguf())
    encode = random_ids if tokenizer is None else tokenizer.chat
    config = ServeConfig(new_tokens=new_tokens)
    if mtp:
        config = ServeConfig(new_tokens=new_tokens, model=MIMO, drafts=MIMO.draft_layers)
    if quick:  # never more than four requests at once
        config = config.model_copy(update={"buckets": tuple(size for size in config.buckets if size <= 4)})
    most = largest_output(config, [[0] * 512] * 6 if tokenizer is None else [encode(text) for text in first_round()])
    if new_tokens > most:
        raise typer.BadParameter(f"--new-tokens {new_tokens}: the decode pool holds at most {most} for every request")

    def on_start(workers: Workers) -> None:
        console.print("processes: " + ", ".join(f"{role} {pid}" for role, pid in workers.processes.items()))

    try:
        serving = Serving(config, on_start=on_start, on_stage=_say_stage(console), restart_decode=faults)
        with serving:
            rounds = Rounds(console, serving, encode)
            (serve_mtp if mtp else serve_smollm2)(rounds, min(new_tokens, 16) if quick else new_tokens, quick)
            if faults:
                serve_faults(rounds, min(new_tokens, 16))
            serving.close()
    except (WorkerFailed, TimeoutError) as error:
        console.print("[red]stopped:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        console.print("all other processes were ended")
        raise typer.Exit(1) from None
    judgement = _check(console, config, rounds.rounds, margin) if check else None
    figures = as_json(config, rounds.rounds, judgement)
    if text and tokenizer is not None:
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
