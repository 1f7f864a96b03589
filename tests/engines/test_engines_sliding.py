"""SGLang's hybrid pool of full and sliding layers and its attention over both, against a float64 loop, eager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ascend_emulator.kernels import OpRefused
from engines_attention import verify_input
from engines_reference import attend
from engines_sliding import FULL, PAGE, ROOM, SLIDING, WINDOW, SlidingWorld
from kv_pool import PageAllocator, WindowPages, slots_for
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

LENGTHS = [3, WINDOW, PAGE, 2 * PAGE + 5]
PREFIXES = [0, 30, 2 * PAGE, PAGE + 60]
NEWS = [150, 70, 1, PAGE]
WIDTH = 4
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
BOUND = 1.5e-2

each_layer = pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH))
    monkeypatch.setenv("ASCEND_USE_FIA", "1")


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)


def per_request(rows: torch.Tensor, news: list[int]) -> list[torch.Tensor]:
    return list(torch.split(rows, news))


@each_layer
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_prefill(layer: int, sinks: torch.Tensor | None) -> None:
    """FIA v2, packed; the band of the sliding layer shows WINDOW positions before a token's own."""
    world = SlidingWorld(PREFIXES)
    query, found = world.run(ForwardMode.EXTEND, layer, NEWS, sinks=sinks)
    compare(found, world.expected(layer, query, NEWS, sinks=sinks))


@each_layer
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_verify(layer: int, sinks: torch.Tensor | None) -> None:
    world, news = SlidingWorld(LENGTHS), [WIDTH] * 4
    query, found = world.run(ForwardMode.TARGET_VERIFY, layer, news, sinks=sinks, spec_info=verify_input(WIDTH))
    compare(found, world.expected(layer, query, news, sinks=sinks))


@pytest.mark.parametrize("fia", ["0", "1"])
def test_decode_of_a_full_layer(monkeypatch: pytest.MonkeyPatch, fia: str) -> None:
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    world, news = SlidingWorld(LENGTHS), [1] * 4
    query, found = world.run(ForwardMode.DECODE, FULL, news)
    compare(found, world.expected(FULL, query, news))


def test_eager_decode_passes_what_the_document_does_not_allow() -> None:
    """A-17b: a mask of (batch, 1, length) for the sliding layer; sinks in a layout that is not packed."""
    with pytest.raises(OpRefused, match="mask-full"):
        SlidingWorld(LENGTHS).run(ForwardMode.DECODE, SLIDING, [1] * 4)
    for layer in (FULL, SLIDING):
        with pytest.raises(OpRefused, match="sink-layout"):
            SlidingWorld(LENGTHS).run(ForwardMode.DECODE, layer, [1] * 4, sinks=SINKS)


def test_a_last_token_alone_sees_past_the_window() -> None:
    """Heads that FIA does not pack: with one query the operator ignores the band, and the whole prefix is seen."""
    world = SlidingWorld(PREFIXES, dims=64)
    query, found = world.run(ForwardMode.EXTEND, SLIDING, NEWS)
    wanted = world.expected(SLIDING, query, NEWS)
    for row, (got, want) in enumerate(zip(per_request(found, NEWS), per_request(wanted, NEWS), strict=True)):
        if NEWS[row] > 1:
            compare(got, want)
        else:
            assert (got - want).abs().max() > 0.1
            whole = world.expected(SLIDING, query, NEWS, back=world.lengths[row])
            compare(got, per_request(whole, NEWS)[row])


def test_sinks_are_lost_a_request_at_a_time() -> None:
    """A-19: heads that FIA does not pack: no sink is passed, and a full layer gets a band that shows nothing."""
    world = SlidingWorld(PREFIXES, dims=64)
    query, found = world.run(ForwardMode.EXTEND, SLIDING, NEWS, sinks=SINKS)
    compare(found[: NEWS[0]], world.expected(SLIDING, query, NEWS)[: NEWS[0]])
    query, found = world.run(ForwardMode.EXTEND, FULL, NEWS, sinks=SINKS)
    assert not found[: NEWS[0]].any()


def test_without_fia_a_sliding_layer_reads_the_other_pools_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FIA and without sinks the full block table is used for the sliding pool, and no window."""
    monkeypatch.setenv("ASCEND_USE_FIA", "0")
    world, news = SlidingWorld(LENGTHS), [1] * 4
    query, found = world.run(ForwardMode.DECODE, SLIDING, news)
    assert (found - world.expected(SLIDING, query, news)).abs().max() > 0.5
    key, value = (get(SLIDING).cpu().flatten(0, 1) for get in (world.pool.get_key_buffer, world.pool.get_value_buffer))
    for row, length in enumerate(LENGTHS):
        slots = world.taken[row][: length + 1].cpu()
        compare(
            found[row : row + 1], attend(query[row : row + 1], key[slots], value[slots], scale=128**-0.5, start=length)
        )


def test_both_pools_hold_what_was_written() -> None:
    """Each pool at its own slots, and nothing else but page 0."""
    world = SlidingWorld(LENGTHS)
    for layer in (FULL, SLIDING):
        key = world.pool.get_key_buffer(layer).cpu().flatten(0, 1)
        for row, length in enumerate(LENGTHS):
            slots = world.taken[row][:length]
            slots = world.pool.translate_loc_from_full_to_swa(slots) if layer == SLIDING else slots
            assert torch.equal(key[slots.cpu()], world.key[row, layer, :length])
            key[slots.cpu()] = 0
        assert not key.any()


def test_pages_that_left_the_window_are_given_back() -> None:
    """SGLang's allocator frees the sliding side alone: those full slots then map to slot 0, as ours do."""
    world = SlidingWorld([ROOM])
    before = world.allocator.swa_available_size(), world.allocator.full_available_size()
    world.allocator.free_swa(world.taken[0][: 2 * PAGE])
    assert world.allocator.swa_available_size() - before[0] == 2 * PAGE
    assert world.allocator.full_available_size() == before[1]
    mapped = world.pool.translate_loc_from_full_to_swa(world.taken[0]).cpu()
    assert not mapped[: 2 * PAGE].any() and mapped[2 * PAGE :].all()
    ours = WindowPages(PageAllocator(33, PAGE), PageAllocator(21, PAGE))
    taken = ours.alloc(-(-ROOM // PAGE))
    assert ours.leave(taken[:2]) == 2
    kept = ours.window_slots(slots_for(taken, 0, ROOM, PAGE)) >= PAGE
    assert torch.equal(torch.from_numpy(kept), mapped >= PAGE)
