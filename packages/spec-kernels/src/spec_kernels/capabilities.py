"""Owns what is known about the machine that makes backends eligible: a frozen record, conservative by default.

It reads package metadata only; it imports no device library, looks for no attribute in one, and probes no device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

__all__ = ["Capabilities", "detect", "parse_version"]


@dataclass(frozen=True)
class Capabilities:
    """Versions that ops ask for; `None` means absent or unknown, and makes dependent backends ineligible.

    Attributes:
        torch_npu: Version of torch_npu.
        cann: Version of CANN.
        chip: Name of the chip, as the driver reports it.
    """

    torch_npu: str | None = None
    cann: str | None = None
    chip: str | None = None


@lru_cache(maxsize=1)
def detect() -> Capabilities:
    """Read the versions of the installed packages, once a process; CANN and chip stay unknown: no op asks for them."""
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return Capabilities()
    return Capabilities(torch_npu=version)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `"2.12.0.post3"` gives `(2, 12, 0)`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
