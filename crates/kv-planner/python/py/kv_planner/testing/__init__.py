"""Owns simulated deployments for tests: buffers at made-up addresses whose every byte has a label.

It does not own memory or a copy engine, and uses none of the planner's arithmetic, so that it can prove it wrong.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kv_planner import (
    Agreement,
    BufferEntry,
    Capabilities,
    Component,
    ComponentSpec,
    Deployment,
    LoweredPlan,
    ModelLayout,
    Part,
    Placement,
    Plan,
    RankManifest,
    Runs,
    lower,
)

__all__ = ["Label", "build_deployment", "build_rank", "byte_map", "expected_image", "label_bytes", "received_images"]

_ITEMSIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
}


class Label(NamedTuple):
    """Where a byte belongs; ``head`` counts over the whole model, ``token`` over the entries of an item."""

    component: Component
    part: Part
    layer_id: int
    occurrence: int
    item: int
    token: int
    head: int
    dim: int
    byte: int


def _heads(total: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    if tp_size <= total:
        share = total // tp_size
        return tp_rank * share, (tp_rank + 1) * share
    head = tp_rank * total // tp_size
    return head, head + 1


def _tokens(layout: ModelLayout, spec: ComponentSpec) -> int:
    return layout.page_size // spec.compression if spec.item_kind == "page" else spec.rows


def build_rank(
    layout: ModelLayout,
    layer_ids: Sequence[int],
    placement: Placement | None = None,
    *,
    items: int = 6,
    base: int = 4096,
    padding: int = 0,
    device: str = "cpu",
) -> RankManifest:
    """Builds the manifest of a rank that owns some layers, with buffers one after another from ``base``.

    Args:
        layout: Geometry of the model.
        layer_ids: Global layer ids of this rank's stage, target and draft alike.
        placement: Where the rank stands; alone when left out.
        items: Items (pages) of every buffer.
        base: Address of the first buffer.
        padding: Bytes between two items, so that the stride exceeds the item.
        device: Device of all buffers.

    Returns:
        A manifest with the customary share of heads for the placement's tp rank.
    """
    place = placement or Placement()
    address = base
    entries = []
    for spec in layout.components:
        seen: Counter[int] = Counter()
        for layer_id in spec.layer_ids:
            occurrence = seen[layer_id]
            seen[layer_id] += 1
            if layer_id not in layer_ids:
                continue
            start, stop = _heads(spec.total_heads, place.tp_rank, place.tp_size)
            item_bytes = _tokens(layout, spec) * (stop - start) * spec.dims * _ITEMSIZE[spec.dtype]
            nbytes = (items - 1) * (item_bytes + padding) + item_bytes
            entries.append(
                BufferEntry(
                    spec.component,
                    spec.part,
                    layer_id,
                    device=device,
                    address=address,
                    nbytes=nbytes,
                    item_stride=item_bytes + padding,
                    item_bytes=item_bytes,
                    head_range=(start, stop),
                    occurrence=occurrence,
                )
            )
            address += nbytes + 16
    return RankManifest(layout, place, entries)


def build_deployment(
    layout: ModelLayout,
    stages: Sequence[Sequence[int]],
    tp_size: int = 1,
    *,
    items: int = 6,
    base: int = 4096,
    padding: int = 0,
) -> Deployment:
    """Builds all ranks of one side, stage by stage; ``stages[s]`` lists the layer ids of stage s.

    Args:
        layout: Geometry of the model.
        stages: Global layer ids of each stage.
        tp_size: Tensor-parallel ranks of each stage.
        items: Items (pages) of every buffer.
        base: Address of the first rank's first buffer; ranks are 2**32 apart.
        padding: Bytes between two items.

    Returns:
        The deployment; rank ``stage * tp_size + tp_rank`` is ``manifests[...]`` of that index.
    """
    ranks: list[RankManifest] = []
    for (pp_rank, layer_ids), tp_rank in itertools.product(enumerate(stages), range(tp_size)):
        place = Placement(pp_rank=pp_rank, pp_size=len(stages), tp_rank=tp_rank, tp_size=tp_size)
        start = base + len(ranks) * 2**32
        ranks.append(build_rank(layout, layer_ids, place, items=items, base=start, padding=padding))
    return Deployment(ranks)


def label_bytes(manifest: RankManifest) -> dict[int, Label]:
    """Labels every byte of every item of a rank, by address."""
    labels: dict[int, Label] = {}
    for entry in manifest.entries:
        for offset, label in _item_labels(manifest.layout, entry):
            for item in range(entry.items):
                labels[entry.address + item * entry.item_stride + offset] = label._replace(item=item)
    return labels


def _item_labels(layout: ModelLayout, entry: BufferEntry) -> Iterator[tuple[int, Label]]:
    spec = layout.spec(entry.component, entry.part)
    start, stop = entry.head_range
    extents = {"token": _tokens(layout, spec), "head": stop - start, "dim": spec.dims, "group": len(spec.groups)}
    axes: list[str] = list(spec.axes)
    if spec.groups:
        axes.insert(axes.index("head"), "group")
    offset = 0
    for index in itertools.product(*(range(extents[axis]) for axis in axes)):
        at = dict(zip(axes, index, strict=True))
        first = sum(spec.groups[: at.get("group", 0)])
        if spec.groups and not first <= at["dim"] < first + spec.groups[at["group"]]:
            continue
        for byte in range(_ITEMSIZE[spec.dtype]):
            name = (entry.component, entry.part, entry.layer_id, entry.occurrence)
            yield offset, Label(*name, 0, at["token"], at["head"] + start, at["dim"], byte)
            offset += 1


def byte_map(lowered: LoweredPlan) -> dict[int, int]:
    """Expands blocks to single bytes: source address of every destination address.

    Args:
        lowered: Blocks of one plan.

    Returns:
        The map; a byte that is written twice raises AssertionError.
    """
    moved: dict[int, int] = {}
    for batch in lowered.batches:
        columns = (batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist())
        for source, destination, nbytes in zip(*columns, strict=True):
            for byte in range(nbytes):
                if destination + byte in moved:
                    raise AssertionError(f"byte {destination + byte:#x} is written twice")
                moved[destination + byte] = source + byte
    return moved


def received_images(
    agreement: Agreement, runs: Runs, capabilities: Capabilities | None = None
) -> list[dict[int, Label]]:
    """Plays every route of an agreement and returns what each remote rank holds afterwards.

    Args:
        agreement: Local side sends, remote side receives.
        runs: Page pairs of one request.
        capabilities: Limits of the engine; none when left out.

    Returns:
        Per remote rank the label that arrived at every written address. A byte written by two local ranks, or read from
        outside a buffer, raises AssertionError.
    """
    labels = [label_bytes(manifest) for manifest in agreement.local]
    images = []
    for remote_index in range(len(agreement.remote)):
        image: dict[int, Label] = {}
        for local_index, source in enumerate(labels):
            plan = Plan(agreement.route(local_index, remote_index), runs)
            for to, from_ in byte_map(lower(plan, capabilities)).items():
                if to in image or from_ not in source:
                    raise AssertionError(f"byte {to:#x} <- {from_:#x}: written twice or read outside the buffers")
                image[to] = source[from_]
        images.append(image)
    return images


def expected_image(
    manifest: RankManifest, source_pages: Sequence[int], destination_pages: Sequence[int]
) -> dict[int, Label]:
    """Labels that a remote rank must hold after a whole request: its own, on the paired pages, and nothing else."""
    pairs = dict(zip(destination_pages, source_pages, strict=True))
    own = label_bytes(manifest).items()
    return {address: label._replace(item=pairs[label.item]) for address, label in own if label.item in pairs}
