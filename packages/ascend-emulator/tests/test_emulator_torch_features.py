"""What torch builds on operators: compiling, fake tensors, saving, several devices, memory figures, profilers."""

from __future__ import annotations

import copy
import io
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MIB = 1 << 20


# --- compiling and tracing ---


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_functions_and_their_gradients(backend: str) -> None:
    torch.manual_seed(1)
    layer, rows = torch.nn.Linear(4, 3), torch.randn(5, 4)
    on_npu = copy.deepcopy(layer).to("npu")
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        lambda x: on_npu(x).relu().square().sum(), backend=backend
    )
    expected = layer(rows).relu().square().sum()
    got = compiled(rows.to("npu"))
    torch.testing.assert_close(got.cpu(), expected)
    expected.backward()
    got.backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert on_npu.weight.grad is not None
    torch.testing.assert_close(on_npu.weight.grad.cpu(), layer.weight.grad)


def test_fake_tensors_have_device_shape_and_dtype() -> None:
    real = torch.ones(3, 4, device="npu:1")
    before = torch_npu.npu.memory_allocated(0)
    with FakeTensorMode() as mode:
        made = torch.empty(3, 4, device="npu", dtype=torch.float16) @ torch.empty(
            4, 2, device="npu", dtype=torch.float16
        )
        taken = mode.from_tensor(real).sum(0)
        activated = torch_npu.npu_swiglu(torch.empty(2, 8, device="npu"))
    assert isinstance(made, FakeTensor)
    assert (made.shape, made.dtype, made.device) == ((3, 2), torch.float16, torch.device("npu:0"))
    assert (taken.shape, taken.device) == ((4,), torch.device("npu:1"))
    assert activated.shape == (2, 4)
    assert torch_npu.npu.memory_allocated(0) == before


def test_function_transforms() -> None:
    rows = torch.arange(6.0).view(3, 2)
    per_row = torch.vmap(lambda row: row.sin().sum())
    torch.testing.assert_close(per_row(rows.to("npu")).cpu(), per_row(rows))
    slope = torch.func.grad(lambda x: x.sin().sum())
    torch.testing.assert_close(slope(rows.to("npu")).cpu(), rows.cos())


def test_autocast() -> None:
    with torch.autocast("npu", dtype=torch.float16):
        assert (torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).dtype == torch.float16


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_optimizers(kind: Callable[..., torch.optim.Optimizer], foreach: bool) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(2)
        layer, rows = torch.nn.Linear(6, 2).to(device), torch.arange(24.0).view(4, 6).to(device) / 24
        optimizer = kind(layer.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            layer(rows).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in layer.parameters()]

    for got, expected in zip(trained("npu"), trained("cpu"), strict=True):
        torch.testing.assert_close(got, expected)


Lists = list[torch.Tensor]
FOREACH: dict[str, Callable[[Lists, Lists], Lists | tuple[torch.Tensor, ...] | None]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=2),
    "mul by a scalar": lambda x, y: torch._foreach_mul(x, 3),
    "div by scalars": lambda x, y: torch._foreach_div(x, [2.0, 4.0]),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, y, x, 0.5),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.25),
    "norm": lambda x, y: torch._foreach_norm(x),
    "sqrt": lambda x, y: torch._foreach_sqrt(x),
    "maximum": lambda x, y: torch._foreach_maximum(x, y),
    "add_": lambda x, y: torch._foreach_add_(x, y),
    "copy_": lambda x, y: torch._foreach_copy_(x, y),
    "zero_": lambda x, y: torch._foreach_zero_(x),
    "mul_ on views": lambda x, y: torch._foreach_mul_([part.t() for part in x], 2),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach(name: str) -> None:
    def case(device: str) -> list[torch.Tensor]:
        x = [(torch.arange(6.0).view(2, 3) + 1).to(device), torch.full((2, 2), 3.0).to(device)]
        y = [torch.ones(2, 3).to(device) * 2, torch.arange(4.0).view(2, 2).to(device)]
        made = FOREACH[name](x, y)
        return [*x, *(made or ())]

    for got, expected in zip(case("npu"), case("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), expected)


# --- saving and copying ---


def test_saving_keeps_the_device_views_and_sharing() -> None:
    base = torch.arange(6.0).to("npu:1")
    buffer = io.BytesIO()
    torch.save({"all": base, "part": base[2:4]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded["all"].device == torch.device("npu:1")
    assert loaded["part"].cpu().tolist() == [2, 3]
    loaded["all"][2] = 9
    assert loaded["part"][0].item() == 9
    for place in ("npu:0", {"npu:1": "npu:0"}, lambda storage, _: storage.npu(0)):
        buffer.seek(0)
        assert torch.load(buffer, map_location=place, weights_only=True)["part"].device == torch.device("npu:0")


def test_state_dicts_move_between_devices() -> None:
    torch.manual_seed(4)
    layer = torch.nn.Linear(3, 2).to("npu:1")
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = torch.nn.Linear(3, 2).to("npu:0")
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.weight.device == torch.device("npu:0")
    assert torch.equal(other.weight.cpu(), layer.weight.cpu())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's own copying
def test_deepcopy_keeps_strides_and_shared_storage() -> None:
    base = torch.arange(6.0).view(2, 3).to("npu:1")
    whole, turned = copy.deepcopy([base, base.t()])
    assert (turned.stride(), turned.device) == ((1, 3), torch.device("npu:1"))
    whole[0, 1] = 7
    assert turned[1, 0].item() == 7
    assert base[0, 1].item() == 1


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's own pickling
def test_pickles_keep_values_and_strides() -> None:
    tensor = torch.arange(6.0).view(2, 3).to("npu").t()
    again = pickle.loads(pickle.dumps(tensor))
    assert again.stride() == tensor.stride()
    assert torch.equal(again.cpu(), tensor.cpu())


# --- several devices ---


def test_copies_between_devices() -> None:
    source = torch.arange(12.0).view(3, 4).to("npu:0")
    for tensor in (source, source.t(), source[:, ::2], source.expand(2, 3, 4)):
        moved = tensor.to("npu:1")
        assert moved.device == torch.device("npu:1")
        assert torch.equal(moved.cpu(), tensor.cpu())
    target = torch.zeros(4, 3, dtype=torch.float16, device="npu:1")
    target.t().copy_(source)
    assert torch.equal(target.t().float().cpu(), source.cpu())
    source.fill_(5)
    assert target[0, 0].item() == 0
    assert torch_npu.npu.current_device() == 0


def test_operators_refuse_tensors_of_several_devices() -> None:
    zero, one, host = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1"), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"at least two devices, npu:0 and npu:1! \(when calling aten::add"):
        zero + one
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu!"):
        zero + host
    assert (zero + torch.tensor(2.0)).cpu().tolist() == [3, 3]


def test_factories_follow_the_current_device() -> None:
    with torch_npu.npu.device(1):
        for made in (torch.ones(2, device="npu"), torch.rand(2, device="npu"), torch.arange(3, device="npu")):
            assert made.device == torch.device("npu:1")
    with torch.device("npu:1"):
        assert (torch.zeros(2) + torch.empty(2).fill_(1)).device == torch.device("npu:1")


def test_seeds_and_states_are_those_of_one_device() -> None:
    torch_npu.npu.manual_seed_all(3)
    first = torch.rand(4, device="npu:1")
    torch.rand(7, device="npu:0")
    second = torch.rand(4, device="npu:1")
    torch_npu.npu.manual_seed_all(3)
    assert torch.equal(torch.rand(4, device="npu:1").cpu(), first.cpu())
    state = torch_npu.npu.get_rng_state(1)
    assert torch.equal(torch.rand(4, device="npu:1").cpu(), second.cpu())
    torch_npu.npu.set_rng_state(state, 1)
    assert torch.equal(torch.rand(4, device="npu:1").cpu(), second.cpu())
    with torch.random.fork_rng(devices=[1], device_type="npu"):
        torch.rand(4, device="npu:1")
    torch_npu.npu.manual_seed_all(3)
    assert torch.equal(torch.rand(4, device="npu:1").cpu(), first.cpu())


# --- memory ---


def test_memory_figures_follow_allocations() -> None:
    npu = torch_npu.npu
    npu.empty_cache()
    npu.reset_peak_memory_stats(1)
    allocated, reserved = npu.memory_allocated(1), npu.memory_reserved(1)
    free, total = npu.mem_get_info(1)
    held = torch.empty(24 * MIB, dtype=torch.uint8, device="npu:1")
    grown = npu.memory_allocated(1) - allocated
    assert 24 * MIB <= grown <= 24 * MIB + 512  # torch_npu rounds up
    assert npu.memory_reserved(1) >= reserved + 24 * MIB
    assert npu.mem_get_info(1) == (free - (npu.memory_reserved(1) - reserved), total)
    stats = npu.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == npu.memory_allocated(1)
    assert stats["reserved_bytes.all.current"] == npu.memory_reserved(1)
    del held
    assert npu.memory_allocated(1) == allocated
    assert npu.max_memory_allocated(1) == allocated + grown
    npu.empty_cache()
    assert npu.mem_get_info(1) == (free, total)
    assert "allocated" in npu.memory_summary(1).lower()


def test_out_of_memory_has_torch_npus_text_and_counts() -> None:
    npu = torch_npu.npu
    ooms = npu.memory_stats(0)["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(20 << 30, dtype=torch.uint8, device="npu:0")
    text = str(caught.value)
    assert text.startswith("NPU out of memory. Tried to allocate 20.00 GiB (NPU 0; 16.00 GiB total capacity; ")
    assert "already allocated" in text and "reserved in total by PyTorch" in text
    assert npu.memory_stats(0)["num_ooms"] == ooms + 1
    npu.set_per_process_memory_fraction(1 / 64, 0)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"256\.00 MiB allowed"):
            torch.empty(300 * MIB, dtype=torch.uint8, device="npu:0")
    finally:
        npu.set_per_process_memory_fraction(1.0, 0)


def test_a_full_device_gives_back_its_cache_before_it_fails() -> None:
    npu = torch_npu.npu
    npu.set_per_process_memory_fraction(1 / 64, 1)  # 256 MiB
    try:
        for size in (200, 201, 202):  # each leaves a cached block that the next one does not fit into
            assert torch.empty(size * MIB, dtype=torch.uint8, device="npu:1").shape == (size * MIB,)
        assert npu.memory_stats(1)["num_alloc_retries"] >= 1
    finally:
        npu.set_per_process_memory_fraction(1.0, 1)
        npu.set_device(0)  # torch_npu leaves the device of the fraction current
        npu.empty_cache()


# --- time and profilers ---


def test_elapsed_time_is_the_hosts() -> None:
    start, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 20_000


def test_ranges_and_marks() -> None:
    mstx = torch_npu.npu.mstx
    opened = mstx.range_start("copy", torch_npu.npu.current_stream())
    with torch.profiler.record_function("step"):
        total = torch.ones(3, device="npu").sum()
    mstx.range_end(opened)
    mstx.mark("done")
    assert mstx.mstx_range("function")(lambda: total.item())() == 3


@pytest.mark.filterwarnings("ignore")  # torch's own, of a build for CUDA
def test_torchs_profiler_sees_the_operators() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("my range"):
        torch.ones(3, device="npu").mul_(2)
    names = {event.key for event in profile.key_averages()}
    assert {"my range", "aten::mul_"} <= names


@pytest.mark.filterwarnings("ignore")  # torch_npu's own, of its file handling
def test_torch_npus_profiler_writes_a_trace_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # torch_npu leaves a folder where it is called
    profiler = torch_npu.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        schedule=profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path / "traces")),
    ) as profile:
        for _ in range(3):
            torch.ones(3, device="npu").mul_(2)
            profile.step()
    (trace,) = (tmp_path / "traces").rglob("trace_view.json")
    assert any("mul_" in str(event.get("name")) for event in json.loads(trace.read_text()))
