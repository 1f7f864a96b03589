"""What everybody shares who works on one device of one process: a lock and an update worker.

It owns their life: the worker ends when the last user leaves. It does not own an order between lock and worker; the
runner does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .turns import Turn
from .worker import UpdateWorker

__all__ = ["DeviceGate"]


class DeviceGate:
    """A lock held while a step is enqueued or a graph captured, and one worker for the updates.

    The thread that holds the lock may hold it again: a runner may be called from another one's callback.

    torch_npu re-issues updated ops on one stream that all graphs of the process share, and a capture may refuse what
    other threads do meanwhile; so both are taken in turn.

    Args:
        name: Name of the device.
        bind: Makes the device current for the calling thread.
    """

    def __init__(self, name: str, bind: Callable[[], None]) -> None:
        self.lock = Turn(f"device {name}")
        self._name = name
        self._bind = bind
        self._users = 0
        self._worker: UpdateWorker | None = None
        self._guard = threading.Lock()

    @property
    def users(self) -> int:
        """How many have entered and not left."""
        return self._users

    def enter(self) -> UpdateWorker:
        """Registers a user.

        Returns:
            The device's worker; the same for all users.
        """
        with self._guard:
            self._users += 1
            if self._worker is None:
                self._worker = UpdateWorker(self._bind, name=f"graph-update-{self._name}")
            return self._worker

    def leave(self) -> None:
        """Unregisters a user; the last one ends the worker's thread."""
        with self._guard:
            self._users -= 1
            worker = self._worker if self._users == 0 else None
            if worker is not None:
                self._worker = None
        if worker is not None:
            worker.close()
