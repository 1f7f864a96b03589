"""When a peer was last heard, and when to say that we live ourselves.

A pause of our own process (stopped, swapped out) is not the peer's silence: `woke` forgives it. Decides nothing.
"""

from __future__ import annotations

from kv_transfer.config import Timeouts

__all__ = ["Silence"]


class Silence:
    """Clock of one conversation.

    Args:
        timeouts: Heartbeat interval.
        now: Monotonic seconds; the peer counts as heard now.
    """

    __slots__ = ("_beat_at", "_heard_at", "_interval", "_seen_at")

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        """Heard now."""
        self._interval = timeouts.heartbeat_interval
        self._heard_at = now
        self._seen_at = now
        self._beat_at = now

    def heard(self, now: float) -> None:
        """The peer said something."""
        self._heard_at = max(self._heard_at, now)

    def silent_for(self, now: float) -> float:
        """Seconds since the peer was heard, less the pauses of our own process."""
        pause = now - self._seen_at
        self._seen_at = now
        if pause > 2 * self._interval:
            self._heard_at = min(now, self._heard_at + pause)
        return now - self._heard_at

    def beat_due(self, now: float) -> bool:
        """Whether a heartbeat is due; it counts as sent."""
        if now < self._beat_at:
            return False
        self._beat_at = now + self._interval
        return True
