"""Ranks of one group as threads of this process, for the tests of operators that talk to each other. Not a test."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ascend_emulator.kernels import expert_groups

_calls = itertools.count()


def on_ranks(count: int, body: Callable[[int, str], Any]) -> list[Any]:
    """What ``body(rank, group name)`` returns on each rank; the first rank's error, if any raises."""
    store, number = torch._C._distributed_c10d.HashStore(), next(_calls)
    results: list[Any] = [None] * count
    errors: list[Exception] = []

    def run(rank: int) -> None:
        name = f"ep{number}-{rank}"
        group: Any = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=20))
        expert_groups.name_group(name, group)
        try:
            results[rank] = body(rank, name)
        except Exception as error:
            errors.append(error)
        finally:
            expert_groups.name_group(name, None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
