"""Errors that the emulator raises. It owns their types and attributes, not the rules that raise them.

Every error subclasses `EmulatorError` and the nearest builtin; the text says what happened, which values were involved
and what to do, and the values are attributes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .order import AccessInfo

__all__ = [
    "AlreadyLoadedError",
    "CaptureError",
    "CaptureFailedError",
    "CompilerNotFoundError",
    "DeadlockError",
    "DeferredExecutionError",
    "DoubleUpdateError",
    "EmulatorError",
    "FenceError",
    "HostRaceError",
    "InstallError",
    "KernelNotFoundError",
    "MissingPackageError",
    "NotInstalledError",
    "OperatorNotEmulatedError",
    "RaceError",
    "RuntimeBuildError",
    "VersionPairError",
    "WrongDeviceError",
]


class EmulatorError(Exception):
    """Base of all errors of this package."""

    acl_code = 507000


class InstallError(EmulatorError, RuntimeError):
    """The emulator cannot be installed in this process."""


class AlreadyLoadedError(InstallError):
    """`torch_npu` was imported before `ascend_emulator.install()`."""

    def __init__(self) -> None:
        super().__init__(
            "torch_npu is already imported in this process without the emulator's runtime, so it cannot be placed "
            "under it any more. Call ascend_emulator.install() before the first import of torch_npu; with torch_npu "
            "installed, `import torch` itself imports it unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set."
        )


class MissingPackageError(InstallError, ImportError):
    """torch or torch_npu is not installed."""

    def __init__(self, package: str, supported: str) -> None:
        self.package = package
        super().__init__(
            f"the package {package} is not installed; the emulator runs the real torch_npu. "
            f"Supported pair: {supported}. "
            'Install it with: python -m pip install "ascend-emulator[npu]"'
        )


class VersionPairError(InstallError):
    """The installed torch and torch_npu do not form a supported pair."""

    def __init__(self, torch_version: str, torch_npu_version: str, supported: str) -> None:
        self.torch_version = torch_version
        self.torch_npu_version = torch_npu_version
        self.supported = supported
        super().__init__(
            f"torch {torch_version} and torch_npu {torch_npu_version} do not form a supported pair; torch_npu would "
            f"abort or misbehave. Supported: {supported}. Install that pair with: "
            'python -m pip install "ascend-emulator[npu]"'
        )


class CompilerNotFoundError(InstallError):
    """No C compiler was found to build the runtime library, or no C++ compiler for the compiled operators."""

    def __init__(self, tried: tuple[str, ...], language: str = "C") -> None:
        self.tried = tried
        self.language = language
        package, variable = ("gcc", "CC") if language == "C" else ("g++", "CXX")
        super().__init__(
            f"no {language} compiler was found (tried {', '.join(tried)}); the emulator builds its libraries once per "
            f"machine. Install {package} or clang (Debian: apt-get install {package}), "
            f"or set the environment variable {variable} to a compiler."
        )


class RuntimeBuildError(InstallError):
    """The compiler refused the runtime library or the compiled operators."""

    def __init__(self, command: str, output: str) -> None:
        self.command = command
        self.output = output
        super().__init__(f"building a library of the emulator failed.\ncommand: {command}\noutput:\n{output}")


class NotInstalledError(EmulatorError, RuntimeError):
    """Something that needs the emulator was called before `install()`."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} needs the emulator: call ascend_emulator.install() first.")


class KernelNotFoundError(EmulatorError, LookupError):
    """A kernel was registered for an operator that does not exist."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"register_kernel({name!r}): {reason}")


class OperatorNotEmulatedError(EmulatorError, NotImplementedError):
    """An operator was called that torch_npu runs as a device kernel, and for which nobody registered a kernel."""

    def __init__(self, name: str, schema: str, device_kernel: str) -> None:
        self.name = name
        self.schema = schema
        self.device_kernel = device_kernel
        super().__init__(
            f"{name} has no emulated kernel: torch_npu would launch {device_kernel} on the device. Register one with "
            f'ascend_emulator.register_kernel("{name}", kernel), where `kernel` gets a CPU tensor over the same bytes '
            f"for every npu tensor and returns or writes CPU tensors as the schema says: {schema}"
        )


class WrongDeviceError(EmulatorError, RuntimeError):
    """A tensor of an NPU operator is on the host or on another device than the first one; nothing was computed.

    Attributes:
        operator: its full name.
        argument: the argument that holds the tensor.
        device: where the tensor is.
        expected: where the first tensor of the call on a device is.
    """

    def __init__(self, operator: str, argument: str, tensor: torch.Tensor, expected: torch.device) -> None:
        self.operator = operator
        self.argument = argument
        self.device = tensor.device
        self.expected = expected
        super().__init__(
            "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
            f"device is correct.\n[ascend-emulator] {operator}: {argument} ({tensor.dtype}, shape "
            f"{tuple(tensor.shape)}) is on {self.device}, the call runs on {expected}: a device kernel would be given "
            f"an address that is not its own. Pass {argument}.to({str(expected)!r})."
        )


class CaptureError(EmulatorError, RuntimeError):
    """Something that needs data on the host was done while a graph was being captured (device error 107027)."""

    acl_code = 107027

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        super().__init__(
            f"error code is 107027 (stream is captured): {what} {reason}, and nothing is computed during a capture. "
            "Move it out of the captured region, or make it a device operation."
        )


class CaptureFailedError(EmulatorError, RuntimeError):
    """A capture has failed: something in it was refused, or a stream in it was not waited for."""

    acl_code = 107026

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the capture of this graph failed, so it cannot be replayed: {reason}")


class DeadlockError(EmulatorError, RuntimeError):
    """A wait cannot end: a stream waits for a flag that nobody sets."""

    def __init__(
        self,
        text: str,
        *,
        graph: int | None = None,
        record: int | None = None,
        operator: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.graph = graph
        self.record = record
        self.operator = operator
        self.seconds = seconds
        super().__init__(text)


class DoubleUpdateError(EmulatorError, RuntimeError):
    """A record was updated twice although no replay consumed the first update."""

    def __init__(self, graph: int, record: int, operator: str) -> None:
        self.graph, self.record, self.operator = graph, record, operator
        super().__init__(
            f"second graph.update() of record {record} ({operator}) of graph {graph} before a replay consumed the "
            "first. The flag behind an update is one word, so both would collapse into one and a later replay would "
            "wait for ever. Issue exactly one update per replay()."
        )


class FenceError(EmulatorError, RuntimeError):
    """A record's host arguments were rewritten while the replay that uses them may still run."""

    def __init__(self, graph: int, record: int, operator: str) -> None:
        self.graph, self.record, self.operator = graph, record, operator
        super().__init__(
            f"graph.update() rewrites the host arguments of record {record} ({operator}) of graph {graph}, but the "
            "host has not waited for the replay that consumed the previous ones: on a device that replay may read the "
            "new values. Wait for it first: synchronize an event recorded after replay(), the stream or the device, "
            "or read a result."
        )


class HostRaceError(EmulatorError, RuntimeError):
    """Pinned host memory was written by the host while a non-blocking copy from or to it was under way."""

    def __init__(self, end: str, copy: str) -> None:
        self.end = end
        self.copy = copy
        undefined = "which bytes were copied" if end == "source" else "whose bytes stay"
        super().__init__(
            f"the pinned {end} of the non-blocking {copy} was written before the host waited for the copy: on a "
            f"device it is undefined {undefined}. Synchronize an event or the stream before writing the "
            "buffer again, or alternate between two buffers."
        )


class RaceError(EmulatorError, RuntimeError):
    """Two streams touch the same bytes, one of them writes, and no event orders the two."""

    def __init__(
        self,
        earlier: AccessInfo,
        later: AccessInfo,
        low: int,
        high: int,
        *,
        reused: bool = False,
        captured: bool = False,
        place: str = "",
    ) -> None:
        self.earlier = earlier
        self.later = later
        self.low = low
        self.high = high
        self.reused = reused
        self.captured = captured
        where = f"{low:#x}..{high:#x}" + (f" ({place})" if place else "")
        if reused:
            remedy = (
                "The memory was freed and given to another tensor in between, while the first stream may still use "
                "it: call record_stream() on the first tensor before it is freed, or let its own stream wait."
            )
        else:
            remedy = (
                f"Let stream {later.stream} wait for an event that is recorded on stream {earlier.stream} after the "
                "first access."
            )
        inside = " Both are in one capture, so every replay has this race." if captured else ""
        super().__init__(
            f"race on {high - low} bytes, {where}: {later}, and {earlier}; no event, replay or wait of the host orders "
            f"the two, so on a device either may come first.{inside} {remedy}"
        )


class DeferredExecutionError(EmulatorError, RuntimeError):
    """Work that had been queued failed when it was run; `__cause__` is the kernel's own error."""

    acl_code = 507015

    def __init__(self, what: str, cause: BaseException) -> None:
        self.what = what
        super().__init__(
            f"{what} failed when the stream reached it: {type(cause).__name__}: {cause}. "
            "The rest of that work was dropped; the process can go on."
        )
