"""Draft-extend over several layers: a step a graph, buffers a step, tokens rotated in between.

It owns the steps, their buffers and their order. It does not own how tokens are rotated or drawn: that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_planner import RowLayout

from .buckets import Buckets
from .buffers import StaticBuffers
from .device import GraphDevice, HostLengths
from .errors import GraphError, StepKindError
from .step import CaptureReport, StepInputs, StepResult
from .window_runners import DraftExtendRunner

__all__ = ["MultiStepDraftExtendRunner", "Rotation", "step_layers"]


@dataclass(frozen=True)
class Rotation:
    """What lies between two steps.

    Attributes:
        step: The step about to run, 1 or more.
        previous: Static inputs of the step before, unchanged since it ran.
        output: Its output, live rows.
        inputs: Static inputs of this step; the rotated fields of their live rows are to be written, on the device.
    """

    step: int
    previous: StepInputs
    output: Any
    inputs: StepInputs


def step_layers(layers: int, steps: int, *, wrap: bool = False) -> tuple[int, ...]:
    """Which draft layer each step runs.

    Args:
        layers: Draft layers of the model.
        steps: Steps.
        wrap: Whether to begin again with the first layer; otherwise there may not be more steps than layers.

    Raises:
        StepKindError: There is no layer, no step, or no layer for a step.
    """
    if layers < 1 or steps < 1 or (steps > layers and not wrap):
        raise StepKindError(
            "steps",
            expected=f"1 to {layers} steps, or wrap=True" if layers > 0 else "a model with draft layers",
            got=steps,
            consequence="A step would have no layer of its own.",
            remedy="Draft fewer tokens, or say that layers are used again.",
        )
    return tuple(step % layers for step in range(steps))


class MultiStepDraftExtendRunner:
    """Runs every draft layer once over a window.

    Every step has static buffers of its own, made here: a step is loaded while the one before it may still run.

    Args:
        device: Where to capture.
        forwards: One a draft layer.
        layout: Static inputs of one step.
        buckets: Batch sizes.
        window: Tokens a request.
        rotate: Writes the rotated fields of steps after the first.
        rotated: These fields, such as token ids and hidden states; only the first step loads them.
        token_fields: Fields with a row a token.
        steps: Steps; as many as layers when None.
        wrap: See `step_layers`.
        poison: See `StaticBuffers`; finds rows that `rotate` left out.
        **options: As for `DraftExtendRunner`.

    Raises:
        StepKindError: See `step_layers`.
    """

    def __init__(
        self,
        *,
        device: GraphDevice,
        forwards: Sequence[Callable[[StepInputs], Any]],
        layout: RowLayout,
        buckets: Buckets | Sequence[int],
        window: int,
        rotate: Callable[[Rotation], None],
        rotated: Collection[str],
        token_fields: Collection[str] = (),
        steps: int | None = None,
        wrap: bool = False,
        poison: bool = False,
        **options: Any,
    ) -> None:
        self.layers = step_layers(len(forwards), len(forwards) if steps is None else steps, wrap=wrap)
        self._rotate = rotate
        self._rotated = frozenset(rotated)
        self._inputs: StepInputs | None = None
        self._output: Any = None
        self._buffers: list[StaticBuffers] = []
        self._runners: list[DraftExtendRunner] = []
        for step, layer in enumerate(self.layers):
            written = self._rotated if step else ()
            self._buffers.append(StaticBuffers(layout, device, device_written=written, poison=poison))
            self._runners.append(
                DraftExtendRunner(
                    device=device,
                    forward=forwards[layer],
                    buffers=self._buffers[-1],
                    buckets=buckets,
                    window=window,
                    token_fields=token_fields,
                    before_step=self._between(step),
                    **options,
                )
            )

    @property
    def steps(self) -> tuple[DraftExtendRunner, ...]:
        """The runner of each step."""
        return tuple(self._runners)

    def capture(self, progress: bool = True) -> tuple[CaptureReport, ...]:
        """Captures every step; see `DecodeRunner.capture`."""
        return tuple(runner.capture(progress) for runner in self._runners)

    def run(
        self,
        values: Mapping[str, Any],
        host_lists: Mapping[str, HostLengths] | None = None,
        raw_bs: int = 0,
        *,
        eager: bool = False,
    ) -> tuple[StepResult, ...]:
        """Runs all steps; nothing waits for the device in between.

        Args:
            values: Field to value; the rotated fields for the first step.
            host_lists: KV lengths, the window included; the same for all steps, whose layers have caches of their own.
            raw_bs: Live requests.
            eager: Do not replay.

        Returns:
            A result a step, valid until the next run.

        Raises:
            GraphError: As for `DecodeRunner.run`.
        """
        later = {name: value for name, value in values.items() if name not in self._rotated}
        results: list[StepResult] = []
        try:
            for step, runner in enumerate(self._runners):
                result = runner.run(later if step else values, host_lists, raw_bs, eager=eager)
                self._output = result.output
                results.append(result)
        finally:
            self._inputs = self._output = None
        return tuple(results)

    def close(self) -> None:
        """Closes runners and buffers; the first error is raised after all were closed."""
        failures: list[GraphError] = []
        closes = [*(runner.close for runner in self._runners), *(buffers.close for buffers in self._buffers)]
        for close in closes:
            try:
                close()
            except GraphError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _between(self, step: int) -> Callable[[StepInputs], None]:
        def before(inputs: StepInputs) -> None:
            if step and self._inputs is not None:
                self._rotate(Rotation(step, self._inputs, self._output, inputs))
            self._inputs = inputs

        return before
