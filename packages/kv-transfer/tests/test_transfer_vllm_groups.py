"""vLLM's KV cache groups from its scheduler's words to bytes: windows and states beside full attention, both sides.

Tensors are those that vLLM and vllm-ascend lay out; block tables have null blocks where theirs have.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_pair import eventually
from vllm_pieces import Request, configuration, done, full, groups, names, states, step, tables, window

import kv_transfer as kt
from kv_transfer.engine import Blocks, TransferHandle, TransferState, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.integrations.vllm.caches import Caches, read_caches
from kv_transfer.integrations.vllm.decode import DecodeWorker
from kv_transfer.integrations.vllm.groups import block_groups
from kv_transfer.integrations.vllm.prefill import PrefillWorker
from kv_transfer.integrations.vllm.scheduler import SchedulerSide
from kv_transfer.integrations.vllm.settings import Settings
from kv_transfer.integrations.vllm.words import Failures, StepWords

TIMEOUTS = kt.Timeouts(handshake=2.0, heartbeat_interval=0.05, peer_lost_after=10.0, dead_writer_grace=0.2, drain=1)
BLOCK, PAGE, BLOCKS, HEADS, DIMS = 8, 4, 12, 2, 3  # a block of the engine is two pages
STATES = "model.layers.3.linear_attn"
WINDOWED = groups(full(BLOCK), window(9, BLOCK), window(9, BLOCK), layers=[names(0), names(1), names(2)])
HYBRID = groups(full(BLOCK), states(), layers=[names(0), [STATES]])
ALL = groups(full(BLOCK), window(9, BLOCK), states(BLOCK, "align"), layers=[names(0), names(1), [STATES]])
ALONE = groups(window(9, BLOCK), layers=[names(1)])


def allocate(config: Any, heads: int = HEADS) -> tuple[torch.Tensor, dict[str, Any]]:
    """Tensors that a layer of each group shares, one after the other, and their views, as vllm-ascend makes them."""
    shape = (BLOCKS * BLOCK // PAGE, PAGE, heads, DIMS)
    size = BLOCK * heads * DIMS * 2  # of a block's K
    layers = [list(group.layer_names) for group in config.kv_cache_groups]
    memory = torch.zeros(max(map(len, layers)), BLOCKS * (24 + 2 * size), dtype=torch.int8)
    first, second = BLOCKS * 24, BLOCKS * (24 + size)
    found: dict[str, Any] = {}
    for names_of_group in layers:
        for name, raw in zip(names_of_group, memory, strict=False):
            if name == STATES:
                found[name] = [
                    raw[:first].view(torch.bfloat16).view(BLOCKS, 3, 4),
                    raw[first:second].view(torch.float32).view(BLOCKS, size // 4),
                ]
            else:
                found[name] = tuple(own.view(torch.bfloat16).view(shape) for own in (raw[first:second], raw[second:]))
    return memory.view(-1), found


class Failing(LoopbackEngine):
    """Gives every batch up."""

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        handle = super().submit(peer, batch)
        handle.settle(TransferStatus(TransferState.FAILED, "broken by the test"))
        return handle


class Rank:
    """One worker with its caches."""

    def __init__(self, keep: contextlib.ExitStack, side: str, config: Any, directory: kt.Directory, **options: Any):
        engine = options.pop("engine", LoopbackEngine)()
        heads = options.pop("local", HEADS)
        self.raw, caches = allocate(config, heads)
        own = configuration(side, layers=4, **options)
        self.caches: Caches = read_caches(own, config, caches, Settings.of(own))
        common: dict[str, Any] = {"windows": self.caches.windows, "timeouts": TIMEOUTS, "every": 0.02}
        self.end: kt.PrefillEnd | kt.DecodeEnd
        if side == "kv_producer":
            self.raw.random_(-128, 127)
            self.end = kt.PrefillEnd(self.caches.manifests, engine, directory, **common)
            keep.callback(self.end.close)
            self.prefill = PrefillWorker(self.end, self.caches.groups, 120.0)
            keep.callback(self.prefill.close)
        else:
            self.end = kt.DecodeEnd(self.caches.manifests, engine, directory, on_failed_pages="recompute", **common)
            keep.callback(self.end.close)
            self.decode = DecodeWorker(self.end, self.caches.groups, TIMEOUTS.handshake, restarts=True)


class World:
    """A scheduler on each side, a worker for each of prefill's stages and `tp` of them at decode."""

    def __init__(
        self,
        keep: contextlib.ExitStack,
        config: Any,
        tp: int = 1,
        engine: type[LoopbackEngine] = LoopbackEngine,
        stages: Sequence[Any] = (),
    ) -> None:
        directory, stages = kt.Directory(), stages or [config]
        text = {"layer_types": ["full_attention", "sliding_attention"] * 2}
        self.sources = [
            Rank(keep, "kv_producer", own, directory, engine=engine, pp=len(stages), rank=rank, text=text)
            for rank, own in enumerate(stages)
        ]
        self.source = self.sources[0]
        self.targets = [
            Rank(keep, "kv_consumer", config, directory, tp=tp, rank=rank, local=HEADS // tp) for rank in range(tp)
        ]
        self.target = self.targets[0]
        for rank in (*self.sources, *self.targets):
            rank.end.wait_ready(60)
        self.prefill, self.decode = (SchedulerSide(block_groups(config), 0, name) for name in ("p", "d"))

    def offer(self, table: Sequence[Sequence[int]], tokens: int, here: int = 0, room: int = 7) -> Request:
        """A request at decode, whose blocks vLLM has just allocated."""
        request = Request("d", tokens, {"do_remote_prefill": True, "room": room, "prefill_group": 0})
        self.decode.arrived(request)
        count, between = self.decode.matched(request, here)
        assert between
        self.blocks = tables(*table)
        self.decode.allocated(request, self.blocks, count)
        words = self.decode.step(step())
        for rank in self.targets:
            rank.decode.take(words)
        return request

    def send(self, table: Sequence[Sequence[int]], tokens: int, steps: Sequence[int], room: int = 7) -> Request:
        """A request at prefill: the block ids that vLLM tells of in each step, those of the last step in all."""
        request = Request("p", tokens, {"do_remote_decode": True, "room": room})
        self.prefill.arrived(request)
        assert self.prefill.matched(request, 0) == (0, False)
        self.prefill.allocated(request, tables(*([] for _ in table)), 0)
        computed, told = 0, [0 for _ in table]
        for count in steps:
            own = self.prefill._groups
            stops = [min(len(ids), group.count(computed + count)) for ids, group in zip(table, own, strict=True)]
            fresh = tuple(list(ids[a:b]) for ids, a, b in zip(table, told, stops, strict=True))
            told = stops
            words = self.prefill.step(
                step({"p": (fresh, 0, count)}) if not computed else step(cached={"p": (fresh, computed, count)})
            )
            for rank in self.sources:
                rank.prefill.take(words, None)
            computed += count
        assert computed == request.num_prompt_tokens
        return request

    def wait(self) -> Failures | None:
        """Until decode's worker has reported the request, and prefill's has."""
        assert eventually(lambda: self.target.decode.finished() == {"d"}, 60)
        for rank in self.sources:
            assert eventually(lambda own=rank: own.prefill.finished({"p"}) == {"p"}, 60)  # type: ignore[misc]
        assert self.target.decode.failed_blocks() == set()
        failed = self.target.decode.failed_requests()
        assert self.target.decode.failed_requests() == frozenset()
        return Failures(failed) if failed else None

    def faults(self, moved: Sequence[dict[int, int]]) -> list[str]:
        """Of decode's memory, when item d of a manifest of group g should hold prefill's item moved[g][d], and no other
        byte be touched."""
        expected, here = torch.zeros_like(self.target.raw), self.target.raw
        for group, items in zip(self.target.caches.groups, moved, strict=True):
            for name in group.names:
                places = {(own.component, own.layer_id): own for own in self.target.caches.manifests[name].entries}
                for source in self.sources:
                    there = source.raw
                    for theirs in source.caches.manifests[name].entries:
                        ours = places.pop((theirs.component, theirs.layer_id))
                        for d, s in items.items():
                            start = theirs.address - there.data_ptr() + s * theirs.item_stride
                            place = ours.address - here.data_ptr() + d * ours.item_stride
                            expected[place : place + ours.item_bytes] = there[start : start + ours.item_bytes]
                assert not places
        return [f"byte {at}" for at in (expected != here).nonzero().flatten().tolist()]


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def pages(blocks: dict[int, int], first: int, stop: int) -> dict[int, int]:
    """Pages from `first` to `stop` of a request, whose blocks at decode and prefill are these, in order."""
    found = [(d * 2 + half, s * 2 + half) for d, s in blocks.items() for half in range(2)]
    return dict(found[first:stop])


@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize("steps", [[22], [8, 8, 6], [13, 9]])
def test_windows_send_the_pages_that_the_next_token_reads(
    keep: contextlib.ExitStack, steps: list[int], first: str
) -> None:
    """23 tokens, of which 22 are sent: the window's 8 before token 22 begin at 14, in page 3, the second of block 1."""
    world = World(keep, WINDOWED)
    here = ([5, 2, 4], [0, 7, 9], [0, 10, 1])
    there = ([3, 1, 6], [0, 2, 8], [7, 11, 4])  # of the second group, block 7 was freed as the window moved
    if first == "decode":
        world.offer(here, 23)
    request = world.send(there, 23, steps)
    assert (request.num_prompt_tokens, request.max_tokens, len(request.prompt_token_ids or ())) == (22, 1, 22)
    if first == "prefill":
        world.offer(here, 23)
    assert world.wait() is None
    moved = [pages(dict(zip(own, theirs, strict=True)), 0, 6) for own, theirs in zip(here, there, strict=True)]
    for own in moved[1:]:
        for item in list(own)[:3]:
            del own[item]
    assert world.faults(moved) == []
    ended, params = world.prefill.finished(request)
    assert ended and params is not None and params["room"] == 7


def test_a_prefix_hit_at_decode_counts_for_every_group(keep: contextlib.ExitStack) -> None:
    """16 tokens are here: of 26 sent ones the last 10, whose window of 8 begins behind them, in block 2."""
    world = World(keep, WINDOWED)
    here, there = ([5, 2, 4, 3], [0, 0, 9, 8], [0, 0, 1, 6]), ([3, 1, 6, 9], [0, 0, 8, 4], [0, 0, 5, 2])
    world.offer(here, 27, here=16)
    world.send(there, 27, [26])
    assert world.wait() is None
    tails = [dict(zip(own[2:], theirs[2:], strict=True)) for own, theirs in zip(here, there, strict=True)]
    assert world.faults([pages(own, 0, 3) for own in tails]) == []


@pytest.mark.parametrize(("config", "tokens"), [(HYBRID, 21), (HYBRID, 2), (ALL, 23), (ALL, 25)])
def test_states_are_those_after_the_last_token_that_is_sent(
    keep: contextlib.ExitStack, config: Any, tokens: int
) -> None:
    world = World(keep, config)
    sent = tokens - 1
    count, last = -(-sent // BLOCK), (sent - 1) // BLOCK
    wholly = dict(zip((5, 2, 4, 1)[:count], (3, 1, 6, 10)[:count], strict=True))
    moved = [pages(wholly, 0, -(-sent // PAGE))]
    here, there = [list(wholly)], [list(wholly.values())]
    if config is ALL:
        windowed = {own: own + 1 for own in (6, 7, 8, 9)[:count]}
        begin = max(0, sent - 8) // PAGE
        moved.append(pages(windowed, begin, -(-sent // PAGE)))
        here.append([0 if index < begin // 2 else own for index, own in enumerate(windowed)])
        there.append(list(windowed.values()))
        here.append([0] * last + [11])
        there.append([2] * last + [5])
    else:  # one block for all tokens, and another one for speculative states
        here.append([11, 8])
        there.append([5, 9])
    moved.append({11: 5})
    world.send(there, tokens, [sent] if sent < 10 else [8, sent - 8])
    world.offer(here, tokens)
    assert world.wait() is None
    assert world.faults(moved) == []


def test_a_model_of_windows_alone(keep: contextlib.ExitStack) -> None:
    world = World(keep, ALONE)
    world.offer([[0, 7, 9]], 23)
    world.send([[0, 2, 8]], 23, [22])
    assert world.wait() is None
    assert world.faults([pages({7: 2, 9: 8}, 1, 4)]) == []


def test_heads_are_shared_out(keep: contextlib.ExitStack) -> None:
    """Two decode ranks with half of the heads each take their halves of the pages of every group."""
    world = World(keep, WINDOWED, tp=2)
    world.offer(([5, 2, 4], [0, 7, 9], [0, 10, 1]), 23)
    world.send(([3, 1, 6], [0, 2, 8], [7, 11, 4]), 23, [22])
    for rank in world.targets:
        assert eventually(lambda own=rank: own.decode.finished() == {"d"}, 60)  # type: ignore[misc]
    moved = pages({5: 3, 2: 1, 4: 6}, 0, 6) | pages({7: 2, 9: 8}, 1, 4) | pages({10: 11, 1: 4}, 1, 4)
    theirs = world.source.raw[BLOCKS * 24 :].view(2, BLOCKS * 2, PAGE, HEADS, DIMS * 2)
    for number, rank in enumerate(world.targets):
        expected = torch.zeros(2, BLOCKS * 2, PAGE, 1, DIMS * 2, dtype=torch.int8)
        expected[:, list(moved)] = theirs[:, list(moved.values()), :, number : number + 1]
        assert torch.equal(rank.raw[BLOCKS * 24 :].view(expected.shape), expected)
        assert not rank.raw[: BLOCKS * 24].any()


def test_stages_of_prefill_send_their_layers_of_every_group(keep: contextlib.ExitStack) -> None:
    def config(*stages: int) -> Any:
        layers = [[2 * stage + kind for stage in stages] for kind in range(2)]
        return groups(full(BLOCK), window(9, BLOCK), layers=[names(*own) for own in layers])

    world = World(keep, config(0, 1), stages=[config(0), config(1)])
    world.send(([3, 1, 6], [0, 2, 8]), 23, [16, 6])
    world.offer(([5, 2, 4], [0, 7, 9]), 23)
    assert world.wait() is None
    assert world.faults([pages({5: 3, 2: 1, 4: 6}, 0, 6), pages({7: 2, 9: 8}, 1, 4)]) == []


def test_shares_of_states_are_refused_with_their_name(keep: contextlib.ExitStack) -> None:
    """What a half of a state is, only the model knows."""
    directory = kt.Directory()
    source = Rank(keep, "kv_producer", HYBRID, directory)
    Rank(keep, "kv_consumer", HYBRID, directory, tp=2, rank=0, local=1)
    assert eventually(lambda: source.end.problem is not None, 60)
    problem = source.end.problem
    assert isinstance(problem, kt.PeerRefused)
    found = {own.field: (own.local, own.remote) for own in problem.differences}
    assert found["group 'states, tensor 1': state/target.total_heads"] == ("1", "2")
    assert found["group 'states, tensor 2': state/target.total_heads"] == ("1", "2")


def test_unlike_groups_are_refused_with_their_names(keep: contextlib.ExitStack) -> None:
    directory = kt.Directory()
    source = Rank(keep, "kv_producer", WINDOWED, directory)
    other = groups(full(BLOCK), window(5, BLOCK), layers=[names(0), names(1)])
    Rank(keep, "kv_consumer", other, directory)
    assert eventually(lambda: source.end.problem is not None, 60)
    problem = source.end.problem
    assert isinstance(problem, kt.PeerRefused)
    found = {own.field: (own.local, own.remote) for own in problem.differences}
    assert found == {"group 'window 2'": ("present", "absent"), "group 'window'.window": ("8 tokens", "4 tokens")}


@pytest.mark.parametrize("how", ["engine", "abort"])
def test_a_prompt_that_did_not_come_is_computed_from_its_start(keep: contextlib.ExitStack, how: str) -> None:
    """vLLM cannot be told of blocks of several tables: the request gets new blocks, and the old ones are free."""
    world = World(keep, ALL, engine=Failing if how == "engine" else LoopbackEngine)
    freed: list[Any] = []
    world.decode.bind(SimpleNamespace(free_blocks=freed.append))
    request = world.offer(([5, 2, 4], [0, 7, 9], [0, 0, 11]), 23)
    request.num_computed_tokens = 22
    if how == "engine":
        world.send(([3, 1, 6], [0, 2, 8], [0, 0, 5]), 23, [22])
    else:
        world.send(([3, 1, 6], [0, 2, 8], [0, 0, 5]), 24, [23])  # another prompt
        world.source.prefill.take(StepWords(aborts=(("p", "aborted by the user"),)), None)
    told = world.wait()
    assert told == Failures(frozenset({"d"})) and told.aggregate(Failures(frozenset({"e"}))).requests == {"d", "e"}
    world.decode.heard(done(failed=told))  # of one rank of several, before the others have reported it
    assert freed == [] and request.num_computed_tokens == 22
    world.decode.heard(done("d"))
    assert freed == [[4, 2, 5], [9, 7, 0], [11, 0, 0]] and world.blocks.blocks == ([], [], [])
    assert request.num_computed_tokens == 0 and request.skip_reading_prefix_cache
    assert world.decode.matched(request, 0) == (0, False)
    world.decode.heard(done("d"))
    assert len(freed) == 3, "once"


def test_a_request_that_ended_meanwhile_keeps_its_blocks_for_the_engine_to_free(keep: contextlib.ExitStack) -> None:
    world = World(keep, ALL)
    world.decode.bind(SimpleNamespace(free_blocks=pytest.fail))
    request = world.offer(([5, 2, 4], [0, 7, 9], [0, 0, 11]), 23)
    assert world.decode.finished(request) == (False, None)
    world.target.decode.take(world.decode.step(step()))
    assert eventually(lambda: world.target.decode.finished() == {"d"}, 60)
    assert world.target.decode.failed_requests() == frozenset()
    world.decode.heard(done("d", failed=Failures(frozenset({"d"}))))
    assert world.blocks.blocks[0] == [5, 2, 4]


@pytest.mark.parametrize("config", [WINDOWED, ALL])
def test_a_prompt_of_one_token_and_one_that_decode_has(keep: contextlib.ExitStack, config: Any) -> None:
    """Nothing travels, and neither side waits for the other."""
    world = World(keep, config)
    one = Request("p", 1, {"do_remote_decode": True, "room": 9})
    world.prefill.arrived(one)
    world.prefill.allocated(one, tables([1], [2], [3]), 0)
    assert world.prefill.step(step({"p": (([1], [2], [3]), 0, 1)})).chunks == ()
    assert world.prefill.finished(one) == (False, None)
    request = Request("d", 17, {"do_remote_prefill": True, "room": 7, "prefill_group": 0})
    assert world.decode.matched(request, 16) == (0, False)
    world.decode.allocated(request, tables([5, 2, 4], [0, 7, 9], [0, 0, 11]), 0)
    world.source.prefill._offer = float("inf")  # nothing but the word of decode ends it
    world.send(([3, 1], [0, 2], [0, 5]), 17, [16])
    time.sleep(0.02)
    assert world.source.prefill.finished({"p"}) == set()
    world.target.decode.take(world.decode.step(step()))
    assert eventually(lambda: world.source.prefill.finished(set()) == {"p"}, 60)
    assert world.faults([{}, {}, {}]) == []
