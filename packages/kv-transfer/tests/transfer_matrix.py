"""Byte-exact transfers between two real processes, one with all prefill ranks and one with all decode ranks.

`python transfer_matrix.py ENGINE COUNT SEED` runs COUNT cases of the matrix (0: all) and exits with 0 when every
byte of every decode rank was as it should be, and every refusal was the named one. A role word starts one of its two
processes instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import kv_planner as kp
from transfer_image import Image, side

import kv_transfer as kt

LAYERS, ITEMS = 6, 9
SOURCE, DESTINATION = [7, 3, 4], [2, 5, 6]
SOURCE_ROW, DESTINATION_ROW = 3, 5
TIMEOUTS = kt.Timeouts(handshake=20, offer=20, transfer=30, heartbeat_interval=0.5, peer_lost_after=20)
OPTIONS: dict[str, dict[str, Any]] = {"loopback": {"shared": True}, "mooncake": {"transfer_timeout": 10.0}}
LIMITS = kt.Limits(ready_step_bytes=40)  # a layer or two at a time
TARGET: tuple[kp.Part, ...] = ("target",)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell: what a model keeps, and how both sides share it."""

    kind: str
    heads: int
    page_size: int
    pp: tuple[int, int]
    tp: tuple[int, int]
    draft: tuple[int, int]

    def layout(self, here: int) -> kp.ModelLayout:
        layers, draft = list(range(LAYERS)), list(range(LAYERS, LAYERS + self.draft[here]))
        specs = []
        for part, ids in (("target", layers), ("draft", draft)):
            if not ids:
                continue
            common: dict[str, Any] = {"part": part, "dtype": "uint8"}
            if self.kind == "mha":
                specs += [
                    kp.ComponentSpec("key", layer_ids=ids, total_heads=self.heads, dims=3, **common),
                    kp.ComponentSpec("value", layer_ids=ids, total_heads=self.heads, dims=2, **common),
                ]
            elif self.kind.startswith("mla"):
                specs.append(kp.ComponentSpec("latent", layer_ids=ids, total_heads=1, dims=3, **common))
                specs.append(kp.ComponentSpec("rope", layer_ids=ids, total_heads=1, dims=2, **common))
                if self.kind == "mla+index" and part == "target":
                    specs.append(kp.ComponentSpec("index_key", layer_ids=ids[1::2], total_heads=1, dims=2, **common))
                    specs.append(kp.ComponentSpec("index_scale", layer_ids=ids[1::2], total_heads=1, dims=1, **common))
            else:
                specs.append(kp.ComponentSpec("key", layer_ids=ids[1::2] or ids, total_heads=2, dims=3, **common))
                specs.append(kp.ComponentSpec("value", layer_ids=ids[1::2] or ids, total_heads=2, dims=2, **common))
                if part == "target":
                    states: dict[str, Any] = {"rows": 3, "groups": [1, 1, 2], "item_kind": "request_row"}
                    specs.append(
                        kp.ComponentSpec("state", layer_ids=ids[::2], total_heads=4, dims=4, **common, **states)
                    )
        return kp.ModelLayout(specs, page_size=self.page_size, fingerprint=self.kind)

    @property
    def parts(self) -> tuple[kp.Part, ...]:
        """Without a draft on one side, only the target is moved."""
        return TARGET if 0 in self.draft else ("target", "draft")

    @property
    def refused(self) -> bool:
        """Heads that do not split evenly, or drafts of unlike depth."""
        unlike = 0 not in self.draft and self.draft[0] != self.draft[1]
        return unlike or (self.kind == "mha" and any(max(tp, self.heads) % min(tp, self.heads) for tp in self.tp))


def cases() -> list[Case]:
    kinds = [("mha", 1), ("mha", 2), ("mha", 8), ("mha", 3), ("mla", 1), ("mla+index", 1), ("hybrid", 2)]
    pipelines = itertools.product((1, 2, 3), (1, 2))
    tensors = list(itertools.product((1, 2, 4), (1, 2, 4)))
    drafts = itertools.cycle(itertools.product((0, 1, 3), (0, 1, 3)))
    sizes = itertools.cycle((1, 2, 4))
    found = []
    for pp, (kind, heads), tp in itertools.product(pipelines, kinds, tensors):
        found.append(Case(kind, heads, next(sizes), pp, tp, next(drafts)))
    return found


class World:
    """One of the two processes: an engine that lives over all cases, and the ranks of one case."""

    def __init__(self, engine: str, here: int) -> None:
        self.engine = kt.create_engine(engine, **OPTIONS.get(engine, {}))
        self.here = here
        self.case: Case | None = None
        self.ranks: list[Image] = []
        self.ends: list[Any] = []
        self.arenas: list[kt.SharedArena] = []

    def _allocate(self, nbytes: int) -> Any:
        arena = kt.SharedArena(nbytes)
        self.arenas.append(arena)
        return arena.array

    def begin(self, fields: dict[str, Any]) -> None:
        known: dict[str, Any] = {name: tuple(own) if isinstance(own, list) else own for name, own in fields.items()}
        self.case = Case(**known)
        draft = range(LAYERS, LAYERS + self.case.draft[self.here])
        self.ranks = side(
            self.case.layout(self.here),
            LAYERS,
            self.case.pp[self.here],
            self.case.tp[self.here],
            items=ITEMS,
            padding=3 * self.here,
            draft=draft,
            allocate=self._allocate,
        )

    def end(self) -> None:
        for own in self.ends:
            own.close()
        for arena in self.arenas:
            arena.close()
        self.ends, self.arenas = [], []


def decode(world: World, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "begin":
        world.begin(command["case"])
        assert world.case is not None
        count = world.case.pp[0] * world.case.tp[0]
        world.ends = [
            kt.Receiver(own.manifest, world.engine, prefill_ranks=count, parts=world.case.parts, timeouts=TIMEOUTS)
            for own in world.ranks
        ]
        return {"endpoints": [own.endpoint for own in world.ends]}
    assert world.case is not None
    if command["do"] == "open":
        row = DESTINATION_ROW if world.case.kind == "hybrid" else None
        for own, rank in zip(world.ends, world.ranks, strict=True):
            own.wait_ready()
            here = row if any(entry.component == "state" for entry in rank.manifest.entries) else None
            own.session = own.open(0, DESTINATION, row=here)
        return {}
    if command["do"] == "check":
        faults, moved = [], 0
        for own, rank in zip(world.ends, world.ranks, strict=True):
            result = own.session.wait(30)
            expected = rank.expected(dict(zip(DESTINATION, SOURCE, strict=True)), {DESTINATION_ROW: SOURCE_ROW})
            expected = {at: label for at, label in expected.items() if label.part in world.case.parts}
            faults += rank.faults(expected)
            if result.nbytes < len(expected):
                faults.append(f"{result.nbytes} bytes reported, {len(expected)} arrived")
            moved += len(expected)
        return {"faults": faults, "moved": moved}
    world.end()
    return {}


def prefill(world: World, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "begin":
        world.begin(command["case"])
        assert world.case is not None
        for own in world.ranks:
            own.fill()
            for endpoint in command["endpoints"]:
                sender = kt.Sender(
                    own.manifest,
                    world.engine,
                    endpoint=endpoint,
                    parts=world.case.parts,
                    timeouts=TIMEOUTS,
                    limits=LIMITS,
                )
                world.ends.append(sender)
                sender.connect()
        for sender in world.ends:
            sender.wait_ready()
        return {}
    if command["do"] == "send":
        for sender in world.ends:
            sending = sender.open(0)
            sending.send(SOURCE[:1], start=0)
            marks = kt.LayerMarks()
            sending.send(SOURCE[1:], start=1, ready=marks)
            sending.send_states(SOURCE_ROW, ready=marks)
            for part in ("target", "draft"):
                for layer in range(LAYERS + 3):
                    marks.mark(layer, part)
            sending.finish()
        return {}
    world.end()
    return {}


def serve(role: str, engine: str) -> None:
    world, handle = World(engine, int(role == "decode")), decode if role == "decode" else prefill
    for line in sys.stdin:
        try:
            answer = handle(world, json.loads(line))
        except (kt.TransferError, kp.PlanError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    world.end()
    world.engine.close()


class Process:
    def __init__(self, role: str, engine: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, __file__, role, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **command: object) -> dict[str, Any]:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()
        answer = json.loads(self.popen.stdout.readline())
        assert isinstance(answer, dict)
        return answer


def run(case: Case, writer: Process, reader: Process) -> str:
    """How the case ended: "exact" or "refused"."""
    fields = dataclasses.asdict(case)
    try:
        here = reader.ask(do="begin", case=fields)
        if "error" in here:
            assert case.refused and here["error"] == "UnsupportedLayout" and "heads" in here["text"], (case, here)
            return "refused"
        there = writer.ask(do="begin", case=fields, endpoints=here["endpoints"])
        if "error" in there:
            assert case.refused and there["error"] in ("PeerRefused", "UnsupportedLayout"), (case, there)
            return "refused"
        assert not case.refused, f"{case} was to be refused"
        assert "error" not in (answer := reader.ask(do="open")), (case, answer)
        assert "error" not in (answer := writer.ask(do="send")), (case, answer)
        found = reader.ask(do="check")
        assert found.get("faults") == [] and found["moved"] > 0, (case, found)
        return "exact"
    finally:
        writer.ask(do="end")
        reader.ask(do="end")


def main(engine: str, count: int, seed: int) -> Counter[str]:
    chosen = cases()
    if count:
        chosen = random.Random(seed).sample(chosen, count)
    processes = [Process(role, engine) for role in ("prefill", "decode")]
    try:
        return Counter(run(case, *processes) for case in chosen)
    finally:
        for process in processes:
            process.popen.communicate(timeout=30)


if __name__ == "__main__":
    if sys.argv[1] in ("prefill", "decode"):
        serve(*sys.argv[1:])
    else:
        ends = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        assert ends["exact"] and (ends["refused"] or int(sys.argv[2]) < 20), ends
        print(f"count: cases of the matrix, {sys.argv[1]} | {ends['exact']:,} byte-exact, {ends['refused']:,} refused")
        print("as it should be")
