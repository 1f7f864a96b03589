"""The NPU operators that released engines call, and which of them have a kernel here: ``docs/engine-operators.md``.

This module owns the reading of ``engine_operators.tsv`` (one operator a line: its name, the files of each engine that
name it, what for, and, where it has no kernel, why not) and the printing of the document. Whether there is a kernel
is asked of the registry, not of the list.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import resources

from . import REGISTRY

ENGINES = {"sglang": "SGLang 0.5.23", "vllm_ascend": "vLLM-Ascend 0.23.0"}
"""Engines by the name of their package, in the order of the list's columns."""

HEAD = """# Operators that engines call

Written by `python -m ascend_emulator.kernels.engine_operators`; do not edit. The list is
`src/ascend_emulator/kernels/engine_operators.tsv`; whether an operator has a kernel is asked of the emulator's
registry. `python -m ascend_emulator.kernels.engine_calls sglang FOLDER` (or `vllm_ascend`) compares the list with an
installed engine's source and says what differs. Searched are the engines' whole packages but for SGLang's
`multimodal_gen` and `test`; of the spaces `npu`, `atb`, `custom`, `batch_invariant_ops` and `_C_ascend`. What a kernel
refuses is in [refusals.md](refusals.md). An operator without one raises `OperatorNotEmulatedError`, which says how to
register one. Those of sgl_kernel_npu and of vLLM-Ascend's extension are defined here ([engines.md](engines.md)); what
no source is at hand for does not exist until its library defines it.

"""
_COLUMNS = ("operator", *ENGINES, "purpose", "refusal")


@dataclass(frozen=True)
class Row:
    """One operator.

    Attributes:
        operator: its full name, without an overload.
        callers: files that name it, relative to the engine's package, by engine; empty for none.
        purpose: what engines call it for.
        refusal: why it has no kernel; empty when it has one.
    """

    operator: str
    callers: dict[str, tuple[str, ...]]
    purpose: str
    refusal: str


def short(operator: str) -> str:
    """Name of an operator without the spaces ``npu`` and ``atb``: ``torch_npu.X`` does not say which of them it is."""
    space, _, name = operator.partition("::")
    return name if space in ("npu", "atb") else operator


def parse(text: str) -> tuple[Row, ...]:
    """Reads the list.

    Args:
        text: a line of column names, then one operator a line, columns separated by tabs.

    Returns:
        Its rows.

    Raises:
        ValueError: a line has other columns, or the list is not sorted, or names an operator twice.
    """
    lines = text.splitlines()
    if tuple(lines[0].split("\t")) != _COLUMNS:
        raise ValueError(f"engine_operators.tsv:1: expected the columns {', '.join(_COLUMNS)}, got {lines[0]!r}")
    out: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(_COLUMNS):
            raise ValueError(f"engine_operators.tsv:{number}: {len(cells)} columns, expected {', '.join(_COLUMNS)}")
        if out and short(out[-1].operator) >= short(cells[0]):
            raise ValueError(
                f"engine_operators.tsv:{number}: {cells[0]} after {out[-1].operator}: sort the lines by name (without "
                "npu:: and atb::), one line a name"
            )
        callers = {engine: tuple(cell.split()) for engine, cell in zip(ENGINES, cells[1:-2], strict=True)}
        out.append(Row(cells[0], callers, *cells[-2:]))
    return tuple(out)


@cache
def rows() -> tuple[Row, ...]:
    """The list, sorted by the operators' names as ``short`` gives them."""
    return parse(resources.files(__package__).joinpath("engine_operators.tsv").read_text(encoding="utf-8"))


def has_kernel(operator: str) -> bool:
    """Whether any overload of an operator has a kernel here."""
    return any(name.partition(".")[0] == operator for name in REGISTRY)


def render() -> str:
    """The document."""
    lines = [f"| operator | for | {' | '.join(ENGINES.values())} | kernel here |", "| --- " * (3 + len(ENGINES)) + "|"]
    for row in rows():
        files = ["<br>".join(f"`{name}`" for name in row.callers[engine]) or "—" for engine in ENGINES]
        kernel = "yes" if has_kernel(row.operator) else f"no: {row.refusal}"
        lines.append(f"| `{row.operator}` | {row.purpose} | {' | '.join(files)} | {kernel} |")
    with_kernel = sum(has_kernel(row.operator) for row in rows())
    return f"{HEAD}{with_kernel} of {len(rows())} have a kernel.\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
