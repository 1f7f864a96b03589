"""Where another thread stands, for diagnoses. It owns reading the stack, and stops nobody."""

from __future__ import annotations

import sys
import traceback

__all__ = ["stack_of"]


def stack_of(ident: int | None) -> str | None:
    """The innermost four frames of a thread, or None when it has ended."""
    frame = sys._current_frames().get(ident) if ident is not None else None
    if frame is None:
        return None
    try:
        return "".join(traceback.format_stack(frame)[-4:]).rstrip()
    finally:
        del frame
