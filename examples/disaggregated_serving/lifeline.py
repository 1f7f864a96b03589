"""Ties the life of this process to the one that started it (Linux).

It imports nothing slow, so that it can be the first thing a process does.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent, process `parent`, ends.

    When the parent has ended already, the signal is raised at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
