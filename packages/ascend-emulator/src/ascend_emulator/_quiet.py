"""Drops single known lines from standard output and standard error while torch_npu starts; everything else passes."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["without_lines", "without_native_lines"]


class _Filter(io.TextIOBase):
    """A text stream that passes all lines on but those that hold a given text."""

    def __init__(self, target: TextIO, text: str) -> None:
        self._target = target
        self._text = text
        self._line = ""

    def write(self, text: str) -> int:
        """Pass on the complete lines."""
        self._line += text
        *complete, self._line = self._line.split("\n")
        for line in complete:
            if self._text not in line:
                self._target.write(line + "\n")
        return len(text)

    def finish(self) -> None:
        """Pass on what did not end in a line break."""
        if self._line:
            self._target.write(self._line)


@contextmanager
def without_lines(text: str) -> Iterator[None]:
    """What Python prints to standard output, without the lines that hold `text`."""
    original: Any = sys.stdout
    if original is None:
        yield
        return
    filtered = _Filter(original, text)
    sys.stdout = filtered
    try:
        yield
    finally:
        sys.stdout = original
        filtered.finish()


@contextmanager
def without_native_lines(text: bytes) -> Iterator[None]:
    """What native code writes to standard error, without the lines that hold `text`."""
    try:
        saved = os.dup(2)
    except OSError:  # no standard error: nothing to filter
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            kept = b"".join(line for line in held if text not in line)
            if kept:
                os.write(2, kept)
