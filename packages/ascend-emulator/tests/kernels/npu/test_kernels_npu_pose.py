"""install() sets what the emulator stands for, and the ops on the device refuse accordingly."""

from __future__ import annotations

from collections.abc import Iterator

import ascend_emulator
import pytest
import torch
from ascend_emulator.kernels import OpRefused, pose


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def test_a_named_release_switches_rows() -> None:
    x, weight = torch.ones(2, 3, 16).half().to("npu"), torch.ones(2, 32, 16).half().to("npu")
    op = torch.ops.npu.npu_transpose_batchmatmul
    with pytest.raises(OpRefused, match="tbm-perm-x2"):
        op(x, weight, perm_x2=[0, 2, 1])
    ascend_emulator.install(cann="8.5.0", chip="A3")
    assert pose.current() == pose.Pose((8, 5), "910C")
    assert bool((op(x, weight, perm_x2=[0, 2, 1]).cpu() == 16).all())
    ascend_emulator.install()
    assert pose.current() == pose.Pose((8, 5), "910C")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="cann"):
        ascend_emulator.install(cann="6.3")
    with pytest.raises(ValueError, match="chip"):
        ascend_emulator.install(chip="A1")
