"""Records SGLang's answers as the golden files that the tests of planner and pools read, or checks that they are true.

Beside them the calls of memfabric_hybrid's wheel. It needs SGLang 0.5.23, the torch release that its compiled tree
was built for, and that wheel, but neither an NPU nor torch_npu: `nox -s golden` makes that environment. Absent
packages stand in while SGLang is imported and raise when they are used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "crates/kv-planner/python/tests/golden"
POOLS = ROOT / "packages/kv-pool/tests/golden"
TRANSFER = ROOT / "packages/kv-transfer/tests/golden"
NAMES = (
    "compressed", "contents", "contexts", "hashes", "heads", "memfabric", "pairing", "pools", "prefixes", "recurrent",
    "runs", "slicing", "states", "steps", "transfers",
)  # fmt: skip
ENGINE = "SGLang 0.5.23"

__all__ = ["NAMES", "dump", "place", "record"]


def place(name: str) -> Path:
    """The file that holds an answer."""
    folders = {"contents": POOLS, "pools": POOLS, "recurrent": POOLS, "memfabric": TRANSFER, "transfers": TRANSFER}
    return folders.get(name, GOLDEN) / f"{name}.json"


def record(name: str) -> dict[str, Any]:
    """Ask SGLang, or the library that an answer names; their packages must be importable already."""
    found: dict[str, Any] = importlib.import_module(f"golden.{name}").record()
    return {"engine": ENGINE, **found}


def dump(answer: dict[str, Any]) -> str:
    """One line a case: files stay small, and a change shows where it is."""
    lines = []
    for key, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            cases = ",\n".join(json.dumps(case, separators=(",", ":"), ensure_ascii=False) for case in value)
            lines.append(f"{json.dumps(key)}:[\n{cases}\n]")
        else:
            lines.append(f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}")
    return "{" + ",\n".join(lines) + "}\n"


def main() -> int:
    """Write the files, or compare with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="name", help=f"any of {', '.join(NAMES)}; all")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in NAMES]:
        parser.error(f"no golden files are named {', '.join(unknown)}; there are {', '.join(NAMES)}")
    sys.path.append(str(ROOT / "tests/engines"))
    absent = importlib.import_module("engines_absent")
    absent.install({"sgl_kernel", "torch_npu"})
    changed = []
    for name in chosen.names:
        text, path = dump(record(name)), place(name)
        if chosen.check:
            same = path.read_text(encoding="utf-8") == text
            changed += [] if same else [name]
            print(f"{path.relative_to(ROOT)}: {'as recorded' if same else 'differs'}")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {len(text)} bytes")
    if changed:
        print(f"not what they answer: {', '.join(changed)}; record them again and look at the differences")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
