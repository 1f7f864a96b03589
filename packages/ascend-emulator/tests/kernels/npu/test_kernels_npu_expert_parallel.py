"""Dispatch, combine and summed products through the real torch_npu, in two processes of one gloo group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("expert_rank.py")


def test_two_processes_share_their_experts(tmp_path: Path) -> None:
    command = [sys.executable, str(RANK)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "rendezvous")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    for process in ranks:
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text.decode()[-3000:]
