"""A progress bar over the buckets of a capture, where one can be shown.

It shows a bar on a terminal when `rich` is installed, and otherwise nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence

__all__ = ["track"]


def track(buckets: Sequence[int], *, enabled: bool) -> Iterator[int]:
    """Yields the buckets, with a bar when enabled and possible."""
    if not enabled or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield from buckets
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("capture", total=len(buckets))
        for bucket in buckets:
            bar.update(task, description=f"capture bucket {bucket}")
            yield bucket
            bar.advance(task)
