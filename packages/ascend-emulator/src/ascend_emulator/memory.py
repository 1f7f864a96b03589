"""Answers whose memory an address is. It owns no memory: the C runtime allocates and accounts."""

from __future__ import annotations

from dataclasses import dataclass

from ._runtime import PINNED, UNKNOWN, runtime
from .errors import NotInstalledError

__all__ = ["Allocation", "describe", "forget", "label"]

_LABELS: dict[tuple[int, int], str] = {}


@dataclass(frozen=True)
class Allocation:
    """Where an address lies.

    Attributes:
        device: "npu:0", … or "pinned host".
        start: first byte of the runtime's allocation.
        nbytes: its size.
        offset: distance of the address from `start`.
        label: what `label` said about the address, else "".
    """

    device: str
    start: int
    nbytes: int
    offset: int
    label: str

    def __str__(self) -> str:
        name = f"{self.label}, " if self.label else ""
        return f"{name}byte {self.offset} of a block of {self.nbytes} bytes on {self.device}"


def label(address: int, nbytes: int, text: str) -> None:
    """Give a range of device memory a name (a layer's cache, say), which errors then repeat.

    Args:
        address: first byte.
        nbytes: size of the range; an equal range that was labelled before gets the new text.
        text: the name.
    """
    _LABELS[address, nbytes] = text


def forget(address: int, nbytes: int) -> None:
    """Remove the name of a range; nothing happens when it has none."""
    _LABELS.pop((address, nbytes), None)


def describe(address: int) -> Allocation | None:
    """The allocation that holds an address, or None when it is not memory of the emulator.

    Raises:
        NotInstalledError: before `install()`.
    """
    if not runtime.loaded:
        raise NotInstalledError("memory.describe()")
    owner, start, nbytes = runtime.locate(address)
    if owner == UNKNOWN:
        return None
    text = next((t for (first, size), t in _LABELS.items() if first <= address < first + size), "")
    return Allocation("pinned host" if owner == PINNED else f"npu:{owner}", start, nbytes, address - start, text)
