"""Many faults: `python engines_transfer_soak.py 100` stops and kills either side of SGLang's disaggregation so often.

Each fault comes at a random moment of a request, and is followed by a request that arrives whole. Sockets and threads
of the survivor are counted before and after. Run in the environment of the session `engines`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # the emulated NPU and SGLang, before anything else
import pytest
from engines_transfer import configured, free_port
from engines_transfer_fault_node import DELAY, Nodes
from engines_transfer_queue import queued, within
from engines_transfer_survivors import OPTIONS, Decode, Prefill
from sglang.srt.disaggregation.base.conn import KVPoll

__all__: list[str] = []

HOW = ("killed", "stopped and continued", "stopped and killed")


def handles() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def are_steady(before: tuple[int, int]) -> None:
    """No more is held than with the first peer, but for what Mooncake opens by chance.

    That is one to four connections to a peer, and its library twice once an address came again.
    """
    after = handles()
    print(f"sockets and threads: {before} before, {after} after", flush=True)
    assert after[0] <= before[0] + 20 and after[1] <= before[1] + 1, (before, after)


def ends_of(one: Any, seconds: float) -> None:
    within(seconds, lambda: one.poll() in (KVPoll.Success, KVPoll.Failed), "the request ends")


def is_noticed(here: Decode, seconds: float) -> None:
    within(seconds, lambda: not here.manager.connection_pool, "the dead peer is noticed")


def hit(peer: Any, how: str, dice: random.Random) -> None:
    time.sleep(dice.uniform(0, 7 * DELAY))
    peer.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def wake(peer: Any, how: str) -> None:
    if how != "killed":
        peer.signal(signal.SIGCONT if how == "stopped and continued" else signal.SIGKILL)


def decode_survives(nodes: Nodes, engine: str, count: int, dice: random.Random) -> Counter[str]:
    ends: Counter[str] = Counter()
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, queued(patch) as make, configured(patch, port, engine) as arguments:
        here, left, before = None, count, (0, 0)
        while left:
            with nodes.start("prefill", engine, OPTIONS[engine], port) as peer:
                here = here or Decode(arguments, port, make())
                here.serve(peer)
                before = before if any(before) else handles()
                while left and peer.lives():
                    left, how = left - 1, dice.choice(HOW)
                    here.manager.waiting_timeout = 2.0
                    room = here.ask(peer)
                    receiver = here.queue.queue[0].kv_receiver
                    hit(peer, how, dice)
                    ends_of(receiver, 15)
                    ends[f"{how}, {'arrived' if receiver.poll() else 'failed'}"] += 1
                    if receiver.poll() == KVPoll.Success:  # SGLang would commit it
                        here.queue.queue.clear()
                        receiver.clear()
                        here.wipe()
                    else:
                        here.fails(1)
                        wake(peer, how)
                        here.frees(15)
                    wake(peer, how)
                    here.manager.waiting_timeout = 300
                    if how == "stopped and continued":
                        peer.ends(room, 15)
                        here.serve(peer)
                    else:
                        within(5, lambda: not peer.lives(), "the peer is dead")
            # SGLang's heartbeat: until it misses the peer, a request that comes is sent to the dead one, and fails.
            assert here is not None
            is_noticed(here, 30)
        assert here is not None
        are_steady(before)
        here.cluster.close()
    return ends


def prefill_survives(nodes: Nodes, engine: str, count: int, dice: random.Random) -> Counter[str]:
    ends: Counter[str] = Counter()
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, configured(
        patch, port, engine, json.dumps(OPTIONS[engine])
    ) as arguments:  # fmt: skip
        here, left, before = Prefill(arguments, port), count, (0, 0)
        while left:
            with nodes.start("decode", engine, {}, port) as peer:
                here.serve(peer, attempts=3)
                before = before if any(before) else handles()
                while left and peer.lives():
                    left, how = left - 1, dice.choice(HOW)
                    room, request = here.send(peer)
                    hit(peer, how, dice)
                    ends_of(request.senders[0], 20)
                    failed = request.senders[0].poll() == KVPoll.Failed
                    ends[f"{how}, {'failed' if failed else 'arrived'}"] += 1
                    if failed:
                        here.fails(request, 1)
                    else:
                        request.end()
                    wake(peer, how)
                    if how == "stopped and continued":
                        peer.ends(room, 15)
                        here.serve(peer, attempts=3)
                    else:
                        within(5, lambda: not peer.lives(), "the peer is dead")
        are_steady(before)
        here.cluster.close()
    return ends


def main() -> None:
    """So many faults, in four equal parts."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Nodes(Path(folder))) as nodes:
        for engine in OPTIONS:
            for survives in (decode_survives, prefill_survives):
                ends = survives(nodes, engine, count // 4, dice)
                print(f"{survives.__name__} over {engine}: {dict(sorted(ends.items()))}", flush=True)


if __name__ == "__main__":
    main()
