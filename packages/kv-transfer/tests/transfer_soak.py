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
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import transfer_strangers as strangers
from test_transfer_messages import EXAMPLES
from transfer_faults import Steady, random_fault
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_scenarios import HASTY, Cluster
from transfer_schedules import run_schedules, run_words

import kv_transfer as kt

HERE = Path(__file__).parent
ENGINES = ("loopback", "nixl", "mooncake")


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


def matrix(scale: float, seed: int) -> None:
    """The product over shared memory; a covering set on the other engines, with a process a rank."""
    whole = "all" if scale >= 3 else "turns"
    runs = [("loopback", whole, 1), ("mooncake", "pairs", 0), ("nixl", "pairs", 0)]
    short = [("loopback", "few:0-2/10", 1), ("mooncake", "few:2-3/10", 2), ("nixl", "few:3-4/10", 2)]
    for engine, which, processes in runs if scale >= 1 else short:
        command = [sys.executable, str(HERE / "transfer_ranks.py"), engine, which, str(seed), str(processes)]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=6 * 3600, check=False)
        print(done.stdout, end="", flush=True)
        assert done.returncode == 0, f"the matrix failed on {engine}"


def requests(engine: str, count: int, seed: int) -> None:
    """Requests one after the other and 64 at once, over pages that are used again and again; every byte is checked."""
    dice = random.Random(seed)
    layout = make_layout(layers=2, heads=1, key_dims=4, value_dims=3)
    prefill, decode = stages(layout, 2, pages=200), whole(layout, pages=200)
    engines = [kt.create_engine(engine) for _ in range(3)]
    with contextlib.ExitStack() as keep:
        receiver = keep.enter_context(kt.Receiver(decode.manifest, engines[2], prefill_ranks=2))
        senders = [
            keep.enter_context(kt.Sender(own.manifest, used, endpoint=receiver.endpoint))
            for own, used in zip(prefill, engines[:2], strict=True)
        ]
        for sender in senders:
            sender.connect()
        receiver.wait_ready()
        served, base, now = 0, None, Held(0, 0, 0, 0)
        while served < count:
            many = min(64, count - served) if served % 3 else 1
            _serve(receiver, senders, decode, many, dice)
            served += many
            now = Held.now()
            if base is None and served > count // 3:
                base = now
        assert base is not None
        assert (now.files, now.threads) == (base.files, base.threads), (base, now)
        assert now.handles <= base.handles + 8, (base, now)
        assert now.kib <= base.kib * 1.05 + 4096, (base, now)
    for used in engines:
        used.close()
    print(
        f"count: requests over reused pages on {engine}, up to 64 at once | {served:,}; {now.files} files, "
        f"{now.threads} threads, {now.handles} handles, {now.kib >> 10} MiB from the first third to the end",
        flush=True,
    )


class Held(NamedTuple):
    """What a process holds."""

    files: int
    threads: int
    handles: int
    kib: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        handles = sum(isinstance(found, kt.TransferHandle) for found in gc.get_objects())
        threads = len(os.listdir("/proc/self/task"))
        return cls(
            len(os.listdir("/proc/self/fd")), threads, handles, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )


def _serve(receiver: kt.Receiver, senders: list[kt.Sender], decode: RankMemory, many: int, dice: random.Random) -> None:
    pages = dice.sample(range(1, 200), 3 * many)
    moved: dict[int, int] = {}
    sessions = []
    for room in range(many):
        own = pages[3 * room : 3 * room + 3]
        sessions.append(receiver.open(room, own))
        moved |= {page: dice.randrange(1, 200) for page in own}
    for sender in senders:
        sending = [sender.open(room) for room in range(many)]
        for room, own_session in enumerate(sending):
            own_session.send([moved[page] for page in pages[3 * room : 3 * room + 3]], start=0)
            own_session.finish(wait=False)
        for own_session in sending:
            own_session.wait(60)
    for session in sessions:
        session.wait(60)
        assert session.wait_released(60)
    assert decode.faults(moved) == []
    decode.wipe(pages)


def strange(count: int, seed: int) -> None:
    """Peers that do not fit, noise, a taken port, while requests are served; a directory that is down."""
    with strangers.serving(random.Random(seed)) as pair:
        kinds = strangers.misfits(pair)
        kinds += strangers.other_layouts()
        sent = strangers.noise(pair, count, seed)
        strangers.taken_port(pair)
    strangers.directory_down()
    print(f"count: kinds of peers that do not fit, refused with their reason while rooms were served | {kinds}")
    print(f"count: malformed, untimely and oversized messages to a receiver that served on | {sent:,}", flush=True)


def faults(count: int, seed: int) -> None:
    """SIGKILL and SIGSTOP of either side at random moments; the survivors serve on after each, and hold no more."""
    dice = random.Random(seed)
    for engine in ENGINES:
        done: Counter[str] = Counter()
        share = -(-count // len(ENGINES))
        while sum(done.values()) < share:
            with contextlib.ExitStack() as keep:
                cluster, steady = Cluster(engine, keep, HASTY), Steady()
                for room in range(min(10, share - sum(done.values()))):
                    what = random_fault(cluster, dice, 10 * room)
                    done[what] += 1
                    print(f"{engine}: {what}", flush=True)
                    steady.check(cluster)
        told = ", ".join(f"{what} {times}" for what, times in sorted(done.items()))
        print(f"count: faults of processes at random moments on {engine} | {sum(done.values()):,}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts")
    options = parser.parse_args()
    scale, seed = options.scale, options.seed
    schedules(max(40, round(1200 * scale)), seed)
    words(max(1000, round(1_000_000 * scale)), seed)
    for engine in ENGINES:
        requests(engine, max(130, round(500 * scale)), seed)
    strange(max(2000, round(200_000 * scale)), seed)
    faults(max(3, round(200 * scale)), seed)
    matrix(scale, seed)


if __name__ == "__main__":
    if os.environ.get("KV_TRANSFER_SOAK_INSIDE") != "1":  # Mooncake listens on every interface
        again = [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, *sys.argv]
        sys.exit(subprocess.run(again, env={**os.environ, "KV_TRANSFER_SOAK_INSIDE": "1"}, check=False).returncode)
    main()
