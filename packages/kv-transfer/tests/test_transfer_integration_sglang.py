"""SGLang's calls over our planner and engines: bytes that tell where they belong, without SGLang.

The control plane around these calls is SGLang's own, and runs in `tests/engines`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from transfer_sglang import MHA, MLA, PAGE, PAGES, SENTINEL, Manager, Side

from kv_transfer import EngineError, EngineUnavailable, TransferFailed, UnsupportedLayout, create_engine
from kv_transfer.integrations import sglang
from kv_transfer.integrations.sglang import SessionEngine
from kv_transfer.integrations.sglang.engine import BlockList

FROM, TO = [3, 7, 8, 2, 9], [4, 5, 10, 1, 6]


@pytest.fixture
def managers() -> Iterator[Any]:
    made: list[Manager] = []

    def make(side: Side, *, mla: bool) -> Manager:
        made.append(Manager(side, mla=mla))
        return made[-1]

    yield make
    for manager in made:
        manager.engine.close()


def send(source: Manager, destination: Manager, peer: Side, *more: Any, **named: Any) -> int:
    return source.send_kvcache(
        destination.engine.get_session_id(), np.array(FROM, np.int32), list(peer.args.kv_data_ptrs),
        np.array(TO, np.int32), None, *more, **named,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("drafts", [(0, 0), (0, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("stages", [(5,), (2, 3), (4, 1), (2, 2, 1)])
@pytest.mark.parametrize("caller", ["today", "seeds", "registered"])
def test_stages_into_one_decode(
    managers: Any, kinds: Any, drafts: tuple[int, int], stages: tuple[int, ...], caller: str
) -> None:
    """Uneven stages, drafts at either side (A02, A-01, A-25), by today's call and by the seeds'."""
    mla, decode = kinds is MLA, Side(kinds, range(5), drafts=drafts[1])
    there = managers(decode, mla=mla)
    for stage, layers in enumerate(stages):
        start, last = sum(stages[:stage]), stage == len(stages) - 1
        own = Side(
            kinds, range(start, start + layers), drafts=drafts[0] if last else 0, hidden=5, pp=(stage, len(stages))
        )
        own.args.draft_kv_layers = drafts[0]
        own.fill(FROM)
        here = managers(own, mla=mla)
        if caller == "registered":
            assert here.register(decode, there.engine.get_session_id()) is None
        first = decode.args.kv_item_lens[0]
        more: tuple[Any, ...] = ([], None, first, 1) if caller == "today" else ([],) if caller == "seeds" else ()
        assert send(here, there, decode, *more) == 0
    both = drafts[0] > 0
    decode.check(TO, [name for name in decode.names if both or name[1] == "target"])


@pytest.mark.parametrize("prefill", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_heads_over_unequal_ranks(managers: Any, prefill: int, decode: int, heads: int) -> None:
    """K and V of unequal widths (A-26), the draft's layer too (B09); all decode ranks have their heads (B08)."""
    sources = [Side(MHA, range(2), drafts=1, heads=heads, tp=(rank, prefill)) for rank in range(prefill)]
    here = [managers(source, mla=False) for source in sources]
    for source in sources:
        source.fill(FROM)
    for rank in range(decode):
        peer = Side(MHA, range(2), drafts=1, heads=heads, tp=(rank, decode))
        there = managers(peer, mla=False)
        readers = [rank // (decode // prefill)] if decode >= prefill else [
            rank * (prefill // decode) + i for i in range(prefill // decode)
        ]  # fmt: skip
        for reader in readers:
            session = there.engine.get_session_id()
            assert here[reader].register(peer, session) is None
            arguments = (session, np.array(FROM), list(peer.args.kv_data_ptrs), np.array(TO))
            if prefill == decode:
                assert here[reader].send_kvcache(*arguments, None) == 0
            else:
                item = peer.args.kv_item_lens[0]
                assert here[reader].send_kvcache_slice(*arguments, rank, decode, item, None) == 0
        peer.check(TO)


def test_a_replica_that_another_rank_brings_sends_nothing(managers: Any) -> None:
    """B05: 4 prefill ranks with 2 heads, one decode rank: the second of each pair is silent."""
    peer = Side(MHA, range(2), heads=2, tp=(0, 1))
    there = managers(peer, mla=False)
    for rank in range(4):
        source = Side(MHA, range(2), heads=2, tp=(rank, 4))
        here = managers(source, mla=False)
        assert here.register(peer, there.engine.get_session_id()) is None
        before = [memory.copy() for memory in peer.memory]
        source.fill(FROM)
        arguments = (there.engine.get_session_id(), np.array(FROM), list(peer.args.kv_data_ptrs), np.array(TO))
        assert here.send_kvcache_slice(*arguments, 0, 1, peer.args.kv_item_lens[0], None) == 0
        changed = any((a != b).any() for a, b in zip(before, peer.memory, strict=True))
        assert changed == (rank in (0, 2))
    peer.check(TO)


@pytest.mark.parametrize("name", ["dst_kv_item_len", "dst_attn_tp_size"])
def test_none_is_a_named_refusal(managers: Any, name: str) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    known = {"dst_kv_item_len": peer.args.kv_item_lens[0], "dst_attn_tp_size": 1}
    for register in (False, True):
        if register:
            assert here.register(peer, there.engine.get_session_id()) is None
        with pytest.raises(UnsupportedLayout, match=name):
            send(here, there, peer, **{**known, name: None})
    peer.check([])


def test_unequal_ranks_need_a_registration_or_a_rank(managers: Any) -> None:
    """`send_kvcache` has no argument for the peer's rank; a registered peer is known, another one is not."""
    own, peer = Side(MHA, range(2), heads=4), Side(MHA, range(2), heads=4, tp=(1, 2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    own.fill(FROM)
    more: tuple[Any, ...] = ([], None, peer.args.kv_item_lens[0], 2)
    with pytest.raises(UnsupportedLayout, match="dst_attn_tp_size"):
        send(here, there, peer, *more)
    assert here.register(peer, there.engine.get_session_id()) is None
    assert send(here, there, peer, *more) == 0
    peer.check(TO)


def test_device_indices_are_refused_by_name(managers: Any) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    with pytest.raises(UnsupportedLayout, match="dst_device_kv_indices"):
        send(here, there, peer, dst_device_kv_indices=np.array(TO))
    peer.check([])


def test_an_argument_that_nobody_knows_is_an_error(managers: Any) -> None:
    """A01: a shared caller with one more argument."""
    here = managers(Side(MHA, range(2)), mla=False)
    with pytest.raises(TypeError, match="dst_new_field"):
        send(here, here, Side(MHA, range(2)), dst_new_field=[])


def shorter(peer: Side) -> None:
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        getattr(peer.args, name).pop()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (shorter, "dst_kv_ptrs"),
        (lambda peer: peer.args.kv_item_lens.__setitem__(1, None), "item length of entry 1"),
        (lambda peer: peer.args.kv_item_lens.__setitem__(1, 2 * peer.args.kv_item_lens[1]), "dims"),
        (lambda peer: peer.args.kv_item_lens.__setitem__(0, peer.args.kv_item_lens[0] - 1), "item length of key"),
        (lambda peer: peer.args.kv_item_lens.pop(), "kv_item_lens"),
        (lambda peer: peer.args.aux_data_ptrs.pop(), "aux_data_ptrs"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_when_it_registers(managers: Any, change: Any, match: str) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here = managers(own, mla=False)
    change(peer)
    reason = here.register(peer, "kv-transfer/1/loopback/x:1")
    assert reason is not None and match in reason
    peer.check([])


def test_a_refused_peer_may_register_again(managers: Any) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    session = there.engine.get_session_id()
    assert here.register(peer, session, dst_attn_tp_size=None) is not None
    assert here.register(peer, session) is None
    own.fill(FROM)
    assert send(here, there, peer) == 0
    peer.check(TO)


@pytest.mark.parametrize(
    ("source", "destination", "kind"),
    [
        ([1, 2, 3], [1, 2], kp.PlanError),  # C01
        ([1, 2], [], kp.PlanError),  # SGLang sends nothing and says success
        ([1, 2], [3, 3], kp.PlanError),
        ([1, -2], [3, 4], kp.PlanError),
        ([1, PAGES], [3, 4], kp.PlanError),
    ],
)
def test_pages_that_do_not_pair_are_refused(
    managers: Any, source: list[int], destination: list[int], kind: Any
) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    with pytest.raises(kind):
        here.send_kvcache(
            there.engine.get_session_id(), np.array(source), list(peer.args.kv_data_ptrs), np.array(destination), None
        )
    peer.check([])


def test_no_pages_are_nothing_to_do(managers: Any) -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    empty = np.array([], np.int32)
    assert here.send_kvcache(there.engine.get_session_id(), empty, list(peer.args.kv_data_ptrs), empty, None) == 0
    peer.check([])


@pytest.mark.parametrize("said", [False, True], ids=["bare", "said"])
def test_a_page_far_past_the_peers_memory_is_refused(managers: Any, said: bool) -> None:
    """A peer of SGLang's own manager does not say how long its buffers are, but they must not overlap."""
    own, peer = Side(MHA, range(1)), Side(MHA, range(1))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    session, pointers = there.engine.get_session_id(), list(peer.args.kv_data_ptrs)
    assert here.register(peer, session, said=there._published() if said else None) is None
    far = 2 * 10**12  # times a page: farther than any two addresses of a process are apart
    with pytest.raises(kp.PlanError, match=str(far) if said else "share bytes"):
        here.send_kvcache(session, np.array([1]), pointers, np.array([far]), None)
    peer.check([])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stages", [(3,), (2, 1)])
def test_contexts_shared_by_decode_ranks(managers: Any, size: int, stages: tuple[int, ...]) -> None:
    """Latents of a rank's own pages; index keys and drafts of all, page by page, in super pages of `size` pages."""
    total, tokens = 5, 5 * PAGE - 1
    destinations = [11, 3, 7][: -(-total // size)]
    for rank in range(size):
        peer = Side(MLA, range(3))
        kept = [memory for memory, name in zip(peer.memory, peer.names, strict=True) if name[0] == "index_key"]
        wide = [np.full((PAGES * size, *memory.shape[1:]), SENTINEL, np.uint8) for memory in kept]
        place = [number for number, name in enumerate(peer.names) if name[0] == "index_key"]
        for number, memory in zip(place, wide, strict=True):
            peer.args.kv_data_ptrs[number] = memory.ctypes.data
            peer.args.kv_data_lens[number] = memory.nbytes
            peer.args.kv_item_lens[number] *= size
        there = managers(peer, mla=True)
        for stage, layers in enumerate(stages):
            start = sum(stages[:stage])
            own = Side(MLA, range(start, start + layers), hidden=3, pp=(stage, len(stages)))
            own.fill(FROM)
            here = managers(own, mla=True)
            session = there.engine.get_session_id()
            assert here.register(peer, session, dst_dcp_size=size, dst_dcp_rank=rank) is None
            assert here.send_kvcache_dcp(
                session, np.array(FROM), list(peer.args.kv_data_ptrs), np.array(destinations),
                dcp_token_item_lens=[], dst_dcp_size=size, dst_dcp_rank=rank, src_page_offset=0, decode_prefix_len=0,
                num_kv_tokens=tokens, executor=None, dst_layer_ids=[], dst_kv_item_lens=list(peer.args.kv_item_lens),
            ) == 0  # fmt: skip
        reference = Side(MLA, range(3))
        reference.fill(range(total))
        for number, name in enumerate(peer.names):
            found = wide[place.index(number)] if number in place else peer.memory[number]
            expected = np.full_like(found, SENTINEL)
            for page in range(total):
                if number in place:
                    expected[destinations[page // size] * size + page % size] = reference.memory[number][page]
                elif page % size == rank:
                    expected[destinations[page // size]] = reference.memory[number][page]
            np.testing.assert_array_equal(found, expected, err_msg=str(name))


def test_auxiliary_rows(managers: Any) -> None:
    own, peer = Side(MHA, range(1)), Side(MHA, range(1))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    session = there.engine.get_session_id()
    assert here.register(peer, session, said=there._published()) is None
    for number, rows in enumerate(own.aux):
        rows[:] = np.arange(rows.size).reshape(rows.shape) % 200 + number
    request = SimpleNamespace(dst_aux_index=4, mooncake_session_id=session)
    assert here.send_aux(request, 2, list(peer.args.aux_data_ptrs)) == 0
    for mine, theirs in zip(own.aux, peer.aux, strict=True):
        assert (theirs[4] == mine[2]).all() and (theirs[:4] == SENTINEL).all()
    request.dst_aux_index = 5
    with pytest.raises(TransferFailed, match="auxiliary row 5 of destination"):
        here.send_aux(request, 2, list(peer.args.aux_data_ptrs))


def test_hidden_states_of_another_width_are_refused(managers: Any) -> None:
    """A19: 8,192 of the target against 6,144 of the draft's input; SGLang reads rows with its own length."""
    own, peer = Side(MHA, range(1)), Side(MHA, range(1))
    here, there = managers(own, mla=False), managers(peer, mla=False)
    own.args.aux_item_lens = [16, 8192 * 2]
    said = there._published().model_copy(update={"aux_item_bytes": (16, 6144 * 2)})
    reason = here.register(peer, there.engine.get_session_id(), said=said)
    assert reason is not None and "aux_item_lens[1]" in reason and "16384" in reason and "12288" in reason


def test_the_engine_has_sglangs_calls() -> None:
    """Neighbours are one region, empty buffers none; a session ends in a port; what fails is -1 and in the log."""
    engine, peer = (SessionEngine(create_engine("loopback")) for _ in range(2))
    memory = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, np.uint8)
    at, to = memory.ctypes.data, target.ctypes.data
    assert engine.batch_register([at, at + 16, at], [16, 48, 0]) == 0
    assert engine.batch_register([at], [64]) == 0
    assert peer.batch_register([to], [64]) == 0
    session = peer.get_session_id()
    assert 0 <= int(session.rpartition(":")[2]) < 65536
    assert engine.batch_transfer_sync(session, [at, at + 8], [to + 8, to], [8, 8]) == 0
    assert target[:16].tolist() == [*range(8, 16), *range(8)]
    assert engine.batch_transfer_sync(session, [at], [to + 60], [8]) == -1
    assert engine.batch_transfer_sync(session, [at], [], [8]) == -1
    assert engine.batch_transfer_sync("kv-transfer/1/mooncake/127.0.0.1:17000:17000", [at], [to], [8]) == -1
    with pytest.raises(EngineError, match="'mooncake', this side with 'loopback'"):
        engine.move("kv-transfer/1/mooncake/127.0.0.1:17000:17000", [BlockList.of([at], [to], [8])])
    with pytest.raises(EngineError):
        engine.batch_register([at + 32], [64])  # overlaps what is open
    engine.batch_deregister([at])
    assert engine.batch_transfer_sync(session, [at], [to], [8]) == -1
    assert engine.send_probe(session) != 0
    engine.close()
    peer.close()


def test_long_batches_and_blocks_are_cut_to_the_engine() -> None:
    engine = SessionEngine(create_engine("loopback", max_entries_per_batch=3, max_block_bytes=10))
    memory, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    engine.batch_register([memory.ctypes.data, target.ctypes.data], [100, 100])
    sources = [memory.ctypes.data + at for at in (0, 25, 50, 75)]
    destinations = [target.ctypes.data + at for at in (0, 25, 50, 75)]
    assert engine.batch_transfer_sync(engine.get_session_id(), sources, destinations, [25] * 4) == 0
    assert (memory == target).all()
    engine.close()


@pytest.mark.parametrize("block", [(-1, 5, 5), (5, 2**64 - 2, 5), (5, 5, -1)])
def test_addresses_outside_64_bits_are_refused(block: tuple[int, int, int]) -> None:
    with pytest.raises(TransferFailed, match="64-bit"):
        BlockList.of(*([number] for number in block))


def test_importing_it_loads_no_engine() -> None:
    program = (
        "import sys, kv_transfer.integrations.sglang\n"
        "print(sorted({'sglang', 'torch', 'torch_npu', 'mooncake', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    "make", [sglang.manager_class, sglang.sender_class, sglang.receiver_class, sglang.bootstrap_server_class]
)
def test_without_sglang_its_classes_are_a_named_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in [name for name in sys.modules if name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineUnavailable, match="install SGLang"):
        make.__wrapped__() if hasattr(make, "__wrapped__") else make()


@pytest.mark.parametrize("field", ["kv_data_ptrs", "kv_data_lens", "kv_item_lens", "page_size"])
@pytest.mark.parametrize("value", [None, 0, "x"])
def test_a_field_that_is_not_filled_is_named(managers: Any, field: str, value: object) -> None:
    side, peer = Side(MHA, range(2), heads=2), Side(MHA, range(2), heads=2)
    here, there = managers(side, mla=False), managers(peer, mla=False)
    setattr(side.args, field, value)
    with pytest.raises(UnsupportedLayout, match=field):
        sglang.manifest_of(side.args, mla=False)
    if field in ("kv_data_lens", "kv_item_lens"):  # a registration is refused, and its thread goes on
        assert field in (here.register(peer, there.engine.get_session_id()) or "")


@pytest.mark.parametrize("pages", [None, [1.5], ["1"], [True]])
def test_pages_are_whole_numbers(managers: Any, pages: Any) -> None:
    here, there = (managers(Side(MHA, range(2), heads=2), mla=False) for _ in range(2))
    peer = there.kv_args
    for lists, name in (((pages, [1]), "prefill_kv_indices"), (([1], pages), "dst_kv_indices")):
        with pytest.raises(UnsupportedLayout, match=f"{name}: page ids are whole numbers"):
            here.send_kvcache(
                there.engine.get_session_id(), lists[0], list(peer.kv_data_ptrs), lists[1], None, [], None,
                peer.kv_item_lens[0], 1,
            )  # fmt: skip
