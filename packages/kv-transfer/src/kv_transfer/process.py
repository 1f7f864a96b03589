"""The name of this process among all others; it knows nothing of what a process holds or does.

A process id alone does not tell processes of two containers apart, and a random token alone is inherited by a fork.
"""

from __future__ import annotations

import os
import secrets

__all__ = ["process_name"]

_TOKENS: dict[int, str] = {}

os.register_at_fork(after_in_child=_TOKENS.clear)


def process_name() -> str:
    """The id of this process and a random token of its own; the same at every call, another one after a fork."""
    pid = os.getpid()
    return f"{pid}:{_TOKENS.setdefault(pid, secrets.token_hex(8))}"
