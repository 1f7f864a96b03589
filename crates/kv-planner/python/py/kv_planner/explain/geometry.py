"""Owns the description of a deployment by geometry and parallelism, and the manifests that it stands for.

It does not own real buffers: addresses are made up, one rank's after another's.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

import kv_planner as kp

__all__ = ["Component", "Deployment", "Model", "Parallelism"]

_SPAN = re.compile(r"(\d+)(?:\.\.(\d+)(?:/(\d+))?)?")
_MOST = 1 << 16


def _layers(value: object) -> object:
    """``"0..30, 47, 3..59/4"``: both ends stand for themselves; ``/4`` is every fourth."""
    if not isinstance(value, str):
        return value
    layers: list[int] = []
    for part in value.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is no span of layers; write 0..30, 47 or 3..59/4")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step == 0 or last - first >= _MOST:
            raise ValueError(f"{part.strip()!r} has a step of 0 or more than {_MOST} layers")
        layers += range(first, last + 1, step)
    return layers


_READ = BeforeValidator(_layers)
_SCHEMA = WithJsonSchema(
    {
        "anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 0}}, {"type": "string"}],
        "description": 'Global layer ids: a list, or spans such as "0..30, 47, 3..59/4", both ends included.',
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Component(_Strict):
    """What some layers keep; the fields of `kv_planner.ComponentSpec`."""

    component: kp.Component
    part: kp.Part = "target"
    layers: Annotated[list[int], _READ, _SCHEMA]
    dtype: kp.DType
    total_heads: int = Field(default=1, ge=1)
    dims: int = Field(ge=1)
    axes: list[kp.Axis] = Field(default=["token", "head", "dim"], min_length=3, max_length=3)
    item_kind: kp.ItemKind = "page"
    compression: int = Field(default=1, ge=1)
    rows: int = Field(default=1, ge=1)
    groups: list[int] = []


class Model(_Strict):
    """What all ranks share; the fields of `kv_planner.ModelLayout`."""

    fingerprint: str = Field(min_length=1)
    page_size: int = Field(ge=1)
    kernel_block_size: int | None = Field(default=None, ge=1)
    format_version: int = Field(default=1, ge=1)
    components: list[Component] = Field(min_length=1)


class Parallelism(_Strict):
    """How the ranks share the model.

    Attributes:
        pipeline: number of stages, over which the target's layers are divided evenly, the first ones taking what is
            left over; draft layers lie on the last.
        stages: the layers of every stage where they are not even, draft layers included; then `pipeline` is not given.
        tensor: tensor-parallel ranks of a stage; under data-parallel attention those of one group.
        context: decode-context-parallel ranks, which share a request's tokens.
        data: data-parallel groups, each a whole copy.
    """

    pipeline: int | None = Field(default=None, ge=1, le=1024)
    stages: list[Annotated[list[int], _READ, _SCHEMA]] | None = Field(default=None, min_length=1, max_length=1024)
    tensor: int = Field(default=1, ge=1, le=1024)
    context: int = Field(default=1, ge=1, le=1024)
    data: int = Field(default=1, ge=1, le=1024)


class Deployment(_Strict):
    """One side: its model and its parallelism."""

    schema_version: Literal[1] = 1
    name: str = ""
    model: Model
    parallelism: Parallelism = Parallelism()

    def layout(self) -> kp.ModelLayout:
        """The layout of all ranks.

        Raises:
            PlanError: An invariant of the layout fails.
        """
        specs = [
            kp.ComponentSpec(
                own.component,
                own.part,
                layer_ids=own.layers,
                dtype=own.dtype,
                total_heads=own.total_heads,
                dims=own.dims,
                axes=own.axes,
                item_kind=own.item_kind,
                compression=own.compression,
                rows=own.rows,
                groups=own.groups,
            )
            for own in self.model.components
        ]
        return kp.ModelLayout(
            specs,
            page_size=self.model.page_size,
            fingerprint=self.model.fingerprint,
            kernel_block_size=self.model.kernel_block_size,
            format_version=self.model.format_version,
        )

    def stages(self) -> list[set[int]]:
        """Global layer ids of every stage.

        Raises:
            ValueError: Both `pipeline` and `stages` are given, or more stages than layers.
        """
        parallel = self.parallelism
        if parallel.stages is not None:
            if parallel.pipeline is not None:
                raise ValueError("parallelism: give pipeline or stages, not both")
            return [set(stage) for stage in parallel.stages]
        count = parallel.pipeline or 1
        ids = {part: sorted({i for own in self.model.components if own.part == part for i in own.layers})
               for part in ("target", "draft")}  # fmt: skip
        if count > max(len(ids["target"]), 1):
            raise ValueError(f"parallelism.pipeline: {count} stages for {len(ids['target'])} layers")
        share, rest = divmod(len(ids["target"]), count)
        ends = list(itertools.accumulate(share + (stage < rest) for stage in range(count)))
        stages = [set(ids["target"][start:stop]) for start, stop in itertools.pairwise([0, *ends])]
        stages[-1] |= set(ids["draft"])
        return stages

    def places(self) -> Iterator[tuple[kp.Placement, set[int]]]:
        """Every rank's placement and layers, data-parallel groups outermost."""
        own = self.parallelism
        stages = self.stages()
        ranks = itertools.product(range(own.data), range(own.context), enumerate(stages), range(own.tensor))
        for dp_rank, dcp_rank, (pp_rank, layers), tp_rank in ranks:
            place = kp.Placement(
                pp_rank=pp_rank, pp_size=len(stages), tp_rank=tp_rank, tp_size=own.tensor,
                dcp_rank=dcp_rank, dcp_size=own.context, dp_rank=dp_rank, dp_size=own.data,
            )  # fmt: skip
            yield place, layers

    def ranks(self, items: int, base: int) -> kp.Deployment:
        """All ranks, with buffers of `items` items one after another from address `base` on.

        Raises:
            PlanError: The deployment is not possible, for example because heads do not split.
            ValueError: The stages are not given once.
        """
        layout, manifests = self.layout(), []
        for place, layers in self.places():
            entries = []
            for spec in layout.components:
                heads = kp.split_heads(spec.total_heads, tp_rank=place.tp_rank, tp_size=place.tp_size)
                item = layout.item_bytes(spec.component, spec.part, heads=heads[1] - heads[0])
                seen: Counter[int] = Counter()
                for layer_id in spec.layer_ids:
                    if layer_id in layers:
                        entries.append(
                            kp.BufferEntry(
                                spec.component,
                                spec.part,
                                layer_id,
                                device="described",
                                address=base,
                                nbytes=item * items,
                                item_stride=item,
                                item_bytes=item,
                                head_range=heads,
                                occurrence=seen[layer_id],
                            )
                        )
                        base += item * items
                    seen[layer_id] += 1
            manifests.append(kp.RankManifest(layout, place, entries))
        return kp.Deployment(manifests)
