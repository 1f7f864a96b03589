"""What counts as a fault of code that was called, in a library or in the words of a peer.

Decides about exceptions only; what follows from one is the catcher's.
"""

from __future__ import annotations

__all__ = ["is_fault"]


def is_fault(error: BaseException) -> bool:
    """Whether `error` is a fault, a panic of a Rust library included, and no request to end this process."""
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
