"""Ops of engines' libraries without a kernel: they exist, a call says so, and a kernel can be registered."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from ascend_emulator import OperatorNotEmulatedError
from ascend_emulator.kernels import ABSENT, REGISTRY, engine_absent

SIMPLE: dict[str, Any] = {"str": "NPU", "int": 1, "float": 1.0, "bool": True}


def operator(name: str) -> Any:
    space, _, op = name.partition("::")
    return getattr(getattr(torch.ops, space), op).default


def test_they_are_defined_as_the_libraries_write_them() -> None:
    for space, schemas in (("_C_ascend", engine_absent._VLLM), ("npu", engine_absent._SGL)):
        for text in schemas:
            name = f"{space}::{text.partition('(')[0]}"
            assert operator(name)._schema == torch._C.parse_schema(f"{space}::{text}")
            assert name not in REGISTRY


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_a_call_says_how_to_register_one(name: str, device: str) -> None:
    arguments = []
    for argument in operator(name)._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            continue
        simple: Any = torch.zeros(2, device=device) if kind == "Tensor" else SIMPLE.get(kind)
        arguments.append([1] if kind == "List[int]" else simple)
    with pytest.raises(OperatorNotEmulatedError, match=name) as caught:
        operator(name)(*arguments)
    assert caught.value.name == name and name.partition("::")[2] in caught.value.schema


REGISTERED = """
import ascend_emulator
ascend_emulator.install()
import torch
ascend_emulator.register_kernel("npu::triangular_inverse", torch.linalg.inv)
x = torch.eye(3) + torch.ones(3, 3).tril(-1)
assert torch.allclose(torch.ops.npu.triangular_inverse(x.to("npu")).cpu() @ x, torch.eye(3), atol=1e-6)
"""


def test_a_registered_kernel_takes_its_place() -> None:
    result = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
