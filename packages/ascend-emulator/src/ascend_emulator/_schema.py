"""What an operator's schema says about its arguments and results, read once at registration. It runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .kernels import REGISTRY, UNDECLARED_WRITES

__all__ = ["Plan", "find_operator", "plan_of"]

_CONTAINERS = ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]", "Optional[List[Optional[Tensor]]]")
# Operators of which one tensor may live on the host.
_MIXING = ("index", "copy", "to_copy", "embedding_bag", "where", "masked_fill", "lerp", "addc", "set_")

# Operators whose tensors torch_npu refuses on the host; those of atb take lengths from there.
_ADDRESSES = ("npu::", "_C_ascend::")


@dataclass(frozen=True)
class Argument:
    """One argument that is not plain data."""

    position: int
    name: str
    keyword_only: bool
    kind: str  # "tensor", "tensors", "device" or "generator"
    written: bool


@dataclass(frozen=True)
class Plan:
    """How to call an operator on aliases and what to do with what it returns.

    Attributes:
        name: qualified name with overload.
        base: qualified name without overload.
        short: name without namespace and overload.
        arguments: those that hold tensors, devices or generators.
        positional: position, kind and written of those that may come by position, for the fast path.
        keywords: kind and written by name.
        returns: per result, the index in `written` of the argument that it is, or None for a new tensor.
        written: the arguments that the operator writes.
        resizes: whether written arguments are out= arguments, which may be resized.
        gives_out: whether the results are the tensors of the list `out`, which the schema does not say; they are never
            resized.
        strict: whether all tensors with dimensions must be on one device.
        on_device: whether all tensors must be on one npu: torch_npu gives their addresses to the device kernel.
        needs_host: whether a result is a number or has a shape that depends on data.
        is_index: whether it is `index`, whose result depends on data when it is given a mask.
        parameters: position and default of every argument.
        randomness: "generator" (has an argument for it), "default" (uses the default generator) or "".
    """

    name: str
    base: str
    short: str
    arguments: tuple[Argument, ...]
    positional: tuple[tuple[int, str, bool], ...]
    keywords: dict[str, tuple[str, bool]]
    written: tuple[Argument, ...]
    returns: tuple[int | None, ...]
    resizes: bool
    gives_out: bool
    strict: bool
    on_device: bool
    needs_host: bool
    randomness: str
    is_index: bool = field(default=False)
    parameters: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def value(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """An argument of a call by its name, or its default; None when the operator has no such argument."""
        if name in kwargs:
            return kwargs[name]
        position, default = self.parameters.get(name, (len(args), None))
        return args[position] if position < len(args) else default


def find_operator(name: str) -> Any:
    """The overload behind a name such as "npu::npu_rms_norm" or "aten::add.out".

    Raises:
        AttributeError: no such operator.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _kind(text: str) -> str | None:
    if text in ("Tensor", "Optional[Tensor]"):
        return "tensor"
    if text in _CONTAINERS:
        return "tensors"
    if "Device" in text or text in ("device", "Optional[device]"):
        return "device"
    if "Generator" in text:
        return "generator"
    return None


def plan_of(name: str, operator: Any) -> Plan:
    """Read an operator's schema."""
    schema = operator._schema
    arguments, sets = [], []
    for position, argument in enumerate(schema.arguments):
        kind = _kind(str(argument.type))
        if kind is None:
            continue
        info = argument.alias_info
        marked = info is not None and info.is_write
        written = marked or argument.name in UNDECLARED_WRITES.get(name, ())
        arguments.append(Argument(position, argument.name, argument.kwarg_only, kind, written))
        if written:
            sets.append(set(info.before_set) if marked else set())
    written = tuple(a for a in arguments if a.written)
    returns: list[int | None] = []
    for result in schema.returns:
        info = result.alias_info
        if info is None or not info.is_write:
            returns.append(None)
            continue
        own = set(info.before_set)
        returns.append(next(i for i, other in enumerate(sets) if own & other))
    listed = any(a.name == "out" and a.kind == "tensors" and not a.written for a in arguments)
    tags = getattr(operator, "tags", ())
    base = schema.name.partition("::")[2]
    plain = [str(r.type) for r in schema.returns if "Tensor" not in str(r.type)]
    is_index = base in ("index", "_unsafe_index")
    has_generator = any(a.kind == "generator" for a in arguments)
    seeded = torch.Tag.nondeterministic_seeded in tags
    return Plan(
        name=name,
        base=schema.name,
        short=base,
        arguments=tuple(arguments),
        positional=tuple((a.position, a.kind, a.written) for a in arguments if not a.keyword_only),
        keywords={a.name: (a.kind, a.written) for a in arguments},
        written=written,
        returns=tuple(returns),
        resizes=any(a.keyword_only for a in written),
        gives_out=listed and all(index is None for index in returns),
        strict=schema.name.startswith("aten::") and not any(word in base for word in _MIXING),
        on_device=name in REGISTRY and name.startswith(_ADDRESSES),
        needs_host=bool(plain) or (torch.Tag.dynamic_output_shape in tags and not is_index),
        randomness="generator" if has_generator else "default" if seeded else "",
        is_index=is_index,
        parameters={a.name: (i, a.default_value) for i, a in enumerate(schema.arguments)},
    )
