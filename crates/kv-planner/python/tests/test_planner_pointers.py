"""Bare lists of pointers: named exactly, or refused with what to publish."""

from __future__ import annotations

import itertools

import kv_planner as kp
import pytest
from hypothesis import given
from hypothesis import strategies as st

MLA: tuple[kp.Component, ...] = ("latent", "rope", "index_key")
Name = tuple[str, str, int, int]


def layout(
    groups: dict[kp.Component, list[int]], drafts: list[int] | None = None, page_size: int = 128
) -> kp.ModelLayout:
    specs = [kp.ComponentSpec(name, layer_ids=ids, dtype="int8", total_heads=1, dims=4) for name, ids in groups.items()]
    if drafts:
        specs += [
            kp.ComponentSpec(name, "draft", layer_ids=drafts, dtype="int8", total_heads=1, dims=4) for name in groups
        ]
    return kp.ModelLayout(specs, page_size=page_size, fingerprint="model")


def pairs(source: tuple[Name, ...], destination: tuple[Name, ...]) -> list[tuple[int, int]]:
    from_, to = kp.pair_names(source, destination)  # type: ignore[arg-type]
    return list(zip(from_.tolist(), to.tolist(), strict=True))


class TestDraftOnTheLastStage:
    """A02: 61 layers, 3 groups, 1 draft layer, stages of 31 and 30."""

    whole = layout({name: list(range(61)) for name in MLA}, [61])
    decode = kp.name_pointers(whole, 186)

    def test_the_customary_order(self) -> None:
        assert [name[2] for name in self.decode] == [*range(61)] * 3 + [61] * 3
        assert [name[0] for name in self.decode[::61]] == [*MLA, "latent"]

    @pytest.mark.parametrize("draft", [False, True])
    def test_the_last_stage(self, draft: bool) -> None:
        layers = [*range(31, 61), *([61] if draft else [])]
        stage = kp.name_pointers(self.whole, len(layers) * 3, layers=layers)
        right = [group * 61 + layer for group in range(3) for layer in range(31, 61)] + [183, 184, 185] * draft
        assert pairs(stage, self.decode) == list(enumerate(right))

    def test_lengths_alone_do_not_say_which_stage(self) -> None:
        for pointers in (90, 93):
            with pytest.raises(kp.UnnamedPointers, match="more than one way; publish component, part, global layer id"):
                kp.name_pointers(self.whole, pointers)

    @pytest.mark.parametrize("pointers", [1, 184, 185, 187])
    def test_a_length_that_no_stage_has(self, pointers: int) -> None:
        with pytest.raises(kp.UnnamedPointers, match="no stage"):
            kp.name_pointers(self.whole, pointers)

    def test_a_length_that_the_stage_does_not_have(self) -> None:
        assert kp.name_pointers(self.whole, 0) == ()
        with pytest.raises(kp.UnnamedPointers, match="pointers: 2 against 3; layers 3 have 3 buffers"):
            kp.name_pointers(self.whole, 2, layers=[3])


def test_a_coincidence_of_counts_is_ambiguous_a25() -> None:
    """Two layers over two stages, the last one with a draft layer: as many pointers as the whole model without it."""
    model = layout({name: [0, 1] for name in MLA}, [2])
    with pytest.raises(kp.UnnamedPointers, match=r"layers 0\.\.1, or layers 0, 2") as caught:
        kp.name_pointers(model, 6)
    assert caught.value.local == 6
    stage = kp.name_pointers(model, 6, layers=[1, 2])
    assert pairs(stage, kp.name_pointers(model, 9)) == [(0, 1), (1, 3), (2, 5), (3, 6), (4, 7), (5, 8)]


def test_groups_on_some_layers_only_a02() -> None:
    """78 keys, 78 values, 21 index keys: 177 is no multiple of three groups, and needs not be one."""
    model = layout({"latent": list(range(78)), "rope": list(range(78)), "index_key": list(range(0, 63, 3))})
    names = kp.name_pointers(model, 177)
    assert [name[0] for name in names].count("index_key") == 21
    assert names[-1] == ("index_key", "target", 60, 0)


@pytest.mark.parametrize(("stage", "keys", "values"), [(0, (0, 7), (15, 22)), (1, (7, 15), (22, 30))])
def test_hybrid_stages_slice_their_attention_layers_a03(
    stage: int, keys: tuple[int, int], values: tuple[int, int]
) -> None:
    owners = list(range(3, 60, 4))
    model = layout({"key": owners, "value": owners})
    own = [layer for layer in owners if layer // 30 == stage]
    names = kp.name_pointers(model, 2 * len(own), layers=own)
    assert [to for _, to in pairs(names, kp.name_pointers(model, 30))] == [*range(*keys), *range(*values)]


@pytest.mark.parametrize("cuts", [(4, 7), (1, 9), (5, 5)])
def test_uneven_stages_of_keys_and_values_a01(cuts: tuple[int, int]) -> None:
    model = layout({"key": list(range(10)), "value": list(range(10))})
    decode = kp.name_pointers(model, 20)
    reached = []
    for start, stop in itertools.pairwise([0, *cuts, 10]):
        stage = kp.name_pointers(model, 2 * (stop - start), layers=range(start, stop))
        reached += [to for _, to in pairs(stage, decode)]
        assert [decode[to] for _, to in pairs(stage, decode)] == list(stage)
    assert sorted(reached) == list(range(20))


def test_repeated_ids_pair_by_occurrence_a04() -> None:
    model = layout({"key": [3, 7, 11, 3, 7, 11]})
    decode, stage = kp.name_pointers(model, 6), kp.name_pointers(model, 4, layers=[7, 11])
    assert pairs(stage, decode) == [(0, 1), (1, 2), (2, 4), (3, 5)]


def test_a_name_that_the_destination_lacks_is_named() -> None:
    model = layout({"key": [0, 1]}, [2])
    source = kp.name_pointers(model, 3)
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.pair_names(source, source[:1])
    assert [d.field for d in caught.value.differences] == ["key/target layer 1", "key/draft layer 2"]
    with pytest.raises(kp.UnnamedPointers, match="two pointers carry this name"):
        kp.pair_names(source[:1] * 2, source)
    with pytest.raises(kp.UnnamedPointers, match="no such layer"):
        kp.name_pointers(model, 1, layers=[9])
    with pytest.raises(kp.ArgumentError, match="source"):
        kp.pair_names([("key", 1)], source)  # type: ignore[list-item]


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(0, 3),
    st.data(),
)
def test_a_list_that_is_read_is_read_right(
    layers: int, held: list[list[bool]], drafts: int, data: st.DataObject
) -> None:
    """Whatever the stage, an answer without `layers` is the stage's own list, or there is none."""
    groups = {
        name: [layer for layer in range(layers) if own[layer]] or [0] for name, own in zip(MLA, held, strict=False)
    }
    model = layout(groups, list(range(layers, layers + drafts)))
    start = data.draw(st.integers(0, layers - 1))
    draft_ids = range(layers, layers + drafts) if data.draw(st.booleans()) else range(0)
    stage = [*range(start, data.draw(st.integers(start, layers))), *draft_ids]
    known = {layer for ids in groups.values() for layer in ids} | set(range(layers, layers + drafts))
    own = [layer for layer in stage if layer in known]
    truth = [
        (name, "draft" if layer >= layers else "target", layer, 0)
        for ids in ((0, layers), (layers, layers + drafts))
        for name in groups
        for layer in range(*ids)
        if layer in own and (layer >= layers or layer in groups[name])
    ]
    assert list(kp.name_pointers(model, len(truth), layers=own)) == truth
    try:
        guessed = kp.name_pointers(model, len(truth))
    except kp.UnnamedPointers as error:
        assert error.remedy.startswith("publish")
    else:
        assert list(guessed) == truth
