"""What a runner calls around its own work: attention metadata, profiling ranges, a memory saver.

It owns the names of these places. It does not own what is done there; `before_step` of a runner is the place
outside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from .step import StepInputs

__all__ = ["Hooks", "MemorySaver"]


class MemorySaver(Protocol):
    """Who can take memory away and give it back at the same addresses, contents lost."""

    def region(self) -> AbstractContextManager[object]:
        """Memory allocated in the block belongs to the saver; entered around every warm-up and capture."""
        ...

    def pause(self) -> None:
        """Gives the memory back to the device."""
        ...

    def resume(self) -> None:
        """Maps memory at the same addresses again."""
        ...


def _no_range(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Hooks:
    """Places around a runner's work; all may be left out.

    Attributes:
        inside: Called before the forward and captured with it: attention metadata that device work makes from the
            static inputs. It follows the rules of a forward.
        after_warmup: Called after each warm-up of a bucket, to undo what a forward leaves behind.
        profile: Opens a range named ``load``, ``before_step``, ``update``, ``replay``, ``eager`` or ``capture``, for
            instance `torch.profiler.record_function`.
        memory: Holds the memory of graphs; see `DecodeRunner.pause`.
    """

    inside: Callable[[StepInputs], None] | None = None
    after_warmup: Callable[[StepInputs], None] | None = None
    profile: Callable[[str], AbstractContextManager[object]] = _no_range
    memory: MemorySaver | None = None

    def around(self, forward: Callable[[StepInputs], Any]) -> Callable[[StepInputs], Any]:
        """The forward with `inside` before it."""
        inside = self.inside
        if inside is None:
            return forward

        def both(inputs: StepInputs) -> Any:
            inside(inputs)
            return forward(inputs)

        return both
