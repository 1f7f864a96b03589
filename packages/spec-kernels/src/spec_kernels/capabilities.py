"""Owns what is known about the machine that makes backends eligible: a frozen record, conservative by default.

It reads package metadata only; it imports no device library, looks for no attribute in one, and probes no device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

from spec_kernels.config import triton_interpreted

__all__ = ["Capabilities", "detect", "parse_version"]


@dataclass(frozen=True)
class Capabilities:
    """Versions that ops ask for; `None` means absent or unknown, and makes dependent backends ineligible.

    Attributes:
        torch_npu: Version of torch_npu.
        cann: Version of CANN.
        chip: Name of the chip, as the driver reports it.
        triton: Version of Triton.
        triton_ascend: Version of triton-ascend, which brings a Triton for NPUs.
        sgl_kernel_npu: Version of sgl-kernel-npu.
        interpreter: Whether Triton kernels run in its interpreter, and thus on host memory.
    """

    torch_npu: str | None = None
    cann: str | None = None
    chip: str | None = None
    triton: str | None = None
    triton_ascend: str | None = None
    sgl_kernel_npu: str | None = None
    interpreter: bool = False


def detect() -> Capabilities:
    """What is installed and asked for; CANN and chip stay unknown: no op asks for them."""
    return _detect(triton_interpreted())


@lru_cache(maxsize=2)
def _detect(interpreter: bool) -> Capabilities:
    return Capabilities(
        torch_npu=_version("torch-npu"),
        triton=_version("triton"),
        triton_ascend=_version("triton-ascend"),
        sgl_kernel_npu=_version("sgl-kernel-npu"),
        interpreter=interpreter,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `"2.12.0.post3"` gives `(2, 12, 0)`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
