"""Long proofs of kv-transfer, run by `nox -s soak -- kv-transfer`: schedules, words, the matrix, requests, real faults.

Prints `count: what | figure` for each, and exits with 0 when all held.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import transfer_scenarios as scenarios
from test_transfer_messages import EXAMPLES
from transfer_memory import make_layout, stages, whole
from transfer_pair import Pair
from transfer_schedules import run_schedules, run_words

HERE = Path(__file__).parent


def schedules(count: int, seed: int) -> None:
    ends = run_schedules(range(seed % 2**20, seed % 2**20 + count))
    assert {"NoneType", "PeerLost", "TransferAborted", "SessionStateError"} <= set(ends), ends
    complete = ends.pop("NoneType")
    print(
        f"count: random schedules of two stages | {count:,}, {complete:,} rooms complete, {sum(ends.values()):,} ended"
    )


def words(count: int, seed: int) -> None:
    ends = run_words(EXAMPLES, count, seed)
    print(f"count: fuzzed messages | {count:,}, of which {ends['named errors']:,} named errors")


def matrix(whole: bool, seed: int) -> None:
    """The product over shared memory; a covering set on the other engines, with a process a rank."""
    runs = [("loopback", "all", 1), ("mooncake", "pairs", 0), ("nixl", "pairs", 0)]
    short = [("loopback", "0-2/10", 1), ("mooncake", "2-3/10", 2), ("nixl", "3-4/10", 2)]
    for engine, which, processes in runs if whole else short:
        command = [sys.executable, str(HERE / "transfer_ranks.py"), engine, which, str(seed), str(processes)]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=4 * 3600, check=False)
        print(done.stdout, end="", flush=True)
        assert done.returncode == 0, f"the matrix failed on {engine}"


def requests(count: int, seed: int) -> None:
    """Requests one after the other and 64 at once, over pages that are used again and again; every byte is checked."""
    dice = random.Random(seed)
    layout = make_layout(layers=2, heads=1, key_dims=4, value_dims=3)
    pair = Pair(stages(layout, 2, pages=200), whole(layout, pages=200))
    served, base = 0, (0, 0)
    while served < count:
        many = min(64, count - served) if served % 3 else 1
        pages = dice.sample(range(1, 200), 3 * many)
        moved: dict[int, int] = {}
        sessions = []
        for room in range(many):
            own = pages[3 * room : 3 * room + 3]
            sessions.append(pair.receiver.open(room, own))
            moved |= {page: dice.randrange(1, 200) for page in own}
        for sender in pair.senders:
            sending = [sender.open(room) for room in range(many)]
            for room, own_session in enumerate(sending):
                own_session.send([moved[page] for page in pages[3 * room : 3 * room + 3]], start=0)
                own_session.finish(wait=False)
            for own_session in sending:
                own_session.wait(30)
        for session in sessions:
            session.wait(30)
        assert pair.decode.faults(moved) == []
        pair.decode.wipe(pages)
        served += many
        gc.collect()
        now = (len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if served > count // 3 and base == (0, 0):
            base = now
    assert now[0] == base[0], f"open files grew from {base[0]} to {now[0]}"
    assert now[1] <= base[1] * 1.05 + 4096, f"memory grew from {base[1]} KiB to {now[1]} KiB"
    pair.close()
    print(f"count: requests over reused pages, up to 64 at once | {served:,}; open files {now[0]}, {now[1] >> 10} MiB")


def faults(count: int, seed: int) -> None:
    """SIGKILL and SIGSTOP of either side at random moments; the survivors serve on after each."""
    dice = random.Random(seed)
    kinds: list[Callable[[scenarios.Cluster, float], None]] = [
        scenarios.sender_killed, scenarios.sender_killed, scenarios.receiver_killed, scenarios.stopped,
    ]  # fmt: skip
    done = 0
    for engine in ("mooncake", "nixl"):
        with contextlib.ExitStack() as keep:
            cluster = scenarios.Cluster(engine, keep)
            for round_ in range(count // 2):
                dice.choice(kinds)(cluster, dice.uniform(0.0, 0.4))
                done += 1
                if round_ % 10 == 9:
                    keep.close()
                    cluster = scenarios.Cluster(engine, keep)
    print(f"count: processes killed or stopped at random moments | {done:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts")
    options = parser.parse_args()
    scale, seed = options.scale, options.seed
    schedules(max(40, round(1500 * scale)), seed)
    words(max(1000, round(1_000_000 * scale)), seed)
    requests(max(130, round(500 * scale)), seed)
    matrix(scale >= 1, seed)
    faults(max(2, round(200 * scale)), seed)


if __name__ == "__main__":
    main()
