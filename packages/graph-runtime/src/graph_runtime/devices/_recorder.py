"""Records the torch ops of one call as nodes that can be run again into the same memory.

It owns what a node is and which ops are refused. It does not replay them and knows nothing of updates; `cpu.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graph_runtime.devices._origins import Origins, storage_key
from graph_runtime.errors import CaptureRefused

__all__ = ["HostReadGuard", "Node", "Recorder"]

_RESIZING = frozenset({"resize_", "resize_as_", "_resize_output_", "set_", "resize_as_sparse_"})
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_LIFTING = frozenset({"lift", "lift_fresh"})  # what torch.tensor, as_tensor, new_tensor and from_numpy end with
_HOST_READS = ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__")


def _refuse(op: str, why: str, remedy: str) -> CaptureRefused:
    return CaptureRefused(
        f"captured op {op}",
        expected="an op whose result depends on its tensors alone and has a fixed shape",
        got=f"{op}: {why}",
        consequence="A replay would repeat what was true at capture.",
        remedy=remedy,
    )


class Node:
    """One op to run again: the call, and the captured tensors that receive new results.

    Attributes:
        func: The op.
        args: Positional arguments; tensors are aliases of the captured ones.
        kwargs: Keyword arguments.
        results: Per flat output of the op, the captured tensor to write, or None where the op itself wrote it.
        into: An `.out` form of the op and the names of its out arguments, where there is one.
    """

    __slots__ = ("args", "func", "into", "kwargs", "results")

    def __init__(
        self,
        func: torch._ops.OpOverload,
        args: list[Any],
        kwargs: dict[str, Any],
        results: list[torch.Tensor | None],
        into: tuple[torch._ops.OpOverload, tuple[str, ...]] | None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.results = results
        self.into = into

    def run(self) -> None:
        """Runs the op once more; the captured tensors hold its results afterwards."""
        if self.into is not None:
            func, names = self.into
            func(*self.args, **self.kwargs, **dict(zip(names, self.results, strict=True)))
            return
        produced = self.func(*self.args, **self.kwargs)
        if not self.results:
            return
        fresh = [leaf for leaf in tree_leaves(produced) if isinstance(leaf, torch.Tensor)]
        for target, value in zip(self.results, fresh, strict=True):
            if target is not None:
                if target.shape != value.shape or target.dtype != value.dtype:
                    raise _refuse(
                        str(self.func),
                        f"it gave {tuple(target.shape)} at capture and {tuple(value.shape)} now",
                        "Keep shapes fixed within a bucket.",
                    )
                target.copy_(value)

    def argument(self, name: str) -> tuple[list[Any] | dict[str, Any], int | str] | None:
        """Where the value of a schema argument is kept, or None when it was not passed."""
        if name in self.kwargs:
            return self.kwargs, name
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name and index < len(self.args):
                return self.args, index
        return None


def _out_form(
    func: torch._ops.OpOverload, results: Sequence[torch.Tensor | None]
) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload with the same arguments and one out argument a result, if there is one."""
    if func.namespace != "aten" or not results or any(result is None for result in results):
        return None
    own = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    if len(func._schema.returns) != len(results):
        return None
    packet: Any = func._overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        extra = arguments[len(own) :]
        if (
            len(extra) == len(results)
            and [(argument.name, str(argument.type)) for argument in arguments[: len(own)]] == own
            and all(argument.is_out and str(argument.type) == "Tensor" for argument in extra)
        ):
            return candidate, tuple(argument.name for argument in extra)
    return None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Runs every op and notes it as a node.

    Views and changes of metadata need no node: the consumers of a view hold its address, sizes and strides. A constant
    made from Python numbers gets a node that restores it, as the code would make it anew in every call.

    Args:
        device_type: Tensors of other devices are refused.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.inside = False
        self._device_type = device_type
        self._origins = Origins()

    @property
    def nbytes(self) -> int:
        """Bytes that the ops recorded so far hold for a replay."""
        return self._origins.nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        self._check(func, args, keywords)
        self.inside = True
        try:
            result = func(*args, **keywords)
            self._note(func, args, keywords, result)
        finally:
            self.inside = False
        return result

    def _check(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = str(func)
        base = func._overloadpacket.__name__
        if base in _RESIZING:
            raise _refuse(name, "it moves or resizes memory", "Allocate outside the captured function.")
        if torch.Tag.data_dependent_output in func.tags:
            raise _refuse(name, "it reads a value to the host", "Keep the value on the device, or pass it as a list.")
        if torch.Tag.dynamic_output_shape in func.tags and not self._has_static_shape(base, args, kwargs):
            raise _refuse(name, "the shape of its result depends on values", "Use a mask of fixed shape.")
        if torch.Tag.nondeterministic_seeded in func.tags and not self._without_dropout(func, args, kwargs):
            raise _refuse(name, "it draws random numbers", "Draw them outside and pass them in a static buffer.")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != self._device_type:
                raise _refuse(name, f"an argument is on {leaf.device}", f"Keep tensors on {self._device_type}.")
        for leaf in tree_leaves(_written(func, args, kwargs)):
            if isinstance(leaf, torch.Tensor) and self._origins.is_foreign(leaf):
                raise _refuse(
                    name,
                    "it writes memory that the captured code took from numpy, a buffer or DLPack, whose first content "
                    "no replay could restore",
                    "Make the tensor before the capture, or with a torch factory such as torch.zeros or torch.tensor.",
                )

    @staticmethod
    def _has_static_shape(base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if base in {"index", "_unsafe_index"}:
            return not any(
                isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)
                for leaf in tree_leaves(args[1])
            )
        return base == "repeat_interleave" and kwargs.get("output_size") is not None

    @staticmethod
    def _without_dropout(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        for index, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
                return bool(value == 0)
        return False

    def _note(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        base = func._overloadpacket.__name__
        if torch.Tag.inplace_view in func.tags:
            return
        if base in _LIFTING and isinstance(result, torch.Tensor):
            self._note_constant(result)
            return
        inputs = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        results = [None if storage_key(leaf) in inputs else leaf.detach() for leaf in outputs]
        for leaf in results:
            if leaf is not None:
                self._origins.produced(leaf)
        if base in _UNINITIALISED:
            return
        mutable = func._schema.is_mutable
        if not mutable and outputs and all(leaf is None for leaf in results):
            return
        # Aliases: later changes of the caller's tensor objects (`.data =`, transpose_) must not be seen by a replay.
        held_args, held_kwargs = tree_map_only(torch.Tensor, lambda leaf: leaf.detach(), (list(args), dict(kwargs)))
        into = None if mutable else _out_form(func, results)
        if all(leaf is None for leaf in results):
            results = []
        self.nodes.append(Node(func, held_args, held_kwargs, results, into))

    def _note_constant(self, made: torch.Tensor) -> None:
        if self._origins.is_produced(made) or self._origins.is_foreign(made):
            return  # an op's result; or memory of others, which is only read (see `_check`) and so needs no restoring
        self._origins.produced(made)
        copy: Any = torch.ops.aten.copy_.default
        self.nodes.append(Node(copy, [made.detach(), made.detach().clone()], {}, [], None))


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the op's schema says it writes."""
    if not func._schema.is_mutable:
        return []
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


class HostReadGuard(TorchFunctionMode):
    """Refuses what reads a tensor to the host without passing the dispatcher, such as `tolist`.

    Args:
        recorder: While it runs an op, the op's own code may do as it likes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not self._recorder.inside and name in _HOST_READS and getattr(torch.Tensor, name, None) is func:
            raise _refuse(
                f"Tensor.{name}", "it reads a value to the host", "Keep it on the device, or pass it as a list."
            )
        return func(*args, **(kwargs or {}))
