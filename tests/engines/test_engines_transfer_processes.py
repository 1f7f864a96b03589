"""Prefill in this process and decode in another, over real engines: SGLang's control plane, our manager, every byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines_transfer import Cluster, Request, configured, free_port
from engines_transfer_node import FROM, LAYERS
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_sglang import MLA, Side

ENGINES = ("mooncake", "nixl")


@pytest.mark.timeout(300)  # the other process imports SGLang first
def test_two_processes_over_mooncake_and_nixl() -> None:
    """Two stages with a draft; the decode process compares every byte and prints what it served."""
    ports = [free_port() for _ in ENGINES]
    work = [[engine, {}, port] for engine, port in zip(ENGINES, ports, strict=True)]
    node = Path(__file__).with_name("engines_transfer_node.py")
    with subprocess.Popen(
        [sys.executable, str(node), json.dumps(work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as decode:
        try:
            for engine, _, port in work:
                serve(str(engine), int(str(port)), decode)
            output, errors = decode.communicate(timeout=60)
        finally:
            decode.kill()
    assert decode.returncode == 0, errors[-3000:]
    assert output.split("\n")[:-1] == [f"served {engine}" for engine in ENGINES]


def serve(engine: str, port: int, decode: subprocess.Popen[str]) -> None:
    sides = [
        Side(MLA, range(2), hidden=LAYERS, pp=(0, 2)), Side(MLA, range(2, LAYERS), hidden=LAYERS, drafts=1, pp=(1, 2)),
    ]  # fmt: skip
    for side in sides:
        side.args.draft_kv_layers = 1
        side.fill(FROM)
    with pytest.MonkeyPatch.context() as patch, configured(patch, port, engine) as arguments:
        cluster = Cluster(arguments, port, sides, [], mla=True)
        for room in (11, 12):
            for side in sides:
                side.aux[0][2], side.aux[1][2] = room, room
            request = Request(cluster, room, alive=lambda: decode.poll() is None)
            request.send(FROM, aux=2, chunks=[2])
            assert request.end()[0] == [KVPoll.Success] * 2
        cluster.close()
