"""The demo: `python -m disaggregated_serving`.

Serves SmolLM2 with two prefill stages and one decode process, checks every token, prints a table, writes a report.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_transfer.isolation import current_isolation
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .config import ServeConfig
from .front import Served, ServeResult, serve
from .launcher import WorkerFailed, Workers
from .lifeline import die_with
from .prompts import demo_prompts
from .reference import judge
from .report import Judgement, as_json, show, write_json
from .tokenizer import ChatTokenizer
from .weights import load_smollm2, open_gguf


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _serve_with_bars(console: Console, config: ServeConfig, prompts: list[list[int]]) -> ServeResult:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        prefill = progress.add_task("prefill, prompt tokens", total=sum(len(prompt) for prompt in prompts))
        decode = progress.add_task("decode, new tokens", total=len(prompts) * config.new_tokens)
        seen: dict[int, Served] = {}

        def on_progress(served: Served) -> None:
            seen[served.room] = served
            progress.update(prefill, completed=sum(item.prefilled for item in seen.values()))
            progress.update(decode, completed=sum(len(item.output) for item in seen.values()))

        def on_start(workers: Workers) -> None:
            pids = ", ".join(f"{role} {pid}" for role, pid in workers.processes.items())
            progress.console.print(f"processes: {pids}")

        return serve(
            config,
            prompts,
            on_start=on_start,
            on_stage=lambda text: progress.console.print(f"{text} …"),
            on_progress=on_progress,
        )


def _check(console: Console, result: ServeResult, margin: float) -> Judgement:
    verdicts = {}
    weights = load_smollm2()
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("check, requests", total=len(result.requests))
        for served in result.requests:
            verdicts[served.room] = judge(weights, served.prompt, served.output, kv_dtype=torch.float16, margin=margin)
            progress.advance(task)
    return Judgement(verdicts)


def run(
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for every request.")] = 40,
    check: Annotated[bool, typer.Option(help="Compare every token with a plain forward on the CPU.")] = True,
    margin: Annotated[
        float, typer.Option(help="Logits within which a token that is not the best still counts.")
    ] = 0.05,
    text: Annotated[bool, typer.Option(help="Print the answers.")] = True,
    report: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("demo-report.json"),
) -> None:
    """Serve a 135M-parameter model the disaggregated way on an emulated Ascend NPU, and check every token."""
    console = Console()
    if not console.is_terminal:  # a log file: the table must not be cut
        console = Console(width=120)
    signal.signal(signal.SIGTERM, _stop)
    die_with(os.getppid(), signal.SIGTERM)  # when nox or the shell that started it is killed
    began = time.monotonic()
    console.print(f"network: {current_isolation()}")
    tokenizer = ChatTokenizer(open_gguf())
    prompts = [tokenizer.chat(prompt) for prompt in demo_prompts()]
    config = ServeConfig(new_tokens=new_tokens)
    try:
        result = _serve_with_bars(console, config, prompts)
    except (WorkerFailed, TimeoutError) as error:
        console.print(f"[red]stopped:[/red] {error}", markup=True, highlight=False)
        console.print("all other processes were ended")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print("interrupted: all processes were ended")
        raise typer.Exit(130) from error
    judgement = _check(console, result, margin) if check else None
    figures: dict[str, Any] = as_json(config, result, judgement)
    if text:
        for served in result.requests:
            console.print(f"[bold]{served.room}[/bold] {tokenizer.decode(served.output)!r}", highlight=False)
    show(console, figures)
    write_json(report, figures)
    console.print(f"report          {report} ({time.monotonic() - began:.0f} s in all)")
    if not figures["ok"]:
        assert judgement is not None
        for room, verdict in judgement.verdicts.items():
            for position, token, best, gap in verdict.wrong:
                console.print(f"request {room}, token {position}: emitted {token}, best {best}, {gap:.3f} logits apart")
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(typer.run(run))
