"""Imports an engine's package without the compiled library that it loads, whose operators the emulator defines.

It owns the stand-in module alone. Nothing of the library is imitated: what the package has in Python is the package's.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from ._install import is_installed
from .errors import NotInstalledError

__all__ = ["without_library"]


def without_library(name: str) -> ModuleType:
    """Make `import name` pass where the compiled library behind it cannot be loaded.

    For an extension module, such as "vllm_ascend.vllm_ascend_C", an empty module takes its place. For a package that
    loads a library when it is imported, such as "sgl_kernel_npu", a module takes its place whose submodules are the
    package's own and whose `__init__` does not run. A module that is imported already stays as it is.

    Args:
        name: dotted name of an installed module.

    Returns:
        The module, as `sys.modules` has it.

    Raises:
        NotInstalledError: before `install()`.
        ModuleNotFoundError: no such module is installed.
    """
    if not is_installed():
        raise NotInstalledError(f"without_library({name!r})")
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)  # imports the packages around it
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise ModuleNotFoundError(
            f"without_library: no module named {name!r} is installed; install the engine's package (with --no-deps "
            "where its wheel asks for CANN), or leave the call out",
            name=name,
        )
    paths = spec.submodule_search_locations
    module = ModuleType(name, f"{name} without its compiled library: ascend_emulator defines the operators.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=spec.origin, is_package=paths is not None)
    if paths is not None:
        module.__path__ = list(paths)
        module.__spec__.submodule_search_locations = list(paths)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module
