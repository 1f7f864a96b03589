"""The shared secret of a deployment: who does not know it cannot talk to an endpoint, nor read what it says.

ZeroMQ's CURVE does the work. The receiver's key pair is derived from the secret, so that only who has the secret knows
the key that a greeting must be sealed with. It protects control messages; the engines' data connections have no
authentication (see `kv_transfer.isolation`).
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85

from kv_transfer.errors import ArgumentError

__all__ = ["check_secret", "seal_receiver", "seal_sender"]

_SHORTEST = 16
_SALT = b"kv-transfer control plane 1"


def check_secret(secret: str | None) -> str | None:
    """The secret, or None for a conversation in the clear.

    Raises:
        ArgumentError: Shorter than 16 characters, or CURVE is not in this build of ZeroMQ. The secret is not in the
            text.
    """
    if secret is None:
        return None
    if not isinstance(secret, str) or len(secret) < _SHORTEST:
        size = f"{len(secret)} characters" if isinstance(secret, str) else type(secret).__name__
        raise ArgumentError(
            f"secret: expected a text of at least {_SHORTEST} characters, got {size}",
            local=size,
            consequence="it could be guessed",
            remedy="make one with python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    if not zmq.has("curve"):
        raise ArgumentError(
            "secret: this build of ZeroMQ has no CURVE",
            local=zmq.zmq_version(),
            consequence="messages could not be sealed",
            remedy="install pyzmq from its wheel",
        )
    return secret


def seal_receiver(socket: zmq.Socket[bytes], secret: str | None) -> None:
    """Let only peers with the secret talk to a socket that will be bound."""
    if secret is not None:
        socket.curve_secretkey, socket.curve_publickey = _keys(secret)
        socket.curve_server = True


def seal_sender(socket: zmq.Socket[bytes], secret: str | None) -> None:
    """Talk only to a receiver with the secret; before the socket is connected."""
    if secret is not None:
        socket.curve_serverkey = _keys(secret)[1]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _keys(secret: str) -> tuple[bytes, bytes]:
    raw = hashlib.scrypt(secret.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=32)
    key = z85.encode(raw)
    return key, zmq.curve_public(key)
