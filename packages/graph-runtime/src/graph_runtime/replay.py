"""One update and one replay of a captured bucket.

It owns what becomes of the graph when either fails or is interrupted. It loads no buffers and waits for no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from .capture import BucketGraph
from .errors import GraphError, UpdateFailed, UpdateTimeout
from .worker import UpdateWorker

__all__ = ["update_and_replay"]


def update_and_replay(
    held: BucketGraph,
    host: Mapping[str, list[int]],
    worker: UpdateWorker,
    timeout: float | None,
    profile: Callable[[str], AbstractContextManager[object]],
) -> Any:
    """Updates on the worker, then replays on the calling thread.

    Args:
        held: The bucket.
        host: Host list name to lengths of the bucket.
        worker: The device's.
        timeout: Seconds that the update may take.
        profile: Opens the ranges ``update`` and ``replay``.

    Returns:
        The bucket's output.

    Raises:
        UpdateFailed: The update raised. As for every exception but a refusal of the lists, the bucket is out of use.
        UpdateTimeout: The update did not end in time. As above.
        BaseException: Whatever interrupted the wait, such as KeyboardInterrupt. As above: the update may still run, or
            wait for a replay that never comes, so only a new capture can be trusted.
    """
    graph = held.graph
    try:
        if graph.records:
            with profile("update"):
                _update(held, host, worker, timeout)
        with profile("replay"):
            graph.replay()
    except BaseException as error:
        if not isinstance(error, GraphError):
            graph.abandon(f"interrupted by {type(error).__name__}: {error}")
        raise
    return held.output


def _update(held: BucketGraph, host: Mapping[str, list[int]], worker: UpdateWorker, timeout: float | None) -> None:
    graph = held.graph
    update = held.bound.values(host)
    try:
        worker.run(
            lambda: graph.update(update, constant=held.bound.constant),
            timeout=timeout,
            what=f"update of bucket {held.bucket}: {[record.name for record in graph.records]}",
        )
    except UpdateTimeout:
        graph.abandon(f"an update did not end within {timeout} s")
        raise
    except GraphError:
        raise
    except Exception as error:
        graph.abandon(f"the update worker raised {type(error).__name__}: {error}")
        raise UpdateFailed(
            f"update of bucket {held.bucket}",
            expected="an update worker bound to the device",
            got=f"{type(error).__name__}: {error}",
            consequence="Nothing was replayed; the bucket is out of use.",
            remedy="Mend the cause and call capture() again.",
        ) from error
