"""CPU generators that stand in for npu generators. It owns seeds and offsets, not distributions.

Eager: a function of the npu generator's (seed, offset), so manual_seed and saving and restoring a state work. In a
capture: one running generator per npu generator, so that every replay draws new numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["generator_for", "with_default_generator"]

_MASK = 0x7FFFFFFFFFFFFFFF
_RUNNING: dict[int, tuple[Any, torch.Generator]] = {}  # by id; the npu generator is kept so that the id stays its own


def generator_for(source: Any, device_index: int, *, capturing: bool) -> torch.Generator:
    """The CPU generator for an npu generator (None: the device's default one)."""
    if source is None:
        source = torch.npu.default_generators[device_index]  # type: ignore[attr-defined]
    if capturing:
        entry = _RUNNING.get(id(source))
        if entry is None:
            entry = _RUNNING[id(source)] = (source, torch.Generator())
            entry[1].manual_seed(source.initial_seed() & _MASK)
        return entry[1]
    offset = source.get_offset()
    generator = torch.Generator()
    generator.manual_seed((source.initial_seed() * 1000003 + offset) & _MASK)
    source.set_offset(offset + 4)
    return generator


def with_default_generator(call: Callable[..., Any], generator: torch.Generator) -> Callable[..., Any]:
    """`call` with the CPU's default generator seeded from `generator` for its duration."""

    def run(*args: Any, **kwargs: Any) -> Any:
        default = torch.default_generator
        state = default.get_state()
        default.manual_seed(int(torch.randint(_MASK, (), generator=generator)))
        try:
            return call(*args, **kwargs)
        finally:
            default.set_state(state)

    return run
