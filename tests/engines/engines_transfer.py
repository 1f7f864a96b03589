"""SGLang's disaggregation in one process or several: its configuration, bootstrap server, managers, senders, receivers.

Ranks, their memory and its labels are those of kv-transfer's own tests. SGLang's `KVArgs` is filled by hand, as its
scheduler does; everything behind it is SGLang's code, with this project's manager in the place of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_disagg, get_memory, get_parallel
from sglang.srt.server_args import ServerArgs

sys.path.append(str(Path(__file__).parents[2] / "packages/kv-transfer/tests"))

from kv_transfer.integrations import sglang as ours
from transfer_sglang import Side

__all__ = ["Cluster", "Request", "configured", "decode_rank", "free_port", "real_args"]

WAIT_S = 30.0
START_S = 240.0  # of another process, which imports SGLang


def free_port() -> int:
    """A port that nobody has at the moment."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def real_args(side: Side) -> KVArgs:
    """SGLang's own `KVArgs`, with the fields that its scheduler sets."""
    args = KVArgs()
    for name, value in vars(side.args).items():
        setattr(args, name, value)
    args.kv_layout = args.ib_device = args.swa_kv_cache_layout = args.rust_http_port = None
    args.is_hybrid_mla_backend, args.system_dp_rank = False, 0
    return args


@contextlib.contextmanager
def configured(monkeypatch: pytest.MonkeyPatch, port: int, engine: str, options: str = "{}") -> Iterator[ServerArgs]:
    """SGLang's published configuration for this process, and our engine's settings."""
    for name, value in (
        ("SGLANG_HOST_IP", "127.0.0.1"), ("KV_TRANSFER_SGLANG_ENGINE", engine), ("KV_TRANSFER_SGLANG_OPTIONS", options),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    arguments = ServerArgs(
        model_path="none", host="127.0.0.1", disaggregation_mode="prefill", disaggregation_transfer_backend="ascend",
        disaggregation_bootstrap_port=port,
    )  # fmt: skip
    context = get_context()
    before = (context._server_args, context._config_bags)
    context.set_server_args(arguments)
    try:
        with get_disagg().override(disaggregation_bootstrap_port=port), get_memory().override(
            enable_unified_memory=False
        ):  # fmt: skip
            yield arguments
    finally:
        context._server_args, context._config_bags = before


class _Stages:
    """The pipeline group of stages in one process: what the first broadcasts, the others get."""

    def __init__(self) -> None:
        self._said: list[Any] = []

    def of(self, stage: int, stages: int) -> Any:
        return SimpleNamespace(
            rank_in_group=stage, world_size=stages, is_first_rank=stage == 0, is_last_rank=stage == stages - 1,
            broadcast_object=self._broadcast, barrier=lambda: None,
        )  # fmt: skip

    def _broadcast(self, value: Any = None, src: int = 0) -> Any:
        if value is not None:
            self._said.append(value)
        return self._said[-1]


class Request:
    """One request on its way: SGLang's receivers and senders for a room.

    Args:
        cluster: Its ranks.
        room: Its number.
        prefix: Tokens that decode holds already.
        alive: Whether the other process is there, where there is one; it may take its time to start.
    """

    def __init__(
        self, cluster: Cluster, room: int, *, prefix: int = 0, alive: Callable[[], bool] | None = None
    ) -> None:
        self.cluster, self.room, self.prefix, self._alive = cluster, room, prefix, alive
        self.receivers: list[Any] = []
        self.senders: list[Any] = []

    def offer(self, pages: Sequence[int], *, aux: int = 0, states: Sequence[Any] | None = None) -> None:
        """Decode's part: every decode rank registers and names its pages."""
        address = f"127.0.0.1:{self.cluster.port}"
        for manager in self.cluster.decode:
            _until(lambda manager=manager: manager.try_ensure_parallel_info(address), "prefill ranks registered")
            receiver = ours.receiver_class()(manager, address, self.room)
            receiver.init(0)
            assert receiver.poll() == KVPoll.WaitingForInput, manager.failure_records
            receiver.send_metadata(
                np.array(pages, np.int32), aux, list(states) if states else None, decode_prefix_len=self.prefix
            )
            self.receivers.append(receiver)

    def send(
        self, pages: Sequence[int], *, aux: int = 0, states: Sequence[Any] | None = None, chunks: Sequence[int] = ()
    ) -> None:
        """Prefill's part: every prefill rank sends, chunk by chunk."""
        address = f"127.0.0.1:{self.cluster.port}"
        for manager in self.cluster.prefill:
            sender = ours.sender_class()(manager, address, self.room)
            sender.init(len(pages), aux)
            self.senders.append(sender)
        for sender in self.senders:
            _until(lambda sender=sender: sender.poll() != KVPoll.Bootstrapping, "decode's pages arrived", self._alive)
        cuts = [0, *np.cumsum(chunks).tolist(), len(pages)] if chunks else [0, len(pages)]
        for start, stop in itertools.pairwise(cuts):
            last = stop == len(pages)
            for sender in self.senders:
                sender.send(np.array(pages[start:stop], np.int32), list(states) if states and last else None)

    def end(self) -> tuple[list[int], list[int]]:
        """Where both sides ended: (senders, receivers), as `KVPoll`."""
        over = (KVPoll.Success, KVPoll.Failed)
        for one in (*self.senders, *self.receivers):
            _until(lambda one=one: one.poll() in over, "the room ended", self._alive)
        found = [one.poll() for one in self.senders], [one.poll() for one in self.receivers]
        for one in (*self.senders, *self.receivers):
            one.clear()
        return found


class Cluster:
    """Prefill and decode ranks in this process.

    Args:
        arguments: From `configured`.
        port: Of the bootstrap server.
        prefill: Prefill ranks, by stage and then by tensor-parallel rank.
        decode: Decode ranks.
        mla: Latents.
        serve: Starts the bootstrap server.
    """

    def __init__(
        self,
        arguments: ServerArgs,
        port: int,
        prefill: Sequence[Side],
        decode: Sequence[Side],
        *,
        mla: bool,
        serve: bool = True,
    ) -> None:
        self.port = port
        self.server = ours.bootstrap_server_class()(host="127.0.0.1", port=port) if serve else None
        _until(lambda: _listens(port), "the bootstrap server listens")
        self._arguments, self._mla, self._stages = arguments, mla, _Stages()
        self._sides = (*prefill, *decode)  # whose memory is registered
        self.prefill = [self._manager(side, DisaggregationMode.PREFILL) for side in prefill]
        self.decode = [self._manager(side, DisaggregationMode.DECODE) for side in decode]

    def close(self) -> None:
        for manager in (*self.prefill, *self.decode):
            manager._stopped = True
            getattr(manager, "_heartbeat_shutdown", threading.Event()).set()
            for queue in getattr(manager, "transfer_queues", ()):
                queue.put(None)
            manager.engine.close()
        if self.server is not None:
            self.server.close()

    def _manager(self, side: Side, mode: DisaggregationMode) -> Any:
        stage, stages = side.pp
        rank, size = side.tp
        group = self._stages.of(stage, stages)
        with get_parallel().override(
            tp_size=size, tp_rank=rank, moe_tp_size=size, attn_tp_size=size, attn_tp_rank=rank, attn_dp_size=1,
            attn_dp_rank=0, attn_cp_size=1, attn_cp_rank=0, attn_dcp_size=1,
            attn_dcp_rank=0, dcp_enabled=False, pp_size=stages, pp_group=group,
        ):  # fmt: skip
            return ours.manager_class()(real_args(side), mode, self._arguments, self._mla)


def decode_rank(arguments: ServerArgs, port: int, side: Side, *, mla: bool) -> Cluster:
    """A decode rank whose prefill ranks and bootstrap server are in another process."""
    limit = time.monotonic() + START_S
    while not _listens(port) and time.monotonic() < limit:
        time.sleep(0.02)
    return Cluster(arguments, port, [], [side], mla=mla, serve=False)


def _until(done: Any, what: str, alive: Callable[[], bool] | None = None) -> None:
    limit = time.monotonic() + (WAIT_S if alive is None else START_S)
    while not done():
        assert time.monotonic() < limit and (alive is None or alive()), f"{what}: not in time"
        time.sleep(0.002)


def _listens(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
