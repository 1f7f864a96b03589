"""Models with several KV cache groups through vLLM's own hybrid block managers, from prefill to decode.

Both instances run in this process and take turns; one test has the prefill side in a process of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import kv_transfer as kt
import pytest
from engines_vllm_hybrid import (  # type: ignore[import-not-found]  # beside the tests
    HYBRID_BLOCKS,
    WINDOW,
    HybridInstance,
)
from engines_vllm_sides import WAIT, Prefill, until  # type: ignore[import-not-found]  # beside the tests
from kv_transfer.integrations.vllm.groups import block_groups
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

PROMPT = [(7 * index + 3) % 997 for index in range(700)]
FREE = HYBRID_BLOCKS - 1
pytestmark = pytest.mark.timeout(900)
# First and last tokens around the borders of blocks and of the window.
LENGTHS = [1, 2, 128, 129, 130, WINDOW, WINDOW + 1, 256, 257, WINDOW + 127, WINDOW + 128, WINDOW + 129, 385, 400]


@pytest.fixture(scope="module")
def server() -> Iterator[kt.DirectoryServer]:
    with kt.DirectoryServer() as made:
        yield made


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, directory: str, prefill: str, decode: str) -> None:
        self.prefill = HybridInstance("kv_producer", directory, prefill)
        self.decode = HybridInstance("kv_consumer", directory, decode)
        self.decode.worker._ends[0].wait_ready(WAIT)
        self.rooms = 0

    def until(self, what: Any) -> None:
        deadline = time.monotonic() + WAIT
        while not what():
            self.prefill.step()
            self.decode.step()
            assert self.prefill.faults == [] == self.decode.faults
            assert time.monotonic() < deadline, (self.prefill.ended, self.decode.ended)

    def both(self, tokens: list[int], outputs: int = 3, first: str = "prefill") -> str:
        """A request of both sides at once."""
        self.rooms += 1
        name, room = f"r{self.rooms}", self.rooms
        there = {"do_remote_prefill": True, "room": room, "prefill_group": 0}
        if first == "decode":
            self.decode.submit(name, list(tokens), there, outputs=outputs)
            self.decode.step()
        self.prefill.submit(name, list(tokens), {"do_remote_decode": True, "room": room}, outputs=4)
        if first != "decode":
            self.prefill.step()
            self.decode.submit(name, list(tokens), there, outputs=outputs)
        return name

    def idle(self) -> None:
        self.until(lambda: self.prefill.is_idle and self.decode.is_idle)
        assert (self.prefill.free_blocks, self.decode.free_blocks) == (FREE, FREE)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


SIDES = [
    ("windows vllm", "windows vllm"), ("windows ascend", "windows ascend"), ("windows ascend", "windows vllm"),
    ("states vllm", "states vllm"), ("states ascend", "states ascend"), ("states ascend", "states vllm"),
    ("aligned vllm", "aligned ascend"), ("all vllm", "all vllm"),
]  # fmt: skip


@pytest.fixture(params=SIDES, ids=lambda own: f"{own[0]}, {own[1]}")
def pair(request: pytest.FixtureRequest, server: kt.DirectoryServer) -> Iterator[Pair]:
    made = Pair(server.endpoint, *request.param)
    yield made
    made.close()


def test_prompts_of_all_lengths_are_not_computed_again(pair: Pair) -> None:
    assert isinstance(pair.decode.scheduler.kv_cache_manager.coordinator, HybridKVCacheCoordinator) or (
        not pair.decode.config.cache_config.enable_prefix_caching
    )
    for number, length in enumerate(LENGTHS):
        tokens = [(token + number) % 997 for token in PROMPT[:length]]  # no prefix hits
        name = pair.both(tokens, first=("prefill", "decode")[number % 2])
        pair.until(lambda own=name: own in pair.decode.ended)
        assert pair.decode.loaded[name] == max(0, length - 1)
        pair.idle()


def test_prefix_hits_on_either_side(pair: Pair) -> None:
    for number, length in enumerate((300, 300, 420, 129, 384, 513)):
        name = pair.both(PROMPT[:length] + ([] if number % 2 else [number]))
        pair.until(lambda own=name: own in pair.decode.ended)
        pair.idle()


def test_aborts_on_either_side(pair: Pair) -> None:
    name = pair.both(PROMPT[:400], first="decode")
    pair.decode.abort(name)
    pair.idle()
    name = pair.both(PROMPT[1:400], first="decode")
    pair.prefill.step()
    pair.prefill.abort(name)
    pair.until(lambda: name in pair.decode.ended)
    pair.idle()


def test_a_prompt_that_did_not_come_is_computed_beside_others(pair: Pair) -> None:
    """vLLM's scheduler would end by an error if it heard of failed blocks; it goes on, with all blocks in the end."""
    failing = pair.both(PROMPT[:400], first="decode")
    others = [pair.both(PROMPT[index : 300 + index], first="decode") for index in (1, 2)]
    pair.prefill.step()  # a part of its prompt
    pair.prefill.abort(failing)
    pair.until(lambda: {failing, *others} <= set(pair.decode.ended))
    assert pair.decode.loaded[failing] == 0 and {pair.decode.loaded[own] for own in others} == {299}
    pair.idle()


@pytest.mark.parametrize("sides", [SIDES[0], SIDES[6], SIDES[7]], ids=str)
def test_random_traffic(server: kt.DirectoryServer, sides: tuple[str, str]) -> None:
    pair, dice = Pair(server.endpoint, *sides), random.Random(7)
    names: list[str] = []
    for _ in range(40):
        common = PROMPT[: dice.choice([0, 128, 200, 384])]
        tokens = common + [dice.randrange(997) for _ in range(dice.randint(1, 500 - len(common)))]
        names.append(pair.both(tokens, dice.randint(1, 4), dice.choice(["prefill", "decode"])))
        if dice.random() < 0.2:
            dice.choice([pair.prefill, pair.decode]).abort(dice.choice(names))
        for _ in range(dice.randint(1, 6)):
            pair.prefill.step()
            pair.decode.step()
        pair.until(lambda: len(pair.decode.scheduler.requests) < 4 and len(pair.prefill.scheduler.requests) < 4)
    pair.idle()
    assert sum(pair.decode.loaded.get(name, 0) > 0 for name in names) >= 20
    pair.close()


def test_blocks_are_offered_when_the_device_has_zeroed_them(server: kt.DirectoryServer) -> None:
    """vLLM zeroes fresh blocks beside states on the device's stream, and bytes of prefill do not wait for that."""
    pair = Pair(server.endpoint, "states ascend", "states ascend")
    happened: list[str] = []
    worker = pair.decode.worker
    device, take = worker._device_module, worker._decode.take

    class Device:
        def synchronize(self, which: Any) -> None:
            happened.append(f"{which.type} at rest")
            device.synchronize(which)

    def taken(words: Any) -> None:
        happened.append(f"{len(words.loads)} offered")
        take(words)

    worker._device_module, worker._decode.take = Device(), taken
    name = pair.both(PROMPT[:300], first="decode")
    pair.until(lambda: name in pair.decode.ended)
    assert pair.decode.zeroed and happened[:2] == ["npu at rest", "1 offered"]
    assert set(happened[2:]) == {"0 offered"} and pair.decode.loaded[name] == 299
    pair.idle()
    pair.close()


def test_a_prefill_process_that_dies(server: kt.DirectoryServer) -> None:
    prefill = Prefill("engines_vllm_hybrid.py")
    try:
        assert prefill.read() == {"up": True}
        prefill.call("start", role="kv_producer", directory=server.endpoint, kind="all ascend")
        decode = HybridInstance("kv_consumer", server.endpoint, "all vllm")
        decode.worker._ends[0].wait_ready(WAIT)
        prefill.call("submit", name="p1", tokens=PROMPT[:400], params={"do_remote_decode": True})
        params = prefill.until(lambda answer: "p1" in answer["ended"])["answers"]["p1"]
        decode.submit("d1", PROMPT[:400], params, outputs=3)
        until(decode, lambda: "d1" in decode.ended)
        assert decode.loaded["d1"] == 399
        assert prefill.until(lambda answer: answer["idle"] and answer["free"] == FREE)["faults"] == []
        decode.submit("d2", PROMPT[1:400], {"do_remote_prefill": True, "room": 2}, outputs=2)
        decode.step()
        prefill.call("submit", name="p2", tokens=PROMPT[1:400], params={"do_remote_decode": True, "room": 2})
        prefill.call("run", steps=1)
    finally:
        prefill.end()
    until(decode, lambda: "d2" in decode.ended)
    assert decode.loaded["d2"] == 0 and decode.faults == []
    until(decode, lambda: decode.free_blocks == FREE)
    decode.close()


def test_kinds_are_those_that_the_engine_says() -> None:
    common: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": None}
    served = {
        FullAttentionSpec(**common): "full",
        MLAAttentionSpec(**common): "full",
        AscendMLAAttentionSpec(**common): "full",
        SlidingWindowSpec(sliding_window=64, **common): "window",
        SlidingWindowMLASpec(sliding_window=64, **common): "window",
        MambaSpec(block_size=16, shapes=((1,),), dtypes=(None,)): "states",
    }
    theirs = {"full": ("full_attention", "mla_attention"), "window": ("sliding_window", "sliding_window_mla"),
              "states": ("mamba",)}  # fmt: skip
    for spec, kind in served.items():
        config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layers.0"], spec)])
        (group,) = block_groups(config)
        assert (group.kind, group.name) == (kind, "main") and get_kv_cache_spec_kind(spec).value in theirs[kind]
    for refused in (ChunkedLocalAttentionSpec(attention_chunk_size=8, **common), CrossAttentionSpec(**common)):
        with pytest.raises(kt.UnsupportedLayout, match=f"got {type(refused).__name__}"):
            block_groups(KVCacheConfig(8, [], [KVCacheGroupSpec(["layers.0"], refused)]))
