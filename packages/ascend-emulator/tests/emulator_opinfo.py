"""PyTorch's own database of operators with sample inputs, run on the emulated device and on the CPU, and compared.

It owns the running and comparing; what may differ is in `docs/operators.md`, and which part runs when in
`test_emulator_opinfo.py`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch_npu
from ascend_emulator import CaptureError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

__all__ = ["DTYPES", "LEDGER", "MODES", "Failure", "Row", "check", "ledger", "operators", "takes", "unexcused"]

LEDGER = Path(__file__).parents[1] / "docs" / "operators.md"
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn",
)  # fmt: skip
# eager: a call. inplace: the method with an underscore. out, resized: into a given tensor of the right size, of none.
# graph: captured, replayed twice. gradient: of the sum of the results.
MODES = ("eager", "inplace", "out", "resized", "graph", "gradient")
# What the device computes by another algorithm than the CPU.
_LOOSE = frozenset({"nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"})
_NEAR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # bounds where results need only be near, 1e-4 in other dtypes
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


def takes(operator: Any, dtype: str) -> bool:
    """Whether the CPU's operator has samples of the dtype."""
    return getattr(torch, dtype) in operator.supported_dtypes("cpu")


def full_name(operator: Any) -> str:
    """Name of an entry of the database."""
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)


def operators() -> dict[str, Any]:
    """All entries by name."""
    return {full_name(operator): operator for operator in op_db}


@dataclass(frozen=True)
class Failure:
    """One sample for which the device did not do as the CPU does."""

    operator: str
    dtype: str
    mode: str
    text: str

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} {self.mode}: {self.text[:300]}"


@dataclass(frozen=True)
class Row:
    """One row of the ledger: where something else than on the CPU happens, and what the failure then says."""

    operator: str
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    says: str

    def covers(self, failure: Failure) -> bool:
        """Whether the row explains the failure."""
        return (
            failure.operator == self.operator
            and failure.dtype in self.dtypes
            and failure.mode in self.modes
            and self.says in failure.text
        )


def ledger() -> list[Row]:
    """The rows of the document, one an operator."""
    rows = []
    for line in LEDGER.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 5:
            continue
        operators, dtypes, modes, says, _ = cells
        for operator in operators.replace("`", "").split(", "):
            rows.append(
                Row(
                    operator,
                    DTYPES if dtypes == "all" else tuple(dtypes.split(", ")),
                    MODES if modes == "all" else tuple(modes.split(", ")),
                    says,
                )
            )
    return rows


def unexcused(failures: Iterable[Failure]) -> list[str]:
    """The failures that no row of the ledger covers."""
    rows = ledger()
    return sorted({str(failure) for failure in failures if not any(row.covers(failure) for row in rows)})


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _tensors(item)]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [leaf for item in value for leaf in _tensors(item)]
    return [value]


def _map(call: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _map(call, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        mapped = [_map(call, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return call(value)


def _copied(value: Any, device: str, source: str) -> Any:
    """An argument for `device`: what lies on the device `source` is copied with its strides and bits."""
    if isinstance(value, torch.Tensor):
        if value.device.type != source:
            return value.clone()
        if value.layout != torch.strided:
            return value.to(device)
        storage = value.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=source).set_(storage, 0, (storage.nbytes(),), (1,))
        own = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).copy_(raw)
        out = torch.empty(0, dtype=value.dtype, device=device)
        out.set_(own.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        out = out.conj() if value.is_conj() else out
        return torch._neg_view(out) if value.is_neg() else out
    if isinstance(value, torch.device) and value.type == source:
        return torch.device(device)
    return device if isinstance(value, str) and value.partition(":")[0] == source else value


class _Sample:
    """One sample: its call on either device."""

    def __init__(self, operator: Any, sample: Any, source: str) -> None:
        self.operator = operator
        self.parts = (sample.input, sample.args, sample.kwargs)
        self.source = source
        self.broadcasts = sample.broadcasts_input
        tensors = [leaf for leaf in _tensors(self.parts) if isinstance(leaf, torch.Tensor)]
        asked = str(sample.kwargs.get("device", ""))
        self.graph: Any = None
        self.on_device = "cpu" not in asked and bool(asked or any(leaf.device.type == source for leaf in tensors))

    def arguments(self, device: str) -> tuple[Any, list[Any], dict[str, Any]]:
        first, args, kwargs = _map(lambda leaf: _copied(leaf, device, self.source), self.parts)
        return first, list(args), kwargs

    def run(self, device: str, mode: str, expected: Any, salt: int = 0) -> Any:
        first, args, kwargs = self.arguments(device)
        call: Callable[..., Any] = self.operator
        with _seeded(salt):
            if mode == "inplace":
                return self.operator.inplace_variant(first, *args, **kwargs)
            if mode in ("out", "resized"):
                made = _map(lambda leaf: _destination(leaf, device, mode), expected)
                result = call(first, *args, **kwargs, out=made)
                assert all(x is y for x, y in zip(_tensors(result), _tensors(made), strict=True)), (
                    "not the out= tensors"
                )
                return made
            if mode == "graph" and device == "npu":
                return self._replayed(first, args, kwargs)
            if mode == "gradient":
                return _gradients(call, first, args, kwargs)
            return call(first, *args, **kwargs)

    def _replayed(self, first: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.graph = torch_npu.npu.NPUGraph()  # kept while its outputs are looked at
        seed = torch.default_generator.manual_seed  # torch_npu refuses to seed the device's in a capture
        with mock.patch.object(torch, "manual_seed", seed), torch_npu.npu.graph(self.graph):
            out = self.operator(first, *args, **kwargs)
        for _ in range(2):
            self.graph.replay()
        torch_npu.npu.synchronize()
        return out


def _destination(leaf: Any, device: str, mode: str) -> Any:
    return torch.zeros(leaf.shape if mode == "out" else 0, dtype=leaf.dtype, device=device)


def _gradients(call: Callable[..., Any], first: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    leaves = [leaf for leaf in _tensors((first, args, kwargs)) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    results = [leaf for leaf in _tensors(call(first, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    total = sum((leaf.abs() if leaf.is_complex() else leaf).sum() for leaf in results if leaf.requires_grad)
    if not isinstance(total, torch.Tensor):
        return []
    return [leaf for leaf in torch.autograd.grad(total, leaves, allow_unused=True) if leaf is not None]


def _seed(value: int) -> torch.Generator:
    """`torch.manual_seed` without the devices that are not there, for each of which it formats a stack."""
    torch_npu.npu.manual_seed_all(value)
    return torch.default_generator.manual_seed(value)


@contextlib.contextmanager
def _seeded(salt: int) -> Iterator[None]:
    """Every seed, also those that the database's own wrappers set, is moved by `salt`."""
    with mock.patch.object(torch, "manual_seed", lambda value: _seed(value + salt)):
        _seed(salt)
        yield


def _compare(sample: _Sample, name: str, mode: str, expected: Any, got: Any) -> None:
    wanted, have = _tensors(expected), _tensors(got)
    assert len(wanted) == len(have), f"{len(have)} results instead of {len(wanted)}"
    for want, is_ in zip(wanted, have, strict=True):
        if not isinstance(want, torch.Tensor):
            assert isinstance(want, (torch.device, torch.dtype)) or want == is_ or want != want, f"{is_} != {want}"
            continue
        on_device = sample.on_device or mode in ("out", "resized")
        assert (is_.device.type == "npu") is on_device, f"result on {is_.device}"
        assert is_.dtype == want.dtype, f"dtype {is_.dtype} instead of {want.dtype}"
        assert is_.shape == want.shape, f"shape {tuple(is_.shape)} instead of {tuple(want.shape)}"
        if name in _UNWRITTEN:
            continue
        near = mode == "gradient" or name in _LOOSE
        bound = _NEAR.get(want.dtype, 1e-4)
        tolerance: Any = {"rtol": bound, "atol": bound} if near else {}
        torch.testing.assert_close(is_.cpu(), want, equal_nan=True, **tolerance)
        if mode in ("graph", "gradient"):  # a capture has the meta kernel's strides, a gradient any
            continue
        same = is_.layout != torch.strided or want.numel() == 0 or is_.stride() == want.stride()
        assert same, f"stride {is_.stride()} instead of {want.stride()}"


def _is_random(sample: _Sample, mode: str, expected: Any) -> bool:
    """Whether the CPU's own result depends on the seed."""
    for salt in range(1, 31):  # a seed may change one element of many
        again = sample.run("cpu", mode, expected, salt=salt)
        for one, other in zip(_tensors(expected), _tensors(again), strict=True):
            if isinstance(one, torch.Tensor) and not torch.equal(one.resolve_conj(), other.resolve_conj()):
                return True
    return False


def _applies(operator: Any, dtype: str, mode: str, sample: _Sample, expected: Any) -> bool:
    if mode == "inplace":
        return operator.inplace_variant is not None and not sample.broadcasts
    if mode in ("out", "resized"):
        leaves = _tensors(expected)
        return bool(operator.supports_out) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if mode == "gradient":
        return bool(operator.supports_autograd) and dtype in ("float32", "complex64")
    return True


def _samples(operator: Any, dtype: str, limit: int | None) -> list[_Sample]:
    real = getattr(torch, dtype)
    # The database searches the stack for a unittest.TestCase, which takes longer than all samples.
    with mock.patch.object(common_utils, "extract_test_fn", lambda: None):
        try:
            made, source = list(islice(operator.sample_inputs("npu", real), limit)), "npu"
        except RuntimeError:  # the database itself wants what torch_npu refuses, channels_last for example
            made, source = list(islice(operator.sample_inputs("cpu", real), limit)), "cpu"
    return [_Sample(operator, one, source) for one in made]


def check(operator: Any, dtype: str, modes: tuple[str, ...] = MODES, limit: int | None = None) -> Iterator[Failure]:
    """Run an operator's samples; what went otherwise than on the CPU.

    Args:
        operator: entry of the database.
        dtype: of the samples.
        modes: ways to call it.
        limit: samples of it, or None for all.

    Yields:
        At most one failure a sample and mode. An operator none of whose samples runs on the CPU is a failure as well;
        a dtype that it does not take is not.
    """
    name, ran = full_name(operator), 0
    if not operator.supported_dtypes("cpu"):
        yield Failure(name, dtype, "eager", "no dtype on the CPU")
    for sample in _samples(operator, dtype, limit) if takes(operator, dtype) else ():
        for mode in modes:
            try:
                expected = sample.run("cpu", "eager", None)
                if not _applies(operator, dtype, mode, sample, expected):
                    continue
                if mode not in ("eager", "graph"):
                    expected = sample.run("cpu", mode, expected)
            except Exception:  # the sample does not suit this way of calling, or this build of torch
                continue
            ran += 1
            try:
                got = sample.run("npu", mode, expected)
                _compare(sample, name, mode, expected, got)
            except CaptureError:
                continue
            except Exception as error:
                values = isinstance(error, AssertionError) and "are not" in str(error)
                if not (values and _is_random(sample, mode, expected)):
                    yield Failure(name, dtype, mode, f"{type(error).__name__}: {' '.join(str(error).split())}")
    if not ran and "eager" in modes and takes(operator, dtype):
        yield Failure(name, dtype, "eager", "no sample runs on the CPU")
