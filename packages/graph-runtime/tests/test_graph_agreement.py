"""Data-parallel ranks, each a thread: they choose alike, reduce equally often, and none waits for a refused one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from graph_runtime import Buckets, DecodeRunner
from graph_runtime.agreement import RankAgreement
from graph_runtime.errors import HostListError, PeerRefused, RanksDisagree

Make = Callable[..., tuple[DecodeRunner, Any]]


class Group:
    """An element-wise minimum over threads; a rank that does not come breaks it."""

    def __init__(self, ranks: int) -> None:
        self.calls = [0] * ranks
        self._given: list[list[int]] = [[] for _ in range(ranks)]
        self._barrier = threading.Barrier(ranks, timeout=10)

    def member(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        def reduce_min(values: Sequence[int]) -> list[int]:
            self.calls[rank] += 1
            self._given[rank] = list(values)
            self._barrier.wait()
            answer = [min(column) for column in zip(*self._given, strict=True)]
            self._barrier.wait()
            return answer

        return reduce_min


def _values(n: int) -> dict[str, Any]:
    return {"x": torch.ones(n, 2), "seq_lens": [1] * n}


def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


def _ranks(make: Make, sizes: Sequence[Sequence[int]]) -> tuple[list[DecodeRunner], Group]:
    """Rank r fails to capture the buckets that are not in sizes[r]."""
    group = Group(len(sizes))
    runners = []
    for rank, own in enumerate(sizes):

        def forward(step: Any, own: Sequence[int] = own) -> torch.Tensor:
            if step.bs not in own and step.raw_bs == 0:
                raise RuntimeError("no memory")
            scaled: torch.Tensor = torch.ops.graph_test.scale(step.tensors["x"], step.host["kv"])
            return scaled

        runner, _ = make(forward=forward, reduce_min=group.member(rank))
        runner.capture(progress=False)
        runners.append(runner)
    return runners, group


def _step(runners: list[DecodeRunner], rows: Sequence[int], **options: Any) -> list[Any]:
    def call(rank: int) -> Any:
        n = rows[rank]
        return runners[rank].run(_values(n), {"kv": [2] * n}, n, eager=options.get("eager_rank") == rank)

    return _together([partial(call, rank) for rank in range(len(runners))])


@pytest.mark.parametrize(
    ("sizes", "rows", "bucket"),
    [
        ([[1, 2, 4], [1, 2, 4]], [1, 1], 1),
        ([[1, 2, 4], [1, 2, 4]], [1, 3], 4),
        ([[1, 2, 4], [1, 2, 4]], [0, 2], 2),
        ([[1, 4], [1, 2, 4]], [1, 2], 4),  # bucket 2 is missing on one rank: both take the next
        ([[1, 2], [1, 2, 4]], [1, 3], None),  # the only bucket for 3 rows is missing on the other rank
        ([[1, 2, 4], [1, 2, 4], [2, 4]], [0, 1, 0], 2),
    ],
)
def test_ranks_choose_one_bucket_or_all_run_eagerly(
    make: Make, sizes: list[list[int]], rows: list[int], bucket: int | None
) -> None:
    runners, group = _ranks(make, sizes)
    alone = {runner.can_run(n).bucket for runner, n in zip(runners, rows, strict=True)}
    results = _step(runners, rows)
    assert [result.bucket for result in results] == [bucket] * len(sizes)
    assert [result.output.tolist() for result in results] == [[[2.0, 2.0]] * n for n in rows]
    if bucket is None:
        assert {result.reason for result in results} == {"peers"} or "capture_failed" in {r.reason for r in results}
    assert group.calls == [RankAgreement.ROUNDS] * len(sizes)
    if rows not in ([1, 1],):
        assert alone != {bucket}  # the naive way, each rank for itself, would have diverged


def test_a_rank_that_wants_eager_makes_all_eager(make: Make) -> None:
    runners, group = _ranks(make, [[1, 2, 4], [1, 2, 4]])
    first, second = _step(runners, [2, 1], eager_rank=0)
    assert (first.reason, second.reason) == ("forced", "peers")
    assert group.calls == [2, 2]
    assert {result.bucket for result in _step(runners, [2, 1])} == {2}


def test_a_refused_step_runs_nowhere_and_nobody_waits(make: Make) -> None:
    """Naive: the refused rank raises before the reduction, and its peers wait there for ever."""
    runners, group = _ranks(make, [[1, 2, 4], [1, 2, 4]])
    loads = [runner._buffers.loads for runner in runners]
    first, second = _together(
        [
            lambda: runners[0].run(_values(2), {"kv": [1]}, 2),
            lambda: runners[1].run(_values(1), {"kv": [2]}, 1),
        ]
    )
    assert isinstance(first, HostListError) and isinstance(second, PeerRefused)
    assert group.calls == [2, 2] and loads == [runner._buffers.loads for runner in runners]
    assert [result.bucket for result in _step(runners, [2, 1])] == [2, 2]


def test_an_unequal_answer_is_an_error() -> None:
    def one_sided(values: Sequence[int]) -> list[int]:
        return [min(value, 2) for value in values] if len(values) == 2 else list(values)

    agreement = RankAgreement(one_sided, Buckets([1, 2, 4]))
    assert agreement.choose([1, 2, 4]) == 1
    with pytest.raises(RanksDisagree, match="4 on every rank") as caught:
        agreement.choose([4])
    assert caught.value.got == "2 to 4"
    with pytest.raises(RanksDisagree, match="4 numbers"):
        RankAgreement(lambda values: values[:1], Buckets([1, 2, 4])).choose([1])
