"""Finds the NPU operators that an engine's source names, and compares them with ``engine_operators.tsv``.

This module owns the reading of the source: ``torch_npu.X``, ``torch_npu.atb.X``, ``from torch_npu import X`` and
``torch.ops.SPACE.X`` of the spaces in ``SPACES``. Nothing is imported. What is known of each operator is in
``engine_operators.py``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .engine_operators import ENGINES, rows, short

SPACES = ("npu", "atb", "custom", "batch_invariant_ops", "_C_ascend")
"""Spaces of operators that NPU code of the engines calls; all else is aten's, CUDA's or Triton's."""
OUTSIDE = ("multimodal_gen", "test")
"""Folders of an engine that serve no language model."""
_OWN = ("npu_", "_npu_", "empty_with_format", "get_npu_format")
_NOT_OPERATORS = ("npu_config",)


def _dotted(node: ast.Attribute) -> str:
    names = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return ".".join([inner.id, *reversed(names)]) if isinstance(inner, ast.Name) else ""


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch_npu":
            yield from (alias.name for alias in node.names if alias.name.startswith(_OWN))
        if not isinstance(node, ast.Attribute):
            continue
        match _dotted(node).split("."):
            case ["torch_npu", "atb", name] | ["torch_npu", name] if (
                name.startswith(_OWN) and name not in _NOT_OPERATORS
            ):
                yield name
            case ["torch", "ops", space, name] if space in SPACES:
                yield short(f"{space}::{name}")


def calls(root: Path) -> dict[str, tuple[str, ...]]:
    """Operators that the source below a folder names.

    Args:
        root: folder of the engine's package.

    Returns:
        Files that name it, relative to ``root`` and sorted, by the operator's name, as ``short`` gives it.

    Raises:
        SyntaxError: a file is not Python of this release.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[0] in OUTSIDE:
            continue
        for name in _named(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, set()).add(place.as_posix())
    return {name: tuple(sorted(files)) for name, files in sorted(found.items())}


def differences(root: Path, engine: str) -> list[str]:
    """What the list of operators says otherwise than an engine's source.

    Args:
        root: folder of the engine's package.
        engine: one of ``engine_operators.ENGINES``.

    Returns:
        One sentence for each operator; empty when list and source agree.
    """
    found = calls(root)
    listed = {short(row.operator): row.callers[engine] for row in rows() if row.callers[engine]}
    out = []
    for name in sorted(found.keys() | listed.keys()):
        there, here = found.get(name, ()), listed.get(name, ())
        if there != here:
            out.append(f"{name}: named by {', '.join(there) or 'no file'}; listed: {', '.join(here) or 'none'}")
    return out


def main(arguments: Sequence[str]) -> int:
    """``engine_calls ENGINE FOLDER``: prints the differences; 0 when there are none, else 1, and 2 for a wrong call."""
    if len(arguments) != 2 or arguments[0] not in ENGINES:
        sys.stderr.write(f"usage: python -m {__spec__.name} {{{','.join(ENGINES)}}} FOLDER\n")
        return 2
    found = differences(Path(arguments[1]), arguments[0])
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
