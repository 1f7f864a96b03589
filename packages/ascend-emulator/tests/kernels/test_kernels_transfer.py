"""npu::transfer_kv_dim_exchange: its schema, its refusals, its bytes, and when they move on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator.kernels import REGISTRY, RULES, OpRefused
from ascend_emulator.kernels.transfer import OP, SCHEMA

LAYERS, PAGES, SIZE, HEADS = 2, 3, 4, 1
WIDTHS = (512, 64)


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * SIZE, (page + 1) * SIZE) for page in pages])


def pools(host_pages: int = 4) -> dict[str, Any]:
    """Device pools that count their elements, host pools of -1: every value tells where it belongs."""
    made: dict[str, Any] = {}
    start = 0
    for name, width in zip("kv", WIDTHS, strict=True):
        count = LAYERS * PAGES * SIZE * HEADS * width
        made[f"device_{name}"] = torch.arange(start, start + count).view(LAYERS, PAGES, SIZE, HEADS, width).float()
        made[f"host_{name}"] = torch.full((host_pages, LAYERS, SIZE, HEADS, width), -1.0)
        start += count
    return made


def arguments(direct: int = 2, **over: Any) -> list[Any]:
    given = pools() | {"device_indices": slots(2, 0), "host_indices": slots(1, 2), "page_size": SIZE}
    given |= {"direct": direct, "flags": 2}
    order = (
        "device_k",
        "host_k",
        "device_v",
        "host_v",
        "device_indices",
        "host_indices",
        "page_size",
        "direct",
        "flags",
    )
    return [(given | over)[name] for name in order]


def test_the_schema_is_that_of_the_library() -> None:
    schema = torch.ops.npu.transfer_kv_dim_exchange.default._schema
    assert str(schema) == f"npu::{SCHEMA}"
    assert OP in REGISTRY


def test_a_library_that_defined_the_op_before_keeps_it() -> None:
    code = (
        "import torch; own = torch.library.Library('npu', 'FRAGMENT'); "
        "own.define('transfer_kv_dim_exchange(Tensor device_k) -> ()'); import ascend_emulator.kernels; "
        "assert len(torch.ops.npu.transfer_kv_dim_exchange.default._schema.arguments) == 1"
    )
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)


def on_device(given: list[Any]) -> list[Any]:
    moved = [given[0].npu(), given[1].pin_memory(), given[2].npu(), given[3].pin_memory(), *given[4:]]
    return moved


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_key_and_value_have_their_own_widths(device: str) -> None:
    given = arguments() if device == "cpu" else on_device(arguments())
    call = REGISTRY[OP] if device == "cpu" else torch.ops.npu.transfer_kv_dim_exchange
    call(*given)
    torch_npu.npu.synchronize()
    saved = [given[0].cpu().clone(), given[2].cpu().clone()]
    for host, old in zip((given[1], given[3]), saved, strict=True):
        assert torch.equal(host[1], old[:, 2]) and torch.equal(host[2], old[:, 0])
        assert bool((host[[0, 3]] == -1).all())
    given[0].fill_(-2)
    given[2].fill_(-2)
    given[4:8] = [slots(1, 2), slots(2, 1), SIZE, 1]
    call(*given)
    torch_npu.npu.synchronize()
    for device_pool, old in zip((given[0].cpu(), given[2].cpu()), saved, strict=True):
        assert torch.equal(device_pool[:, 1], old[:, 0]) and torch.equal(device_pool[:, 2], old[:, 2])
        assert bool((device_pool[:, 0] == -2).all())


def test_an_empty_value_and_no_pages() -> None:
    empty: dict[str, Any] = {
        "device_v": torch.empty(LAYERS, 0, SIZE, HEADS, 4),
        "host_v": torch.empty(0, LAYERS, SIZE, HEADS, 4),
    }
    given = arguments(**empty)
    REGISTRY[OP](*given)
    assert torch.equal(given[1][1], given[0][:, 2])
    given = on_device(arguments(device_indices=slots(1)[:0], host_indices=slots(1)[:0]))
    torch.ops.npu.transfer_kv_dim_exchange(*given)
    torch_npu.npu.synchronize()
    assert bool((given[1] == -1).all()) and bool((given[3] == -1).all())


def test_only_the_first_slot_of_a_page_counts() -> None:
    """Slots 2 to 5 move page 0 whole: what callers must refuse, the op does not."""
    given = arguments(device_indices=torch.arange(2, 6), host_indices=slots(1))
    REGISTRY[OP](*given)
    assert torch.equal(given[1][1], given[0][:, 0])


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("transfer-rank", "device_k", {"device_k": torch.zeros(LAYERS, PAGES, SIZE, 512)}),
    ("transfer-rank", "device_v", {"device_v": torch.zeros(0)}),
    ("transfer-empty", "host_k", {"host_k": torch.zeros(0, LAYERS, SIZE, HEADS, 512)}),
    ("transfer-layers", "host_v", {"host_v": torch.zeros(4, LAYERS + 1, SIZE, HEADS, 64)}),
    ("transfer-page-size", "device_k", {"page_size": 8}),
    ("transfer-page-size", "device_k", {"page_size": 0}),
    ("transfer-contiguous", "host_k", {"host_k": torch.zeros(4, LAYERS, HEADS, SIZE, 1024)[..., ::2].transpose(2, 3)}),
    ("transfer-alike", "device_v", {"device_v": torch.zeros(LAYERS, PAGES + 1, SIZE, HEADS, 64)}),
    ("transfer-alike", "device_v", {"device_v": torch.zeros(LAYERS, PAGES, SIZE, HEADS + 1, 64)}),
    ("transfer-alike", "device_v", {"device_v": torch.zeros(LAYERS, PAGES, SIZE, HEADS, 64).half()}),
    ("transfer-alike", "host_v", {"host_v": torch.zeros(4, LAYERS, SIZE, HEADS, 64).half()}),
    ("transfer-index-dtype", "device_indices", {"device_indices": slots(2, 0).int()}),
    ("transfer-index-count", "host_indices", {"host_indices": slots(1)}),
    ("transfer-index-whole", "device_indices", {"device_indices": slots(2)[:3], "host_indices": slots(1)[:3]}),
    ("transfer-direct", "direct", {"direct": 3}),
    ("transfer-flags", "flags", {"flags": 1}),
    ("transfer-page", "device_indices", {"device_indices": slots(2, 3)}),
    ("transfer-page", "host_indices", {"host_indices": slots(1, -1)}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_calls_outside_the_contract_move_nothing(number: int) -> None:
    rule, argument, over = REFUSED[number]
    for direct in (over.get("direct", 1), over.get("direct", 2)):
        given = arguments(**({"direct": direct} | over))
        before = [some.clone() if isinstance(some, torch.Tensor) else some for some in given]
        with pytest.raises(OpRefused) as caught:
            REGISTRY[OP](*given)
        assert caught.value.rule is RULES[rule] and caught.value.argument == argument
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True) if isinstance(x, torch.Tensor))
    with pytest.raises(OpRefused):
        torch.ops.npu.transfer_kv_dim_exchange(*on_device(arguments(**over)))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.op == OP}


def test_the_host_gets_its_bytes_when_it_has_waited() -> None:
    given = on_device(arguments())
    side = torch_npu.npu.Stream()
    with torch_npu.npu.stream(side):
        torch.ops.npu.transfer_kv_dim_exchange(*given)
    wanted = given[0][:, 2].cpu()
    assert not torch.equal(given[1][1], wanted)
    side.synchronize()
    assert torch.equal(given[1][1], wanted)


def test_a_transfer_waits_for_its_stream() -> None:
    given = on_device(arguments())
    event, other = torch_npu.npu.ExternalEvent(), torch_npu.npu.Stream()
    event.wait(torch_npu.npu.current_stream())
    given[0].fill_(9)
    torch.ops.npu.transfer_kv_dim_exchange(*given)
    assert not torch_npu.npu.current_stream().query()
    event.record(other)
    torch_npu.npu.synchronize()
    assert bool((given[1][[1, 2]] == 9).all())


def test_a_host_page_that_changes_during_a_load_is_an_error() -> None:
    given = on_device(arguments(direct=1))
    torch.ops.npu.transfer_kv_dim_exchange(*given)
    given[1][1].fill_(5)
    with pytest.raises(ascend_emulator.HostRaceError):
        torch_npu.npu.synchronize()
