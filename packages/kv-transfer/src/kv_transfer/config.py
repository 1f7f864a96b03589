"""Time-outs and limits of the control plane, as frozen records.

Reads no environment: whoever embeds the package passes these in.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from kv_transfer.arguments import check_period, check_whole
from kv_transfer.errors import ArgumentError

__all__ = ["LEAST_MESSAGE", "Limits", "Timeouts", "limits_between"]

LEAST_MESSAGE: Final = 64 << 10
"""Every message but those of manifests, pages and metadata is shorter, with whatever reason it carries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """All in seconds, on the monotonic clock.

    Attributes:
        handshake: From `connect` (or `wait_ready`) until both sides agreed.
        offer: How long `Sender.open` waits for the receiver's pages.
        transfer: On the receiver from `open` until every rank is done; on the sender the longest time without progress.
        heartbeat_interval: How often each side says that it lives.
        peer_lost_after: A peer that was silent for so long is lost.
        dead_writer_grace: How long after the connection of a writer closed its bytes may still land in our memory. Keep
            it at the engine's own transfer time-out or above where a network can cut the connection of a process that
            lives on.
        drain: How long `Receiver.close` waits for writers to stop.
    """

    handshake: float = 30.0
    offer: float = 60.0
    transfer: float = 300.0
    heartbeat_interval: float = 0.5
    peer_lost_after: float = 5.0
    dead_writer_grace: float = 10.0
    drain: float = 2.0

    def __post_init__(self) -> None:
        """Refuses values that are not positive, and a limit that two heartbeats do not fit in.

        Raises:
            ArgumentError: A value is no number of seconds above 0, or they do not fit together.
        """
        for field in dataclasses.fields(self):
            check_period(f"Timeouts.{field.name}", getattr(self, field.name))
        if self.peer_lost_after < 2 * self.heartbeat_interval:
            raise ArgumentError(
                f"Timeouts.peer_lost_after: {self.peer_lost_after:g} s is less than two heartbeats of "
                f"{self.heartbeat_interval:g} s",
                local=self.peer_lost_after,
                consequence="a living peer would be taken for lost",
                remedy="raise it or beat more often",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the control plane accepts.

    Attributes:
        message_bytes: Longest control message, 64 KiB or more; longer ones are refused unread. Of two ends, the lower
            limit holds for both.
        batches_in_flight: Batches that one session gives to its engine at a time.
        batch_retries: How often a batch that the engine could not move is given to it again, where the receiver says
            `on_failed_pages="retry"`.
        remembered_rooms: Ended rooms that a sender remembers, so that a late `open` is told why at once.
        ready_step_bytes: Layers whose bytes become ready one by one are sent together until they are so many bytes:
            smaller transfers cost as much time as this one. A short request goes in one piece.
    """

    message_bytes: int = 16 << 20
    batches_in_flight: int = 4
    batch_retries: int = 2
    remembered_rooms: int = 4096
    ready_step_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        """Refuses limits under one.

        Raises:
            ArgumentError: A limit is no whole number from 1 on, or that of messages is below 64 KiB.
        """
        for field in dataclasses.fields(self):
            least = LEAST_MESSAGE if field.name == "message_bytes" else 1
            check_whole(f"Limits.{field.name}", getattr(self, field.name), least=least)


def limits_between(limits: Limits, message_bytes: int) -> Limits:
    """The limits towards a peer that takes messages of so many bytes."""
    return dataclasses.replace(limits, message_bytes=min(limits.message_bytes, message_bytes))
