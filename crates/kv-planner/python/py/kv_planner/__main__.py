"""Owns the entry of ``python -m kv_planner``. It does not own a command: those are in `kv_planner.explain`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; without pydantic, says how to get it."""
    try:
        from kv_planner.explain.cli import run
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        print("kv_planner explain needs pydantic: pip install 'kv-planner[explain]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
