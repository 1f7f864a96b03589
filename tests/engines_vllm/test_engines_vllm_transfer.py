"""Prefill to decode through vLLM's own scheduler and connector calls: two processes, K/V on the emulated NPU or a CPU.

The decode instance runs here, the prefill instance in a process of its own; they find each other in a directory and
move bytes with NIXL.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import kv_transfer as kt
import pytest
from engines_vllm_instance import BLOCKS, TIMEOUTS, Instance  # type: ignore[import-not-found]  # beside the tests
from engines_vllm_sides import WAIT, Prefill, until  # type: ignore[import-not-found]  # beside the tests

PROMPT = [(7 * index + 3) % 997 for index in range(300)]  # two blocks of 128 and a rest; two steps of prefill
pytestmark = pytest.mark.timeout(900)  # a second process imports the engine
FREE = BLOCKS - 1  # block 0 is vLLM's null block


@pytest.fixture(scope="module")
def server() -> Iterator[kt.DirectoryServer]:
    with kt.DirectoryServer() as made:
        yield made


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Prefill]]:
    """One process is enough for all tests that leave it alive."""
    made: list[Prefill] = []
    yield made
    for process in made:
        process.end()


@pytest.fixture
def prefill(processes: list[Prefill]) -> Prefill:
    alive = [process for process in processes if process.popen.poll() is None]
    if alive:
        return alive[0]
    processes.append(Prefill())
    assert processes[-1].read() == {"up": True}
    return processes[-1]


@pytest.fixture(params=["ascend", "first", "blocks first"])
def sides(
    request: pytest.FixtureRequest, server: kt.DirectoryServer, prefill: Prefill
) -> Iterator[tuple[Prefill, Instance]]:
    """Both sides anew, ready to transfer. The arrangement of a side's tensors is its own business."""
    kinds = {"ascend": "ascend", "first": "first", "blocks first": "ascend"}
    prefill.call("start", role="kv_producer", directory=server.endpoint, kind=kinds[request.param])
    decode = Instance("kv_consumer", server.endpoint, request.param)
    decode.worker._ends[0].wait_ready(WAIT)
    yield prefill, decode
    decode.close()


def test_requests_from_prefill_to_decode(sides: tuple[Prefill, Instance]) -> None:
    prefill, decode = sides
    # Routers that ask one side after the other: the prefill side keeps the blocks until they are fetched.
    prefill.call("submit", name="p1", tokens=PROMPT, params={"do_remote_decode": True})
    answer = prefill.until(lambda answer: "p1" in answer["ended"])
    params = answer["answers"]["p1"]
    assert params["do_remote_prefill"] and answer["free"] == FREE - 3 and not answer["idle"]
    decode.submit("d1", PROMPT, params, outputs=3)
    until(decode, lambda: "d1" in decode.ended)
    assert decode.loaded["d1"] == len(PROMPT) - 1 and decode.faults == []
    prefill.until(lambda answer: answer["idle"] and answer["free"] == FREE)

    # Routers that ask both at once: layers go while later ones are computed. The first block is a prefix hit at decode.
    tokens = PROMPT[:128] + [5, 6, 7] * 60
    decode.submit("d2", tokens, {"do_remote_prefill": True, "room": 2, "prefill_group": 0})
    decode.step()
    prefill.call("submit", name="p2", tokens=tokens, params={"do_remote_decode": True, "room": 2})
    until(decode, lambda: prefill.call("run", steps=1)["idle"] and "d2" in decode.ended)
    assert decode.loaded["d2"] == len(tokens) - 1 and decode.faults == []

    # All of the prompt but its last token is here: nothing is sent, and prefill is told so.
    prefill.call("submit", name="p3", tokens=PROMPT[:256], params={"do_remote_decode": True})
    params = prefill.until(lambda answer: "p3" in answer["ended"])["answers"]["p3"]
    decode.submit("d3", PROMPT[:256], params)
    until(decode, lambda: "d3" in decode.ended)
    prefill.until(lambda answer: answer["idle"])
    assert decode.faults == []

    # Aborts: at decode before the blocks come, at prefill after its first chunk.
    decode.submit("d4", PROMPT[::-1], {"do_remote_prefill": True, "room": 4, "prefill_group": 0})
    decode.step()
    decode.abort("d4")
    until(decode, lambda: decode.free_blocks == FREE)
    decode.submit("d5", PROMPT[3:], {"do_remote_prefill": True, "room": 5, "prefill_group": 0}, outputs=2)
    decode.step()
    prefill.call("submit", name="p5", tokens=PROMPT[3:], params={"do_remote_decode": True, "room": 5})
    prefill.call("run", steps=1)
    prefill.call("abort", name="p5")
    until(decode, lambda: prefill.call("run", steps=1)["idle"] and "d5" in decode.ended)
    assert decode.loaded["d5"] == 0 and "length" in decode.ended["d5"].lower(), "it is computed here, from the start"
    assert decode.free_blocks == FREE and prefill.call("run", steps=1)["free"] == FREE
    until(decode, lambda: decode.is_idle)
    assert decode.faults == [] and prefill.call("run", steps=1)["faults"] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic(server: kt.DirectoryServer, prefill: Prefill, seed: int) -> None:
    """Requests of all lengths, with common prefixes, either way round, some aborted on one side at any moment."""
    dice = random.Random(seed)
    prefill.call("start", role="kv_producer", directory=server.endpoint, kind="ascend")
    decode = Instance("kv_consumer", server.endpoint, "blocks first")
    decode.worker._ends[0].wait_ready(WAIT)
    waiting: list[tuple[str, list[int]]] = []
    for number in range(30):
        common = PROMPT[: dice.choice([0, 128, 200])]
        own = [dice.randrange(997) for _ in range(dice.randint(1, 350 - len(common)))]
        waiting.append((str(number), common + own))
    open_: dict[str, list[int]] = {}  # at decode, or to come there
    first: set[str] = set()  # of them those that go to prefill first
    aborted: set[str] = set()
    deadline = time.monotonic() + 2 * WAIT
    while waiting or open_:
        assert time.monotonic() < deadline, (open_, decode.ended)
        if waiting and len(open_) < 3:
            name, tokens = waiting.pop()
            open_[name] = tokens
            params: dict[str, Any] = {"do_remote_decode": True}
            if dice.random() < 0.5:
                first.add(name)
            else:
                params["room"] = int(name)
                there = {"do_remote_prefill": True, "room": int(name), "prefill_group": 0}
                decode.submit(f"d{name}", tokens, there, outputs=dice.randint(1, 3))
            prefill.call("submit", name=f"p{name}", tokens=tokens, params=params)
        decode.step()
        answer = prefill.call("run", steps=1)
        for name in sorted(first):
            params = answer["answers"].get(f"p{name}")
            if params is not None:
                first.discard(name)
                decode.submit(f"d{name}", open_[name], params, outputs=dice.randint(1, 3))
        if open_ and dice.random() < 0.1:
            name = dice.choice(sorted(open_))
            if name not in first:
                where = dice.choice(["prefill", "decode"])
                if where == "prefill":
                    prefill.call("abort", name=f"p{name}")
                else:
                    decode.abort(f"d{name}")
                    aborted.add(name)
        for name in [name for name in open_ if f"d{name}" in decode.ended or name in aborted]:
            del open_[name]
    until(decode, lambda: decode.is_idle and decode.free_blocks == FREE)
    answer = prefill.until(lambda answer: answer["idle"] and answer["free"] == FREE)
    assert decode.faults == [] and answer["faults"] == []
    assert {f"d{number}" for number in range(30)} == set(decode.ended) | {f"d{name}" for name in aborted}
    assert sum(computed > 0 for computed in decode.loaded.values()) >= 10, "most prompts were not computed here"
    decode.close()


@pytest.mark.parametrize("aborted", [True, False])
def test_a_stopped_prefill_instance_keeps_the_blocks(
    server: kt.DirectoryServer, prefill: Prefill, aborted: bool
) -> None:
    """A late writer: vLLM gets the blocks of a request that is over when prefill woke and let go, and uses them again.

    Without an abort the request waits too: vLLM computes what did not come in the same blocks.
    """
    prefill.call("start", role="kv_producer", directory=server.endpoint, kind="ascend")
    decode = Instance("kv_consumer", server.endpoint, "blocks first")
    decode.worker._ends[0].wait_ready(WAIT)
    decode.submit("d8", PROMPT, {"do_remote_prefill": True, "room": 8, "prefill_group": 0}, outputs=2)
    decode.step()
    assert (held := decode.free_blocks) <= FREE - 3
    prefill.call("submit", name="p8", tokens=PROMPT, params={"do_remote_decode": True, "room": 8})
    prefill.call("run", steps=1)
    prefill.popen.send_signal(signal.SIGSTOP)
    if aborted:
        decode.abort("d8")
    end = time.monotonic() + 1.5 * TIMEOUTS["peer_lost_after"]
    while time.monotonic() < end:
        decode.step()
        assert decode.free_blocks == held and "d8" not in decode.ended
        time.sleep(0.01)
    prefill.popen.send_signal(signal.SIGCONT)
    until(decode, lambda: decode.free_blocks == FREE)
    assert aborted or decode.loaded == {"d8": 0}
    prefill.until(lambda answer: answer["idle"])
    decode.worker._ends[0].wait_ready(WAIT)
    for number in range(3):  # of eleven blocks each takes three: all that were held are used again
        tokens = [number + 11, *PROMPT[1:]]
        decode.submit(f"e{number}", tokens, {"do_remote_prefill": True, "room": 20 + number, "prefill_group": 0})
        decode.step()
        prefill.call("submit", name=f"q{number}", tokens=tokens, params={"do_remote_decode": True, "room": 20 + number})
    until(decode, lambda: prefill.call("run", steps=1)["idle"] and decode.is_idle)
    assert [decode.loaded[f"e{number}"] for number in range(3)] == [len(PROMPT) - 1] * 3
    assert decode.faults == [] and decode.free_blocks == FREE
    decode.close()


def test_a_dead_prefill_instance_costs_computation_not_answers(server: kt.DirectoryServer, prefill: Prefill) -> None:
    prefill.call("start", role="kv_producer", directory=server.endpoint, kind="first")
    decode = Instance("kv_consumer", server.endpoint, "first")
    decode.worker._ends[0].wait_ready(WAIT)
    decode.submit("d6", PROMPT, {"do_remote_prefill": True, "room": 6, "prefill_group": 0}, outputs=2)
    decode.step()
    prefill.call("submit", name="p6", tokens=PROMPT, params={"do_remote_decode": True, "room": 6})
    prefill.call("run", steps=1)
    prefill.popen.kill()
    prefill.popen.wait()
    until(decode, lambda: "d6" in decode.ended)
    decode.submit("d7", PROMPT[1:], {"do_remote_prefill": True, "room": 7, "prefill_group": 0}, outputs=2)
    until(decode, lambda: "d7" in decode.ended)
    assert decode.loaded == {"d6": 0, "d7": 0} and decode.faults == [] and decode.free_blocks == FREE
    decode.close()
