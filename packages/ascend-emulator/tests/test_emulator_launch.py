"""Nothing runs silently: every launch symbol of the runtime fails, and an operator without a kernel is named."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import ascend_emulator as emulator
import pytest
import torch
import torch_npu
from ascend_emulator._build import LIBRARIES, build_runtime
from ascend_emulator._install import _check_versions


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    folder, version = _check_versions()
    loaded = ctypes.CDLL(str(build_runtime(folder, version) / "libascendcl.so"))
    loaded.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize("symbol", ["aclopCompileAndExecute", "aclopCompileAndExecuteV2"])
def test_operator_launches_fail_with_the_operators_name(library: ctypes.CDLL, symbol: str) -> None:
    assert getattr(library, symbol)(b"RotaryMul", 0, None, None, 0, None, None, None, 0, 0, None, None) == 500002
    assert b"no emulated kernel for operator RotaryMul" in library.aclGetRecentErrMsg()


@pytest.mark.parametrize(
    ("symbol", "count"), [("rtKernelLaunch", 6), ("rtDevBinaryRegister", 2), ("aclrtLaunchKernelWithHostArgs", 8)]
)
def test_raw_launches_fail(library: ctypes.CDLL, symbol: str, count: int) -> None:
    assert getattr(library, symbol)(*[None] * count) == 500002
    assert b"no emulated kernel" in library.aclGetRecentErrMsg()


def test_registering_a_kernel_function_names_it(library: ctypes.CDLL) -> None:
    assert library.rtFunctionRegister(None, None, b"my_kernel", None, 0) == 500002
    assert b"my_kernel" in library.aclGetRecentErrMsg()


@pytest.mark.filterwarnings("ignore")  # torch_npu calls some of them deprecated
@pytest.mark.parametrize(
    ("name", "launched", "call"),
    [
        ("npu::npu_mish", "Mish", lambda x: torch_npu.npu_mish(x)),
        (
            "npu::npu_bounding_box_encode",
            "BoundingBoxEncode",
            lambda x: torch_npu.npu_bounding_box_encode(x, x, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0),
        ),
        ("npu::npu_group_norm_silu", "aclnnGroupNormSilu", lambda x: torch_npu.npu_group_norm_silu(x, x[0], x[0], 1)),
        (
            "atb::_npu_flash_attention",
            "SelfAttentionOperation",
            lambda x: torch.ops.atb._npu_flash_attention(x, x, x, x, torch.ones(1, dtype=torch.int32), 1.0, 1, 1, x),
        ),
    ],
)
def test_an_operator_without_a_kernel_says_how_to_register_one(
    name: str, launched: str, call: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(emulator.OperatorNotEmulatedError) as caught:
        call(torch.ones(4, 4, device="npu"))
    assert caught.value.name == name
    assert caught.value.device_kernel == launched
    assert f'register_kernel("{name}", kernel)' in str(caught.value)
    assert caught.value.schema.startswith(f"{name}(")
    assert caught.value.schema in str(caught.value)
    assert torch.ones(2, device="npu").sum().item() == 2


def test_every_operator_of_torch_npu_without_a_kernel_is_named() -> None:
    """Each `npu::` and `atb::` operator runs a kernel of ours, or is watched for launches that find none."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("npu::", "atb::"))]
    assert len(names) > 400
    for name in names:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            active = re.search("^PrivateUse1: (.*)$", torch._C._dispatch_dump(name), re.M)
            assert active is not None
            assert "ascend_emulator" in active[1], name
        else:  # written with other operators
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "PrivateUse1")


def test_a_registered_kernel_takes_its_place() -> None:
    rows = torch.linspace(-2, 2, 8)

    def count(x: torch.Tensor) -> None:
        x.add_(1)

    with torch.library._scoped_library("emulator_launch", "FRAGMENT") as library:
        library.define("twice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.define("count_(Tensor(a!) x) -> ()")
        emulator.register_kernel("emulator_launch::twice", lambda x, *, out: out.copy_(x * 2))
        emulator.register_kernel("emulator_launch::count_", count)
        out = torch.zeros(8, device="npu")
        assert torch.ops.emulator_launch.twice(rows.to("npu"), out=out) is out
        torch.testing.assert_close(out.cpu(), rows * 2)
        torch.ops.emulator_launch.count_(out)
        torch.testing.assert_close(out.cpu(), rows * 2 + 1)


def test_a_kernel_for_an_operator_that_does_not_exist_is_refused() -> None:
    with pytest.raises(emulator.KernelNotFoundError, match="npu::no_such_operator"):
        emulator.register_kernel("npu::no_such_operator", lambda x: x)


def test_every_library_is_there_under_its_soname(library: ctypes.CDLL) -> None:
    for name in LIBRARIES:
        assert ctypes.CDLL(name)._handle  # found because it is loaded: no LD_LIBRARY_PATH is set
