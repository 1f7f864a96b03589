"""Races between streams: what orders two accesses and what does not, which bytes an access has, what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu

Stream = torch_npu.npu.Stream


def on(stream: Any, work: Callable[[], Any]) -> Any:
    with torch_npu.npu.stream(stream):
        return work()


def test_the_error_names_both_sides() -> None:
    x, y, side = torch.zeros(4, 8, device="npu"), torch.ones(4, device="npu"), Stream()
    torch_npu.npu.synchronize()
    emulator.memory.label(x.data_ptr(), 128, "layer 3's keys")
    x[1:3].mul_(2)
    with pytest.raises(emulator.RaceError) as caught:
        on(side, lambda: torch.add(x[:, 2], y))
    error = caught.value
    assert (error.high - error.low, error.low - x.data_ptr()) == (4, 32 + 8)
    assert (error.earlier.operator, error.earlier.argument, error.earlier.writes) == ("aten::mul_.Tensor", "self", True)
    assert (error.later.operator, error.later.argument, error.later.writes) == ("aten::add.Tensor", "self", False)
    assert (error.earlier.shape, error.later.shape, error.later.dtype) == ((2, 8), (4,), "float32")
    assert error.earlier.stream_address == torch_npu.npu.current_stream().npu_stream
    assert error.later.stream_address == side.npu_stream
    assert error.earlier.stream != error.later.stream and not error.reused and not error.captured
    text = str(error)
    for part in (
        "race on 4 bytes",
        "aten::add.Tensor reads self (float32 [4]",
        "aten::mul_.Tensor writes self",
        "layer",
    ):
        assert part in text
    assert (
        f"Let stream {error.later.stream} wait for an event that is recorded on stream {error.earlier.stream}" in text
    )
    emulator.memory.forget(x.data_ptr(), 128)


ACCESSES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], bool]] = {
    "write, read": (lambda x: x.add_(1), lambda x: x + 1, True),
    "read, write": (lambda x: x + 1, lambda x: x.zero_(), True),
    "write, write": (lambda x: x.zero_(), lambda x: x.fill_(2), True),
    "read, read": (lambda x: x + 1, lambda x: x * 2, False),
    "write, out=": (lambda x: x.zero_(), lambda x: torch.add(torch.ones(8, 8, device="npu"), 1, out=x), True),
    "write, copy to the host": (lambda x: x.add_(1), lambda x: x.cpu(), True),
    "write, item": (lambda x: x.add_(1), lambda x: x[0, 0].item(), True),
    "read, copy from the host": (lambda x: x.sum(), lambda x: x.copy_(torch.ones(8, 8)), True),
    "write, list": (lambda x: x.add_(1), lambda x: torch.cat([torch.ones(1, 8, device="npu"), x]), True),
    "read, foreach": (lambda x: x.sum(), lambda x: torch._foreach_add_([x], 1), True),
    "write, index": (lambda x: x.add_(1), lambda x: torch.zeros(9, 8, device="npu").index_select(0, x[0].long()), True),
    "copy, read": (lambda x: x.copy_(torch.ones(8, 8, device="npu")), lambda x: x.clone(), True),
    "halves": (lambda x: x[:4].add_(1), lambda x: x[4:].add_(1), False),
    "columns": (lambda x: x[:, :4].add_(1), lambda x: x[:, 4:].add_(1), False),
    "columns that meet": (lambda x: x[:, :5].add_(1), lambda x: x[:, 4:].add_(1), True),
    "every second element": (lambda x: x.view(-1)[::2].add_(1), lambda x: x.view(-1)[1::2].add_(1), False),
    "a column and its transpose": (lambda x: x.t()[1].add_(1), lambda x: x[:, 1].add_(1), True),
    "keys and values": (lambda x: x.view(2, 4, 8)[0].add_(1), lambda x: x.view(2, 4, 8)[1].add_(1), False),
    "blocks of a grid": (
        lambda x: x.view(2, 4, 2, 4)[:, :, 0].add_(1),
        lambda x: x.view(2, 4, 2, 4)[:, :, 1].add_(1),
        False,
    ),
    "other bytes of one element": (
        lambda x: x.view(torch.uint8)[:, ::4].add_(1),
        lambda x: x.view(torch.uint8)[:, 1::4].add_(1),
        False,
    ),
    "expanded": (lambda x: x[:1].expand(8, 8).sum(), lambda x: x[1:].zero_(), False),
    "nothing": (lambda x: x[:0].zero_(), lambda x: x.zero_(), False),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_which_accesses_collide(name: str) -> None:
    first, second, race = ACCESSES[name]
    x, side = torch.ones(8, 8, device="npu"), Stream()
    torch_npu.npu.synchronize()
    first(x)
    if race:
        with pytest.raises(emulator.RaceError):
            on(side, lambda: second(x))
        side.wait_stream(torch_npu.npu.current_stream())  # and an event orders them
    on(side, lambda: second(x))
    torch_npu.npu.synchronize()


def wait_stream(first: Any, second: Any) -> None:
    second.wait_stream(first)


def event(first: Any, second: Any) -> None:
    mark = torch_npu.npu.Event()
    mark.record(first)
    second.wait_event(mark)


def over_a_third_stream(first: Any, second: Any) -> None:
    third = Stream()
    third.wait_stream(first)
    second.wait_stream(third)


def event_query(first: Any, second: Any) -> None:
    mark = torch_npu.npu.Event()
    mark.record(first)
    assert mark.query()


def external_event(first: Any, second: Any) -> None:
    mark = torch_npu.npu.ExternalEvent()
    mark.wait(second)
    mark.record(first)


def item_on_the_first(first: Any, second: Any) -> None:
    on(first, lambda: torch.ones((), device="npu").item())


ORDERS = {
    "wait_stream": wait_stream,
    "event": event,
    "over a third stream": over_a_third_stream,
    "synchronize of the stream": lambda first, second: first.synchronize(),
    "synchronize of the device": lambda first, second: torch_npu.npu.synchronize(),
    "event query": event_query,
    "external event": external_event,
    "item on the first stream": item_on_the_first,
}


def record_only(first: Any, second: Any) -> None:
    torch_npu.npu.Event().record(first)


def wrong_way(first: Any, second: Any) -> None:
    first.wait_stream(second)


NO_ORDERS = {
    "record without a wait": record_only,
    "wait for the other": wrong_way,
    "synchronize of the second": lambda first, second: second.synchronize(),
    "item on the second stream": lambda first, second: item_on_the_first(second, first),
    "a third stream waits": lambda first, second: Stream().wait_stream(first),
}


@pytest.mark.parametrize("name", [*ORDERS, *NO_ORDERS])
def test_what_orders_two_streams(name: str) -> None:
    first, second, x = Stream(), Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    on(first, lambda: x.add_(1))
    (ORDERS.get(name) or NO_ORDERS[name])(first, second)
    if name in ORDERS:
        assert on(second, lambda: (x + 1).tolist()) == [2] * 4
    else:
        with pytest.raises(emulator.RaceError):
            on(second, lambda: x + 1)


def test_an_event_covers_what_was_before_its_record_only() -> None:
    first, second, x, mark = Stream(), Stream(), torch.zeros(4, device="npu"), torch_npu.npu.Event()
    torch_npu.npu.synchronize()
    mark.record(first)
    on(first, lambda: x.add_(1))
    second.wait_event(mark)
    with pytest.raises(emulator.RaceError):
        on(second, lambda: x + 1)
    mark.record(first)
    second.wait_event(mark)
    mark.record(second)  # recording again changes nothing for who has waited
    assert on(second, lambda: (x + 1).tolist()) == [2] * 4


def test_waits_of_blocked_streams_count_when_they_are_reached(short_wait: float) -> None:
    gate, first, second, x = torch_npu.npu.ExternalEvent(), Stream(), Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    gate.wait(first)
    on(first, lambda: x.add_(1))
    mark = torch_npu.npu.Event()
    mark.record(first)
    on(first, lambda: x.add_(1))  # beyond the event
    second.wait_event(mark)
    on(second, lambda: x.mul_(2))
    gate.record(torch_npu.npu.current_stream())
    with pytest.raises(emulator.RaceError, match=r"aten::(add_|mul_)"):
        torch_npu.npu.synchronize()


def test_the_same_without_the_access_beyond_the_event() -> None:
    gate, first, second, x = torch_npu.npu.ExternalEvent(), Stream(), Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    gate.wait(first)
    on(first, lambda: x.add_(1))
    mark = torch_npu.npu.Event()
    mark.record(first)
    second.wait_event(mark)
    on(second, lambda: x.mul_(2))
    gate.record(torch_npu.npu.current_stream())
    torch_npu.npu.synchronize()
    assert x.tolist() == [2] * 4


def test_a_race_behind_blocked_work_reaches_whoever_waits_next() -> None:
    gate, first, x = torch_npu.npu.ExternalEvent(), Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    gate.wait(first)
    on(first, lambda: x.add_(1))
    on(Stream(), lambda: x.add_(1))
    gate.record(torch_npu.npu.current_stream())
    on(first, lambda: torch.ones(1, device="npu"))
    with pytest.raises(emulator.RaceError):
        on(Stream(), lambda: torch.ones(1, device="npu").item())


def test_rows_that_an_operator_names() -> None:
    cache, side = torch.zeros(6, 4, 2, 8, device="npu"), Stream()
    low, high = torch.tensor([0, 2], device="npu"), torch.tensor([3, 2], device="npu")
    rows = torch.ones(2, 4, 2, 8, device="npu")
    other = torch.tensor([1, 4], device="npu")
    torch_npu.npu.synchronize()
    cache.index_put_((low,), rows)
    assert on(side, lambda: cache[other].sum().item()) == 0
    on(side, lambda: cache.index_copy_(0, other, rows))
    on(side, lambda: cache.index_select(0, other))
    with pytest.raises(emulator.RaceError, match="aten::index"):
        on(side, lambda: cache[high])
    flat = cache.view(24, 2, 8)
    with pytest.raises(emulator.RaceError, match="npu_scatter_nd_update_"):
        on(side, lambda: torch_npu.npu_scatter_nd_update_(flat, torch.tensor([[11]], device="npu"), rows[0, :1]))
    on(side, lambda: torch_npu.npu_scatter_nd_update_(flat, torch.tensor([[12]], device="npu"), rows[0, :1]))
    torch_npu.npu.synchronize()


def test_attention_reads_the_pages_of_its_block_table(attention: Any) -> None:
    side = Stream()
    table = attention.table.clone()
    torch_npu.npu.synchronize()
    on(side, lambda: attention.key_cache[3].fill_(1))
    attention.table.copy_(table[:, [0, 1, 1]])  # page 3 is not named
    attention.attend([130])
    attention.table.copy_(table)
    attention.attend([200])  # named, but beyond the length
    with pytest.raises(emulator.RaceError, match="npu_fused_infer_attention_score_v2 reads key"):
        attention.attend([257])


def test_outputs_that_a_schema_does_not_mark_are_writes(attention: Any) -> None:
    side, out = Stream(), [torch.zeros(1, 1, 1, 64, dtype=torch.float16, device="npu"), torch.zeros(1, device="npu")]
    torch_npu.npu.synchronize()
    torch_npu.npu_fused_infer_attention_score_v2.out(
        attention.static_query,
        attention.key_cache,
        attention.value_cache,
        actual_seq_kvlen=[3],
        block_table=attention.table,
        num_query_heads=1,
        num_key_value_heads=1,
        softmax_scale=0.125,
        block_size=128,
        input_layout="BSND",
        out=out,
    )
    with pytest.raises(emulator.RaceError, match=r"npu_fused_infer_attention_score_v2\.out writes out"):
        on(side, lambda: out[0] + 1)


def test_memory_that_another_stream_still_uses_is_not_free() -> None:
    side = Stream()
    size = 3 << 20

    def use(shared: bool) -> int:
        torch_npu.npu.empty_cache()
        x = torch.zeros(size, device="npu")
        address = x.data_ptr()
        side.wait_stream(torch_npu.npu.current_stream())
        on(side, lambda: x.add_(1))
        if shared:
            x.record_stream(side)
        return address

    address = use(shared=False)
    with pytest.raises(emulator.RaceError, match="record_stream") as caught:
        torch.zeros(size, device="npu")
    assert caught.value.reused and caught.value.low == address
    torch_npu.npu.synchronize()
    torch_npu.npu.empty_cache()
    address = use(shared=True)
    again = torch.zeros(size, device="npu")
    assert again.data_ptr() == address
    with pytest.raises(emulator.RaceError):  # what record_stream told holds for the freed tensor alone
        on(side, lambda: again.add_(1))


def test_two_devices() -> None:
    x, y = torch.zeros(64, device="npu:0"), torch.zeros(64, device="npu:1")
    torch_npu.npu.synchronize(0)
    torch_npu.npu.synchronize(1)
    x.add_(1)
    y.copy_(x)  # torch_npu orders both devices' current streams around it
    y.add_(1)
    x.add_(1)
    with torch_npu.npu.device(1), torch_npu.npu.stream(Stream(device="npu:1")), pytest.raises(emulator.RaceError):
        y.add_(1)


def test_pinned_memory_is_checked_between_streams() -> None:
    host, x, y = torch.zeros(4).pin_memory(), torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    first, second = Stream(), Stream()
    torch_npu.npu.synchronize()
    on(first, lambda: host.copy_(x, non_blocking=True))
    with pytest.raises(emulator.RaceError, match="aten::copy_ reads src"):
        on(second, lambda: y.copy_(host, non_blocking=True))
    first.synchronize()
    on(second, lambda: y.copy_(host, non_blocking=True))
    torch_npu.npu.synchronize()
    assert y.tolist() == [1] * 4


def test_a_host_function_that_has_run_counts_as_waited_for() -> None:
    first, second, x = Stream(), Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    on(first, lambda: x.add_(1))
    seen: list[int] = []
    torch_npu.npu._subscribe_report(first)
    torch_npu.npu._launch_host_func(first, lambda _: seen.append(1), None)
    assert seen == [1]
    torch_npu.npu._unsubscribe_report(first)
    assert on(second, lambda: x.tolist()) == [1] * 4


def is_checked() -> bool:
    return emulator.order.on


def test_unchecked_forgets_both_ways() -> None:
    side, x = Stream(), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()
    x.add_(1)
    with emulator.order.unchecked():
        assert not is_checked()
        on(side, lambda: x.add_(1))
    assert is_checked()
    x.add_(1)
    with pytest.raises(emulator.RaceError):
        on(side, lambda: x.add_(1))
    emulator.install(check_order=False)
    assert not is_checked()
    emulator.install(wait_seconds=10.0)
    assert not is_checked()
    emulator.install(check_order=True)
    assert is_checked()
