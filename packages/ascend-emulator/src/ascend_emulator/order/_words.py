"""What an operator touches, as the words that `emulator_order_access` (runtime/order.c) takes. It decides nothing.

Per tensor: addresses of the names of operator, argument and dtype, whether it is written, bytes of an element, address
of the first element, graph and node of a replay (else 0), number of dimensions, sizes, strides in elements.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, TypeAlias

import torch

from ascend_emulator._runtime import UNKNOWN, runtime
from ascend_emulator._schema import Argument, Plan

from ._rows import REFINED, UNMARKED_WRITES, Refine, Rows

__all__ = [
    "Accesses",
    "Refined",
    "accesses_of",
    "bytes_accesses",
    "plain_accesses",
    "results_of",
    "text",
    "touches_rows",
    "with_results",
    "words_of",
]

_TEXTS: dict[str, Any] = {}
_DTYPES: dict[torch.dtype, int] = {}
_Tensor = torch.Tensor


def text(value: str) -> int:
    """Address of a C string that stays."""
    held = _TEXTS.get(value)
    if held is None:
        held = _TEXTS.setdefault(value, ctypes.create_string_buffer(value.encode()))
    return ctypes.addressof(held)


def _dtype(dtype: torch.dtype) -> int:
    address = _DTYPES.get(dtype)
    if address is None:
        address = _DTYPES[dtype] = text(str(dtype).removeprefix("torch."))
    return address


def _add(words: array[int], operator: int, argument: str, tensor: torch.Tensor, written: bool) -> None:
    shape = tensor.shape
    words.extend(
        (
            operator,
            text(argument),
            _dtype(tensor.dtype),
            written,
            tensor.element_size(),
            tensor.data_ptr(),
            0,
            len(shape),
        )
    )
    words.extend(shape)
    words.extend(tensor.stride())


def _add_rows(words: array[int], operator: int, argument: str, tensor: torch.Tensor, written: bool, rows: Rows) -> None:
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if rows.leading == 2:
        sizes, strides = [sizes[0] * sizes[1], *sizes[2:]], strides[1:]
    size, start = tensor.element_size(), tensor.data_ptr()
    head = (operator, text(argument), _dtype(tensor.dtype), written, size)
    for first, count in rows.runs(sizes[0]):
        words.extend((*head, start + first * strides[0] * size, 0, len(sizes), count, *sizes[1:], *strides))


def touches_rows(plan: Plan) -> bool:
    """Whether an operator touches only those rows of a tensor that its index tensors name."""
    return plan.base in REFINED


class Refined:
    """What an operator touches when its index tensors say which rows: known when the stream reaches it."""

    __slots__ = ("plan", "refine", "results", "touched")

    def __init__(self, plan: Plan, refine: Refine, args: Any, kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.refine = refine
        self.results = array("q")  # words of new results
        self.touched: list[tuple[Argument, list[bool]]] = []  # arguments with tensors; which lie on the device
        for argument in plan.arguments:
            value = plan.value(argument.name, args, kwargs)
            items = [value] if isinstance(value, _Tensor) else value if argument.kind == "tensors" and value else []
            device = [isinstance(item, _Tensor) and not item.is_cpu for item in items]
            if any(device):
                self.touched.append((argument, device))

    def words(self, args: Any, kwargs: dict[str, Any]) -> array[int]:
        """The words, from the arguments as the CPU kernel takes them: tensors over the same bytes."""
        plan = self.plan
        try:
            rows = self.refine(lambda name: plan.value(name, args, kwargs))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError):
            rows = {}  # arguments that the kernel will refuse in its own words
        words = array("q")
        operator, unmarked = text(plan.name), UNMARKED_WRITES.get(plan.base, ())
        for argument, device in self.touched:
            value, written = plan.value(argument.name, args, kwargs), argument.written or argument.name in unmarked
            some = rows.get(argument.name)
            if some is not None and value.dim() >= some.leading:  # a tensor without dimensions has no rows
                _add_rows(words, operator, argument.name, value, written, some)
                continue
            for item, there in zip([value] if isinstance(value, _Tensor) else value, device, strict=True):
                if there:
                    _add(words, operator, argument.name, item, written)
        return words + self.results


Accesses: TypeAlias = "array[int] | Refined"


def accesses_of(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Accesses:
    """What an operator touches of device memory, from its arguments as the caller gave them."""
    refine = REFINED.get(plan.base)
    if refine is not None:
        return Refined(plan, refine, args, kwargs)
    words = array("q")
    operator, unmarked = text(plan.name), UNMARKED_WRITES.get(plan.base, ())
    for argument in plan.arguments:
        value, written = plan.value(argument.name, args, kwargs), argument.written or argument.name in unmarked
        if isinstance(value, _Tensor):
            if not value.is_cpu:
                _add(words, operator, argument.name, value, written)
        elif argument.kind == "tensors" and value is not None:
            for item in value:
                if isinstance(item, _Tensor) and not item.is_cpu:
                    _add(words, operator, argument.name, item, written)
    return words


def words_of(accesses: Accesses, args: Any, kwargs: dict[str, Any]) -> array[int]:
    """The words, now that the stream has reached the work, whose arguments are given as the CPU kernel takes them."""
    return accesses.words(args, kwargs) if isinstance(accesses, Refined) else accesses


def with_results(accesses: Accesses, results: array[int]) -> Accesses:
    """The same and writes to new results."""
    if not isinstance(accesses, Refined):
        return accesses + results
    accesses.results = results
    return accesses


def results_of(plan: Plan, tensors: list[torch.Tensor]) -> array[int]:
    """What an operator writes besides its arguments: its new results."""
    words = array("q")
    operator = text(plan.name)
    for i, tensor in enumerate(tensors):
        _add(words, operator, f"result {i}" if len(tensors) > 1 else "result", tensor, True)
    return words


def plain_accesses(name: str, reads: dict[str, torch.Tensor], writes: dict[str, torch.Tensor]) -> array[int]:
    """Accesses to tensors (of device or pinned memory) by argument name."""
    words = array("q")
    operator = text(name)
    for argument, tensor in reads.items():
        _add(words, operator, argument, tensor, False)
    for argument, tensor in writes.items():
        _add(words, operator, argument, tensor, True)
    return words


def bytes_accesses(name: str, reads: dict[str, int], writes: dict[str, int], nbytes: int) -> array[int]:
    """Accesses to plain bytes by address; addresses that the runtime did not give out are left out."""
    words = array("q")
    for addresses, written in ((reads, False), (writes, True)):
        for argument, address in addresses.items():
            if runtime.locate(address)[0] != UNKNOWN:
                words.extend((text(name), text(argument), text("bytes"), written, 1, address, 0, 1, nbytes, 1))
    return words
