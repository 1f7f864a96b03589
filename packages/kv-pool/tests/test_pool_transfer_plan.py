"""Owns the proof that a manifest is enough to move pages: two prefill stages into one decode pool, byte for byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_planner import Capabilities, Deployment, ModelLayout, Placement, Plan, Runs, agree, lower
from kv_pool import MhaPool


@pytest.mark.parametrize("draft", [(), (20,)])
def test_pages_move_by_the_manifests_alone(
    make_layout: Callable[..., ModelLayout],
    make_labels: Callable[..., torch.Tensor],
    as_bits: Callable[[torch.Tensor], torch.Tensor],
    draft: tuple[int, ...],
) -> None:
    layout = make_layout(layers=range(5), draft=draft)
    stages = []
    for rank, (layers, drafts) in enumerate((((0, 1, 2), ()), ((3, 4), draft))):
        held = {"target": layers, "draft": drafts} if draft else layers
        placement = Placement(pp_rank=rank, pp_size=2)
        stages.append(MhaPool(layout, size=28, device="cpu", layer_ids=held, placement=placement))  # type: ignore[arg-type]
    decode = MhaPool(layout, size=36, device="cpu")
    for seed, pool in enumerate([*stages, decode]):
        for part in pool.parts:
            for component in ("key", "value"):
                storage = pool.storage(component, part)
                storage.copy_(make_labels(storage.shape, storage.dtype, 40 * seed + len(component)))
    views = [(pool, part, layer) for pool in stages for part in pool.parts for layer in pool.layer_ids(part)]
    source, destination = np.array([5, 1, 2, 7]), np.array([3, 8, 9, 1])
    expected = {}
    for pool, part, layer in views:
        for name, read in (("key", "key"), ("value", "value")):
            wanted = as_bits(getattr(decode, read)(layer, part)).clone()
            wanted[destination] = as_bits(getattr(pool, read)(layer, part))[source]
            expected[name, part, layer] = wanted
    agreement = agree(Deployment([pool.manifest() for pool in stages]), Deployment([decode.manifest()]))
    for rank in range(2):
        plan = Plan(agreement.route(rank, 0), Runs(source, destination))
        for batch in lower(plan, Capabilities(max_entries_per_batch=3)).batches:
            for start, target, count in zip(batch.source, batch.destination, batch.nbytes, strict=True):
                ctypes.memmove(int(target), int(start), int(count))
    assert len(expected) == 2 * (5 + len(draft))
    for (name, part, layer), wanted in expected.items():
        assert torch.equal(as_bits(getattr(decode, name)(layer, part)), wanted)
