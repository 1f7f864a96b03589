"""A rank that stands alone for its side must hold what its placement says; and lengths of padded rows."""

from __future__ import annotations

from collections.abc import Callable

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing import build_rank

LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=[0, 1, 1, 2], dtype="uint8", total_heads=2, dims=4),
        kp.ComponentSpec("index_key", layer_ids=[1, 2], dtype="uint8", total_heads=1, dims=4),
        kp.ComponentSpec("key", "draft", layer_ids=[3], dtype="uint8", total_heads=2, dims=4),
    ],
    page_size=2,
    fingerprint="model",
)
WHOLE = build_rank(LAYOUT, range(4), base=2**40)


def but(rank: kp.RankManifest, gone: Callable[[kp.BufferEntry], bool]) -> kp.RankManifest:
    """The rank without some of its entries."""
    return kp.RankManifest(rank.layout, rank.placement, [entry for entry in rank.entries if not gone(entry)])


def found(local: kp.RankManifest, remote: kp.RankManifest, parts: list[kp.Part]) -> list[tuple[str, object, object]]:
    try:
        kp.agree(local, remote, parts=parts)
    except kp.LayoutMismatch as error:
        assert all(d.consequence and d.remedy and d.field in str(error) for d in error.differences)
        return [(d.field, d.local, d.remote) for d in error.differences]
    return []


@pytest.mark.parametrize("index", range(len(WHOLE.entries)))
def test_each_forgotten_buffer_is_a_difference_on_either_side(index: int) -> None:
    entry = WHOLE.entries[index]
    partial = but(WHOLE, lambda other: other == entry)
    field = f"{entry.component}/{entry.part} layer {entry.layer_id}" + " occurrence 1" * entry.occurrence
    heads = f"heads 0..{LAYOUT.spec(entry.component, entry.part).total_heads}"
    assert found(partial, WHOLE, ["target", "draft"]) == [(field, "absent", heads)]
    assert found(WHOLE, partial, ["target", "draft"]) == [(field, heads, "absent")]
    assert len(found(partial, partial, ["target", "draft"])) == 2
    assert bool(found(partial, WHOLE, ["target"])) == (entry.part == "target")


def test_layers_that_are_missing_alike_are_one_difference() -> None:
    partial = but(WHOLE, lambda entry: entry.component == "key" and entry.part == "target")
    assert [field for field, _, _ in found(partial, WHOLE, ["target"])] == [
        "key/target layers 0..2",
        "key/target layer 1 occurrence 1",
    ]


@pytest.mark.parametrize("place", [kp.Placement(), kp.Placement(pp_rank=1, pp_size=2)])
def test_the_only_tensor_parallel_rank_holds_all_heads(place: kp.Placement) -> None:
    half = build_rank(LAYOUT, range(4), kp.Placement(tp_rank=1, tp_size=2))
    short = kp.RankManifest(LAYOUT, place, half.entries)
    assert found(short, WHOLE, ["draft"]) == [("key/draft layer 3", "heads 1..2", "heads 0..2")]


def test_one_of_several_ranks_or_stages_lacks_no_part_of_what_it_holds() -> None:
    half = build_rank(LAYOUT, range(4), kp.Placement(tp_rank=1, tp_size=2))
    assert found(half, WHOLE, ["target", "draft"]) == []
    partial = but(half, lambda entry: entry.component == "index_key" and entry.layer_id == 2)
    assert found(WHOLE, partial, ["target"]) == [("index_key/target layer 2", "heads 0..1", "absent")]
    stage = build_rank(LAYOUT, [1, 2], kp.Placement(pp_rank=1, pp_size=2))
    assert found(stage, WHOLE, ["target", "draft"]) == []
    partial = but(stage, lambda entry: entry.occurrence == 1)
    assert found(partial, WHOLE, ["target"]) == [("key/target layer 1 occurrence 1", "absent", "heads 0..2")]


@pytest.mark.parametrize("kind", ["none", "eagle", "mtp", "dflash", "dspark"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_padded_row_has_no_length(kind: kp.SpeculativeKind, dtype: type[np.signedinteger]) -> None:
    assert kp.kv_lengths(kind, np.array([100, 0, 4, 0], dtype), window=4).tolist()[1::2] == [0, 0]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_published_length_is_not_shorter_than_its_block(kind: kp.SpeculativeKind) -> None:
    with pytest.raises(kp.LengthError, match=r"prefix_lens\[1\]: 7 against 16; .* shorter than the block") as caught:
        kp.kv_lengths(kind, [16, 7], window=16)
    assert (caught.value.local, caught.value.remote) == (7, 16)
    assert kp.kv_lengths(kind, [16, 17], window=16).tolist() == [16, 17]
