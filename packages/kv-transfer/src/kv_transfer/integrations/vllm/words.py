"""What the scheduler's half of the connector tells the workers' half in each step, and what workers tell it.

Plain data that can be pickled; what is done with it is decided in `prefill` and `decode`.
"""

from __future__ import annotations

import dataclasses

from kv_transfer.directory import Place

__all__ = ["Chunk", "Failures", "Handshake", "Load", "StepWords", "Stretch"]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive blocks of a prompt, of one of vLLM's KV cache groups.

    Attributes:
        first: Index of the first of them within the prompt.
        blocks: Block ids, in the order of the prompt.
    """

    first: int
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Blocks of a prompt that are computed when the step is over.

    Attributes:
        request: vLLM's name of the request.
        room: Its number for both sides.
        tokens: Of the prompt, as far as it is sent.
        stretches: The blocks of each group.
        last: Whether the prompt ends with them.
    """

    request: str
    room: int
    tokens: int
    stretches: tuple[Stretch, ...]
    last: bool


@dataclasses.dataclass(frozen=True)
class Load:
    """Blocks of a prompt that the prefill side is to fill.

    Attributes:
        request: vLLM's name of the request.
        room: Its number for both sides.
        group: Data-parallel group of the prefill side that computes it.
        tokens: Of the prompt, as far as it comes from there.
        stretches: The blocks of each group: those before it are here already, or not needed. No blocks when all are
            here, and the prefill side is only told so.
    """

    request: str
    room: int
    group: int
    tokens: int
    stretches: tuple[Stretch, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to fill."""
        return not any(own.blocks for own in self.stretches)


@dataclasses.dataclass(frozen=True)
class StepWords:
    """Everything for one step.

    Attributes:
        chunks: On the prefill side.
        loads: On the decode side.
        aborts: Request and reason: it is over before its transfer.
        rejects: Room, group and reason: a transfer that was never begun here will not be.
        preempted: Requests whose blocks the engine takes away in this step; their transfers end.
    """

    chunks: tuple[Chunk, ...] = ()
    loads: tuple[Load, ...] = ()
    aborts: tuple[tuple[str, str], ...] = ()
    rejects: tuple[tuple[int, int, str], ...] = ()
    preempted: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failures:
    """What the decode workers tell their scheduler after a step.

    Attributes:
        requests: Those whose prompt has to be computed from its start.
    """

    requests: frozenset[str]

    def aggregate(self, other: Failures) -> Failures:
        """Those of two workers."""
        return Failures(self.requests | other.requests)


@dataclasses.dataclass(frozen=True)
class Handshake:
    """What a worker registered, for its scheduler.

    Attributes:
        place: Which rank it is.
        engine: Name of its engine.
        fingerprint: The model's.
        block_tokens: Tokens of a page.
    """

    place: Place
    engine: str
    fingerprint: str
    block_tokens: int
