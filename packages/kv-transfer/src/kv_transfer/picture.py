"""A picture of a plan: prefill ranks on the left, decode ranks on the right, a band for each transfer.

Needs matplotlib (extra `picture`), which is imported when a picture is drawn. It computes nothing of the plan.
"""

from __future__ import annotations

from pathlib import Path

from kv_planner.explain import Report

from kv_transfer.arguments import check_kind, check_text, check_word
from kv_transfer.errors import ArgumentError

__all__ = ["draw"]

_FORMATS = (".pdf", ".png", ".svg")

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")


def draw(report: Report, path: Path) -> None:
    """Draws who sends what to whom.

    Args:
        report: Of two sides that agree.
        path: Where to; the ending says the format (png, svg, pdf).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ArgumentError: The report is none or of sides that do not agree, or the path is none or its ending no format.
    """
    if not check_kind("report", report, Report).agrees:
        raise ArgumentError("report: the sides do not agree; there is nothing to draw; see its differences")
    ending = check_kind("path", path, Path).suffix.lower()
    check_word("path's ending", ending, _FORMATS)
    check_text("path", str(path))
    from matplotlib.figure import Figure

    rows = max(len(report.prefill), len(report.decode))
    figure = Figure(figsize=(9, max(3.0, 0.9 * rows + 1)), layout="constrained")
    axes = figure.add_subplot()
    heights = [
        {rank.index: (rows - 1) / 2 + (len(side) - 1) / 2 - place for place, rank in enumerate(side)}
        for side in (report.prefill, report.decode)
    ]
    for column, (side, title) in enumerate(((report.prefill, "prefill"), (report.decode, "decode"))):
        align = "right" if column == 0 else "left"
        for rank in side:
            words = f"{rank.place}\n(nothing)" if rank.idle else rank.place
            at = (column, heights[column][rank.index])
            axes.plot(*at, "s", color="#999999" if rank.idle else "#333333", markersize=9)
            axes.annotate(
                words, at, (-9 if column == 0 else 9, 0), textcoords="offset points", ha=align, va="center", fontsize=8
            )
        axes.text(column, rows - 0.3, title, ha="center", fontsize=10, fontweight="bold")
    most = max((move.bytes for move in report.transfers), default=1) or 1
    for number, move in enumerate(report.transfers):
        colour = _COLOURS[move.source % len(_COLOURS)]
        start, end = heights[0][move.source], heights[1][move.destination]
        axes.annotate(
            "",
            (1, end),
            (0, start),
            arrowprops={"arrowstyle": "->", "color": colour, "lw": 1 + 3 * move.bytes / most, "alpha": 0.8},
        )
        along = 0.25 + 0.5 * ((number * 3) % 8) / 7
        layers = "; ".join(f"{part} {ids}" for part, ids in move.layers.items())
        axes.text(
            along,
            start + (end - start) * along,
            f"{layers}\n{move.bytes / 1e6:.3g} MB",
            fontsize=7,
            ha="center",
            va="center",
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(-0.7, rows)
    axes.axis("off")
    figure.savefig(path, dpi=150)
