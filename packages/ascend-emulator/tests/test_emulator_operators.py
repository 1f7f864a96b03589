"""aten operators through the fallback: views, in-place, indexing, sorting, scatter, factories, random numbers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch_npu

Case = Callable[[torch.Tensor], object]
X = torch.arange(24.0).view(4, 6).add(0.25)
CASES: dict[str, Case] = {
    "add": lambda x: x + x,
    "scalar left": lambda x: 2 - x,
    "matmul": lambda x: x @ x.t(),
    "sum over a dim": lambda x: x.sum(0, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "max with indices": lambda x: x.max(1),
    "sort descending": lambda x: x.flip(1).sort(dim=1, descending=True),
    "topk": lambda x: x.topk(2),
    "split": lambda x: [part.clone() for part in torch.split_with_sizes(x, [2, 4], 1)],
    "chunk and cat": lambda x: torch.cat(x.chunk(2, 1), 0),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 5, x, torch.zeros_like(x)),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 5]] * 4, device=x.device)),
    "index by tensors": lambda x: x[torch.tensor([3, 1], device=x.device), torch.tensor([0, 5], device=x.device)],
    "index by cpu tensor": lambda x: x[torch.tensor([3, 1])],
    "boolean mask": lambda x: x[x > 7],
    "nonzero": lambda x: (x > 20).nonzero(),
    "unique": lambda x: torch.unique(x % 3),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1, 1], device=x.device),), x[:2], accumulate=True),
    "slice assignment": lambda x: _assign(x),
    "scatter_add": lambda x: x.clone().scatter_add_(1, torch.zeros(4, 6, dtype=torch.long, device=x.device), x),
    "masked_fill": lambda x: x.masked_fill(x > 3, float("-inf")),
    "cumsum": lambda x: x.cumsum(1),
    "in-place on a view": lambda x: _inplace(x),
    "addmm": lambda x: torch.addmm(x[:, :4], x, x.t()),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([[0, 3]], device=x.device), x),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (6,)),
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 2, 2, 6), x.view(1, 2, 2, 6) * 2, x.view(1, 2, 2, 6), is_causal=True
    ),
    "conv1d": lambda x: torch.nn.functional.conv1d(x.view(1, 4, 6), torch.ones(2, 4, 3, device=x.device)),
    "foreach": lambda x: torch._foreach_add(torch._foreach_mul([x, x], 2), 1),
    "arange": lambda x: torch.arange(2, 9, 3, device=x.device),
    "eye": lambda x: torch.eye(3, device=x.device),
    "full": lambda x: torch.full((2, 2), 7, device=x.device),
    "full_like": lambda x: torch.full_like(x, 2, dtype=torch.int32),
    "ones bool": lambda x: torch.ones(3, dtype=torch.bool, device=x.device),
    "new_zeros": lambda x: x.new_zeros(2, dtype=torch.int64),
    "tril": lambda x: torch.ones(3, 3, device=x.device).tril(),
    "complex": lambda x: torch.view_as_real(torch.polar(x, x)),
    "type promotion": lambda x: x.half() + torch.ones(4, 6, device=x.device),
    "item": lambda x: x.sum().item(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "empty": lambda x: x[:0].sum(0),
    "linalg.inv": lambda x: torch.linalg.inv(torch.eye(3, device=x.device) * 2),
    "in-place views": lambda x: [x.clone().transpose_(0, 1), x.clone().unsqueeze_(0), x[:1].clone().squeeze_(0)],
    "rot90": lambda x: torch.rot90(x),
    "rows of a scalar": lambda x: x[0, 0].index_select(0, torch.tensor([0], device=x.device)),
    "quantile": lambda x: torch.quantile(x, 0.3),
    "one_hot": lambda x: torch.nn.functional.one_hot(torch.tensor([0, 3], device=x.device), 5),
    "slogdet": lambda x: torch.linalg.slogdet(torch.eye(3, device=x.device) * 2),
    "fill_diagonal_": lambda x: x.clone().fill_diagonal_(3),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
}


def _assign(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:3, ::2] = 9
    x[0] = x[3]
    return x


def _inplace(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.t()[2].mul_(3).add_(1)
    x.view(-1)[::5].zero_()
    return x


def flat(result: object) -> list[object]:
    return [y for x in result for y in flat(x)] if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize("name", CASES)
def test_same_as_on_the_cpu(name: str) -> None:
    expected, got = flat(CASES[name](X)), flat(CASES[name](X.to("npu")))
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        if not isinstance(want, torch.Tensor):
            assert have == want
            continue
        assert isinstance(have, torch.Tensor)
        assert have.device == torch.device("npu:0")
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(have.cpu(), want, equal_nan=True)


def test_views_share_memory() -> None:
    base = torch.zeros(4, 6, device="npu")
    base.view(-1)[5] = 1
    base.t()[0, 3] = 2
    base[1:].narrow(1, 2, 2).fill_(3)
    expected = torch.zeros(4, 6)
    expected.view(-1)[5], expected[3, 0], expected[1:, 2:4] = 1, 2, 3
    assert torch.equal(base.cpu(), expected)


def test_gradients_flow() -> None:
    weight = torch.ones(3, 3, device="npu", requires_grad=True)
    (weight @ torch.arange(3.0).to("npu")).square().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.cpu().tolist() == [[0, 6, 12]] * 3


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers(kind: Callable[..., torch.nn.Module]) -> None:
    """Values and gradients; torch_npu would run LSTM and GRU as device kernels of their own."""
    torch.manual_seed(3)
    layer, rows = kind(6, 4, 2), torch.randn(5, 3, 6)
    on_npu = copy.deepcopy(layer).to("npu")
    expected, got = layer(rows)[0], on_npu(rows.to("npu"))[0]
    torch.testing.assert_close(got.cpu(), expected)
    expected.sum().backward()
    got.sum().backward()
    for mine, theirs in zip(on_npu.parameters(), layer.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_no_grad_and_inference_mode() -> None:
    weight = torch.ones(2, device="npu", requires_grad=True)
    with torch.no_grad():
        assert not (weight * 2).requires_grad
    with torch.inference_mode():
        made = torch.ones(2, device="npu") * 3
        made.add_(1)
    assert made.is_inference()
    assert (made + 1).cpu().tolist() == [5, 5]


def test_random_numbers_follow_the_seed_and_the_state() -> None:
    torch_npu.npu.manual_seed(5)
    first, second = torch.rand(8, device="npu"), torch.randn(8, device="npu")
    assert not torch.equal(first.cpu(), torch.rand(8, device="npu").cpu())
    torch_npu.npu.manual_seed(5)
    assert torch.equal(first.cpu(), torch.rand(8, device="npu").cpu())
    state = torch_npu.npu.get_rng_state()
    third = torch.randn(8, device="npu")
    torch_npu.npu.set_rng_state(state)
    assert torch.equal(third.cpu(), torch.randn(8, device="npu").cpu())
    assert torch.equal(second.cpu(), third.cpu())


def test_own_generators_and_devices_do_not_disturb_each_other() -> None:
    generator = torch.Generator(device="npu:0").manual_seed(3)
    first = torch.rand(4, device="npu", generator=generator)
    torch.rand(4, device="npu")
    generator.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(4, device="npu", generator=generator).cpu())
    torch_npu.npu.manual_seed_all(9)
    zero, one = torch.rand(4, device="npu:0"), torch.rand(4, device="npu:1")
    assert torch.equal(zero.cpu(), one.cpu())


def test_dropout_follows_the_npu_seed_and_leaves_the_cpu_generator_alone() -> None:
    ones = torch.ones(64, device="npu")
    before = torch.get_rng_state()
    torch_npu.npu.manual_seed(4)
    first = torch.nn.functional.dropout(ones, 0.5, training=True).cpu()
    torch_npu.npu.manual_seed(4)
    assert torch.equal(first, torch.nn.functional.dropout(ones, 0.5, training=True).cpu())
    assert 5 < int((first == 0).sum()) < 60
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's own pickling
def test_tensors_are_copied_pickled_and_saved() -> None:
    tensor = torch.arange(6.0).view(2, 3).to("npu")
    assert torch.equal(copy.deepcopy(tensor).cpu(), tensor.cpu())
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).cpu(), tensor.cpu())
    buffer = io.BytesIO()
    torch.save({"x": tensor}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cpu", weights_only=True)
    assert loaded["x"].device.type == "cpu"
    assert torch.equal(loaded["x"], tensor.cpu())


def test_module_moves_to_the_device() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    rows = torch.randn(3, 4)
    expected = module(rows)
    torch.testing.assert_close(copy.deepcopy(module).to("npu")(rows.to("npu")).cpu(), expected)
