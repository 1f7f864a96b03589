"""The CPU device: replay equals a fresh run, into the same memory; what cannot be replayed is refused."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_runtime import get_device, register_device
from graph_runtime.device import GraphDevice
from graph_runtime.devices.cpu import CpuDevice
from graph_runtime.errors import CaptureRefused, GraphBroken, GraphClosed, UnknownDevice
from hypothesis import given, settings
from hypothesis import strategies as st

Function = Callable[[torch.Tensor], Any]

_OTHER = torch.linspace(-1, 1, 24).reshape(4, 6)
_INDEX = torch.tensor([3, 0, 2])


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 6)
    y.add_(x).mul_(2)
    y[1:3] = x[:2] * 3
    y[:, 2].fill_(7)
    return y


def _out_argument(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(4, 6)
    torch.mul(x, _OTHER, out=y)
    z = torch.empty(0)
    torch.add(y, x, out=z)
    return z


def _writes_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.t()[0].copy_(x[:, 1])
    y.view(-1)[::5].zero_()
    return y


def _metadata_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y + 1
    y.transpose_(0, 1)
    y.unsqueeze_(0)
    return y.sum(-1) + z.sum()


def _rebinds_data(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y * 3
    y.data = torch.zeros(2, 2)
    return z


def _attention(x: torch.Tensor) -> torch.Tensor:
    q = x.reshape(1, 1, 4, 6)
    return torch.nn.functional.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)[0, 0]


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
        return y.softmax(-1)


def _static_repeat(x: torch.Tensor) -> torch.Tensor:
    counts = torch.tensor([1, 0, 2, 1])
    return torch.repeat_interleave(x, counts, dim=0, output_size=4)


_PROGRAMS: dict[str, Function] = {
    "matmul": lambda x: torch.nn.functional.linear(x, _OTHER) + x.sum(),
    "views": lambda x: x.t().reshape(3, 8)[1:].permute(1, 0).contiguous() + 1,
    "the input itself": lambda x: x,
    "a view of the input": lambda x: x[1:],
    "tuple": lambda x: (x * 2, x.argmax(-1), x.max(dim=1)),
    "in place": _in_place,
    "out argument": _out_argument,
    "through a view": _writes_through_a_view,
    "metadata in place": _metadata_in_place,
    "data rebound": _rebinds_data,
    "index": lambda x: x[_INDEX] + x[:, _INDEX].sum(),
    "index_put": lambda x: x.clone().index_put_((_INDEX,), x[:3], accumulate=True),
    "masked": lambda x: torch.where(x > 0, x, torch.full_like(x, -5)).masked_fill(x > 1, 0),
    "several outputs": lambda x: torch.cat(list(torch.topk(x, 2, dim=-1)[:1]) + list(torch.chunk(x, 3, dim=1)), dim=1),
    "factories": lambda x: torch.arange(6) * x + torch.ones(4, 1) + torch.tensor([2.0]) + torch.full((6,), 3.0),
    "casts": lambda x: (x.half().float() + x.to(torch.bfloat16)).to(torch.int32),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (6,)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "attention": _attention,
    "inference mode": _inference,
    "repeat with known size": _static_repeat,
    "sort": lambda x: torch.cat([x.sort(dim=1).values, x.cumsum(0)]),
    "scatter": lambda x: torch.zeros(5, 6).index_add_(0, torch.tensor([4, 1, 1, 0]), x),
}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in value for leaf in _flat(part)]


@pytest.fixture
def device() -> GraphDevice:
    return get_device("cpu")


@pytest.mark.parametrize("name", sorted(_PROGRAMS))
def test_replay_equals_a_fresh_run_in_the_same_memory(name: str, device: GraphDevice) -> None:
    program = _PROGRAMS[name]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    graph, output = device.capture(lambda: program(x))
    addresses = [leaf.data_ptr() for leaf in _flat(output)]
    for seed in range(1, 4):
        x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        expected = [leaf.clone() for leaf in _flat(program(x.clone()))]
        graph.replay()
        for got, want in zip(_flat(output), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [leaf.data_ptr() for leaf in _flat(output)] == addresses


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul_": lambda a, b: a.mul_(0.5).add_(b),
    "relu": lambda a, b: torch.relu(a) - b.abs(),
    "t": lambda a, b: a.t().contiguous().reshape(a.shape) + b[0],
    "index": lambda a, b: a[torch.tensor([1, 0, 3, 2])] * b,
    "copy_": lambda a, b: a.clone().copy_(b) + a,
    "slice_": lambda a, b: a.narrow(0, 1, 2).copy_(b[:2].clone()).sum() + a,
    "softmax": lambda a, b: a.softmax(-1) + b.mean(),
    "fill": lambda a, b: torch.zeros_like(a).add_(b) + a,
}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=10), st.integers(0, 1000))
def test_random_programs(steps: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def program(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        a, b = x * 1, state
        for step in steps:
            a, b = _STEPS[step](a, b), a
        state.copy_(a.tanh())
        return a

    x, state = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    graph, output = get_device("cpu").capture(lambda: program(x, state))
    plain = state.clone()
    for _ in range(3):
        x.copy_(torch.randn(4, 6, generator=generator))
        graph.replay()
        expected = program(x.clone(), plain)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        torch.testing.assert_close(state, plain, rtol=0, atol=0)
    graph.close()


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (lambda x: x * x.sum().item(), "host"),
        (lambda x: x if x.sum() > 0 else -x, "host"),
        (lambda x: x * float(x[0, 0]), "host"),
        (lambda x: x + torch.tensor(x.tolist()), "host"),
        (lambda x: x + torch.from_numpy(x.numpy().copy()), "host"),
        (lambda x: x.nonzero(), "shape"),
        (lambda x: x[x > 0], "shape"),
        (lambda x: x.masked_select(x > 0), "shape"),
        (lambda x: torch.unique(x), "shape"),
        (lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1]), dim=0), "shape"),
        (lambda x: x + torch.rand(4, 6), "random"),
        (lambda x: torch.empty_like(x).uniform_() + x, "random"),
        (lambda x: torch.bernoulli(x.sigmoid()), "random"),
        (lambda x: torch.multinomial(x.softmax(-1), 1), "random"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=True), "random"),
        (
            lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
            "random",
        ),
        (lambda x: x.clone().resize_(2, 3), "memory"),
        (lambda x: x.clone().set_(_OTHER.clone()), "memory"),
        (lambda x: x + torch.zeros(4, 6, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_replayed_is_refused(program: Function, word: str, device: GraphDevice) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(CaptureRefused, match=word) as caught:
        device.capture(lambda: program(x))
    assert isinstance(caught.value, RuntimeError)
    graph, output = device.capture(lambda: x + 1)  # nothing is left behind
    graph.replay()
    torch.testing.assert_close(output, x + 1)


def test_a_python_number_is_kept_as_it_was(device: GraphDevice) -> None:
    factor = [2.0]
    x = torch.ones(2)
    graph, output = device.capture(lambda: x * factor[0])
    factor[0] = 5.0
    graph.replay()
    assert output.tolist() == [2.0, 2.0]


def test_no_gradient_is_recorded(device: GraphDevice) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    x = torch.ones(1, 2)
    graph, output = device.capture(lambda: torch.nn.functional.linear(x, weight))
    assert not output.requires_grad
    with torch.no_grad():
        weight.fill_(3)
    graph.replay()
    assert output.tolist() == [[6.0, 6.0]]


def test_close_lets_everything_go(device: GraphDevice) -> None:
    weight = torch.ones(4, 4)
    watch = weakref.ref(weight.untyped_storage())
    x = torch.ones(1, 4)
    program = functools.partial(torch.matmul, x, weight)
    graph, output = device.capture(program)
    del weight, program
    graph.close()
    graph.close()
    gc.collect()
    assert watch() is None
    with pytest.raises(GraphClosed):
        graph.replay()
    assert output.tolist() == [[4.0] * 4]


def test_a_failed_replay_breaks_the_graph() -> None:
    fail = [False]
    with torch.library._scoped_library("graph_failing", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")

        def op(x: torch.Tensor) -> torch.Tensor:
            if fail[0]:
                raise ValueError("out of luck")
            return x + 1

        library.impl("op", op, "CPU")
        graph, _ = get_device("cpu").capture(lambda: torch.ops.graph_failing.op(torch.ones(1)))
        graph.replay()
        fail[0] = True
        with pytest.raises(ValueError, match="luck"):
            graph.replay()
        assert graph.broken is not None and "luck" in graph.broken
        with pytest.raises(GraphBroken, match="luck"):
            graph.replay()


def test_changed_shape_in_replay_is_refused() -> None:
    rows = [2]
    with torch.library._scoped_library("graph_growing", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x[:1].repeat(rows[0]), "CPU")
        graph, _ = get_device("cpu").capture(lambda: torch.ops.graph_growing.op(torch.ones(1)))
        rows[0] = 3
        with pytest.raises(CaptureRefused, match="shapes fixed"):
            graph.replay()


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_device("cpu").name == "cpu" and get_device("cpu").torch_device == torch.device("cpu")
    assert get_device("cpu").gate is not get_device("cpu").gate
    with pytest.raises(UnknownDevice, match="abacus"):
        get_device("abacus:0")
    with pytest.raises(UnknownDevice):
        register_device("abacus", "no.function")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(UnknownDevice, match="torch_npu"):
        get_device("npu:0")
    register_device("cpu2", "graph_runtime.devices.cpu:create")
    assert get_device("cpu2:1").name == "cpu2:1"


@pytest.mark.parametrize(
    "updatable",
    [{"graph_test::nothing": ("lens",)}, {"graph_test::scale": ("x",)}, {"graph_test::scale": ("y",)}, {"a": ()}],
)
def test_updatable_arguments_must_exist(updatable: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(UnknownDevice, match="updatable"):
        CpuDevice(updatable=updatable)


def test_an_op_of_the_custom_op_decorator() -> None:
    @torch.library.custom_op("graph_decorated::scale", mutates_args=())
    def scale(x: torch.Tensor, lens: list[int]) -> torch.Tensor:
        return torch.stack([x[row] * int(length) for row, length in enumerate(lens)])

    x = torch.ones(2, 1)
    graph, output = CpuDevice(updatable={"graph_decorated::scale": ("lens",)}).capture(lambda: scale(x, [0, 0]) + 1)
    graph.update({"lens": [2, 3]})
    graph.replay()
    assert output.tolist() == [[3.0], [4.0]] and graph.node_count == 2
