"""`python -m kv_transfer`: looks at a machine and at a plan before they serve. Needs the extra `cli`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(f"python -m kv_transfer needs {error.name}: pip install 'kv-transfer[cli]'") from None

from kv_transfer.directory import Directory
from kv_transfer.directory_service import DirectoryServer
from kv_transfer.doctor import EngineReport, Report, examine
from kv_transfer.errors import ArgumentError
from kv_transfer.explain import explain as explain_sides
from kv_transfer.explain import read_side
from kv_transfer.picture import draw
from kv_transfer.registry import engine_names

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Moves KV from prefill to decode: checks of a machine and of two deployments, and the ranks' directory."""


@app.command()
def doctor(
    engine: Annotated[list[str] | None, typer.Option(help="Only these engines; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Most time for one engine.")] = 30.0,
    host: Annotated[str | None, typer.Option(help="Address that ends will listen on; all by default.")] = None,
    ports: Annotated[str, typer.Option(help="Ports that they will have there, such as 7701-7708.")] = "",
) -> None:
    """Tries every engine with real bytes, and looks at ports, limits, shared memory, versions and settings.

    Exits with 0 when an engine reaches other processes and nothing is a problem, with 1 otherwise, with 2 for an
    option that is not usable, such as a name that is no engine.
    """
    _require_names(engine)
    try:
        report = examine(tuple(engine) if engine else None, seconds=seconds, host=host, ports=_port_range(ports))
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _show(Console(), report)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def explain(
    prefill: Annotated[Path, typer.Argument(help="Description of the sending side (python -m kv_planner schema).")],
    decode: Annotated[Path, typer.Argument(help="Description of the receiving side.")],
    pages: Annotated[int, typer.Option(min=1, max=1 << 16, help="Pages of the request that is counted.")] = 1,
    engine: Annotated[list[str] | None, typer.Option(help="Only these engines; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw who sends what to whom (png, svg, pdf).")] = None,
) -> None:
    """Says who sends what to whom and how long each engine takes, or all reasons why the two sides do not fit.

    Rates are measured on this machine. Exits with 0 when the sides agree, with 1 when they are refused, with 2 when the
    input is not usable.
    """
    _require_names(engine)
    try:
        sides = [read_side(path) for path in (prefill, decode)]
        found = explain_sides(*sides, pages=pages)
        if found.plan.agrees:
            reports = examine(tuple(engine) if engine else None).engines
            found = explain_sides(*sides, pages=pages, engines=reports)
            if picture is not None:
                draw(found.plan, picture)
    except ModuleNotFoundError as error:
        raise SystemExit(f"--picture needs {error.name}: pip install 'kv-transfer[picture]'") from None
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(found.model_dump_json(indent=2) if as_json else found.text())
    raise typer.Exit(0 if found.plan.agrees else 1)


@app.command()
def directory(
    bind: Annotated[str, typer.Option(help="ZeroMQ address to listen on.")] = "tcp://127.0.0.1:7701",
    secret_file: Annotated[Path | None, typer.Option(help="File with the secret that all clients have.")] = None,
    lifetime: Annotated[float, typer.Option(min=1.0, help="Seconds after which a silent rank is gone.")] = 30.0,
) -> None:
    """Runs the directory in which prefill and decode ranks of a deployment find each other, until it is stopped.

    It keeps nothing on disk: after a restart the ranks register again by themselves. Exits with 2 when the address
    cannot be bound.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        secret = None if secret_file is None else secret_file.read_text(encoding="utf-8").strip()
        server = DirectoryServer(Directory(lifetime=lifetime), bind=bind, secret=secret)
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    with server:
        typer.echo(f"directory at {server.endpoint}")
        stop.wait()


def _require_names(engine: list[str] | None) -> None:
    unknown = sorted(set(engine or ()) - set(engine_names()))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(engine_names())}")


def _port_range(text: str) -> range:
    first, _, last = text.partition("-")
    if not text:
        return range(0)
    if not (first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first) < 1 << 16):
        raise typer.BadParameter(f"{text!r}: expected a port or two with a dash between, such as 7701-7708")
    return range(int(first), int(last or first) + 1)


def _show(console: Console, report: Report) -> None:
    engines = Table("engine", "works", "other processes", "MB/s", "remark", title="Engines", title_justify="left")
    for item in report.engines:
        rate = "" if item.megabytes_per_second is None else f"{item.megabytes_per_second:.0f}"
        words = ("yes", "yes" if item.cross_process else "no") if item.works else ("no", "")
        engines.add_row(item.name, *words, rate, item.problem or _remark(item))
    console.print(engines)
    machine = Table("", "", "", title="Machine", title_justify="left", show_header=False)
    for finding in report.findings:
        machine.add_row(finding.level, finding.subject, finding.text)
    console.print(machine)
    settings = Table("variable", "value", "from", title="Settings that engines read", title_justify="left")
    for name, setting in report.settings.items():
        settings.add_row(name, setting.value, setting.origin)
    console.print(settings)
    console.print(f"control messages: version {report.protocol}; Python {report.python}")
    console.print(_verdict(report), style="green" if report.ok else "red")


def _remark(item: EngineReport) -> str:
    return "" if item.cross_process else "with shared=True it reaches other processes of this host"


def _verdict(report: Report) -> str:
    """Ready with which engines, or what stands in the way."""
    if report.ok:
        names = [item.name for item in report.engines if item.works and item.cross_process]
        return f"ready: {', '.join(names)} can move K/V between processes"
    reasons = [f"{finding.subject}: {finding.text}" for finding in report.findings if finding.level == "problem"]
    if not any(item.works and item.cross_process for item in report.engines):
        reasons.append("no engine that was tried reaches other processes")
    return "not ready: " + "; ".join(reasons)


if __name__ == "__main__":
    app(prog_name="python -m kv_transfer")
