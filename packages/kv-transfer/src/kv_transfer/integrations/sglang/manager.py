"""Owns the manager that SGLang's disaggregation asks for: `AscendKVManager`, planned by kv-planner over our engines.

The control plane stays SGLang's: bootstrap, rooms, `KVPoll`, abort and time-outs. What is replaced is what pairs
buffers, what moves bytes, and what says that a failed request's pages may be used again (`drain`, `holds`). A peer is
compared whole when it registers; one that does not fit gets each of its rooms failed with the reason, and an error in a
room fails that room, where SGLang's worker thread would end (A-36).
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Sequence
from typing import Any, Final, Literal

import kv_planner
import numpy as np

from kv_transfer.arguments import told
from kv_transfer.engine import Blocks
from kv_transfer.errors import TransferFailed
from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.fields import check_fields
from kv_transfer.integrations.sglang.names import check_list, own_names, refusal
from kv_transfer.integrations.sglang.pages import Pages, Ranks
from kv_transfer.integrations.sglang.peer import Peer
from kv_transfer.integrations.sglang.pointers import Pointers
from kv_transfer.integrations.sglang.rank import RELEASE
from kv_transfer.integrations.sglang.registration import Registrations
from kv_transfer.integrations.sglang.settings import create_session_engine
from kv_transfer.integrations.sglang.words import word

__all__ = ["PlannedTransfers", "Unstated", "manager_class"]

logger = logging.getLogger(__name__)


class Unstated(enum.Enum):
    """The default of an argument that callers of the older signature do not have; None is a value that they gave."""

    UNSTATED = "not given"


UNSTATED: Final = Unstated.UNSTATED


class _Watched:
    """A worker's queue that remembers the chunk it handed out last."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.chunk: Any = None

    def get(self) -> Any:
        self.chunk = self._queue.get()
        return self.chunk

    def put(self, chunk: Any) -> None:
        self._queue.put(chunk)


class PlannedTransfers(Registrations, Pointers):
    """The calls of SGLang's manager that pair buffers or move bytes; `manager_class` puts them before SGLang's own."""

    kv_args: Any

    def init_engine(self) -> None:
        """Make the engine that the settings name.

        Raises:
            ArgumentError: The settings name none, or SGLang is told not to hold pages.
            EngineError: It does not start.
        """
        self._begin()
        self._check_holding()
        self.engine = create_session_engine(self)

    def register_buffer_to_engine(self) -> None:
        """Open all KV, state and auxiliary memory.

        Raises:
            EngineError: The engine refused a range; SGLang's Ascend engine writes that to a debug log alone (A-37).
            UnsupportedLayout: A field of `KVArgs` is of another kind.
        """
        args = self.kv_args
        check_fields(args)
        pointers, lengths = [*args.kv_data_ptrs, *args.aux_data_ptrs], [*args.kv_data_lens, *args.aux_data_lens]
        for addresses, sizes in zip(args.state_data_ptrs or (), args.state_data_lens or (), strict=True):
            pointers += addresses
            lengths += sizes
        self.engine.batch_register(pointers, lengths)

    def teardown(self) -> None:
        """End SGLang's threads and sockets, then the engine."""
        super().teardown()
        self.engine.close()

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: Pages,
        dst_kv_ptrs: list[int],
        dst_kv_indices: Pages,
        executor: Any,
        dst_layer_ids: list[int] | None = None,
        dst_device_kv_indices: Pages | None = None,
        dst_kv_item_len: int | Literal[Unstated.UNSTATED] | None = UNSTATED,
        dst_attn_tp_size: int | Literal[Unstated.UNSTATED] | None = UNSTATED,
    ) -> int:
        """Write pages of all own layers into a peer of equal TP, or of latents.

        Callers of the older signature end with `dst_layer_ids`; then the peer is taken as it registered, and one that
        did not is taken to have pages and ranks like these.

        Args:
            mooncake_session_id: The peer's session.
            prefill_kv_indices: Shape: [pages].
            dst_kv_ptrs: The peer's buffers.
            dst_kv_indices: Shape: [pages].
            executor: Not used: an engine's batches need no threads.
            dst_layer_ids: The peer's layer ids, if it published any.
            dst_device_kv_indices: Refused.
            dst_kv_item_len: Bytes of a page in the peer's first buffer.
            dst_attn_tp_size: The peer's TP size.

        Returns:
            0, or -1 when the engine could not write; the reason is in the log and in the room's record.

        Raises:
            UnsupportedLayout: Device indices; an item length or TP size of None; lists that do not fit.
            PlanError: Pages or buffers that cannot be paired. Nothing was written.
        """
        _check_call(mooncake_session_id, dst_kv_ptrs, dst_layer_ids)
        if dst_device_kv_indices is not None:
            raise refusal(
                "dst_device_kv_indices", None, told(dst_device_kv_indices), "a second list of pages is not moved",
                "switch HiSparse off on decode",
            )  # fmt: skip
        own = self.kv_args.kv_item_lens[0] if self.kv_args.kv_item_lens else 0
        given = (dst_kv_item_len, dst_attn_tp_size)
        peer = self._peers.get(mooncake_session_id)
        if peer is not None and self._is_registered(peer, dst_kv_ptrs, dst_layer_ids, *given):
            plan = peer.kv
        else:
            local = self._local()
            size = local.tp_size if dst_attn_tp_size is UNSTATED else dst_attn_tp_size
            first = own if dst_kv_item_len is UNSTATED else dst_kv_item_len
            if isinstance(size, int) and size != local.tp_size and not local.mla:
                raise refusal(
                    "dst_attn_tp_size", local.tp_size, size, "the call does not say which heads the peer has",
                    "register the peer first, or call send_kvcache_slice with its rank",
                )  # fmt: skip
            ranks = local.ranks(local.tp_rank, size)
            plan = local.plan(dst_kv_ptrs, None, ranks, first_item=first, layer_ids=dst_layer_ids or ())
        return 0 if plan is None else self._write(mooncake_session_id, plan.batches(
            *_pages(prefill_kv_indices, dst_kv_indices), self._capabilities()
        ))  # fmt: skip

    def send_kvcache_slice(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: Pages,
        dst_kv_ptrs: list[int],
        dst_kv_indices: Pages,
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        dst_kv_item_len: int,
        executor: Any,
        dst_layer_ids: list[int] | None = None,
    ) -> int:
        """Write the heads that a peer of another TP size has, K and V each with its own width (A-26).

        Arguments, returns and errors are those of `send_kvcache`; `dst_tp_rank` says which heads the peer has.
        """
        _check_call(mooncake_session_id, dst_kv_ptrs, dst_layer_ids)
        peer = self._peers.get(mooncake_session_id)
        if peer is not None and self._is_registered(
            peer, dst_kv_ptrs, dst_layer_ids, dst_kv_item_len, dst_attn_tp_size
        ):
            ranks, plan = peer.ranks, peer.kv
        else:
            local = self._local()
            ranks = local.ranks(dst_tp_rank, dst_attn_tp_size)
            plan = local.plan(dst_kv_ptrs, None, ranks, first_item=dst_kv_item_len, layer_ids=dst_layer_ids or ())
        if plan is None or ranks.is_surplus():
            return 0
        batches = plan.batches(*_pages(prefill_kv_indices, dst_kv_indices), self._capabilities())
        return self._write(mooncake_session_id, batches)

    def send_kvcache_dcp(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: Pages,
        dst_kv_ptrs: list[int],
        dst_kv_indices: Pages,
        *,
        dcp_token_item_lens: list[int],
        dst_dcp_size: int,
        dst_dcp_rank: int,
        src_page_offset: int,
        decode_prefix_len: int,
        num_kv_tokens: int | None,
        executor: Any,
        dst_layer_ids: list[int],
        pack_buffer: Any = None,
        dst_kv_item_lens: list[int] | None = None,
        dst_tp_rank: int = 0,
        dst_attn_tp_size: int | None = None,
    ) -> int:
        """Write a rank's share of a context: whole pages of latents here, by token as SGLang plans it elsewhere.

        Arguments are SGLang's; returns and errors those of `send_kvcache`.
        """
        if not self._is_npu_dsa_layout():
            return int(super().send_kvcache_dcp(
                mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices,
                dcp_token_item_lens=dcp_token_item_lens, dst_dcp_size=dst_dcp_size, dst_dcp_rank=dst_dcp_rank,
                src_page_offset=src_page_offset, decode_prefix_len=decode_prefix_len, num_kv_tokens=num_kv_tokens,
                executor=executor, dst_layer_ids=dst_layer_ids, pack_buffer=pack_buffer,
                dst_kv_item_lens=dst_kv_item_lens, dst_tp_rank=dst_tp_rank, dst_attn_tp_size=dst_attn_tp_size,
            ))  # fmt: skip
        if num_kv_tokens is None:
            raise refusal(
                "num_kv_tokens", None, None, "a share of a context is counted in tokens", "pass the tokens of the chunk"
            )
        local, shared = self._local(), self._shared()
        names = own_names(self.kv_args, **local.stage)
        peer = self._peers.get(mooncake_session_id)
        plan = None if peer is None or dst_kv_ptrs != peer.info.dst_kv_ptrs else peer.kv
        if plan is None:
            plan = local.plan(
                dst_kv_ptrs, dst_kv_item_lens, Ranks(share=(dst_dcp_rank, dst_dcp_size)),
                first_item=self.kv_args.kv_item_lens[0], layer_ids=dst_layer_ids or (), shared=shared,
            )  # fmt: skip
        source, destination = _pages(prefill_kv_indices, dst_kv_indices)
        kinds = {name[:2]: slots for name, slots in zip(names, shared, strict=True)}
        batches: list[Blocks] = []
        page = self.kv_args.page_size
        for slots in (False, True):
            runs = kv_planner.page_interleaved(
                source, destination, page_size=page, dcp_rank=dst_dcp_rank, dcp_size=dst_dcp_size,
                tokens=src_page_offset * page + num_kv_tokens, prefix_tokens=decode_prefix_len,
                page_offset=src_page_offset, slots="global" if slots else "local",
            )  # fmt: skip
            chosen = [kind for kind, held in kinds.items() if held is slots]
            batches += plan.lowered(runs, destination, self._capabilities(), chosen)
        return self._write(mooncake_session_id, batches)

    def maybe_send_extra(
        self, req: Any, prefill_state_indices: list[Any], executor: Any, target_rank_registration_info: Any = None
    ) -> int:
        """Write the states of a request: pages, request rows, recurrent states resharded where TP differs.

        Arguments are SGLang's; returns and errors those of `send_kvcache`. Lists of unequal length are refused where
        SGLang cuts the longer one.
        """
        peer = self._peers.get(req.mooncake_session_id)
        if peer is None:
            raise refusal("mooncake_session_id", None, req.mooncake_session_id[:80], "not registered", "register first")
        for number, plan in enumerate(peer.states):
            own = prefill_state_indices[number] if number < len(prefill_state_indices) else None
            if own is None:
                continue
            there = req.dst_state_indices[number] if number < len(req.dst_state_indices) else []
            if plan is not None:
                code = self._write(req.mooncake_session_id, plan.batches(own, there, self._capabilities()))
            elif word(self.kv_args.state_types[number]) == "dsa_tail":
                info, args = peer.info, self.kv_args
                code = self._send_slot_state(
                    req, args.state_data_ptrs[number], args.state_item_lens[number], info.dst_state_data_ptrs[number],
                    info.dst_state_item_lens[number], list(own), list(there), "dsa_tail",
                )  # fmt: skip
            else:
                raise refusal(
                    f"state_types[{number}]", word(self.kv_args.state_types[number]), None, "not moved",
                    "serve the model with SGLang's own manager",
                )  # fmt: skip
            if code != 0:
                return int(code)
        return 0

    def send_aux(self, req: Any, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Write the auxiliary rows of a request; arguments are SGLang's, returns and errors those of `send_kvcache`."""
        peer = self._peers.get(req.mooncake_session_id)
        if peer is None:
            raise refusal("mooncake_session_id", None, req.mooncake_session_id[:80], "not registered", "register first")
        return self._write(req.mooncake_session_id, [peer.aux(prefill_aux_index, req.dst_aux_index)])

    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: Sequence[tuple[int, int, int]]) -> int:
        """Write blocks that SGLang's own code planned."""
        if not transfer_blocks:
            return 0
        try:
            batches = self.engine.batches(*map(list, zip(*transfer_blocks, strict=True)))
        except TransferFailed as error:
            logger.error("transfer to %s failed: %s", mooncake_session_id[:80], error)
            return -1
        return self._write(mooncake_session_id, batches)

    def transfer_worker(self, queue: Any, executor: Any, staging_buffer: Any = None, worker_index: int = 0) -> None:
        """SGLang's worker; an error in it fails the room that it served, and the next one is served."""
        watched = _Watched(queue)
        self._worker.queue = watched
        while True:
            try:
                super().transfer_worker(watched, executor, staging_buffer, worker_index)
                return
            except RuntimeError as error:  # what the worker makes of every error
                if watched.chunk is None:
                    raise
                self._fail(watched.chunk, error.__context__ or error)

    def _fail(self, chunk: Any, error: BaseException) -> None:
        logger.error("room %s failed: %s", chunk.room, error, exc_info=error)
        self.conclude_failure(bootstrap_room=chunk.room, failure_reason=str(error))
        self._staging_outstanding.pop(chunk.room, None)
        self._maybe_ack_drained_abort(chunk.room)
        if chunk.is_last_chunk:
            self.transfer_infos.pop(chunk.room, None)
            self.req_to_decode_prefix_len.pop(chunk.room, None)

    def _is_registered(self, peer: Peer, pointers: Sequence[int], ids: Sequence[int] | None, *given: Any) -> bool:
        """Whether a call describes the peer as it registered."""
        info = peer.info
        known = (info.dst_kv_item_len, info.dst_attn_tp_size)
        same = all(one is UNSTATED or one == other for one, other in zip(given, known, strict=True))
        return same and pointers == info.dst_kv_ptrs and (not ids or list(ids) == list(info.dst_kv_layer_ids))

    def _capabilities(self) -> kv_planner.Capabilities:
        return self.engine.engine.capabilities.planner()


def _check_call(session: object, pointers: object, ids: object) -> None:
    """Refuses what could name no peer and no buffers.

    Raises:
        UnsupportedLayout: The session is no text, or a list is none.
    """
    if not isinstance(session, str):
        raise refusal("mooncake_session_id", None, told(session), "no text", "pass the peer's session id")
    check_list("dst_kv_ptrs", pointers)
    check_list("dst_layer_ids", () if ids is None else ids)


def _pages(source: Any, destination: Any) -> tuple[Any, Any]:
    """Both lists as int64; an empty one has no dtype of its own.

    Raises:
        UnsupportedLayout: One is None, or holds other things than whole numbers.
    """
    found = []
    for name, pages in (("prefill_kv_indices", source), ("dst_kv_indices", destination)):
        try:
            array = np.asarray(pages).reshape(-1)
        except (TypeError, ValueError):  # lists of unequal length, tensors of a device
            array = np.zeros(1, object)
        if array.size and array.dtype.kind not in "iu":
            raise refusal(
                name, str(array.dtype), "int32 or int64", "page ids are whole numbers", "pass the allocator's indices"
            )
        found.append(array.astype(np.int64))
    return found[0], found[1]


@functools.cache
def manager_class() -> type[Any]:
    """`PlannedTransfers` as a subclass of SGLang's `AscendKVManager`, for its `get_kv_class`.

    Raises:
        EngineUnavailable: SGLang 0.5.23 is not installed.
    """
    base = engine_module("sglang.srt.disaggregation.ascend.conn", RELEASE).AscendKVManager
    return type(
        "KvTransferManager", (PlannedTransfers, base), {"__module__": __name__, "__doc__": PlannedTransfers.__doc__}
    )
