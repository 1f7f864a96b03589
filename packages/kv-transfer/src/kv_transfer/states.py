"""The states of conversations and rooms, and the legal steps between them, as tables.

Who takes a step, and why, is decided in the rooms and cores.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from kv_transfer.errors import SessionStateError

__all__ = [
    "PEER_STEPS",
    "RECEIVER_STEPS",
    "SENDER_PHASE_STEPS",
    "SENDER_STEPS",
    "PeerPhase",
    "ReceiverState",
    "SenderPhase",
    "SenderState",
    "StateMachine",
]


class ReceiverState(enum.Enum):
    """A room at the receiver."""

    OPEN = "open"
    """Pages are offered; ranks may write."""
    COMPLETE = "complete"
    """Every rank that has something to send is done; the bytes are all there."""
    ABORTING = "aborting"
    """Given up, but a rank may still write: the pages must not be reused."""
    ABORTED = "aborted"
    """Given up, and nobody writes any more."""


class SenderState(enum.Enum):
    """A room at one sender."""

    SENDING = "sending"
    DRAINING = "draining"
    """`finish` was called; transfers are on their way."""
    DONE_SENT = "done sent"
    FINISHED = "finished"
    ABORTING = "aborting"
    """Given up, but the engine still holds a batch."""
    ABORTED = "aborted"


class SenderPhase(enum.Enum):
    """A sender's conversation with its receiver."""

    NEW = "new"
    GREETING = "greeting"
    AGREED = "agreed"
    READY = "ready"
    REFUSED = "refused"
    LOST = "lost"
    CLOSED = "closed"


class PeerPhase(enum.Enum):
    """A sender, as its receiver sees it."""

    WELCOMED = "welcomed"
    """Its hello was right; its own agreement is awaited."""
    MEMBER = "member"
    LOST = "lost"
    """Taken for lost, but its connection stands: it may still write."""
    GONE = "gone"
    """Its connection is closed."""


RECEIVER_STEPS: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.OPEN: frozenset({ReceiverState.COMPLETE, ReceiverState.ABORTING}),
    ReceiverState.ABORTING: frozenset({ReceiverState.ABORTED}),
    ReceiverState.COMPLETE: frozenset(),
    ReceiverState.ABORTED: frozenset(),
}
SENDER_STEPS: Mapping[SenderState, frozenset[SenderState]] = {
    SenderState.SENDING: frozenset({SenderState.DRAINING, SenderState.ABORTING}),
    SenderState.DRAINING: frozenset({SenderState.DONE_SENT, SenderState.FINISHED, SenderState.ABORTING}),
    SenderState.DONE_SENT: frozenset({SenderState.FINISHED, SenderState.ABORTED}),
    SenderState.ABORTING: frozenset({SenderState.ABORTED}),
    SenderState.FINISHED: frozenset(),
    SenderState.ABORTED: frozenset(),
}
SENDER_PHASE_STEPS: Mapping[SenderPhase, frozenset[SenderPhase]] = {
    SenderPhase.NEW: frozenset({SenderPhase.GREETING, SenderPhase.CLOSED}),
    SenderPhase.GREETING: frozenset({SenderPhase.AGREED, SenderPhase.REFUSED, SenderPhase.LOST, SenderPhase.CLOSED}),
    SenderPhase.AGREED: frozenset({SenderPhase.READY, SenderPhase.REFUSED, SenderPhase.LOST, SenderPhase.CLOSED}),
    SenderPhase.READY: frozenset({SenderPhase.REFUSED, SenderPhase.LOST, SenderPhase.CLOSED}),
    SenderPhase.REFUSED: frozenset({SenderPhase.CLOSED}),
    SenderPhase.LOST: frozenset({SenderPhase.CLOSED}),
    SenderPhase.CLOSED: frozenset(),
}
PEER_STEPS: Mapping[PeerPhase, frozenset[PeerPhase]] = {
    PeerPhase.WELCOMED: frozenset({PeerPhase.MEMBER, PeerPhase.LOST, PeerPhase.GONE}),
    PeerPhase.MEMBER: frozenset({PeerPhase.LOST, PeerPhase.GONE}),
    PeerPhase.LOST: frozenset({PeerPhase.GONE}),
    PeerPhase.GONE: frozenset(),
}

_State = TypeVar("_State", bound=enum.Enum)


class StateMachine(Generic[_State]):
    """One current state; steps that the table does not hold are errors.

    Args:
        name: What has the state, for error texts.
        table: Legal steps from each state.
        initial: First state.
    """

    __slots__ = ("_name", "_state", "_table")

    def __init__(self, name: str, table: Mapping[_State, frozenset[_State]], initial: _State) -> None:
        """Starts in `initial`."""
        self._name = name
        self._table = table
        self._state = initial

    @property
    def state(self) -> _State:
        """The current state."""
        return self._state

    @property
    def is_terminal(self) -> bool:
        """Whether no step leads on."""
        return not self._table[self._state]

    def to(self, state: _State) -> None:
        """Takes a step.

        Raises:
            SessionStateError: The table does not hold it.
        """
        if state not in self._table[self._state]:
            raise SessionStateError(
                f"{self._name}: no step from {self._state.value!r} to {state.value!r}", local=self._state.value
            )
        self._state = state
