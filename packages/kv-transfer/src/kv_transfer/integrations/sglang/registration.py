"""Owns how a decode rank registers with a prefill rank, and how that is compared before any room is served.

What the comparison is, `Peer` owns. A registration that is refused fails the peer's rooms; a message that is none is
dropped, where SGLang's receiving thread would end.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

import kv_planner

from kv_transfer.errors import TransferError
from kv_transfer.gone import is_gone
from kv_transfer.integrations._engine import engine_module
from kv_transfer.integrations.sglang.holds import Holds
from kv_transfer.integrations.sglang.names import Name, own_names, refusal
from kv_transfer.integrations.sglang.peer import Peer
from kv_transfer.integrations.sglang.published import Published, decode
from kv_transfer.integrations.sglang.rank import RELEASE, endpoint_of
from kv_transfer.integrations.sglang.words import word

__all__ = ["Registrations"]

_FRAMES: Final = 20
_STAGING: Final = (b"WATERMARK", b"STAGING_RSP")
logger = logging.getLogger(__name__)


class Registrations(Holds):
    """The manager's part that registers with peers and hears registrations."""

    def _begin(self) -> None:
        super()._begin()
        self._peers: dict[str, Peer] = {}
        self._said: dict[str, Published | TransferError] = {}
        self._refused: dict[str, str] = {}
        self._registering = ""
        self._visiting = threading.Lock()

    def build_receiver_registration_message(self) -> list[bytes]:
        """SGLang's frames, and one with what they leave out.

        Raises:
            UnsupportedLayout: A state's item is longer than SGLang's frames can say (A-39).
        """
        args = self.kv_args
        longest = max((size for sizes in args.state_item_lens or () for size in sizes), default=0)
        if longest >= 1 << 32:
            raise refusal(
                "state_item_lens", longest, (1 << 32) - 1, "SGLang registers item lengths of states in 32 bits",
                "hold the state in several tensors",
            )  # fmt: skip
        frames: list[bytes] = super().build_receiver_registration_message()
        return [*frames, self._published().encode()]

    def _published(self) -> Published:
        args = self.kv_args
        names: tuple[Name, ...] = ()
        if getattr(args, "kv_entry_names", None) or not getattr(args, "kv_layer_ids", None):  # ids have a frame
            try:
                names = own_names(args, **self._local().stage)
            except TransferError as error:
                logger.info("buffers are registered without names: %s", error)
        return Published(
            page_size=args.page_size,
            dtype=str(getattr(args, "kv_cache_dtype_str", "") or ""),
            names=names,
            kv_nbytes=tuple(args.kv_data_lens),
            aux_item_bytes=tuple(args.aux_item_lens),
            aux_nbytes=tuple(args.aux_data_lens),
            state_types=tuple(word(kind) for kind in args.state_types or ()),
            state_nbytes=tuple(tuple(sizes) for sizes in args.state_data_lens or ()),
        )

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], list[bytes] | None]:
        """SGLang's receive call; takes our frame off registrations, and drops messages that are none or too late."""
        receive = super()._make_worker_recv(socket, timeout_ms)

        def checked() -> list[bytes] | None:
            message: list[bytes] | None = receive()
            if message is None or not self._is_prefill():
                return message
            try:
                return self._heard(message)
            except (ValueError, IndexError, struct.error) as error:  # UnicodeDecodeError among them
                logger.warning("a control message of %d frames was dropped: %s", len(message), error)
                return None

        return checked

    def _heard(self, message: list[bytes]) -> list[bytes] | None:
        """A control message as SGLang's own code reads it; reads it once before, so that none ends its thread.

        Pages of a room that has failed here already are answered and dropped.
        """
        words = engine_module("sglang.srt.disaggregation.mooncake.conn", RELEASE)
        if message[0] == b"None":
            info = words.KVArgsRegisterInfo.from_zmq(message[:_FRAMES])
            session = info.mooncake_session_id
            self._drop_dead(session, (info.endpoint, info.dst_port))
            self._registering = session
            self._refused.pop(session, None)
            self._said.pop(session, None)
            if len(message) > _FRAMES:
                try:
                    self._said[session] = decode(message[_FRAMES])
                except TransferError as error:
                    self._said[session] = error
            return message[:_FRAMES]
        if message[0] not in (words.ABORT_TAG, *_STAGING):
            return None if self.answer_late(words.TransferInfo.from_zmq(message)) else message
        return message

    def _drop_dead(self, session: str, address: tuple[str, int]) -> None:
        """A rank registers: of those that did before, forget the dead. SGLang keeps their sockets for good."""
        with self.session_lock:
            others = {one: info for one, info in self.decode_kv_args_table.items() if one != session}
        for other, info in list(others.items()):
            if (info.endpoint, info.dst_port) == address:  # which is another process's now
                self._forget(other, others.pop(other))
        if others and self._visiting.acquire(blocking=False):
            # A machine that is off keeps silent for a second, and others register meanwhile.
            threading.Thread(target=self._visit, args=(others,), name="kv-transfer-sglang-visit", daemon=True).start()

    def _visit(self, others: dict[str, Any]) -> None:
        try:
            for session, info in others.items():
                address = (info.endpoint, info.dst_port)
                if is_gone(address) and self._forget(session, info):
                    self._disconnect(endpoint_of(address))
        finally:
            self._visiting.release()

    def _forget(self, session: str, info: Any) -> bool:
        """Whether nothing of a registration is kept any more: it is, while a room needs it, or when there is a new one.

        Its rooms fail at their next write, with the reason.
        """
        with self.session_lock:
            needed = any(session in room for room in list(self.transfer_infos.values()))
            if needed or self.decode_kv_args_table.get(session) is not info:
                return False
            self.decode_kv_args_table.pop(session)
            self.state_layout_rejections.pop(session, None)
            self.state_strides_validated.discard(session)
            self._unblacklist_session(session)
        self._peers.pop(session, None)
        self._said.pop(session, None)
        self.engine.forget(session)
        return True

    def _disconnect(self, endpoint: str) -> None:
        with self._socket_lock:
            for links in (self._socket_cache, self._monitor_cache):
                link = links.pop(endpoint, None)
                if link is not None:
                    link.close(linger=0)
            self._socket_send_locks.pop(endpoint, None)

    def _validate_peer_state_layout(self, registration_info: Any) -> tuple[bool, str | None]:
        """Compare a peer whole: (whether it was compared, why it is refused)."""
        session = registration_info.mooncake_session_id
        reason = self._refused.pop(session, None)
        said = self._said.get(session)
        try:
            if isinstance(said, TransferError):
                raise said
            if reason is None:
                self._peers[session] = Peer(self._local(), registration_info, said, shared=self._shared())
                return True, None
        except (TransferError, kv_planner.PlanError) as error:
            reason = str(error)
        self._peers.pop(session, None)  # one that registers once more keeps its place until then: its rooms go on
        return False, reason

    def requires_dcp_relayout(self, dst_dcp_size: int, dst_dcp_rank: int) -> bool:
        """SGLang's question; a topology that it does not serve refuses the peer, not the thread that asks."""
        try:
            return bool(super().requires_dcp_relayout(dst_dcp_size, dst_dcp_rank))
        except RuntimeError as error:
            self._refused[self._registering] = str(error)
            return False

    def prepare_dcp_token_item_lens(self, dst_page_item_lens: list[int | None], dst_dcp_size: int) -> list[int]:
        """Bytes of a token, in each own buffer; a peer of another geometry is refused."""
        try:
            lengths: list[int] = super().prepare_dcp_token_item_lens(dst_page_item_lens, dst_dcp_size)
        except RuntimeError as error:
            self._refused[self._registering] = str(error)
            return []
        return lengths
