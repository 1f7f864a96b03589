"""The memfabric engine makes calls that the wheel's signatures take, in the right order; its codes have words."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memfabric_recorder import FACTS, Recorder, make_module
from transfer_batches import batch, end

import kv_transfer as kt
from kv_transfer.engine import RegistersTogether
from kv_transfer.engines import memfabric
from kv_transfer.engines.memfabric import describe_code
from kv_transfer.regions import plan_regions

OPTIONS = {"store_url": "tcp://127.0.0.1:21234", "role": "Prefill", "device_id": 3}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", make_module(made))
    made.codes["get_rpc_port"] = [0, 15_001]
    return made


def test_the_whole_life_of_an_engine(recorder: Recorder) -> None:
    engine = kt.create_engine("memfabric", **OPTIONS, hostname="10.0.0.7", max_entries_per_batch=2)
    assert (engine.name, engine.session) == ("memfabric", "10.0.0.7:15001")
    memory = np.zeros(64, np.uint8)
    address = int(memory.ctypes.data)
    engine.register(address, 64)
    assert end(engine, engine.submit("10.0.0.8:15002", batch((address, 4096, 8), (address + 8, 8192, 4)))) is None
    with pytest.raises(kt.RegionError, match="source block 0"):
        engine.submit("10.0.0.8:15002", batch((address + 60, 4096, 8)))
    with pytest.raises(kt.EngineError, match="the engine takes 2"):
        engine.submit("10.0.0.8:15002", batch(*[(address, 4096, 1)] * 3))
    engine.unregister(address)
    engine.close()
    engine.close()
    assert recorder.calls == [
        ("get_rpc_port", {}),
        (
            "initialize",
            {
                "store_url": "tcp://127.0.0.1:21234",
                "session_id": "10.0.0.7:0",
                "role": "Prefill",
                "device_id": 3,
                "data_op_type": 1,
            },
        ),
        ("get_rpc_port", {}),
        ("batch_register_memory", {"buffer_addrs": [address], "capacities": [64]}),
        (
            "batch_transfer_sync_write",
            {
                "dest_session": "10.0.0.8:15002",
                "buffers": [address, address + 8],
                "peer_buffers": [4096, 8192],
                "lengths": [8, 4],
            },
        ),
        ("unregister_memory", {"buffer_addr": address}),
        ("destroy", {}),
        ("unInitialize", {}),
    ]


@pytest.mark.parametrize(("code", "words"), [(-1, "its log says why"), (-2000, "store's URL"), (-7, "without a known")])
def test_codes_have_words(recorder: Recorder, code: int, words: str) -> None:
    assert words in describe_code(code) and str(code) in describe_code(code)
    recorder.codes["initialize"] = [code]
    with pytest.raises(kt.EngineError, match="did not start for Prefill on device 3") as caught:
        kt.create_engine("memfabric", **OPTIONS)
    assert caught.value.code == code and words in str(caught.value)


def test_failures_of_calls_are_errors(recorder: Recorder) -> None:
    engine = kt.create_engine("memfabric", **OPTIONS, transport="device_rdma")
    assert recorder.calls[1][1]["data_op_type"] == 8
    recorder.codes |= {
        "batch_register_memory": [-2001],
        "unregister_memory": [-2009],
        "batch_transfer_sync_write": [-2014],
    }
    memory = np.zeros(64, np.uint8)
    address = int(memory.ctypes.data)
    with pytest.raises(kt.EngineError, match=r"cannot register 64 bytes .* out of memory"):
        engine.register(address, 64)
    engine.register(address, 64)
    failed = end(engine, engine.submit("x:1", batch((address, 4096, 8))))
    assert failed is not None and "the peer is not connected (memfabric code -2014)" in failed
    with pytest.raises(kt.EngineError, match="it is in use"):
        engine.unregister(address)
    engine.close()


def test_what_cannot_start_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kt.EngineError, match="role: expected"):
        kt.create_engine("memfabric", **{**OPTIONS, "role": "prefill"})
    with pytest.raises(kt.EngineError, match="transport: 'tcp' is none"):
        kt.create_engine("memfabric", **OPTIONS, transport="tcp")
    assert recorder.calls == []
    recorder.codes["get_rpc_port"] = [0, 0]
    with pytest.raises(kt.EngineError, match="no port after its start"):
        kt.create_engine("memfabric", **OPTIONS)
    assert recorder.names()[-1] == "unInitialize"
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(kt.EngineUnavailable, match="pip install memfabric_hybrid"):
        kt.create_engine("memfabric", **OPTIONS)


def test_the_recorder_refuses_what_the_library_would(recorder: Recorder) -> None:
    engine: Any = sys.modules["memfabric_hybrid"].TransferEngine()
    calls: list[Callable[[], object]] = [
        lambda: engine.register_memory("address", 3),
        lambda: engine.register_memory(1),
        lambda: engine.batch_transfer_sync_write("x", 1, [2], [3]),
        lambda: engine.transfer_sync_write("x", 1, 2, 3, hint=""),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert recorder.calls == []


def test_the_recorder_is_what_the_wheel_says(recorder: Recorder) -> None:
    """Every fact of the golden file is in the recording module, and nothing else."""
    engine = sys.modules["memfabric_hybrid"].TransferEngine
    found = {name: member for name, member in vars(engine).items() if callable(member)}
    assert sorted(found) == [fact["name"] for fact in FACTS["methods"]]
    for fact in FACTS["methods"]:
        own, *parameters = inspect.signature(found[fact["name"]]).parameters.values()
        assert own.name == "self"
        assert [parameter.name for parameter in parameters] == [each["name"] for each in fact["parameters"]], fact
        defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
        assert defaults == {each["name"]: each["default"] for each in fact["parameters"] if "default" in each}
    assert vars(engine.TransDataOpType) == {fact["name"]: fact["value"] for fact in FACTS["transports"]}
    assert FACTS["engine"].removeprefix("memfabric_hybrid ") in (memfabric.__doc__ or "")


def test_the_engine_calls_what_the_wheel_has() -> None:
    """Whatever path a call lies on: names of the library's methods and transports, read from the engine's source."""
    tree = ast.parse(inspect.getsource(memfabric))
    used = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("library", "self._library")
    }
    assert {"initialize", "batch_register_memory", "batch_transfer_sync_write", "unInitialize"} <= used
    assert used <= {fact["name"] for fact in FACTS["methods"]}
    transports = {name.upper() for name in typing.get_args(memfabric.Transport)}
    assert transports == {fact["name"] for fact in FACTS["transports"]}


def test_a_batch_of_regions_is_rounded_to_device_pages_and_taken_back_when_it_is_refused(recorder: Recorder) -> None:
    engine = kt.create_engine("memfabric", **OPTIONS, max_regions=2)
    page = 2 << 20
    assert plan_regions(engine, [(5 * page + 64, 128), (6 * page, page), (9 * page, 1)]) == (
        (5 * page, 2 * page),
        (9 * page, page),
    )
    with pytest.raises(kt.RegionError, match="3 regions after neighbours were joined; engine 'memfabric' takes 2"):
        plan_regions(engine, [(page, 1), (4 * page, 1), (7 * page, 1)])
    recorder.codes["batch_register_memory"] = [-2001]
    assert isinstance(engine, RegistersTogether)
    before = len(recorder.calls)
    with pytest.raises(kt.EngineError, match=r"cannot register 6291456 bytes in 2 regions: out of memory"):
        engine.register_all([(5 * page, 2 * page), (9 * page, page)])
    assert recorder.names()[before:] == ["batch_register_memory", "unregister_memory", "unregister_memory"]
    engine.register_all([(5 * page, 2 * page), (9 * page, page)])
    with pytest.raises(kt.RegionError, match="3 regions"):
        engine.register(page, 1)
    with pytest.raises(kt.RegionError, match="overlaps"):
        engine.register_all([(20 * page, page), (5 * page, page)])
    engine.unregister(9 * page)
    engine.register(page, 1)  # there is room again, and nothing of the refused calls is left
    assert recorder.names()[-1] == "batch_register_memory"
    engine.close()
