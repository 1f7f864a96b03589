"""Owns the proof that expert-parallel MoE over torch_npu gives what the native step gives, on two ranks over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import spec_kernels as sk
import torch

NPU = "npu:0"


@pytest.mark.timeout(400)
def test_two_ranks_equal_native_in_order_and_counts(tmp_path: Path) -> None:
    """Unequal numbers of tokens, none on one rank, and padded choices; rows reach the experts in one order."""
    script = str(Path(__file__).with_name("moe_rank.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", str(tmp_path / "store"), str(tmp_path / str(rank))],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text.decode()[-3000:]
    seen = 0
    for rank in range(2):
        for parts in torch.load(tmp_path / str(rank)).values():
            for name in ("rows", "counts", "step_counts", "unasked"):
                assert torch.equal(*parts[name]), name
            torch.testing.assert_close(*parts["out"], atol=2e-2, rtol=2e-2)
            seen += parts["rows"][1].shape[0]
    assert seen > 40


def test_one_rank_runs_native_and_the_operator_says_why() -> None:
    hidden, ids = torch.randn(3, 64, device=NPU), torch.tensor([[0], [1], [0]], device=NPU)
    w13, w2 = torch.randn(2, 8, 64, device=NPU), torch.randn(2, 64, 4, device=NPU)
    layout = sk.ExpertLayout(2)
    found = sk.expert_parallel_moe(hidden, ids, torch.ones(3, 1, device=NPU), w13, w2, layout)
    assert found.expert_counts.tolist() == [2, 1]
    with pytest.raises(sk.UnsupportedByOp, match="no comm_name"):
        sk.expert_parallel_moe(hidden, ids, torch.ones(3, 1, device=NPU), w13, w2, layout, backend="npu")
