"""What two ends must have in common besides layouts: parts, the process, and buffers that are really there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

import kv_planner as kp
import pytest
from transfer_memory import Owned, RankMemory, make_layout, whole
from transfer_pair import FAST

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.errors import PeerRefused
from kv_transfer.messages import Hello, Welcome
from kv_transfer.process import process_name
from kv_transfer.terms import ALL_PARTS, Terms, check_parts

TARGET: tuple[kp.Part, ...] = ("target",)


class Ends:
    """One receiver and one sender with loopback engines."""

    def __init__(
        self,
        prefill: RankMemory,
        decode: RankMemory,
        prefill_parts: Sequence[kp.Part] = ALL_PARTS,
        decode_parts: Sequence[kp.Part] = ALL_PARTS,
    ) -> None:
        self.engines = [LoopbackEngine(), LoopbackEngine()]
        self.receiver = kt.Receiver(
            decode.manifest, self.engines[0], prefill_ranks=1, parts=decode_parts, timeouts=FAST
        )
        self.sender = kt.Sender(
            prefill.manifest, self.engines[1], endpoint=self.receiver.endpoint, parts=prefill_parts, timeouts=FAST
        )

    def refusals(self) -> tuple[PeerRefused, PeerRefused]:
        """What the sender and the receiver raise."""
        with pytest.raises(PeerRefused) as at_sender:
            self.sender.connect()
        with pytest.raises(PeerRefused) as at_receiver:
            self.receiver.wait_ready()
        return at_sender.value, at_receiver.value

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def open_ends() -> Iterator[list[Ends]]:
    made: list[Ends] = []
    yield made
    for ends in made:
        ends.close()


def without(layout: kp.ModelLayout, component: kp.Component, part: kp.Part, layer: int) -> RankMemory:
    """One rank that owns everything but one buffer."""
    owned: dict[tuple[kp.Component, kp.Part], Sequence[int]] = {
        (spec.component, spec.part): [
            own for own in spec.layer_ids if (spec.component, spec.part, own) != (component, part, layer)
        ]
        for spec in layout.components
    }
    return RankMemory(layout, owned)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("part", "layer"), [("target", 2), ("draft", 4)])
def test_a_rank_that_forgot_a_buffer_is_refused_on_both_sides(
    side: str, part: kp.Part, layer: int, open_ends: list[Ends]
) -> None:
    layout = make_layout(draft=1)
    partial = without(layout, "value", part, layer)
    ends = Ends(partial, whole(layout)) if side == "prefill" else Ends(whole(layout), partial)
    open_ends.append(ends)
    at_sender, at_receiver = ends.refusals()
    for error, here in ((at_sender, "prefill"), (at_receiver, "decode")):
        (difference,) = error.differences
        assert error.code == "layout"
        assert difference.field == f"value/{part} layer {layer}"
        assert (difference.local, difference.remote) == (
            ("absent", "heads 0..2") if here == side else ("heads 0..2", "absent")
        )
        assert "never be sent or filled" in difference.consequence


def test_a_tensor_parallel_rank_that_forgot_a_layer_is_refused(open_ends: list[Ends]) -> None:
    layout = make_layout()
    owned: Owned = {("key", "target"): [0, 1, 2, 3], ("value", "target"): [0, 1, 3]}
    half = RankMemory(layout, owned, placement=kp.Placement(tp_rank=1, tp_size=2), head_range=(1, 2))
    open_ends.append(Ends(whole(layout), half))
    at_sender, _ = open_ends[0].refusals()
    assert [difference.field for difference in at_sender.differences] == ["value/target layer 2"]


@pytest.mark.parametrize("layers_only", [True, False])
def test_a_prefill_side_without_a_draft_serves_one_that_has_it(layers_only: bool, open_ends: list[Ends]) -> None:
    """The decode side's draft memory is neither touched nor open to peers."""
    full = make_layout(draft=1)
    prefill, decode = whole(make_layout()).fill(), whole(full)
    ends = Ends(prefill, decode, TARGET, TARGET)
    open_ends.append(ends)
    ends.sender.connect()
    ends.receiver.wait_ready()
    arriving = ends.receiver.open(0, [5, 2])
    leaving = ends.sender.open(0)
    if layers_only:
        leaving.send([7, 1], start=0, layer_ids=range(4))
    else:
        leaving.send([7, 1], start=0)
    leaving.finish()
    result = arriving.wait(60)
    target = [name for name in decode.names if name[1] == "target"]
    assert decode.faults({5: 7, 2: 1}, names=target) == []
    assert result.nbytes == 2 * sum(decode.layout.item_bytes(spec) * 4 for spec in ("key", "value"))
    draft = next(entry for entry in decode.manifest.entries if entry.part == "draft")
    with pytest.raises(kt.RegionError):
        ends.engines[0].unregister(draft.address)


def test_without_saying_so_the_missing_draft_is_a_difference(open_ends: list[Ends]) -> None:
    open_ends.append(Ends(whole(make_layout()), whole(make_layout(draft=1))))
    at_sender, _ = open_ends[0].refusals()
    assert {difference.field for difference in at_sender.differences} == {"key/draft", "value/draft"}


def test_unlike_parts_are_refused_with_both_named(open_ends: list[Ends]) -> None:
    layout = make_layout(draft=1)
    open_ends.append(Ends(whole(layout), whole(layout), TARGET, ALL_PARTS))
    at_sender, at_receiver = open_ends[0].refusals()
    assert "parts: local target, remote target, draft" in str(at_sender)
    assert "parts: local target, draft, remote target;" in str(at_receiver)


def test_parts_are_checked() -> None:
    assert check_parts(["draft", "target", "draft"]) == ALL_PARTS
    wrong: list[object] = [[], "target", ["target", "verifier"]]
    for parts in wrong:
        with pytest.raises(ValueError, match="parts: expected some of"):
            check_parts(parts)  # type: ignore[arg-type]


def test_a_state_of_a_part_that_is_not_sent_stands_in_nobodys_way() -> None:
    layout = make_layout(layers=1)
    state = kp.ComponentSpec("state", "draft", layer_ids=[1], dtype="float32", total_heads=1, dims=4, item_kind="token")
    both = kp.ModelLayout([*layout.components, state], page_size=4, fingerprint="model-a")
    memory = RankMemory(both, {("key", "target"): [0], ("value", "target"): [0]})
    engine = LoopbackEngine()
    with pytest.raises(kt.UnsupportedLayout, match="draft state"):
        kt.Receiver(memory.manifest, engine, prefill_ranks=1)
    kt.Receiver(memory.manifest, engine, prefill_ranks=1, parts=TARGET).close()
    engine.close()


def test_terms_name_the_process_only_where_the_engine_cannot_leave_it() -> None:
    engine = LoopbackEngine()
    terms = Terms.of(engine)
    assert terms.process == process_name()
    assert engine.session.startswith(f"loopback:{process_name()}:")
    for kind in (Hello, Welcome):
        known: dict[str, object] = {
            "engine": "loopback",
            "session": "s",
            "groups": {},
            "incarnation": 1,
            "process": "7:other",
        }
        message = kind(**{name: known[name] for name in kind.model_fields if name in known})  # type: ignore[arg-type]
        with pytest.raises(PeerRefused, match=r"does not reach other processes: local session .* of process 7:other"):
            terms.check(message)
    Terms("far", "s").check(Hello(engine="far", session="t", groups={}))
    engine.close()


_DECODE = """
import sys; sys.path.insert(0, {path!r})
from transfer_memory import make_layout, whole
from transfer_pair import FAST
import kv_transfer as kt
manifest, engine = whole(make_layout()).manifest, kt.create_engine("loopback")
with kt.Receiver(manifest, engine, prefill_ranks=1, timeouts=FAST) as receiver:
    print(receiver.endpoint, flush=True)
    try:
        receiver.wait_ready()
    except kt.PeerRefused as error:
        print(error.code, error, flush=True)
"""
_FORK = """
import os, sys; sys.path.insert(0, {path!r})
import numpy as np
from transfer_memory import make_layout, whole
import kv_transfer as kt
from kv_transfer.process import process_name
engine, memory, here = kt.create_engine("loopback"), whole(make_layout()), process_name()
child = os.fork()
if child == 0:
    assert process_name() != here and kt.create_engine("loopback").session != engine.session
    for use in (lambda: engine.submit(engine.session, None), lambda: engine.register(4096, 8)):
        try:
            use()
        except kt.EngineError as error:
            assert "after a fork" in str(error), error
        else:
            os._exit(3)
    engine.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert process_name() == here
engine.register(memory.manifest.entries[0].address, 8)
"""


def _folder() -> str:
    return str(__file__).rpartition("/")[0]


def test_loopback_between_two_processes_is_refused_by_both() -> None:
    prefill = whole(make_layout())
    with subprocess.Popen(
        [sys.executable, "-c", _DECODE.format(path=_folder())], stdout=subprocess.PIPE, text=True
    ) as decode:
        assert decode.stdout is not None
        endpoint = decode.stdout.readline().strip()
        engine = LoopbackEngine()
        with kt.Sender(prefill.manifest, engine, endpoint=endpoint, timeouts=FAST) as sender:
            with pytest.raises(PeerRefused, match="does not reach other processes") as caught:
                sender.connect()
            assert caught.value.code == "engine"
        engine.close()
        words = decode.stdout.read()
        assert words.startswith("engine ")
        assert process_name() in words
        assert decode.wait(60) == 0


def test_an_engine_made_before_a_fork_is_refused_after_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK.format(path=_folder())], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
