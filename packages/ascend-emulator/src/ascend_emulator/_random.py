"""CPU generators that stand in for npu generators. It owns seeds and offsets, not distributions.

Each draw is a function of the npu generator's (seed, offset), so manual_seed and saving and restoring a state work. A
captured draw has a generator of its graph, which every replay seeds anew when it is issued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["next_seed", "seeded", "source_of", "with_default_generator"]

_MASK = 0x7FFFFFFFFFFFFFFF


def source_of(generator: Any, device_index: int) -> Any:
    """The npu generator that an operator draws from: the given one, else the device's default one."""
    return torch.npu.default_generators[device_index] if generator is None else generator  # type: ignore[attr-defined]


def next_seed(source: Any) -> int:
    """A seed for the next draw of an npu generator, whose offset moves on."""
    offset = source.get_offset()
    source.set_offset(offset + 4)
    return int((source.initial_seed() * 1000003 + offset) & _MASK)


def seeded(source: Any) -> torch.Generator:
    """A CPU generator for one draw of an npu generator."""
    generator = torch.Generator()
    generator.manual_seed(next_seed(source))
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
