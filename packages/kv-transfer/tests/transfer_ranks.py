"""Byte-exact transfers between real processes: the ranks of both sides live in processes that serve case after case.

`python transfer_ranks.py ENGINE WHICH SEED PROCESSES` runs cases of the matrix and exits with 0 when every byte of
every rank was as it should be, and every refusal was the named one. WHICH: "all" is the whole product, "turns" the same
with page sizes that take turns, "pairs" a set that covers all pairs, "few" such a set without cases of many
connections; ":6-9/10" behind it takes the part behind the first 6 tenths and before the last one. PROCESSES: of each
side; 0 gives every rank one of its own. A role word starts one of the processes instead.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import kv_planner as kp
import transfer_matrix as matrix
from kv_planner.testing import Label
from transfer_image import Image, places, stage_layers
from transfer_matrix import Case

import kv_transfer as kt

TIMEOUTS = kt.Timeouts(handshake=60, offer=60, transfer=60, heartbeat_interval=0.5, peer_lost_after=30)
OPTIONS: dict[str, dict[str, Any]] = {"loopback": {"shared": True}, "mooncake": {"transfer_timeout": 20.0}}
LIMITS = kt.Limits(ready_step_bytes=40)  # a layer or two at a time
SOURCE_ROWS, DESTINATION_ROWS = (3, 2), (5, 6)
MOST_RANKS = (12, 8)  # of a side, without shares and data-parallel groups
Answer = dict[str, Any]


class Rank:
    """One rank of a case: an image for each group."""

    def __init__(self, world: World, case: Case, index: int) -> None:
        here = world.here
        share, dp = (1, case.dp[0]) if here == 0 else (case.share[0], case.dp[1])
        self.index, self.place = index, places(case.pp[here], case.tp[here], share, dp)[index]
        draft = range(matrix.LAYERS, matrix.LAYERS + case.draft[here])
        self.images = {
            name: Image(
                group.layout,
                stage_layers(matrix.LAYERS, self.place, draft),
                self.place,
                items=case.items(here),
                padding=case.padding * here,
                allocate=world.allocate,
            )
            for name, group in case.groups(here).items()
        }
        self.filled: dict[str, Any] = {}

    @property
    def manifests(self) -> kt.Manifests:
        found = {name: own.manifest for name, own in self.images.items()}
        return found["main"] if list(found) == ["main"] else found

    def rows(self, request: int) -> dict[str, int] | None:
        """Where a request's states go, in the groups that have some on this stage."""
        own = {
            name: DESTINATION_ROWS[request]
            for name, image in self.images.items()
            if any(entry.component == "state" for entry in image.manifest.entries)
        }
        return own or None

    def expected(self, case: Case, request: int, name: str) -> dict[int, Label]:
        """Bytes of one request in one group, of the parts that are moved."""
        group, image = case.groups(1)[name], self.images[name]
        rows = {DESTINATION_ROWS[request]: SOURCE_ROWS[request]}
        if not group.has_pages:
            found = image.expected({}, rows)
        else:
            span = matrix.needed(case, group)
            source = matrix.source_pages(case, group, request)[span.start :]
            to = matrix.destination_pages(case, group, request)
            if case.share[0] == 1:
                found = image.expected(dict(zip(to, source, strict=True)), rows)
            else:
                tokens = case.tokens - span.start * group.layout.page_size if case.share[1] == "token" else None
                found = image.expected_share(source, to, tokens) | image.expected({}, rows)
        return {at: label for at, label in found.items() if label.part in case.parts}


class World:
    """One process: an engine that lives over all cases, and some ranks of one case."""

    def __init__(self, engine: str, here: int) -> None:
        self.engine = kt.create_engine(engine, **OPTIONS.get(engine, {}))
        self.here = here
        self.case: Case | None = None
        self.ranks: list[Rank] = []
        self.ends: list[tuple[Rank, int, Any]] = []
        self.sessions: list[tuple[Rank, int, kt.ReceiverSession]] = []
        self.arenas: list[kt.SharedArena] = []

    def allocate(self, nbytes: int) -> Any:
        arena = kt.SharedArena(nbytes)
        self.arenas.append(arena)
        return arena.array

    def begin(self, fields: dict[str, Any], ranks: Sequence[int], endpoints: Sequence[Any] = ()) -> Answer:
        """Makes ranks and their ends; a prefill rank connects to all decode ranks of each of its requests."""
        case = self.case = Case.of(fields)
        windows = {name: own.window for name, own in case.groups(self.here).items() if own.window is not None}
        common: dict[str, Any] = {"windows": windows, "parts": case.parts, "timeouts": TIMEOUTS}
        for index in ranks:
            rank = Rank(self, case, index)
            self.ranks.append(rank)
            if self.here == 0:
                rank.filled = {name: image.fill().arena.copy() for name, image in rank.images.items()}
        found = []
        for rank in self.ranks:
            for request in range(max(case.dp)):
                groups = matrix.request_groups(case, request)
                if groups[self.here] != rank.place.dp_rank:
                    continue
                if self.here == 1:
                    receiver = kt.Receiver(
                        rank.manifests, self.engine, prefill_ranks=case.pp[0] * case.tp[0],
                        prefill_dp_rank=groups[0], interleave=case.share[1], **common,
                    )  # fmt: skip
                    self.ends.append((rank, request, receiver))
                    found.append([request, receiver.endpoint])
                for own, endpoint in endpoints:
                    if own == request:
                        sender = kt.Sender(rank.manifests, self.engine, endpoint=endpoint, limits=LIMITS, **common)
                        self.ends.append((rank, request, sender))
                        sender.connect()
        return {"endpoints": found}

    def ready(self) -> Answer:
        for _, _, end in self.ends:
            end.wait_ready()
        return {}

    def open(self) -> Answer:
        assert self.case is not None
        for rank, request, receiver in self.ends:
            pages: Any = {
                name: matrix.destination_pages(self.case, group, request)
                for name, group in self.case.groups(1).items() if group.has_pages
            }  # fmt: skip
            pages = pages["main"] if list(pages) == ["main"] else pages
            session = receiver.open(request, pages, tokens=self.case.tokens, row=rank.rows(request))
            self.sessions.append((rank, request, session))
        return {}

    def send(self) -> Answer:
        """The first page as a chunk of its own, the others and the states layer by layer."""
        assert self.case is not None
        groups = {name: own for name, own in self.case.groups(0).items() if own.has_pages}
        for _, request, sender in self.ends:
            pages = {name: matrix.source_pages(self.case, own, request) for name, own in groups.items()}
            sending, marks = sender.open(request), kt.LayerMarks()
            for part, start in ((slice(0, 1), 0), (slice(1, None), 1)):
                chunk: Any = {name: own[part] for name, own in pages.items()}
                chunk = chunk["main"] if list(chunk) == ["main"] else chunk
                sending.send(chunk, start=start, ready=marks if start else None)
            sending.send_states(SOURCE_ROWS[request], ready=marks)
            for own_part in ("target", "draft"):
                marks.mark(range(matrix.LAYERS + 3), own_part)
            sending.finish()
        return {}

    def check(self) -> Answer:
        """Compares all memory of all ranks, those of other data-parallel groups included."""
        assert self.case is not None
        faults, moved = [], 0
        results = {(rank.index, request): session.wait(60) for rank, request, session in self.sessions}
        for rank in self.ranks:
            for name, image in rank.images.items():
                expected: dict[int, Label] = {}
                for request in range(max(self.case.dp)):
                    if (rank.index, request) in results:
                        expected |= rank.expected(self.case, request, name)
                if self.here == 1:
                    faults += [f"rank {rank.index}, group {name}: {fault}" for fault in image.faults(expected)]
                elif (image.arena != rank.filled[name]).any():
                    faults.append(f"rank {rank.index}, group {name}: prefill was written to")
                moved += len(expected)
        counted = sum(result.nbytes for result in results.values())
        if counted != moved:
            faults.append(f"{counted} bytes reported, {moved} arrived")
        return {"faults": faults[:8], "moved": moved}

    def end(self) -> Answer:
        for _, _, own in self.ends:
            own.close()
        for arena in self.arenas:
            arena.close()
        self.ranks, self.ends, self.sessions, self.arenas = [], [], [], []
        return {}


def serve(role: str, engine: str) -> None:
    world = World(engine, int(role == "decode"))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(world, command.pop("do"))(**command)
        except (kt.TransferError, kp.PlanError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    world.end()
    world.engine.close()


class Side:
    """The processes of one side; rank i is in process i % their number."""

    def __init__(self, role: str, engine: str, count: int) -> None:
        self.here = int(role == "decode")
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, role, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]

    def ask(self, do: str, **command: object) -> list[Answer]:
        """Asks all processes at once."""
        return self._ask([{"do": do, **command} for _ in self.processes])

    def begin(self, case: Case, endpoints: Sequence[Any] = ()) -> list[Answer]:
        ranks = case.pp[self.here] * case.tp[self.here] * case.dp[self.here] * (case.share[0] if self.here else 1)
        fields = dataclasses.asdict(case)
        own = [list(range(first, ranks, len(self.processes))) for first in range(len(self.processes))]
        more = {"endpoints": list(endpoints)} if self.here == 0 else {}
        return self._ask([{"do": "begin", "fields": fields, "ranks": held, **more} for held in own])

    def _ask(self, commands: Sequence[Answer]) -> list[Answer]:
        for process, command in zip(self.processes, commands, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.communicate(timeout=60)


def run(case: Case, prefill: Side, decode: Side) -> str:
    """How the case ended: "exact" or "refused"."""

    def good(answers: list[Answer]) -> list[Answer]:
        assert not any("error" in own for own in answers), (case, answers)
        return answers

    try:
        here = decode.begin(case)
        there = [] if any("error" in own for own in here) else prefill.begin(
            case, [pair for own in here for pair in own["endpoints"]]
        )  # fmt: skip
        errors = [own for own in (*here, *there) if "error" in own]
        if case.refused:
            assert errors, f"{case} was to be refused"
            for own in errors:
                assert own["error"] in ("PeerRefused", "UnsupportedLayout") and case.refused in own["text"], (case, own)
            return "refused"
        assert not errors, (case, errors)
        good(decode.ask("ready"))
        good(prefill.ask("ready"))
        good(decode.ask("open"))
        good(prefill.ask("send"))
        found = good([*decode.ask("check"), *prefill.ask("check")])
        assert all(own["faults"] == [] for own in found) and sum(own["moved"] for own in found), (case, found)
        return "exact"
    finally:
        prefill.ask("end")
        decode.ask("end")


def main(engine: str, which: str, seed: int, processes: int) -> Counter[str]:
    name, _, part = which.partition(":")
    if name in ("all", "turns"):
        cases = list(matrix.product(sizes=name == "all"))
    else:
        cases = matrix.covering(seed, most=matrix.FEW if name == "few" else matrix.MANY)
    if part:
        own, parts = part.split("/")
        first, last = (len(cases) * int(end) // int(parts) for end in own.split("-"))
        cases = cases[first:last]
    sides = [
        Side(role, engine, processes or most) for role, most in zip(("prefill", "decode"), MOST_RANKS, strict=True)
    ]
    ends: Counter[str] = Counter()
    try:
        for number, case in enumerate(cases):
            ends[run(case, *sides)] += 1
            if number % 500 == 499:
                print(f"{number + 1:,} of {len(cases):,} cases", flush=True)
    finally:
        for side in sides:
            side.close()
    return ends


if __name__ == "__main__":
    if sys.argv[1] in ("prefill", "decode"):
        serve(*sys.argv[1:])
    else:
        ends = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        assert ends["exact"], ends
        print(
            f"count: cases of the matrix ({sys.argv[2]}), {sys.argv[1]} | {ends['exact']:,} byte-exact, "
            f"{ends['refused']:,} refused"
        )
        print("as it should be")
