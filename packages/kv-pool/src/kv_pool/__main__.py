"""Owns the command `python -m kv_pool size CONFIG`: how many tokens fit, as a table or as JSON.

Needs the extra `cli` (typer and rich). It does not compute (see `sizing`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from kv_pool.errors import KvPoolError
from kv_pool.host_memory import available_host_bytes
from kv_pool.sizing import MemoryPlan, plan_memory, request_from_json

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    sys.exit(f"python -m kv_pool needs {error.name}: pip install 'kv-pool[cli]'")

app = typer.Typer(add_completion=False, help="Tools around K/V pools.")


@app.callback()
def main() -> None:
    """Tools around K/V pools."""


@app.command()
def size(
    config: Annotated[Path, typer.Argument(help="JSON: pools, placements, device_bytes, host_bytes.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    host_free: Annotated[
        bool, typer.Option("--host-free", help="Give host pools what this machine and its cgroup have free.")
    ] = False,
) -> None:
    """Divide one memory budget over all pools and ranks."""
    try:
        request = request_from_json(config.read_text())
        if host_free:
            request["host_bytes"] = available_host_bytes()
        plan = plan_memory(**request)
    except (KvPoolError, OSError, UnicodeDecodeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(_as_dict(plan)))
    else:
        _show(plan)


def _as_dict(plan: MemoryPlan) -> dict[str, object]:
    pools = [
        {
            "name": pool.name,
            "rank": {"pp": pool.placement.pp_rank, "tp": pool.placement.tp_rank},
            "items": pool.items,
            "item_bytes": pool.item_bytes,
            "nbytes": pool.nbytes,
            "host_items": pool.host_items,
            "host_nbytes": pool.host_nbytes,
        }
        for pool in plan.pools
    ]
    return {"tokens": plan.tokens, "host_tokens": plan.host_tokens, "tightest": plan.tightest, "pools": pools}


def _show(plan: MemoryPlan) -> None:
    table = Table(title=f"{plan.tokens} tokens on the device, {plan.host_tokens} on the host")
    for column in ("pool", "rank", "items", "MiB", "host items", "host MiB"):
        table.add_column(column, justify="left" if column in ("pool", "rank") else "right")
    for pool in plan.pools:
        rank = f"pp {pool.placement.pp_rank} tp {pool.placement.tp_rank}"
        mib = [f"{nbytes / 2**20:.1f}" for nbytes in (pool.nbytes, pool.host_nbytes)]
        table.add_row(pool.name, rank, str(pool.items), mib[0], str(pool.host_items), mib[1])
    Console().print(table)


if __name__ == "__main__":
    app(prog_name="python -m kv_pool")
