"""Constants and wrapped memory in a captured function: every replay starts from what a fresh call would start from."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from graph_runtime import get_device
from graph_runtime.errors import CaptureRefused

_OUTSIDE = torch.zeros(2)
_ARRAY = np.zeros(2, dtype=np.float32)

_MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([0.0, 0.0]),
    "tensor of an array": lambda: torch.tensor(_ARRAY),
    "as_tensor": lambda: torch.as_tensor([0.0, 0.0]),
    "asarray": lambda: torch.asarray([0.0, 0.0]),
    "new_tensor": lambda: _OUTSIDE.new_tensor([0.0, 0.0]),
    "new": lambda: _OUTSIDE.new([0.0, 0.0]),
    "Tensor": lambda: torch.Tensor([0.0, 0.0]),
    "FloatTensor": lambda: torch.FloatTensor([0.0, 0.0]),
    "a view of a constant": lambda: torch.tensor([[0.0], [0.0]]).view(2),
    "a part of a constant": lambda: torch.tensor([1.0, 0.0, 0.0])[1:],
    "no-op conversion": lambda: torch.tensor([0.0, 0.0]).to(torch.float32).contiguous(),
    "conversion": lambda: torch.tensor([0, 0]).to(torch.float32),
    "zeros": lambda: torch.zeros(2),
    "full": lambda: torch.full((2,), 0.0),
    "new_zeros": lambda: _OUTSIDE.new_zeros(2),
    "empty and filled": lambda: torch.empty(2).zero_(),
    "from_numpy, cloned": lambda: torch.from_numpy(_ARRAY).clone(),
    "from_dlpack, cloned": lambda: torch.utils.dlpack.from_dlpack(_ARRAY).clone(),
}

_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda made, x: made.add_(x),
    "out argument": lambda made, x: torch.add(made, x, out=made),
    "through a view": lambda made, x: made.view(2, 1).t()[0].add_(x),
    "list of tensors": lambda made, x: torch._foreach_add_([made], [x]),
    "indexed": lambda made, x: made.index_add_(0, torch.tensor([0, 1]), x),
}


@pytest.mark.parametrize("write", sorted(_WRITES))
@pytest.mark.parametrize("maker", sorted(_MAKERS))
def test_no_state_passes_from_replay_to_replay(maker: str, write: str) -> None:
    x = torch.ones(2)

    def program() -> torch.Tensor:
        made = _MAKERS[maker]()
        _WRITES[write](made, x)
        return made * 1

    graph, output = get_device("cpu").capture(program)
    for factor in (1.0, 2.0, 2.0, 3.0):
        x.fill_(factor)
        graph.replay()
        assert output.tolist() == program().tolist() == [factor, factor]


_WRAPPERS: dict[str, Callable[[], torch.Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(np.zeros(2, dtype=np.float32)),
    "as_tensor": lambda: torch.as_tensor(np.zeros(2, dtype=np.float32)),
    "asarray": lambda: torch.asarray(np.zeros(2, dtype=np.float32)),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
    "from_dlpack": lambda: torch.utils.dlpack.from_dlpack(np.zeros(2, dtype=np.float32)),
    "an array of before": lambda: torch.from_numpy(_ARRAY),
}


@pytest.mark.parametrize("write", sorted(_WRITES))
@pytest.mark.parametrize("wrapper", sorted(_WRAPPERS))
def test_writing_memory_that_the_function_wraps_is_refused(wrapper: str, write: str) -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureRefused, match="numpy"):
        get_device("cpu").capture(lambda: _WRITES[write](_WRAPPERS[wrapper](), x))
    assert not _ARRAY.any()


@pytest.mark.parametrize("wrapper", sorted(set(_WRAPPERS)))
def test_reading_it_is_allowed(wrapper: str) -> None:
    x = torch.ones(2)
    graph, output = get_device("cpu").capture(lambda: _WRAPPERS[wrapper]() + x)
    for factor in (1.0, 2.0):
        x.fill_(factor)
        graph.replay()
        assert output.tolist() == [factor, factor]


@pytest.mark.parametrize("wrapper", sorted(_WRAPPERS))
@pytest.mark.parametrize("write", sorted(_WRITES))
def test_wrapped_memory_of_before_the_capture_is_state_like_any_other(wrapper: str, write: str) -> None:
    state = copy.copy(_WRAPPERS[wrapper]().clone() if wrapper == "an array of before" else _WRAPPERS[wrapper]())
    x = torch.ones(2)
    graph, _ = get_device("cpu").capture(lambda: _WRITES[write](state, x))
    state.zero_()
    for turn in range(1, 4):
        graph.replay()
        assert state.tolist() == [turn, turn]


def test_an_op_that_wraps_memory_itself_is_run_again() -> None:
    with torch.library._scoped_library("graph_wrapping", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: torch.from_numpy(x.numpy().copy()), "CPU")
        x = torch.ones(2)
        graph, output = get_device("cpu").capture(lambda: torch.ops.graph_wrapping.op(x).add_(1))
        for factor in (1.0, 2.0, 5.0):
            x.fill_(factor)
            graph.replay()
            assert output.tolist() == [factor + 1] * 2
