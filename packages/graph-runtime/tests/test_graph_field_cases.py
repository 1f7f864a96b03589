"""Faults that engines had, each beside the naive version that had it: what holds for ours fails for that one.

Cases with a test of their own elsewhere are not repeated here. Every check takes an implementation and asserts.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_runtime import (
    DecodeRunner,
    DraftDecodeRunner,
    StaticBuffers,
    StepInputs,
    UpdateSpec,
    UpdateWorker,
    get_device,
    row_starts,
    step_layers,
    step_list,
    token_capacity,
)
from graph_runtime.batch_shape import BatchShape, batch_shape
from graph_runtime.errors import HostListError, StepKindError, UncoveredKey, UnwrittenRows
from graph_runtime.ledger import int_list
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

ATTEND = {"graph_test::attend": ("q_lens", "kv_lens")}


def refutes(check: Callable[[Any], None], naive: Any) -> None:
    """The check fails on the naive version."""
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        check(naive)


def test_c09_capacity_of_slots() -> None:
    def check(capacity: Callable[[int, int, int], int]) -> None:
        assert [capacity(80, 12, 3), capacity(80, 12, 5)] == [104, 128]

    check(lambda budget, requests, drafts: token_capacity(budget, requests, draft_tokens=drafts))
    refutes(check, lambda budget, requests, drafts: budget + 2 * requests)  # right with three drafts only


def test_c10_a_draft_at_the_end_of_a_full_table() -> None:
    device = get_device("cpu", updatable=ATTEND)
    buffers = StaticBuffers(RowLayout([RowField("x", "float32", rows=2)]), device)
    runner = DraftDecodeRunner(
        steps=2, longest=80_000, device=device, forward=lambda step: step.tensors["x"], buffers=buffers, buckets=[2]
    )

    def check(lengths: Callable[[list[int]], list[list[int]]]) -> None:
        for step in lengths([79_998, 80_000]):
            assert max(step) <= 625 * 128
        assert lengths([79_998, 80_000])[1][0] == 80_000

    def ours(committed: list[int]) -> list[list[int]]:
        lists = runner._host_lists({"kv_lens": committed})
        return [int_list("kv", lists[step_list("kv_lens", step)]) for step in range(2)]

    check(ours)
    refutes(check, lambda committed: [[length + step + 1 for length in committed] for step in range(2)])
    runner.close()


def test_c15_a_prompt_as_long_as_the_window() -> None:
    def check(is_decode: Callable[[list[int], list[int]], bool]) -> None:
        assert not is_decode([4, 4], [0, 0]) and not is_decode([4, 4], [10, 0]) and is_decode([4, 4], [10, 20])

    check(lambda query, computed: batch_shape(query, computed, window=4) is BatchShape.DECODE)
    refutes(check, lambda query, computed: all(length == 4 for length in query))


def test_e02_sums_of_padded_lengths() -> None:
    """23 during the step, 21 for the caller afterwards, also when the step fails."""
    layout = RowLayout([RowField("seq_lens", "int64", rows=4, fill=1)])

    def ours(lens: list[int], look: Callable[[int], None]) -> None:
        buffers = StaticBuffers(layout, get_device("cpu"))
        buffers.load(2, {"seq_lens": lens})
        look(int(buffers.view("seq_lens").sum()))

    def unpadded(lens: list[int], look: Callable[[int], None]) -> None:
        look(sum(lens))

    def in_place(lens: list[int], look: Callable[[int], None]) -> None:
        lens += [1, 1]
        look(sum(lens))  # raises before the list is cut again
        del lens[2:]

    def check(step: Callable[[list[int], Callable[[int], None]], None]) -> None:
        lens, seen = [10, 11], []

        def look(total: int) -> None:
            seen.append(total)
            raise OSError("planned")

        with pytest.raises(OSError, match="planned"):
            step(lens, look)
        assert seen == [23] and sum(lens) == 21

    check(ours)
    refutes(check, unpadded)
    refutes(check, in_place)


def test_e03_rows_lie_as_they_were_laid_out() -> None:
    def check(starts: Callable[[int, int, int], list[int]]) -> None:
        assert starts(3, 3, 8) == [0, 8, 16, 24]

    check(lambda requests, steps, drafts: row_starts(requests, drafts))
    refutes(check, lambda requests, steps, drafts: row_starts(requests, steps + 1))


def test_e04_no_negative_length_reaches_an_op() -> None:
    """Rank 6 owns tokens 60 to 69; a padded slot of length 0 is 0 - 2 there."""

    def check(local: Callable[[int, int], list[int]]) -> None:
        try:
            lens = local(10, 0)
        except HostListError:
            return
        assert min(lens) >= 0

    check(lambda live, padded: int_list("kv_lens", [live - 2, padded - 2]))
    check(lambda live, padded: int_list("kv_lens", [max(live - 2, 0), max(padded - 2, 0)]))
    refutes(check, lambda live, padded: [live - 2, padded - 2])


def test_e07_twins_of_one_size() -> None:
    """Nine requests at most, four in the largest captured batch."""

    def check(twins: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        host, device = twins(9, 4)
        device[:9].copy_(host[:9])

    def ours(requests: int, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = StaticBuffers(RowLayout([RowField("mask", "bool", rows=requests)]), get_device("cpu"))
        return buffers._host_views["mask"], buffers.view("mask")

    check(ours)
    refutes(check, lambda requests, bucket: (torch.zeros(requests), torch.zeros(bucket)))


def test_e08_an_idle_step_writes_to_nobodys_page() -> None:
    """Four rows write their slots; the idle step after them must leave every slot but 0 alone."""
    layout = RowLayout([RowField("slots", "int64", rows=4), RowField("x", "float32", rows=4)])

    def build() -> tuple[DecodeRunner, torch.Tensor]:
        cache, device = torch.zeros(16), get_device("cpu")

        def forward(step: StepInputs) -> torch.Tensor:
            cache.index_put_((step.tensors["slots"],), step.tensors["x"] + 1)
            return step.tensors["x"]

        runner = DecodeRunner(device=device, forward=forward, buffers=StaticBuffers(layout, device), buckets=[4])
        runner.capture(progress=False)
        runner.run({"slots": [3, 5, 7, 9], "x": [1.0, 2.0, 3.0, 4.0]}, raw_bs=4)
        return runner, cache

    def check(idle: Callable[[DecodeRunner], object]) -> None:
        runner, cache = build()
        cache[1:] = -1.0  # freed, and given to others
        idle(runner)
        runner.close()
        assert (cache[1:] == -1.0).all()

    check(lambda runner: runner.run({}, raw_bs=0))
    refutes(check, lambda runner: runner._graphs[4].graph.replay())  # a dummy run that skips input preparation


def test_verify_lengths_do_not_accumulate() -> None:
    """§3.3, aliasing: metadata that adds the window to the runner's own buffer adds it again where nobody refreshes."""
    buffers = StaticBuffers(RowLayout([RowField("seq_lens", "int64", rows=2)]), get_device("cpu"))

    def ours(lens: list[int]) -> list[int]:
        buffers.load(2, {"seq_lens": lens})
        found: list[int] = (buffers.view("seq_lens") + 3).tolist()
        return found

    kept = torch.tensor([8, 5])

    def naive(lens: list[int]) -> list[int]:
        kept.add_(3)
        found: list[int] = kept.tolist()
        return found

    def check(verify: Callable[[list[int]], list[int]]) -> None:
        assert [verify([8, 5]) for _ in range(3)] == [[11, 8]] * 3

    check(ours)
    refutes(check, naive)


def test_e15_a_job_runs_on_the_callers_device() -> None:
    current = threading.local()

    def on_worker(job: Callable[[], None], bind: Callable[[], None]) -> None:
        worker = UpdateWorker(bind, name="field")
        worker.run(job, timeout=5)
        worker.close()

    def on_thread(job: Callable[[], None], bind: Callable[[], None]) -> None:
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()

    def check(run: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        seen: list[int] = []
        run(lambda: seen.append(getattr(current, "device", 0)), lambda: setattr(current, "device", 3))
        assert seen == [3]

    check(on_worker)
    refutes(check, on_thread)


def test_e16_the_fence_follows_the_replay_that_it_guards() -> None:
    recorder = RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))
    layout = RowLayout([RowField("x", "float32", rows=1, width=1)])

    def ours() -> list[str]:
        runner = DecodeRunner(
            device=recorder, buffers=StaticBuffers(layout, recorder), buckets=[1], update=UpdateSpec({"lens": "kv"}),
            forward=lambda step: torch.ops.graph_test.scale(step.tensors["x"], step.host["kv"]),
        )  # fmt: skip
        runner.capture(progress=False)
        runner.run({"x": [[1.0]]}, {"kv": [1]}, 1)
        recorder.events.clear()
        runner.run({"x": [[1.0]]}, {"kv": [2]}, 1)
        runner.close()
        return list(recorder.events)

    def naive() -> list[str]:
        """The event is recorded first: the wait for it ends before the replay does."""
        graph, _ = recorder.capture(lambda: torch.ops.graph_test.scale(torch.ones(1, 1), [0]))
        recorder.events.clear()
        recorder.record_fence().wait(None)
        graph.update({"lens": [2]})
        graph.replay()
        return list(recorder.events)

    def check(step: Callable[[], list[str]]) -> None:
        events = [event for event in step() if event in {"wait", "updated", "replay", "fence"}]
        assert events[0] == "wait" and events.index("updated") < events.index("replay")
        assert "fence" in events[events.index("replay") :]

    check(ours)
    refutes(check, naive)


def test_e18_an_idle_rank_keeps_the_captured_shape() -> None:
    device = get_device("cpu")
    buffers = StaticBuffers(RowLayout([RowField("ids", "int64", rows=8)]), device)
    runner = DecodeRunner(
        device=device, forward=lambda step: step.tensors["ids"] + 1, buffers=buffers, buckets=[1, 2],
        rows_per_request={"ids": 4}, output_rows_per_request=4,
    )  # fmt: skip
    runner.capture(progress=False)

    def ours(lens: list[int]) -> tuple[int, int]:
        assert runner.run({}, raw_bs=len(lens)).mode == "graph"
        return 4 * runner.buckets.smallest, runner._rows.views(runner.buckets.smallest)["ids"].shape[0]

    def check(idle: Callable[[list[int]], tuple[int, int]]) -> None:
        replayed, captured = idle([])
        assert replayed == captured == 4

    check(ours)
    refutes(check, lambda lens: (max(lens), 4))
    refutes(check, lambda lens: (1, 4))  # a dummy of one token, for which there is no graph
    refutes(check, lambda lens: (int(torch.tensor([0]).cumsum(0)[-1]) - 1, 4))
    runner.close()


def test_e19_every_captured_length_is_updated() -> None:
    def graph() -> tuple[Any, torch.Tensor]:
        query, cache, table = torch.zeros(1, 1), torch.ones(1, 8, 1), torch.zeros(1, 1, dtype=torch.int64)
        values = torch.arange(8.0).view(1, 8, 1)
        device = get_device("cpu", updatable=ATTEND)
        made: tuple[Any, torch.Tensor] = device.capture(
            lambda: torch.ops.graph_test.attend(query, cache, values, table, [0], [0])
        )
        return made

    def ours(update: dict[str, list[int]]) -> float | None:
        captured, output = graph()
        try:
            captured.update(update)
        except UncoveredKey:
            return None
        captured.replay()
        return float(output)

    def naive(update: dict[str, list[int]]) -> float:
        captured, output = graph()
        captured.update(update, constant=set(ATTEND["graph_test::attend"]) - set(update))  # ignored in silence
        captured.replay()
        return float(output)

    def check(step: Callable[[dict[str, list[int]]], float | None]) -> None:
        assert step({"kv_lens": [5], "q_lens": [1]}) == 2.0  # the mean of 0 to 4
        assert step({"kv_lens": [5]}) in (2.0, None)  # right, or refused

    check(ours)
    refutes(check, naive)


def test_e20_one_thread_and_no_reference_kept() -> None:
    class Lengths(list[int]):
        """A list that can be watched."""

    def ours(steps: int) -> tuple[set[int], list[Any]]:
        worker = UpdateWorker(lambda: None, name="field")
        names: set[int] = set()
        watches: list[Any] = []

        def used(lens: Lengths) -> None:
            names.add(threading.get_ident() * len(lens))

        for _ in range(steps):
            lens = Lengths([1])
            watches.append(weakref.ref(lens))
            worker.run(partial(used, lens), timeout=5)
        del lens
        gc.collect()
        worker.close()
        return names, watches

    def naive(steps: int) -> tuple[set[int], list[Any]]:
        names: set[int] = set()
        kept, watches, threads = [], [], []
        for step in range(steps):
            lens = Lengths([1])
            watches.append(weakref.ref(lens))
            kept.append(lens)  # as parameters of a captured op
            threads.append(threading.Thread(target=lambda step=step: names.add(step)))
            threads[-1].start()
            threads[-1].join()
        del lens
        gc.collect()
        alive = [watch for watch in watches if watch() is not None]
        assert len(alive) == len(kept)
        return names, watches

    def check(run: Callable[[int], tuple[set[int], list[Any]]]) -> None:
        names, watches = run(10)
        assert len(names) == 1
        assert all(watch() is None for watch in watches)

    check(ours)
    refutes(check, naive)


def test_f02_f06_every_step_has_a_layer() -> None:
    def check(layers: Callable[[int, int], tuple[int, ...]]) -> None:
        assert layers(3, 3) == (0, 1, 2)
        for given in ((0, 1), (3, 4)):  # no draft layers; one step more than layers
            with pytest.raises(StepKindError):
                layers(*given)

    check(step_layers)
    refutes(check, lambda layers, steps: (layers - 1,) * steps)  # the last loaded wins
    with pytest.raises(pytest.fail.Exception):
        check(lambda layers, steps: tuple(range(min(layers, steps))))  # a shorter list, and nobody told


def test_f11_rows_of_other_ranks_are_not_old_data() -> None:
    """A buffer of four rows, of which this rank writes two."""
    layout = RowLayout([RowField("hidden", "float32", rows=4)])

    def step(buffers: Any) -> torch.Tensor:
        buffers.load(4, {})
        hidden: torch.Tensor = buffers.view("hidden")
        hidden[:2] = torch.tensor([1.0, 2.0])
        buffers.check_written()
        return hidden

    def plain() -> Any:
        memory = torch.full((4,), 7.0)  # of the step before
        return SimpleNamespace(load=lambda rows, values: None, view=lambda name: memory, check_written=lambda: None)

    def check(buffers: Any) -> None:
        try:
            hidden = step(buffers)
        except UnwrittenRows:
            return
        assert 7.0 not in hidden.tolist()

    check(StaticBuffers(layout, get_device("cpu"), device_written=["hidden"], poison=True))
    refutes(check, plain())
