"""The scheduler's half of vLLM's connector: which blocks go with which step, and what becomes of ended requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_pieces import Request, blocks, configuration, done, full, groups, states, step, window

import kv_transfer as kt
from kv_transfer.integrations.vllm.groups import block_groups
from kv_transfer.integrations.vllm.scheduler import SchedulerSide
from kv_transfer.integrations.vllm.settings import Settings, engine_options, place_of, side_of
from kv_transfer.integrations.vllm.words import Chunk, Handshake, Load, StepWords, Stretch


@pytest.fixture
def side() -> SchedulerSide:
    return SchedulerSide(block_groups(groups()), group=1, engine_id="engine-a")


def _prefill(name: str = "a", tokens: int = 10, room: int | None = 7) -> Request:
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    params |= {} if room is None else {"room": room}
    return Request(name, tokens, params)


def _decode(name: str = "b", tokens: int = 10, **params: Any) -> Request:
    return Request(name, tokens, {"do_remote_prefill": True, "room": 7, "prefill_group": 2, **params})


def _status(request: Request, name: str) -> Request:
    request.status = SimpleNamespace(name=name)
    return request


def test_a_prompt_goes_in_full_blocks_and_its_rest_with_the_last_step(side: SchedulerSide) -> None:
    request = _prefill()
    assert side.matched(request, 0) == (0, False)
    side.allocated(request, blocks(5, 6), 0)
    words = side.step(step({"a": ([5, 6], 0, 6)}))
    assert words == StepWords((Chunk("a", 7, 10, (Stretch(0, (5,)),), False),))
    assert side.step(step(cached={"a": (None, 6, 1)})) == StepWords()
    words = side.step(step(cached={"a": ([9, 2], 7, 3)}))  # one more than the prompt needs, for tokens to come
    assert words == StepWords((Chunk("a", 7, 10, (Stretch(1, (6, 9)),), True),))
    assert side.step(step(cached={"a": ([3], 10, 1)})) == StepWords()
    assert side.finished(request) == (
        True,
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "room": 7,
            "prefill_group": 1,
            "remote_engine_id": "engine-a",
        },
    )
    assert side.step(step()) == StepWords()
    assert side.finished(request) == (False, None)


def test_blocks_of_a_prefix_hit_at_prefill_go_with_the_first_chunk(side: SchedulerSide) -> None:
    side.allocated(_prefill(), blocks(5, 6, 9), 0)
    words = side.step(step({"a": ([5, 6, 9], 8, 2)}))
    assert words.chunks == (Chunk("a", 7, 10, (Stretch(0, (5, 6, 9)),), True),)


def test_without_a_room_the_prefill_side_chooses_one(side: SchedulerSide) -> None:
    rooms = set()
    for name in ("a", "b"):
        request = _prefill(name, 4, None)
        side.allocated(request, blocks(5), 0)
        side.allocated(request, blocks(5), 0)  # vLLM may say it twice
        (chunk,) = side.step(step({name: ([5], 0, 4)})).chunks
        _, params = side.finished(request)
        assert params is not None and params["room"] == chunk.room and 0 <= chunk.room < 2**63
        rooms.add(chunk.room)
    assert len(rooms) == 2


def test_a_load_begins_behind_what_is_here(side: SchedulerSide) -> None:
    request = _decode()
    assert side.matched(request, 0) == (10, True) and side.matched(request, 8) == (2, True)
    assert side.matched(request, 10) == (0, False)
    side.allocated(request, blocks(3, 8, 1, 4), 6)
    assert side.step(step()) == StepWords(loads=(Load("b", 7, 2, 10, (Stretch(1, (8, 1)),)),))
    assert side.matched(request, 0) == (0, False), "what fails is computed here"
    side.allocated(request, blocks(3, 8, 1, 4), 0)
    assert side.step(step()) == StepWords()
    side.heard(done("b"))
    assert side.finished(request) == (False, None)
    assert side.step(step()) == StepWords()


def test_a_whole_hit_at_decode_is_told_with_an_empty_load(side: SchedulerSide) -> None:
    request = _decode(tokens=8)
    assert side.matched(request, 8) == (0, False)
    side.allocated(request, blocks(3, 8, 1), 0)
    assert side.step(step()).loads == (Load("b", 7, 2, 8, (Stretch(2, ()),)),)
    assert side.finished(request) == (False, None) and side.step(step()) == StepWords()


def test_requests_that_end_early(side: SchedulerSide) -> None:
    # At decode: before it had blocks, and while they are filled.
    waiting = _status(_decode("w"), "FINISHED_ABORTED")
    reason = "the request ended as FINISHED_ABORTED"
    assert side.finished(waiting) == (False, None)
    assert side.step(step()) == StepWords(rejects=((7, 2, reason),))
    loading = _decode("l")
    side.allocated(loading, blocks(3, 8, 1), 10)
    side.step(step())
    assert side.finished(_status(loading, "FINISHED_ABORTED")) == (False, None)
    assert side.step(step()) == StepWords(aborts=(("l", reason),))
    # At prefill: before anything went, half-way, and aborted after its prompt was whole.
    for name, steps, delayed in (("x", [], False), ("y", [(0, 8)], True), ("z", [(0, 8), (8, 2)], True)):
        request = _prefill(name)
        side.allocated(request, blocks(5, 6, 9), 0)
        for computed, tokens in steps:
            fresh = {name: ([5, 6, 9], computed, tokens)}
            side.step(step(fresh) if computed == 0 else step(cached={name: (None, computed, tokens)}))
        assert side.finished(_status(request, "FINISHED_ABORTED")) == (delayed, None)
        words = side.step(step())
        assert words == (StepWords(aborts=((name, reason),)) if delayed else StepWords(rejects=((7, 1, reason),)))


@pytest.mark.parametrize("handed", [True, False])
def test_a_preempted_request_is_given_up_once(side: SchedulerSide, handed: bool) -> None:
    request = _prefill()
    side.allocated(request, blocks(5, 6, 9), 0)
    side.step(step({"a": ([5, 6, 9], 0, 8 if handed else 3)}))
    words = side.step(step(preempted=("a",)))
    assert words.preempted == (("a",) if handed else ()) and bool(words.rejects) is not handed
    assert side.step(step(cached={"a": ([1, 2, 3], 0, 10)}, resumed=("a",))) == StepWords()
    assert side.finished(request) == (False, None), "nobody would say that its blocks are sent"


def test_requests_without_a_transfer_are_left_alone(side: SchedulerSide) -> None:
    for params in (None, {}, {"other": 1}):
        request = Request("n", 8, params)
        assert side.matched(request, 0) == (0, False)
        side.allocated(request, blocks(1, 2), 0)
        assert side.step(step({"n": ([1, 2], 0, 8)})) == StepWords()
        assert side.finished(request) == (False, None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"do_remote_prefill": True}, "room: needed"),
        ({"do_remote_prefill": True, "room": "x"}, "room: Input should be a valid integer"),
        ({"do_remote_prefill": True, "room": -1}, "room: Input should be greater than or equal to 0"),
        ({"do_remote_prefill": True, "room": True}, "room: Input should be a valid integer"),
        ({"do_remote_decode": True, "room": 2**63}, "room: Input should be less than or equal to"),
        ({"do_remote_prefill": True, "room": 7, "prefill_group": "first"}, "prefill_group: "),
        ({"do_remote_prefill": "yes", "room": 7}, "do_remote_prefill: "),
        ([7], "all: "),
    ],
)
def test_a_request_with_malformed_parameters_ends_no_scheduler(
    side: SchedulerSide, wrong: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would end vLLM's engine and every other request; whoever sent one chooses its parameters."""
    request = Request("n", 8, wrong)
    assert [side.matched(request, 0) for _ in range(3)] == [(0, False)] * 3
    side.allocated(request, blocks(1, 2), 0)
    assert side.step(step({"n": ([1, 2], 0, 8)})) == StepWords()
    assert side.finished(request) == (False, None)
    (record,) = caplog.records
    assert "request n is served without a transfer: kv_transfer_params: " in record.message
    assert named in record.message
    assert not side._malformed


@pytest.mark.parametrize("config", [groups(full(), window(9)), groups(full(), states())])
def test_prefill_leaves_the_last_token_to_decode_where_a_group_needs_it(config: Any) -> None:
    side = SchedulerSide(block_groups(config), 1, "engine-a")
    request = _prefill(tokens=5)
    request.prompt_embeds, request.prompt_is_token_ids = "abcde", [True, False, True, True, False]
    side.arrived(request)
    assert (request.num_prompt_tokens, request.max_tokens, request.prompt_embeds) == (4, 1, "abcd")
    assert request.prompt_token_ids == request._all_token_ids == [0, 1, 2, 3]
    assert request.prompt_is_token_ids == [True, False, True, True]
    embedded = _prefill("e", 5)
    embedded.prompt_token_ids, embedded.prompt_embeds = None, "abcde"
    side.arrived(embedded)
    assert embedded.num_prompt_tokens == 4 == len(embedded._all_token_ids) and embedded.prompt_embeds == "abcd"
    for other in (Request("n", 5, None), _decode(tokens=5)):
        side.arrived(other)
        assert (other.num_prompt_tokens, other.max_tokens) == (5, 16)
    assert side.matched(other, 0) == (4, True) and side.matched(other, 4) == (0, False)
    plain = SchedulerSide(block_groups(groups(full(), full())), 1, "engine-a")
    whole = _prefill(tokens=5)
    plain.arrived(whole)
    assert (whole.num_prompt_tokens, whole.max_tokens) == (5, 16)


def test_workers_of_one_instance_have_to_fit(side: SchedulerSide) -> None:
    ranks = [Handshake(kt.Place(tp_rank=rank, tp_size=2), "nixl", "m", 4) for rank in range(2)]
    side.met({(0, 0): ranks[0], (0, 1): ranks[1]})
    assert side.workers[0, 1] is ranks[1]
    for second in (ranks[0], Handshake(ranks[1].place, "mooncake", "m", 4)):
        with pytest.raises(kt.ArgumentError, match="2 of them"):
            side.met({(0, 0): ranks[0], (0, 1): second})


def test_settings_come_from_the_extra_config() -> None:
    config = configuration(engine="nixl", group=2, groups=3, timeouts={"offer": 5.0}, draft=False)
    settings = Settings.of(config)
    assert settings.limits_in_time().offer == 5.0 and settings.parts == ("target",)
    place = place_of(configuration(tp=2, pp=2, rank=3), Settings.of(configuration()))
    assert (place.pp_rank, place.tp_rank, place.dp_rank) == (1, 1, 0)
    assert (place_of(config, settings).dp_rank, place_of(config, settings).dp_size) == (2, 3)
    assert side_of(config) == "prefill" and side_of(configuration("kv_consumer")) == "decode"
    with pytest.raises(kt.ArgumentError, match="kv_role: 'kv_both'"):
        side_of(configuration("kv_both"))
    with pytest.raises(kt.ArgumentError, match=r"enigne: Extra inputs.*use the names directory, engine"):
        Settings.of(configuration(enigne="nixl"))
    with pytest.raises(kt.ArgumentError, match="timeouts"):
        Settings.of(configuration(timeouts={"ofer": 5.0})).limits_in_time()
    with pytest.raises(kt.UnsupportedLayout, match="group: 3 is not below"):
        place_of(config, Settings.of(configuration(group=3, groups=3)))
    shared = configuration()
    shared.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(kt.UnsupportedLayout, match="decode_context_parallel_size"):
        place_of(shared, settings)


def test_engines_are_told_what_the_instance_knows() -> None:
    device = SimpleNamespace(index=3)

    def options(engine: str, **given: Any) -> dict[str, Any]:
        return engine_options(
            Settings.of(configuration(engine=engine, engine_options=given)), "decode", "10.0.0.2", device
        )

    assert options("nixl") == {}
    assert options("mooncake", workers=2) == {"hostname": "10.0.0.2", "workers": 2}
    assert options("mooncake", hostname="10.0.0.9") == {"hostname": "10.0.0.9"}
    assert options("memfabric", store_url="tcp://10.0.0.1:21234") == {
        "hostname": "10.0.0.2", "role": "Decode", "device_id": 3, "store_url": "tcp://10.0.0.1:21234",
    }  # fmt: skip
