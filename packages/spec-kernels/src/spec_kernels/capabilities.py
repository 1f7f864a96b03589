"""Owns what is known about the machine that makes backends eligible: a frozen record, conservative by default.

It reads package metadata, the toolkit's own note of its version, and whether the libraries that torch_npu links to can
be loaded. It imports no device package, looks for no attribute in one, and probes no device.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from spec_kernels.config import cann_home, triton_interpreted

__all__ = ["Capabilities", "detect", "parse_version", "toolkit_version"]


@dataclass(frozen=True)
class Capabilities:
    """Versions that ops ask for; `None` means absent or unknown, and makes dependent backends ineligible.

    Attributes:
        torch_npu: Version of torch_npu.
        load_error: What keeps torch_npu from being loaded; None when nothing is known to.
        cann: Version of CANN; limits that a later release lifted hold where it is unknown.
        chip: The chip, as the operators' documents name it: "910B", "910C", "950". Unknown: the limits of all hold.
        triton: Version of Triton.
        triton_ascend: Version of triton-ascend, which brings a Triton for NPUs.
        sgl_kernel_npu: Version of sgl-kernel-npu.
        interpreter: Whether Triton kernels run in its interpreter, and thus on host memory.
    """

    torch_npu: str | None = None
    load_error: str | None = None
    cann: str | None = None
    chip: str | None = None
    triton: str | None = None
    triton_ascend: str | None = None
    sgl_kernel_npu: str | None = None
    interpreter: bool = False


_LIBRARIES = ("libascendcl.so", "libhccl.so")
"""What torch_npu links to and does not bring."""


def detect() -> Capabilities:
    """What is installed and asked for; the chip stays unknown, as no device is asked."""
    return _detect(triton_interpreted(), cann_home(), "torch_npu" in sys.modules)


@lru_cache(maxsize=8)
def _detect(interpreter: bool, home: str | None, loaded: bool) -> Capabilities:
    torch_npu = _version("torch-npu")
    return Capabilities(
        torch_npu=torch_npu,
        load_error=None if loaded or torch_npu is None else _load_error(),
        cann=None if home is None else toolkit_version(Path(home)),
        triton=_version("triton"),
        triton_ascend=_version("triton-ascend"),
        sgl_kernel_npu=_version("sgl-kernel-npu"),
        interpreter=interpreter,
    )


def _load_error() -> str | None:
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return str(error)
    return None


def toolkit_version(home: Path) -> str | None:
    """Return the version that a CANN toolkit notes in `*-linux/ascend_toolkit_install.info`, or None."""
    for note in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
        match = re.search(r"^version=(\S+)", note.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match.group(1)
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `"2.12.0.post3"` gives `(2, 12, 0)`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
