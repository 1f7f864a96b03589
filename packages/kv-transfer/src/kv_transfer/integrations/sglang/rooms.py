"""Owns what senders and receivers do beside SGLang's own part: decode's pages are held, and it is told of failures.

`sender_class` and `receiver_class` put these before SGLang's classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_transfer.integrations.sglang.drain import FAILED

if TYPE_CHECKING:
    from typing import TypeAlias

    _Base: TypeAlias = Any
else:
    _Base = object

__all__ = ["HoldingReceiver", "TellingSender"]


class HoldingReceiver(_Base):  # type: ignore[misc]  # Any: SGLang's receiver
    """A receiver whose pages are its writers' too, from the first that is told them."""

    _published = False
    _aborted = False
    abort_notified: bool

    def send_metadata(self, *arguments: Any, **named: Any) -> None:
        """SGLang's call; from here on prefill ranks may write."""
        if self.bootstrap_infos is not None:
            self._published = True
            self.abort_notified = self.abort_notified and self._abort_generation is not None
            self.kv_mgr.watch(self)
        super().send_metadata(*arguments, **named)

    def abort(self) -> None:
        """SGLang's call."""
        self._aborted = True
        super().abort()

    def clear(self) -> None:
        """SGLang's call; after a failure that was not asked for, the next request registers with its peers anew.

        A prefill rank serves a session that failed once no more, until it registers.
        """
        super().clear()
        self.kv_mgr.unwatch(self)
        if self.conclude_state == FAILED and not self._aborted:
            self.invalidate_cached_bootstrap_infos()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """SGLang's call; asks for an answer whenever a rank may know the pages, also when not all were told them."""
        super()._send_abort_notification(force_arm=force_arm or self._published)
        if self._abort_generation is not None:
            self.kv_mgr.hold(self)


class TellingSender(_Base):  # type: ignore[misc]  # Any: SGLang's sender
    """A sender that does not end without a word."""

    def clear(self) -> None:
        """SGLang's call."""
        self.kv_mgr.leave(self.bootstrap_room)
        super().clear()
