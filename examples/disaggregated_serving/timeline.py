"""Draws what every lane of a run did when: prefill stages, transfers, cache loads, decode steps.

It draws what the workers reported; it measures nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .config import Span

LANES = (
    "prefill-0",
    "hicache prefill-0",
    "transfer prefill-0",
    "prefill-1",
    "hicache prefill-1",
    "transfer prefill-1",
    "decode",
)


def draw(path: Path, spans: Sequence[Span], borders: Sequence[tuple[str, float]]) -> None:
    """Write the picture.

    Args:
        path: PNG file to write.
        spans: what the lanes did; other lanes than `LANES` are an error.
        borders: name and start (monotonic clock, seconds) of every round.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    origin = min(start for _, start in borders)
    figure, axes = pyplot.subplots(figsize=(14, 4.5), layout="constrained")
    colours = pyplot.get_cmap("tab10")
    for row, lane in enumerate(LANES):
        bars = [(span.begin - origin, span.end - span.begin) for span in spans if span.lane == lane]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours(row))
    unknown = {span.lane for span in spans} - set(LANES)
    if unknown:
        raise ValueError(f"spans of unknown lanes {sorted(unknown)}; known are {list(LANES)}")
    for name, start in borders:
        axes.axvline(start - origin, color="0.5", linewidth=0.8, linestyle=":")
        axes.annotate(name, (start - origin, -0.75), fontsize=7, rotation=30, annotation_clip=False)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the first request")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
