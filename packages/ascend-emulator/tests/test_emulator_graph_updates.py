"""The update and replay model of captured graphs, through torch_npu's own NPUGraph."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu


def test_update_before_replay(attention: Any) -> None:
    for length in (10, 5, 300):
        attention.update(length)
        attention.graph.replay()
        attention.check(length)


def test_update_after_replay(attention: Any) -> None:
    for length in (10, 5, 300):
        attention.graph.replay()
        time.sleep(0.01)
        attention.update(length)
        attention.check(length)


def test_replay_computes_nothing_by_itself(attention: Any) -> None:
    attention.update(10)
    attention.graph.replay()
    attention.check(10)
    attention.graph.replay()
    pending = torch_npu.npu.current_stream()
    assert not pending.query()
    attention.update(20)
    assert pending.query()
    attention.check(20)


def test_a_thread_updates_while_the_caller_replays_a_thousand_times(attention: Any) -> None:
    """Exact each time, whichever of the two comes first."""
    order = random.Random(3)
    lengths = [order.randint(1, 380) for _ in range(1000)]
    expected = {n: attention.expected(n) for n in set(lengths)}
    asked: list[threading.Event] = [threading.Event() for _ in lengths]
    failures: list[BaseException] = []

    def updates() -> None:
        try:
            for i, length in enumerate(lengths):
                asked[i].wait(30)
                if i % 7 == 0:
                    time.sleep(0.001)
                attention.update(length)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=updates)
    thread.start()
    for i, length in enumerate(lengths):
        asked[i].set()
        attention.graph.replay()
        got = attention.out.cpu()[0, 0, 0].float()
        torch.testing.assert_close(got, expected[length], atol=2e-3, rtol=2e-3)
    thread.join()
    assert not failures


def test_each_record_waits_for_its_own_update(attention_of: Callable[[int], Any]) -> None:
    case = attention_of(3)
    for lengths in ((10, 20, 30), (1, 300, 128)):
        case.graph.replay()
        case.update(*lengths)
        case.check(*lengths)


def test_one_dict_goes_to_all_records(attention_of: Callable[[int], Any]) -> None:
    case = attention_of(2)
    case.update(17)
    case.graph.replay()
    case.check(17, 17)


def test_wrong_number_of_dicts_is_refused_by_torch_npu(attention_of: Callable[[int], Any]) -> None:
    case = attention_of(3)
    with pytest.raises(RuntimeError, match="3 operators"):
        case.update(1, 2)


def test_operators_issued_behind_a_blocked_replay_are_deferred(attention: Any) -> None:
    attention.graph.replay()
    doubled = attention.out * 2
    doubled += 1
    rows = torch.cat([doubled, doubled])
    assert rows.shape == (2, *attention.out.shape[1:])
    attention.update(33)
    torch.testing.assert_close(rows.cpu()[1, 0, 0].float(), 2 * attention.expected(33) + 1, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("wait", ["device", "stream", "event", "cpu", "item"])
def test_replay_without_update_is_raised_by_the_wait(attention: Any, short_wait: float, wait: str) -> None:
    attention.update(10)
    attention.graph.replay()
    attention.check(10)
    attention.graph.replay()
    event = torch_npu.npu.Event()
    event.record()
    waits: dict[str, Callable[[], Any]] = {
        "device": torch_npu.npu.synchronize,
        "stream": torch_npu.npu.current_stream().synchronize,
        "event": event.synchronize,
        "cpu": attention.out.cpu,
        "item": lambda: attention.out.sum().item(),
    }
    with pytest.raises(emulator.DeadlockError, match=r"no graph.update\(\) arrived") as caught:
        waits[wait]()
    assert caught.value.record == 0
    assert caught.value.operator == "npu_fused_infer_attention_score_v2"
    assert f"replay of graph {caught.value.graph} waits for record 0" in str(caught.value)
    assert torch.ones(3, device="npu").sum().item() == 3
    attention.update(12)
    attention.graph.replay()
    attention.check(12)


def test_the_deadlock_names_the_record_that_got_no_update(
    attention_of: Callable[[int], Any], short_wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that dies half-way leaves the later records waiting, and nothing of it is left for the next replay."""
    case = attention_of(3)
    mode = case.graph.graph_dispatch_mode
    records = mode.graph_dispatch_records
    monkeypatch.setattr(mode, "graph_dispatch_records", records[:1])
    case.update(10)
    monkeypatch.undo()
    case.graph.replay()
    with pytest.raises(emulator.DeadlockError, match=r"waits for record 1 ") as caught:
        torch_npu.npu.synchronize()
    assert caught.value.record == 1
    case.graph.replay()
    case.update(5, 6, 7)
    case.check(5, 6, 7)


def test_a_deadlock_in_one_stream_is_raised_by_a_wait_on_another(attention: Any, short_wait: float) -> None:
    side = torch_npu.npu.Stream()
    attention.graph.replay()
    side.wait_stream(torch_npu.npu.current_stream())
    with pytest.raises(emulator.DeadlockError, match="record 0"):
        side.synchronize()
    torch_npu.npu.synchronize()


def test_second_update_before_a_replay(attention: Any) -> None:
    attention.update(10)
    with pytest.raises(emulator.DoubleUpdateError, match="record 0") as caught:
        attention.update(11)
    assert (caught.value.record, caught.value.operator) == (0, "npu_fused_infer_attention_score_v2")
    attention.graph.replay()
    attention.check(10)


def test_two_updates_for_two_queued_replays_need_the_fence_between(attention: Any) -> None:
    attention.graph.replay()
    first = torch_npu.npu.Event()
    first.record()
    attention.graph.replay()
    attention.update(10)
    first.synchronize()
    attention.update(20)
    attention.check(20)


@pytest.mark.parametrize("drained", [False, True], ids=["queued", "drained"])
def test_update_without_the_fence(attention: Any, drained: bool) -> None:
    """An error whether or not the replay happens to have run already."""
    attention.update(10)
    attention.graph.replay()
    if drained:
        attention.out.clone()  # an operator behind the replay runs it, but the host has waited for nothing
    with pytest.raises(emulator.FenceError, match="record 0") as caught:
        attention.update(11)
    assert (caught.value.record, caught.value.operator) == (0, "npu_fused_infer_attention_score_v2")
    attention.check(10)


@pytest.mark.parametrize("fence", ["event", "query", "stream", "device", "cpu", "item", "other stream"])
def test_what_counts_as_a_fence(attention: Any, fence: str) -> None:
    attention.update(10)
    attention.graph.replay()
    event = torch_npu.npu.Event()
    event.record()
    side = torch_npu.npu.Stream()
    side.wait_event(event)
    fences: dict[str, Callable[[], Any]] = {
        "event": event.synchronize,
        "query": event.query,
        "stream": torch_npu.npu.current_stream().synchronize,
        "device": torch_npu.npu.synchronize,
        "cpu": attention.out.cpu,
        "item": lambda: attention.out[0, 0, 0, 0].flatten()[0].item(),
        "other stream": side.synchronize,
    }
    fences[fence]()
    attention.update(20)
    attention.graph.replay()
    attention.check(20)


def test_an_event_recorded_before_the_replay_is_no_fence(attention: Any) -> None:
    event = torch_npu.npu.Event()
    event.record()
    attention.update(10)
    attention.graph.replay()
    event.synchronize()
    with pytest.raises(emulator.FenceError):
        attention.update(20)
    attention.check(10)


def test_a_key_that_was_not_captured_is_ignored_by_torch_npu_itself(attention: Any) -> None:
    attention.update(10)
    attention.graph.replay()
    attention.check(10)
    attention.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [20]}])
    attention.graph.replay()
    attention.check(10)


def test_what_an_operator_refuses_is_refused_by_the_update(attention: Any, short_wait: float) -> None:
    attention.graph.replay()
    with pytest.raises(ValueError, match="161002"):
        attention.update(100_000)
    with pytest.raises(emulator.DeadlockError, match="record 0"):
        torch_npu.npu.synchronize()
    attention.update(8)
    attention.graph.replay()
    attention.check(8)


def test_a_failing_kernel_surfaces_at_the_wait_and_drops_the_rest(attention: Any) -> None:
    attention.table.fill_(77)
    attention.graph.replay()
    attention.update(10)
    with pytest.raises(
        emulator.DeferredExecutionError, match=r"record 0 \(npu_fused_infer_attention_score_v2\)"
    ) as caught:
        torch_npu.npu.synchronize()
    assert "507015" in str(caught.value.__cause__)
    torch_npu.npu.synchronize()
    attention.table.copy_(torch.arange(1, attention.pages, dtype=torch.int32).view(1, -1))
    attention.update(8)
    attention.graph.replay()
    attention.check(8)


def test_two_graphs_keep_their_records_apart(attention_of: Callable[[int], Any]) -> None:
    first, second = attention_of(1), attention_of(1)
    first.graph.replay()
    second.graph.replay()
    second.update(20)
    first.update(10)
    first.check(10)
    second.check(20)


def test_what_an_operator_refuses_is_refused_at_capture(attention: Any) -> None:
    graph = torch_npu.npu.NPUGraph()
    with pytest.raises(ValueError, match="161002"), torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        attention.attend([100_000])
    attention.update(8)
    attention.graph.replay()
    attention.check(8)


def test_a_mask_that_the_graph_itself_makes() -> None:
    """At the capture it holds nothing yet, so its contents are looked at in the replay; engines cast their mask so."""
    torch.manual_seed(3)
    query, keys = (torch.randn(tokens, 1, 128, dtype=torch.bfloat16) for tokens in (2, 9))
    on_npu = query.to("npu"), keys.to("npu")
    triangle = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu_(1)
    graph, given, rest = torch_npu.npu.NPUGraph(), torch.empty_like(on_npu[0]), torch.empty(0, device="npu")
    with torch_npu.npu.graph(graph):
        out, lse = torch_npu.npu_fused_infer_attention_score_v2.out(
            on_npu[0], on_npu[1], on_npu[1], actual_seq_qlen=[2], actual_seq_kvlen=[9], num_query_heads=1,
            num_key_value_heads=1, softmax_scale=0.1, sparse_mode=3, input_layout="TND",
            atten_mask=triangle.to(torch.int8), out=[given, rest],
        )  # fmt: skip
    assert out is given and lse is rest
    graph.replay()
    for row, visible in enumerate((8, 9)):
        seen = keys[:visible, 0].float()
        expected = torch.softmax(seen @ query[row, 0].float() * 0.1, 0) @ seen
        torch.testing.assert_close(given[row, 0].cpu().float(), expected, atol=1e-2, rtol=1e-2)


def test_reading_a_slot_that_was_never_written_is_the_devices_error(attention: Any) -> None:
    cache = torch.empty_like(attention.key_cache)
    cache[1].copy_(attention.key_cache[1])
    attention.key_cache.copy_(cache)
    attention.update(128)
    attention.graph.replay()
    attention.check(128)
    attention.graph.replay()
    attention.update(129)
    with pytest.raises(emulator.DeferredExecutionError, match=r"(?s)507015.*page 2, slot 256") as caught:
        attention.out.cpu()
    assert getattr(caught.value.__cause__, "page", None) == 2
