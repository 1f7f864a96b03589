"""A prefill rank as its receiver knows it: one connection that said a right hello.

Data with a state; what happens to it is decided in the core.
"""

from __future__ import annotations

import dataclasses

from kv_transfer.config import Limits
from kv_transfer.errors import PeerLost
from kv_transfer.groups import Groups
from kv_transfer.handshake import Rank
from kv_transfer.silence import Silence
from kv_transfer.states import PeerPhase, StateMachine
from kv_transfer.summaries import Summaries

__all__ = ["Peer", "lost_error"]


@dataclasses.dataclass(slots=True)
class Peer:
    """One connection.

    Attributes:
        rank: Who it is on the prefill side.
        groups: What it owns.
        machine: Its phase.
        silence: When it was heard.
        limits: Those that hold between it and us.
        summary: What it delivers for one page of each group; None before the whole side agreed.
        dead_at: When the bytes of a closed connection have landed for sure, monotonic seconds.
    """

    rank: Rank
    groups: Groups
    machine: StateMachine[PeerPhase]
    silence: Silence
    limits: Limits
    summary: Summaries | None = None
    dead_at: float | None = None

    @property
    def phase(self) -> PeerPhase:
        """The current phase."""
        return self.machine.state


def lost_error(rank: Rank, why: str, room: str | None = None) -> PeerLost:
    """The loss of a rank: for everybody who asks, or for one room of it."""
    if room is None:
        return PeerLost(
            f"prefill rank {rank} is lost: {why}",
            consequence="its rooms have ended; no room can be opened without it",
            remedy="start it again; it replaces the lost one",
        )
    return PeerLost(
        f"{room}: prefill rank {rank} is lost: {why}",
        consequence="the room is given up",
        remedy="start the rank again and send the request anew",
    )
