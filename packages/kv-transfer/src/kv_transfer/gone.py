"""Whether the process that listened at an address is gone. It does not know what that process held."""

from __future__ import annotations

import socket

__all__ = ["is_gone"]

_CONNECT = 1.0


def is_gone(address: tuple[str, int]) -> bool:
    """Whether a machine says that nobody listens at an address. Silence says nothing: a process may be stopped.

    Args:
        address: Host and port; a machine that is off takes a second.
    """
    try:
        socket.create_connection(address, _CONNECT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
