"""Every argument of every public callable: an odd value is refused by name, and nothing has happened.

Long because the table has a row for every public callable.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing.odd_values import (
    ANY,
    LISTED,
    NUMBER,
    ODD,
    OPTIONAL,
    SECONDS,
    Case,
    arguments,
    missing,
    public,
    wrongs,
)
from transfer_memory import make_layout, stages, whole
from transfer_pair import FAST, Pair, eventually
from transfer_sglang import MHA, Manager, Side, manifest
from vllm_pieces import configuration

import kv_transfer as kt
from kv_transfer import doctor, explain, machine
from kv_transfer.engines import loopback, memfabric, mooncake, nixl
from kv_transfer.integrations import sglang
from kv_transfer.integrations.vllm import Settings
from kv_transfer.integrations.vllm.settings import place_of

TYPED = (kt.TransferError, kp.PlanError)
RECORD = "a record that calls return"
EXEMPT = {
    "TransferHandle": "made by engines, one a batch",
    "TransferHandle.notify": "called by the package, once a batch",
    "TransferHandle.settle": "called by engines, once a batch",
    "TransferStatus": RECORD,
    "TransferResult": RECORD,
    "Rank": RECORD,
    "Rank.of": RECORD,
    "Span": RECORD,
    "Isolation": RECORD,
    "ReceiverSession": "made by Receiver.open",
    "SenderSession": "made by Sender.open",
    "GroupSession": "made by SenderGroup.open",
    "SenderSession.abort": "takes any reason: giving up must always work",
    "ReceiverSession.abort": "takes any reason: giving up must always work",
    "GroupSession.abort": "takes any reason: giving up must always work",
    "LayerMarks.query": "asked for each layer, and false for what is none",
    "EngineReport": RECORD,
    "Report": RECORD,
    "Finding": RECORD,
    "Setting": RECORD,
    "Side": RECORD,
    "Estimate": RECORD,
    "Explanation": RECORD,
    "PlannedTransfers.maybe_send_extra": "called by SGLang with its own records",
    "PlannedTransfers.send_kvcache_dcp": "called by SGLang with what it registered; see send_kvcache",
    "PlannedTransfers.send_aux": "called by SGLang with its own records",
    "PlannedTransfers.transfer_worker": "a thread that SGLang starts",
    "name_entries": "needs SGLang's pools: tests/engines",
    "setup_state_kv_args": "needs SGLang's pools: tests/engines",
    "kv_class": "answers None for what is no class",
    "SessionEngine": "given an engine that create_engine made",
    "SessionEngine.batch_deregister": "closes all memory whatever it is given",
    "SessionEngine.batch_transfer_sync": "answers -1 as SGLang's engines do, with the reason in the log",
    "SessionEngine.move": "given the batches of a plan",
    "SessionEngine.send_probe": "always the same answer",
}
TEXTS = ("text", "empty text", "half a pair")
MODULES = (kt, doctor, explain, machine, loopback, sglang)


class World:
    """A pair with an open room, ends that are alone, and the table over them."""

    def __init__(self) -> None:
        layout = make_layout(layers=2, draft=1)
        self.pair = Pair(stages(layout, 1), whole(layout), timeouts=FAST)
        self.receiver, self.sender = self.pair.receiver, self.pair.senders[0]
        self.engine, self.directory, self.memory = loopback.LoopbackEngine(), kt.Directory(), whole(layout)
        self.lonely = kt.Sender(self.memory.manifest, loopback.LoopbackEngine(), endpoint="tcp://127.0.0.1:1")
        self.session = self.receiver.open(0, [1, 2], tokens=8)
        self.sending = self.sender.open(0)
        self.group = kt.SenderGroup([self.sender])
        self.session_2 = self.receiver.open(1, [3, 4], tokens=8)
        self.sending_2 = self.group.open(1)
        self.prefill_end = kt.PrefillEnd(self.memory.manifest, loopback.LoopbackEngine(), kt.Directory())
        self.decode_end = kt.DecodeEnd(self.memory.manifest, loopback.LoopbackEngine(), kt.Directory())
        self.client = kt.DirectoryClient("tcp://127.0.0.1:1", timeout=0.01)
        self.arena = kt.SharedArena(4096)
        self.side = Side(MHA, range(2), heads=2)
        self.manager = Manager(self.side, mla=False)

    def close(self) -> None:
        self.manager.engine.close()
        for end in (self.prefill_end, self.decode_end, self.lonely, self.arena, self.pair):
            end.close()

    def cases(self) -> dict[str, Case]:
        """How each public callable is called, and what its arguments take beside."""
        member, place, marks = kt.Member(side="prefill", place=kt.Place()), kp.Placement(), kt.LayerMarks()
        memory = {"manifest": self.memory.manifest, "engine": self.engine}
        end = {
            "windows": None, "parts": ["target"], "aux": (), "timeouts": FAST, "limits": None, "secret": None,
        }  # fmt: skip
        takes = {
            "windows": OPTIONAL, "aux": ("empty list",), "timeouts": OPTIONAL, "limits": OPTIONAL, "secret": OPTIONAL,
            "every": ("fraction",),
        }  # fmt: skip
        words = {"interleave": "page", "on_failed_pages": "fail"}
        pages = ("empty list",)
        timeout = {"timeout": 0.01}
        waits = {"timeout": (*SECONDS, "None")}
        limits = dict.fromkeys(("batches_in_flight", "batch_retries", "remembered_rooms", "ready_step_bytes"), 1) | {
            "message_bytes": 1 << 16
        }
        times = dict.fromkeys(
            ("handshake", "offer", "transfer", "peer_lost_after", "dead_writer_grace", "drain"), 1.0
        ) | {"heartbeat_interval": 0.1}
        caps: dict[str, object] = dict.fromkeys(
            ("max_entries_per_batch", "max_block_bytes", "max_blocks", "max_region_bytes", "max_regions"), 1
        )
        flags = ("cross_process", "progress_on_poll", "settles_itself")
        send = {"source_pages": [5, 6], "start": 0, "layer_ids": [0], "parts": ["target"], "ready": None}
        sends = {
            "source_pages": pages, "start": NUMBER, "layer_ids": LISTED, "parts": LISTED, "ready": OPTIONAL,
        }  # fmt: skip
        ends = {"metadata": {}, "rows": {}, "wait": False, "timeout": None}
        finish = {"metadata": ("None", "mapping"), "rows": OPTIONAL, "wait": ("true",), **waits}
        args = self.side.args
        call = {
            "mooncake_session_id": "x", "prefill_kv_indices": [1], "dst_kv_ptrs": list(args.kv_data_ptrs),
            "dst_kv_indices": [1], "executor": None, "dst_layer_ids": None, "dst_kv_item_len": args.kv_item_lens[0],
            "dst_attn_tp_size": 1,
        }  # fmt: skip
        calls = {
            "mooncake_session_id": TEXTS, "executor": ANY,
            "prefill_kv_indices": ("-1", "0", "true", "2**64", *pages), "dst_kv_indices": ("-1", "0", "true", *pages),
            "dst_layer_ids": LISTED, "dst_tp_rank": ("0", "2**64", "many digits"),
            "dst_kv_item_len": ("2**64", "many digits"),
        }  # fmt: skip
        return {
            "AuxField": Case(kt.AuxField, {"name": "a", "dtype": "int32", "width": 1}, {"name": ("text",)}),
            "DecodeEnd": Case(
                kt.DecodeEnd,
                {**memory, "directory": self.directory, "host": "127.0.0.1", "port": 0, **words, **end, "every": 1.0},
                {**takes, "host": ("text",), "port": NUMBER},
            ),
            "DecodeEnd.wait_ready": Case(
                self.decode_end.wait_ready, {**timeout, "dp_rank": 0}, {**waits, "dp_rank": NUMBER}
            ),
            "Directory": Case(kt.Directory, {"lifetime": 1.0, "clock": time.monotonic}, {"lifetime": ("fraction",)}),
            "Directory.is_whole": Case(
                self.directory.is_whole, {"side": "prefill", "dp_rank": 0}, {"dp_rank": NUMBER}
            ),
            "Directory.members": Case(self.directory.members, {"side": "prefill"}),
            "Directory.register": Case(self.directory.register, {"member": member}),
            "Directory.remove": Case(self.directory.remove, {"generation": 1}, {"generation": NUMBER}),
            "Directory.renew": Case(self.directory.renew, {"generation": 1}, {"generation": NUMBER}),
            "DirectoryClient": Case(
                kt.DirectoryClient, {"endpoint": "tcp://127.0.0.1:1", "secret": None, "timeout": 1.0},
                {"secret": OPTIONAL, "timeout": SECONDS},
            ),
            "DirectoryClient.is_whole": Case(
                self.client.is_whole, {"side": "prefill", "dp_rank": 0}, {"dp_rank": NUMBER}
            ),
            "DirectoryClient.members": Case(self.client.members, {"side": "prefill"}),
            "DirectoryClient.register": Case(self.client.register, {"member": member}),
            "DirectoryClient.remove": Case(self.client.remove, {"generation": 1}, {"generation": NUMBER}),
            "DirectoryClient.renew": Case(self.client.renew, {"generation": 1}, {"generation": NUMBER}),
            "DirectoryServer": Case(
                kt.DirectoryServer, {"directory": self.directory, "bind": "tcp://127.0.0.1:0", "secret": None},
                {"directory": OPTIONAL, "secret": OPTIONAL},
            ),
            "EngineCapabilities": Case(
                kt.EngineCapabilities, {**caps, **dict.fromkeys(flags, False), "region_alignment": 1},
                {**dict.fromkeys(caps, OPTIONAL), **dict.fromkeys(flags, ("true",))},
            ),
            "EngineCapabilities.check_entries": Case(
                kt.EngineCapabilities().check_entries, {"blocks": 1}, {"blocks": NUMBER}
            ),
            "GroupSession.finish": Case(self.sending_2.finish, ends, finish),
            "GroupSession.send": Case(self.sending_2.send, send, sends),
            "GroupSession.send_states": Case(
                self.sending_2.send_states, {"source_row": 1, "ready": None}, {"source_row": NUMBER, "ready": OPTIONAL}
            ),
            "GroupSession.wait": Case(self.sending_2.wait, timeout, waits),
            "LayerMarks.mark": Case(
                marks.mark, {"layer_ids": 1, "part": "target"}, {"layer_ids": ("0", "empty list")}
            ),
            "LayerMarks.subscribe": Case(marks.subscribe, {"wake": print}),
            "LayerMarks.wait": Case(
                marks.wait, {"part": "target", "layer_id": 1, "seconds": 0.0},
                {"part": ANY, "layer_id": ANY, "seconds": SECONDS},
            ),
            "Limits": Case(kt.Limits, limits),
            "Member": Case(
                kt.Member, {"side": "prefill", "place": kt.Place(), "endpoint": "", "serves": 0, "generation": 0},
                {"endpoint": ("text", "empty text"), "serves": NUMBER, "generation": ("0", "2**64")},
            ),
            "Place": Case(
                kt.Place, {f"{axis}_{kind}": int(kind == "size") for axis in ("dp", "pp", "dcp", "tp")
                           for kind in ("rank", "size")},
                {f"{axis}_rank": NUMBER for axis in ("dp", "pp", "dcp", "tp")},
            ),
            "Place.of": Case(kt.Place.of, {"placement": place}),
            "PrefillEnd": Case(
                kt.PrefillEnd, {**memory, "directory": self.directory, **end, "every": 1.0}, takes
            ),
            "PrefillEnd.group": Case(self.prefill_end.group, {"dp_rank": 0}, {"dp_rank": NUMBER}),
            "PrefillEnd.wait_ready": Case(
                self.prefill_end.wait_ready, {**timeout, "dp_rank": 0}, {**waits, "dp_rank": NUMBER}
            ),
            "Rank.at": Case(kt.Rank.at, {"place": place}),
            "Receiver": Case(
                kt.Receiver,
                {**memory, "bind": "tcp://127.0.0.1:0", "prefill_ranks": 1, "prefill_dp_rank": 0, **words, **end},
                {**takes, "prefill_dp_rank": NUMBER},
            ),
            "Receiver.open": Case(
                self.receiver.open,
                {"room": 9, "destination_pages": [7], "tokens": 4, "first_page": 0, "row": None, "timeout": 1.0},
                {"room": NUMBER, "tokens": OPTIONAL, "first_page": NUMBER, "row": OPTIONAL, **waits},
            ),
            "Receiver.reject": Case(self.receiver.reject, {"room": 9, "reason": "x"}, {"room": NUMBER, "reason": ANY}),
            "Receiver.spans": Case(
                self.receiver.spans, {"tokens": 4, "first_page": 0}, {"tokens": NUMBER, "first_page": NUMBER}
            ),
            "Receiver.wait_ready": Case(self.receiver.wait_ready, timeout, {"timeout": ANY}),
            "ReceiverSession.wait": Case(self.session.wait, timeout, waits),
            "ReceiverSession.wait_released": Case(self.session.wait_released, timeout, waits),
            "Registration": Case(
                kt.Registration, {"directory": self.directory, "member": member, "every": 1.0}, {"every": ("fraction",)}
            ),
            "Sender": Case(kt.Sender, {**memory, "endpoint": "tcp://127.0.0.1:1", **end}, takes),
            "Sender.connect": Case(self.lonely.connect, timeout, waits),
            "Sender.open": Case(self.sender.open, {"room": 9, **timeout}, {"room": NUMBER, **waits}),
            "Sender.reject": Case(self.sender.reject, {"room": 9, "reason": "x"}, {"room": NUMBER, "reason": ANY}),
            "Sender.wait_ready": Case(self.sender.wait_ready, timeout, {"timeout": ANY}),
            "SenderGroup": Case(kt.SenderGroup, {"senders": [self.sender]}),
            "SenderGroup.open": Case(self.group.open, {"room": 9, **timeout}, {"room": NUMBER, **waits}),
            "SenderSession.check_finish": Case(
                self.sending.check_finish, {"metadata": {}, "rows": {}}, finish
            ),
            "SenderSession.finish": Case(self.sending.finish, ends, finish),
            "SenderSession.plan": Case(self.sending.plan, send, sends),
            "SenderSession.send": Case(self.sending.send, send, sends),
            "SenderSession.send_states": Case(
                self.sending.send_states, {"source_row": 1, "layer_ids": None, "parts": None, "ready": None},
                {"source_row": NUMBER, "layer_ids": LISTED, "parts": LISTED,
                 "ready": OPTIONAL},
            ),
            "SenderSession.take": Case(self.sending.take, {"chunks": ()}, {"chunks": ("empty list",)}),
            "SenderSession.wait": Case(self.sending.wait, timeout, waits),
            "SharedArena": Case(kt.SharedArena, {"nbytes": 4096}),
            "SharedArena.holds": Case(
                self.arena.holds, {"address": 1, "nbytes": 1}, {"address": NUMBER, "nbytes": NUMBER}
            ),
            "Timeouts": Case(kt.Timeouts, times, dict.fromkeys(times, ("fraction",))),
            "TransferHandle.wait": Case(kt.TransferHandle("x", 1, 1).wait, {"timeout": 0.0}, waits),
            "create_engine": Case(kt.create_engine, {"name": "loopback"}),
            "rank_port": Case(kt.rank_port, {"base": 1, "placement": place}),
            "register_engine": Case(kt.register_engine, {"name": "a", "factory": "a:b"}, {"name": ("text",)}),
            "wait_batch": Case(
                kt.wait_batch, {"engine": self.engine, "handle": kt.TransferHandle("x", 1, 1), "timeout": 0.0}, waits
            ),
            "examine": Case(
                doctor.examine, {"engines": (), "seconds": 1.0, "host": None, "ports": range(0)},
                {"engines": LISTED, "seconds": ("fraction",), "host": ("None", "text")},
            ),
            "explain": Case(
                explain.explain, {"prefill": None, "decode": None, "pages": 1, "engines": ()},
                {"engines": ANY, "pages": ANY}, {"decode": "prefill"},
            ),
            "read_side": Case(explain.read_side, {"path": Path("x")}),
            "effective_settings": Case(
                machine.effective_settings, {"environment": {}}, {"environment": ("mapping",)}
            ),
            "findings": Case(
                machine.findings, {"host": None, "ports": range(0)}, {"host": ("None", "text")}
            ),
            "check_place": Case(
                machine.check_place, {"host": None, "ports": range(0)}, {"host": ("None", "text")}
            ),
            "LoopbackEngine": Case(
                loopback.LoopbackEngine,
                {"shared": False, "blocks_per_poll": 1, "max_entries_per_batch": 1, "max_block_bytes": 1},
                {name: OPTIONAL for name in ("blocks_per_poll", "max_entries_per_batch", "max_block_bytes")}
                | {"shared": ("true",)},
                {"shared": "cross_process"},
            ),
            "LoopbackEngine.register": Case(self.engine.register, {"address": 1, "nbytes": 1}, says={
                "address": "re", "nbytes": "re"
            }),
            "LoopbackEngine.unregister": Case(self.engine.unregister, {"address": 1}, says={"address": "re"}),
            "LoopbackEngine.submit": Case(
                self.engine.submit, {"peer": "x", "batch": _Blocks()}, {"peer": TEXTS}
            ),
            "LoopbackEngine.poll": Case(self.engine.poll, {"handle": None}),
            "LoopbackEngine.forget": Case(self.engine.forget, {"peer": "x"}, {"peer": TEXTS}),
            "LoopbackEngine.cancel": Case(self.engine.cancel, {"handle": None}),
            "SessionEngine.forget": Case(self.manager.engine.forget, {"session": "x"}, {"session": TEXTS}),
            "SessionEngine.batch_register": Case(
                self.manager.engine.batch_register, {"ptrs": [1], "lengths": [1]}, says={"lengths": "length"}
            ),
            "SessionEngine.batches": Case(
                self.manager.engine.batches, {"sources": [4096], "destinations": [4096], "lengths": [8]}
            ),
            "fill_kv_args": Case(
                sglang.fill_kv_args, {"kv_args": args, "manifest": manifest(self.side, mla=False)}
            ),
            "manifest_of": Case(
                sglang.manifest_of,
                {"kv_args": args, "mla": False, "fingerprint": "m", "placement": None, "layers": None, "drafts": None,
                 "device": "npu:0"},
                {"mla": ("true",), "fingerprint": ("text", "empty text"), "placement": OPTIONAL, "layers": ANY,
                 "drafts": ANY, "device": ANY},
                {"kv_args": "kv_data_ptrs"},
            ),
            "PlannedTransfers.send_kvcache": Case(
                self.manager.send_kvcache, {**call, "dst_device_kv_indices": None},
                {**calls, "dst_device_kv_indices": OPTIONAL},
                {"dst_kv_item_len": "item length"},
            ),
            "PlannedTransfers.send_kvcache_slice": Case(
                self.manager.send_kvcache_slice, {**call, "dst_tp_rank": 0}, calls,
                {"dst_kv_item_len": "item length", "dst_attn_tp_size": "tp_"}
            ),
        }  # fmt: skip


class _Blocks:
    source = destination = nbytes = np.zeros(0, np.uint64)


@pytest.fixture(scope="module")
def world() -> Any:
    made = World()
    yield made
    made.close()


def test_the_table_has_every_public_argument(world: World) -> None:
    cases = world.cases()
    assert [missing(module, cases, EXEMPT) for module in MODULES] == [[] for _ in MODULES]
    known = {name for module in MODULES for name in public(module)}
    assert (set(cases) | set(EXEMPT)) - known == set()


def test_odd_values_are_refused_by_name_and_change_nothing(world: World) -> None:
    for sending in (world.sending, world.sending_2):
        sending.send([5, 6], start=0)  # so that `finish` has nothing else to refuse
    threads = threading.active_count()
    assert wrongs(world.cases(), TYPED) == []
    assert eventually(lambda: threading.active_count() <= threads)
    assert (len(world.engine._regions), world.directory.members("prefill")) == (0, ())
    for sending, session in ((world.sending, world.session), (world.sending_2, world.session_2)):
        sending.finish(wait=False)
        session.wait(5)
    assert world.pair.decode.faults({1: 5, 2: 6, 3: 5, 4: 6}) == []


def test_odd_options_of_engines_are_refused_before_a_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    limits: dict[str, object] = dict.fromkeys(("max_block_bytes", "max_regions", "max_region_bytes"))
    shared = {"hostname": "127.0.0.1", "workers": 1, "bind_device": None, "max_entries_per_batch": 1, **limits}
    takes = {
        "hostname": ("text",),
        "bind_device": OPTIONAL,
        **dict.fromkeys(("max_entries_per_batch", *limits), OPTIONAL),
    }
    cases = {
        "mooncake": Case(
            mooncake.MooncakeEngine, {**shared, "protocol": "tcp", "transfer_timeout": None, "log_level": "ERROR"},
            {**takes, "transfer_timeout": ("None", "fraction")},
        ),
        "memfabric": Case(
            memfabric.MemfabricEngine,
            {**shared, "store_url": "tcp://127.0.0.1:1", "role": "Prefill", "device_id": 0, "transport": "sdma"},
            {**takes, "store_url": ("text",), "device_id": NUMBER, "transport": ("text",)},
        ),
        "nixl": Case(
            nixl.NixlEngine, {"max_entries_per_batch": 1, "log_level": "ERROR"}, {"log_level": ("text",)}
        ),
    }  # fmt: skip
    assert [set(case.valid) ^ arguments(case.call) for case in cases.values()] == [set()] * 3
    assert wrongs(cases, TYPED) == []
    assert "MC_TRANSFER_TIMEOUT" not in os.environ


@pytest.mark.parametrize("name", Settings.model_fields)
def test_an_odd_setting_of_vllm_is_taken_or_named(name: str) -> None:
    refused = 0
    for value in ODD.values():
        extra: dict[str, Any] = {name: value}
        try:
            settings = Settings.of(configuration(**extra))
            settings.limits_in_time()
            settings.secret()
        except kt.ArgumentError as error:
            refused += 1
            assert name in str(error) and "kv_connector_extra_config" in str(error)
    assert refused >= len(ODD) - 8


@pytest.mark.parametrize(
    "name", ["rank", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_rank", "data_parallel_size"]
)
def test_an_odd_size_of_vllm_is_named(name: str) -> None:
    for what, value in ODD.items():
        if what == "0" and name.endswith("rank"):
            continue
        config = configuration()
        setattr(config.parallel_config, name, value)
        with pytest.raises(kt.ArgumentError, match=f"parallel_config.{name}: expected a whole number"):
            place_of(config, Settings.of(config))


@pytest.mark.parametrize("reason", ["\ud800", "a file \udcff.bin", "", "x" * 100_000, 5])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_reason_is_told_whatever_it_quotes(two_stages: Pair, side: str, reason: Any) -> None:
    """Names of files bring halves of surrogate pairs into errors; giving up must work with them too."""
    session = two_stages.receiver.open(1, [1])
    sending = [sender.open(1) for sender in two_stages.senders]
    (sending[0] if side == "sender" else session).abort(reason)
    assert session.wait_released(5)
    assert eventually(lambda: all(own.pages_released for own in sending))
    told = sending[0].error if side == "receiver" else session.error
    assert isinstance(told, kt.TransferAborted)
    two_stages.receiver.reject(2, reason)
    for sender in two_stages.senders:
        sender.reject(3, reason)
        with pytest.raises(kt.TransferAborted):
            sender.open(2, timeout=5)
        assert sender.is_ready


def test_numpy_numbers_are_numbers() -> None:
    place = kt.Place(tp_rank=np.int8(1), tp_size=np.uint16(2))
    assert place == kt.Place(tp_rank=1, tp_size=2) and type(place.tp_rank) is int
    member = kt.Member(side="prefill", place=place, serves=np.int64(1), generation=np.uint64(2**40))
    assert kt.Directory(lifetime=np.float32(1)).register(member) > 0
    assert kt.Limits(message_bytes=np.int64(1 << 20)) == kt.Limits(message_bytes=1 << 20)
    assert kt.Timeouts(offer=np.float32(2)) == kt.Timeouts(offer=2.0)
    assert kt.AuxField("a", "int32", np.int64(3)) == kt.AuxField("a", "int32", 3)


@pytest.mark.parametrize("ids", [[True], [np.True_], np.array([True]), [1.0], np.array([1.0])])
def test_what_equals_a_layer_id_is_none(two_stages: Pair, ids: Any) -> None:
    two_stages.receiver.open(1, [1])
    sending = two_stages.senders[1].open(1)
    for call in (sending.send, sending.plan):
        with pytest.raises(kt.ArgumentError, match="layer_ids"):
            call([5], start=0, layer_ids=ids)
    sending.abort("over")
