"""Lets torch_npu 2.13 load beside a torch that was built for CUDA. It owns the names that both of them register.

torch_npu is made for a torch without CUDA. From 2.13 on it names its allocator options to torch, which ends the process
when a name is taken; two of them are options of CUDA's allocator, which has no device here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ._build import OPTIONS, build_options

__all__ = ["make_room"]

_TAKEN = (b"per_process_memory_fraction", b"pinned_reserve_segment_size_mb")
_SET_OF_NAMES = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"


def make_room() -> None:
    """Take CUDA's names of options that torch_npu registers too out of torch's set; call it before torch_npu's import.

    Raises:
        CompilerNotFoundError: names are taken and there is no C++ compiler.
        RuntimeBuildError: the C++ compiler failed.
    """
    names = getattr(ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libc10.so")), _SET_OF_NAMES, None)
    if torch.version.cuda is None or names is None:  # before 2.13 torch_npu registers no names
        return
    names.restype = ctypes.c_void_p
    forget = ctypes.CDLL(str(build_options() / OPTIONS)).emulator_forget_option
    forget.argtypes, forget.restype = [ctypes.c_void_p, ctypes.c_char_p], None
    for name in _TAKEN:
        forget(names(), name)
