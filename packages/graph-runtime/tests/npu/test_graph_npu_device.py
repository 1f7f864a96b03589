"""The NPU device below the runner: memory, fences, host tensors as lengths, names."""

from __future__ import annotations

from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from graph_runtime import StaticBuffers, get_device
from graph_runtime.errors import TensorValuedKey, UnknownDevice, UnwrittenRows, UpdateLengthMismatch
from graph_runtime.testing import RecordingDevice
from graph_runtime.update import UpdateSpec
from kv_planner import RowField, RowLayout


def _layout() -> RowLayout:
    return RowLayout(
        [
            RowField("ids", "int64", rows=4, fill=9),
            RowField("table", "int32", rows=4, width=3),
            RowField("half", "float16", rows=4, width=2, fill=1),
            RowField("brain", "bfloat16", rows=4, fill=2),
            RowField("flag", "bool", rows=4),
        ]
    )


def _values(n: int) -> dict[str, Any]:
    return {
        "ids": list(range(1, n + 1)),
        "table": torch.arange(3 * n, dtype=torch.int32).reshape(n, 3),
        "half": torch.full((n, 2), 0.5, dtype=torch.float16),
        "brain": torch.full((n,), 3.0, dtype=torch.bfloat16),
        "flag": [True] * n,
    }


def test_arenas_are_pinned_and_on_the_device() -> None:
    buffers = StaticBuffers(_layout(), get_device("npu:0"))
    assert buffers._host.is_pinned() and buffers._arena.device == torch.device("npu", 0)
    assert buffers._host.numel() == buffers._arena.numel() == buffers.nbytes


def test_loads_of_changing_sizes() -> None:
    device = RecordingDevice(get_device("npu:0"))
    buffers = StaticBuffers(_layout(), device)
    addresses = {name: buffers.view(name).data_ptr() for name in buffers.names}
    for n in (4, 2, 0, 3, 1):
        device.events.clear()
        buffers.load(n, _values(n))
        assert device.events.count("copy") == 1
        assert buffers.view("ids").cpu().tolist() == [*range(1, n + 1), *[9] * (4 - n)]
        assert buffers.view("table").cpu().flatten().tolist() == [*range(3 * n), *[0] * (12 - 3 * n)]
        assert buffers.view("half").cpu().tolist() == [[0.5, 0.5]] * n + [[1.0, 1.0]] * (4 - n)
        assert buffers.view("brain").cpu().tolist() == [3.0] * n + [2.0] * (4 - n)
        assert buffers.view("flag").cpu().tolist() == [True] * n + [False] * (4 - n)
    assert {name: buffers.view(name).data_ptr() for name in buffers.names} == addresses
    buffers.check_addresses()


def test_loads_in_a_row_do_not_overwrite_a_copy_in_flight() -> None:
    """Each copy takes effect as late as it may; without the fence the first would carry the second's bytes."""
    buffers = StaticBuffers(_layout(), get_device("npu:0"))
    seen = []
    for n in (4, 1, 3):
        buffers.load(n, _values(n))
        seen.append(buffers.view("ids").clone())
    assert [tensor.cpu().tolist() for tensor in seen] == [[1, 2, 3, 4], [1, 9, 9, 9], [1, 2, 3, 9]]


def test_values_on_the_device_are_not_copied_to_the_host() -> None:
    device = RecordingDevice(get_device("npu:0"))
    buffers = StaticBuffers(_layout(), device)
    device.events.clear()
    buffers.load(
        2, {**_values(2), "ids": torch.tensor([5, 6]).to("npu:0"), "half": torch.zeros(2, 2).half().to("npu:0")}
    )
    assert device.events == ["wait", "copy", "fence"]
    assert buffers.view("ids").cpu().tolist() == [5, 6, 9, 9]
    assert buffers.view("half").cpu().tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_poison_on_the_device() -> None:
    buffers = StaticBuffers(_layout(), get_device("npu:0"), device_written=["half"], poison=True)
    values = _values(3)
    del values["half"]
    buffers.load(3, values)
    buffers.view("half")[1].fill_(0.25)
    with pytest.raises(UnwrittenRows) as caught:
        buffers.check_written()
    assert caught.value.got == {"half": [0, 2]}
    buffers.view("half", 3).fill_(0.25)
    buffers.check_written()


def test_names_of_devices() -> None:
    assert get_device("npu").name == "npu:0" and get_device("npu:1").name == "npu:1"
    assert get_device("npu:1").gate is get_device("npu:1").gate is not get_device("npu:0").gate
    for name in ("npu:7", "npu:x"):
        with pytest.raises(UnknownDevice):
            get_device(name)


def _paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    out.copy_(query * context_lens.to(query.dtype)[:, None, None])


@pytest.fixture(scope="module")
def paged() -> Any:
    ascend_emulator.register_kernel("atb::_npu_paged_attention", _paged_attention)

    def call(query: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        cache = query.view(-1, 1, 1, query.shape[-1])
        out = torch.zeros_like(query)
        table = torch.zeros(query.shape[0], 1, dtype=torch.int32, device=query.device)
        torch_npu._npu_paged_attention(query, cache, cache, 1, 1, 1.0, table, lens, out=out)
        return out

    return call


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # raised where torch_npu copies host tensors
def test_context_lengths_as_a_host_tensor_are_replaced(paged: Any) -> None:
    query = torch.ones(2, 1, 16, dtype=torch.float16, device="npu:0")
    graph, output = get_device("npu:0").capture(lambda: paged(query, torch.tensor([1, 1], dtype=torch.int32)))
    assert [record.updatable for record in graph.records] == [("context_lens",)]
    bound = UpdateSpec({"context_lens": "kv"}).bind(graph.records)
    for lens in ([3, 4], [5, 0]):
        graph.update(bound.values({"kv": lens}))
        graph.replay()
        assert output[:, 0, 0].cpu().tolist() == lens
    with pytest.raises(UpdateLengthMismatch):
        graph.update({"context_lens": [1, 2, 3]})
    graph.close()


def test_context_lengths_as_a_device_tensor_cannot_be_replaced(paged: Any) -> None:
    query = torch.ones(2, 1, 16, dtype=torch.float16, device="npu:0")
    lens = torch.tensor([1, 1], dtype=torch.int32, device="npu:0")
    graph, _ = get_device("npu:0").capture(lambda: paged(query, lens))
    assert [record.tensor_valued for record in graph.records] == [("context_lens",)]
    with pytest.raises(TensorValuedKey, match="baked"):
        UpdateSpec({"context_lens": "kv"}).bind(graph.records)
    graph.close()
