"""More cases of the field's fault reports: bytes of an item that depend on the part, the dtype or the window."""

from __future__ import annotations

import itertools

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing import build_deployment, build_rank, expected_image, received_images


def test_two_buffers_of_one_layer_number_are_both_sent_a16() -> None:
    """`model.layers.0` and `mtp.layers.0` yield one number: two bindings, or a refusal that numbers the draft anew."""

    def key(layer_ids: list[int], part: kp.Part = "target") -> kp.ComponentSpec:
        return kp.ComponentSpec("key", part, layer_ids=layer_ids, dtype="uint8", total_heads=1, dims=2)

    with pytest.raises(kp.LayoutError, match="number draft layers after the target's, from 1"):
        kp.ModelLayout([key([0]), key([0], "draft")], page_size=2, fingerprint="m")
    for specs in ([key([0]), key([1], "draft")], [key([0, 0])]):
        model = kp.ModelLayout(specs, page_size=2, fingerprint="m")
        local, remote = (build_rank(model, [0, 1], base=base) for base in (2**12, 2**40))
        agreement = kp.agree(kp.Deployment([local]), kp.Deployment([remote]))
        assert [(pair.source_entry, pair.destination_entry) for pair in agreement.route().pairs] == [(0, 0), (1, 1)]
        (image,) = received_images(agreement, kp.Runs([1, 2], [3, 1]))
        assert image == expected_image(remote, [1, 2], [3, 1])
        with pytest.raises(kp.IncompleteDeployment):
            kp.Deployment([kp.RankManifest(model, kp.Placement(), local.entries[:1])])


def test_hidden_states_have_the_width_of_the_draft_a19() -> None:
    """The target is 8192 wide, the draft reads 6144: a row is 6144 elements, and one of 8192 is refused."""

    def side(width: int, base: int) -> kp.RankManifest:
        own = kp.ComponentSpec(
            "state", "draft", layer_ids=[80], dtype="bfloat16", total_heads=1, dims=width, item_kind="request_row"
        )
        return build_rank(kp.ModelLayout([own], page_size=128, fingerprint="m"), [80], base=base)

    local, remote = side(6144, 2**12), side(6144, 2**40)
    route = kp.agree(local, remote).route()
    assert route.item_bytes == local.entries[0].item_bytes == 6144 * 2
    plan = kp.Plan(route, kp.Runs([2], [5], item_kind="request_row"))
    (batch,) = kp.lower(plan).batches
    assert (batch.nbytes.tolist(), int(batch.destination[0]) - remote.entries[0].address) == ([12288], 5 * 12288)
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(side(8192, 2**12), remote)
    (difference,) = caught.value.differences
    assert (difference.field, difference.local, difference.remote) == ("state/draft.dims", 8192, 6144)


def test_rows_by_windows_and_not_by_scheduled_drafts_f07() -> None:
    """A request has 1 + 3 rows whether or not a draft was scheduled for each: the last ends at 4 x 1011."""
    scheduled = np.full(1011, 3)
    scheduled[-4:] = 2
    rows = kp.token_offsets(np.full(1011, 1 + 3))
    assert int(rows[-1]) == 4044 and int(kp.token_offsets(1 + scheduled)[-1]) == 4040
    index = kp.select_index(scheduled, rows=1011, width=4)
    assert index.tolist() == [4 * row + drafts for row, drafts in enumerate(scheduled.tolist())]
    layout = kp.RowLayout([kp.RowField("tokens", "int64", rows=int(rows[-1]))])
    assert int(index[-1]) < layout.fields[0].rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("source_tp", "destination_tp"), list(itertools.product([1, 2, 4], repeat=2)))
def test_narrow_dtypes_over_tensor_parallel_ranks_h19(dtype: kp.DType, source_tp: int, destination_tp: int) -> None:
    """Narrow keys beside wide values and their scales: every byte arrives whatever the ranks."""
    specs = [
        kp.ComponentSpec("key", layer_ids=[0, 1], dtype=dtype, total_heads=4, dims=3),
        kp.ComponentSpec("value", layer_ids=[0, 1], dtype="bfloat16", total_heads=4, dims=2),
        kp.ComponentSpec("index_scale", layer_ids=[0, 1], dtype="float32", total_heads=1, dims=1),
    ]
    model = kp.ModelLayout(specs, page_size=2, fingerprint="m")
    sides = [
        build_deployment(model, [[0, 1]], tp, base=base) for tp, base in ((source_tp, 2**12), (destination_tp, 2**44))
    ]
    agreement = kp.agree(*sides)
    images = received_images(agreement, kp.Runs([4, 2, 3], [1, 3, 4]))
    for image, manifest in zip(images, agreement.remote, strict=True):
        assert image == expected_image(manifest, [4, 2, 3], [1, 3, 4])
