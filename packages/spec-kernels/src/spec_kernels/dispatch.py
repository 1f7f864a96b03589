"""Owns the choice of a backend: for an op and a device, one eligible backend or an error that lists all with reasons.

Backends are named by import string and imported only when loaded. It does not own what an op means.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch

from spec_kernels.capabilities import Capabilities, detect, parse_version
from spec_kernels.errors import BackendError, UnknownOp

__all__ = ["BackendName", "BackendStatus", "BackendTable", "backends", "choose", "load", "ops"]

BackendName: TypeAlias = Literal["native", "triton", "npu"]

_PREFERENCE: tuple[BackendName, ...] = ("npu", "triton", "native")


@dataclass(frozen=True)
class _Backend:
    target: str
    device_types: tuple[str, ...] | None = None
    torch_npu: str | None = None
    triton: str | None = None


def _family(module: str, *names: str) -> dict[str, dict[BackendName, _Backend]]:
    """Ops whose native and Triton versions stand under their own names in one module of each backend."""
    return {
        name: {
            "native": _Backend(f"spec_kernels.native.{module}:{name}"),
            "triton": _Backend(f"spec_kernels.triton.{module}:{name}", triton="3.2.0"),
        }
        for name in names
    }


# The least torch_npu version is the oldest whose operator schema was checked; the least Triton is what
# triton-ascend 3.2 brings.
_OPS: dict[str, dict[BackendName, _Backend]] = {
    "paged_attention": {
        "native": _Backend("spec_kernels.native.attention:run"),
        "triton": _Backend("spec_kernels.triton.attention:run", triton="3.2.0"),
        "npu": _Backend("spec_kernels.npu.attention:run", ("npu",), torch_npu="2.12.0"),
    },
    "ragged_paged_attention": {
        "native": _Backend("spec_kernels.native.attention:run"),
        "triton": _Backend("spec_kernels.triton.attention:run", triton="3.2.0"),
        "npu": _Backend("spec_kernels.npu.attention:run_ragged", ("npu",), torch_npu="2.12.0"),
    },
    "expert_parallel_moe": {
        "native": _Backend("spec_kernels.native.moe:run"),
        "npu": _Backend("spec_kernels.npu.moe:run", ("npu",), torch_npu="2.12.0"),
    },
    **_family("chain", "accept_chain"),
    "fill_draft_extend_buffers": {
        "native": _Backend("spec_kernels.native.draft_extend:run"),
        "triton": _Backend("spec_kernels.triton.draft_extend:run", triton="3.2.0"),
    },
    **_family("widened", "rotate_input_ids", "append_to_stash", "widened_inputs", "widened_locs"),
    **_family("softmax", "wide_row_softmax"),
    **_family("dflash", "prepare_block", "accept_block"),
    **_family("rolling", "causal_conv1d_update", "keep_states"),
    "write_kv": {
        **_family("kv_writes", "write_kv")["write_kv"],
        "npu": _Backend("spec_kernels.npu.kv_writes:write_kv", ("npu",), torch_npu="2.12.0"),
    },
    **_family("cache_locs", "uniform_cache_locs", "extend_cache_locs", "translate_locs", "compact_window_rows"),
    **_family("cache_locs", "fill_block_table"),
    **_family("accepted", "compact_accepted_locs", "accepted_moves", "move_kv"),
    **_family("steps", "bonus_tokens", "verify_commit_outputs", "draft_extend_inputs", "draft_extend_layout"),
    **_family("trees", "build_chain_tree", "build_tree", "full_tree_mask", "verify_tree_greedy"),
    **_family("sampling", "sample_chain", "sample_tree"),
}

_NO_OPERATOR = "neither torch_npu nor sgl_kernel_npu has an operator of this contract"
_ABSENT: dict[tuple[str, BackendName], str] = {
    ("expert_parallel_moe", "triton"): "ranks exchange messages between its products, which a kernel cannot",
    ("uniform_cache_locs", "npu"): "sgl_kernel_npu's cache_loc_update holds 16 positions a row and faults on overruns",
    ("extend_cache_locs", "npu"): "sgl_kernel_npu's cache_loc_update holds 16 positions a row and faults on overruns",
    ("build_tree", "npu"): "sgl_kernel_npu's operator does not end on a tree with an orphan",
    ("verify_tree_greedy", "npu"): "sgl_kernel_npu's kernel follows the chain only, not siblings",
    ("sample_chain", "npu"): "sgl_kernel_npu's kernel accepts drafts of q = 0 and gives garbage for NaN",
    ("sample_tree", "npu"): "sgl_kernel_npu's is a Triton kernel too, and reads a coin a node instead of a level",
    ("keep_states", "npu"): "sgl_kernel_npu's is a Triton kernel too",
    ("causal_conv1d_update", "npu"): "sgl_kernel_npu's operator takes kernels of 2 to 4, in 16 bits, channels last",
}
"""Why an op has no version on a backend; others without an entry have no operator to call."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can serve an op on a device.

    Attributes:
        op: The op.
        backend: The backend.
        reason: Why it is not eligible; `None` when it is.
    """

    op: str
    backend: BackendName
    reason: str | None

    @property
    def eligible(self) -> bool:
        """Whether the backend can be chosen."""
        return self.reason is None

    def __str__(self) -> str:
        return f"{self.op} on {self.backend}: {self.reason or 'eligible'}"


class BackendTable(tuple[BackendStatus, ...]):
    """Statuses of ops; printed, a line an op with its backends and why some cannot serve."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = list(dict.fromkeys(status.op for status in self))
        width = max(map(len, names), default=0)
        lines = []
        for name in names:
            cells = [f"{s.backend}: {s.reason or 'yes'}" for s in self if s.op == name]
            lines.append(f"{name.ljust(width)}  {'; '.join(cells)}")
        return "\n".join(lines)

    __str__ = __repr__


def ops() -> tuple[str, ...]:
    """Return the names of all ops."""
    return tuple(_OPS)


def backends(
    op: str | None = None, device: torch.device | str = "cpu", *, capabilities: Capabilities | None = None
) -> BackendTable:
    """Return the status of every backend for an op on a device, in order of preference; printed, it is a table.

    Args:
        op: Name of the op; all when `None`.
        device: A device or its name; only its type matters.
        capabilities: What the machine has; detected when `None`.

    Raises:
        UnknownOp: There is no such op.
    """
    have = detect() if capabilities is None else capabilities
    if op is None:
        return BackendTable(status for name in _OPS for status in backends(name, device, capabilities=have))
    table = _OPS.get(op)
    if table is None:
        raise UnknownOp(
            "op",
            given=op,
            expected=f"one of {list(_OPS)}",
            consequence="there is nothing to choose from",
            remedy="check the name",
        )
    device_type = _device_type(device)
    return BackendTable(BackendStatus(op, name, _reason(op, name, device_type, have)) for name in _PREFERENCE)


def choose(
    op: str,
    device: torch.device | str,
    backend: BackendName | None = None,
    *,
    capabilities: Capabilities | None = None,
) -> BackendName:
    """Return the backend that serves an op on a device.

    Args:
        op: Name of the op.
        device: A device or its name; only its type matters.
        backend: Insist on this one; `None` takes the first eligible of npu, triton, native. Triton's interpreter is
            never taken unasked.
        capabilities: What the machine has; detected when `None`.

    Raises:
        UnknownOp: There is no such op.
        BackendError: The backend is not eligible; the text lists the eligible ones and every reason.
    """
    return _choose(op, _device_type(device), backend, detect() if capabilities is None else capabilities)


@lru_cache(maxsize=256)
def _choose(op: str, device_type: str, backend: BackendName | None, capabilities: Capabilities) -> BackendName:
    statuses = backends(op, device_type, capabilities=capabilities)
    eligible = [status.backend for status in statuses if status.eligible]
    if backend is None and eligible:
        return "native" if device_type == "cpu" and "native" in eligible else eligible[0]
    if backend is not None and backend in eligible:
        return backend
    raise BackendError(
        "backend",
        given=backend,
        expected=f"one of {eligible} for {op} on {device_type}",
        consequence="; ".join(str(status) for status in statuses if not status.eligible),
        remedy="leave backend out to get the first eligible one",
    )


def _device_type(device: torch.device | str) -> str:
    # A string is not turned into a device: torch knows "npu" only after torch_npu was imported.
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def load(op: str, backend: BackendName) -> Any:
    """Import and return the function behind a backend that `choose` returned."""
    module, _, attribute = _OPS[op][backend].target.partition(":")
    return getattr(import_module(module), attribute)


def _reason(op: str, backend: BackendName, device_type: str, have: Capabilities) -> str | None:
    entry = _OPS[op].get(backend)
    if entry is None:
        return _ABSENT.get((op, backend), _NO_OPERATOR)
    if entry.device_types is not None and device_type not in entry.device_types:
        return f"serves {' and '.join(entry.device_types)} only"
    if entry.triton is not None:
        return _triton_reason(entry.triton, device_type, have)
    if entry.torch_npu is not None:
        if have.torch_npu is None:
            return "torch_npu is not installed"
        if parse_version(have.torch_npu) < parse_version(entry.torch_npu):
            return f"needs torch_npu {entry.torch_npu}, found {have.torch_npu}"
        if have.load_error is not None:
            return f"torch_npu {have.torch_npu} cannot be loaded: {have.load_error}"
    return None


def _triton_reason(least: str, device_type: str, have: Capabilities) -> str | None:
    version, package = (have.triton_ascend, "triton-ascend") if device_type == "npu" else (have.triton, "triton")
    if device_type == "cpu":  # either brings the interpreter
        version = have.triton or have.triton_ascend
    if version is None:
        return f"{package} is not installed"
    if parse_version(version) < parse_version(least):
        return f"needs {package} {least}, found {version}"
    if device_type == "cpu" and not have.interpreter:
        return "serves a cpu in Triton's interpreter only (TRITON_INTERPRET=1)"
    if device_type != "cpu" and have.interpreter:
        return "TRITON_INTERPRET is set, and the interpreter serves cpu only"
    return None
