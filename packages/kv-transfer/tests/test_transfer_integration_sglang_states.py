"""States and windows through SGLang's call: pages, request rows, recurrent states between unequal TP.

What must have arrived is written down by a plain loop; SGLang's own blocks are in the golden files.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from transfer_sglang import MHA, SENTINEL, Bytes, Manager, Side

from kv_transfer import UnsupportedLayout
from kv_transfer.integrations.sglang.pages import Buffers
from kv_transfer.integrations.sglang.rows import StateShape, state_rows

ROWS = 7


def add_state(side: Side, kind: str, tensors: Sequence[Bytes], **fields: Any) -> None:
    """One component of a rank; the first axis of a tensor is its items."""
    args = side.args
    args.state_types.append(kind)
    args.state_data_ptrs.append([one.ctypes.data for one in tensors])
    args.state_data_lens.append([one.nbytes for one in tensors])
    args.state_item_lens.append([one[0].nbytes for one in tensors])
    for name in ("state_layer_ids", "state_dim_per_tensor", "state_conv_shard_groups", "state_slice_outer_counts"):
        getattr(args, name).append(list(fields.get(name, ())))


def request(session: str, *indices: Sequence[int]) -> Any:
    return SimpleNamespace(mooncake_session_id=session, dst_state_indices=[list(one) for one in indices])


def connected(source: Side, destination: Side, *, said: bool = True) -> tuple[Manager, str, str | None]:
    here, there = Manager(source, mla=False), Manager(destination, mla=False)
    session = there.engine.get_session_id()
    here.others = there  # kept alive
    return here, session, here.register(destination, session, said=there._published() if said else None)


def labelled(shape: tuple[int, ...], salt: int) -> Bytes:
    return ((np.arange(np.prod(shape)) * 7 + salt * 31) % SENTINEL).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize("kind", ["swa", "dsa", "dsv4_c128", "c128_state", "request_row", "minimax_index_k"])
@pytest.mark.parametrize("stages", [1, 2])
def test_pages_and_rows_of_states(kind: str, stages: int) -> None:
    """By layer id where a stage has its own layers only; D01's kind of products are kv-planner's."""
    layers = [1, 2, 5]
    peer = Side(MHA, range(1))
    held = [np.full((ROWS, 3 + layer), SENTINEL, np.uint8) for layer in layers * 2]
    add_state(peer, kind, held, state_layer_ids=layers * 2)
    cuts = [layers] if stages == 1 else [layers[:2], layers[2:]]
    sent: dict[tuple[int, int], Bytes] = {}
    for stage, mine in enumerate(cuts):
        own = Side(MHA, range(1), pp=(stage, stages), hidden=1)
        own.args.kv_data_ptrs, own.args.kv_item_lens, own.args.kv_data_lens = [], [], []
        tensors = [labelled((ROWS, 3 + layer), layer + 10 * half) for half in range(2) for layer in mine]
        add_state(own, kind, tensors, state_layer_ids=mine * 2)
        here, session, reason = connected(own, peer)
        assert reason is None
        assert here.maybe_send_extra(request(session, [6, 2, 3]), [[1, 4, 5]], None) == 0
        for number, tensor in enumerate(tensors):
            sent[mine[number % len(mine)], number // len(mine)] = tensor
    for number, found in enumerate(held):
        expected = np.full_like(found, SENTINEL)
        expected[[6, 2, 3]] = sent[layers[number % 3], number // 3][[1, 4, 5]]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_windows_between_unequal_ranks_are_cut_by_heads(prefill: int, decode: int) -> None:
    """K and V of a window, of unequal widths; the pages are the window's own."""
    heads, widths, page = 4, (6, 4), 4
    shape = [(ROWS, page, heads, width) for width in widths]
    whole = [labelled(one, salt) for salt, one in enumerate(shape)]
    for rank in range(decode):
        peer = Side(MHA, range(1), heads=heads, tp=(rank, decode))
        share = slice(*kp.split_heads(heads, tp_rank=rank, tp_size=decode))
        held = [np.full((ROWS, page, heads // decode, width), SENTINEL, np.uint8) for width in widths]
        add_state(peer, "swa", held)
        for sender in range(prefill):
            own = Side(MHA, range(1), heads=heads, tp=(sender, prefill))
            part = slice(*kp.split_heads(heads, tp_rank=sender, tp_size=prefill))
            add_state(own, "swa", [np.ascontiguousarray(one[:, :, part]) for one in whole])
            tensors = [np.ascontiguousarray(one[:, :, part]) for one in whole]
            own.args.state_data_ptrs[0] = [one.ctypes.data for one in tensors]
            here, session, reason = connected(own, peer)
            assert reason is None
            assert here.maybe_send_extra(request(session, [6, 2]), [[1, 4]], None) == 0
        for found, one in zip(held, whole, strict=True):
            expected = np.full_like(found, SENTINEL)
            expected[[6, 2]] = one[[1, 4]][:, :, share]
            np.testing.assert_array_equal(found, expected)


def shard(whole: Bytes, groups: Sequence[int], rank: int, size: int, outer: int) -> Bytes:
    """A rank's share: of every outer row, its part of each group. Shape: [rows, outer * channels, width]."""
    rows, _, width = whole.shape
    by_outer = whole.reshape(rows, outer, sum(groups), width)
    parts, start = [], 0
    for group in groups:
        part = group // size
        parts.append(by_outer[:, :, start + rank * part : start + (rank + 1) * part])
        start += group
    return np.ascontiguousarray(np.concatenate(parts, axis=2)).reshape(rows, -1, width)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (1, 2), (1, 4), (2, 4), (2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("outer", [1, 3])
def test_recurrent_states_are_resharded(prefill: int, decode: int, outer: int) -> None:
    """B01: groups [8, 8, 16] sharded apart, a temporal state of one axis, and one that all ranks hold whole."""
    groups, width = (8, 8, 16), 2
    conv = labelled((ROWS, outer * 32, width), 1)
    temporal = labelled((ROWS, 16, 5), 2)
    whole = labelled((ROWS, 1, 9), 3)
    for rank in range(decode):
        peer = Side(MHA, range(1), heads=8, tp=(rank, decode))
        wanted = [shard(conv, groups, rank, decode, outer), shard(temporal, (16,), rank, decode, 1), whole]
        held = [np.full_like(one, SENTINEL) for one in wanted]
        dims = [32 // decode, 16 // decode, 0]
        add_state(peer, "mamba", held, state_layer_ids=[3, 3, 3], state_dim_per_tensor=dims)
        senders = [rank // (decode // prefill)] if decode >= prefill else [
            rank * (prefill // decode) + i for i in range(prefill // decode)
        ]  # fmt: skip
        for sender in senders:
            own = Side(MHA, range(1), heads=8, tp=(sender, prefill))
            mine = [shard(conv, groups, sender, prefill, outer), shard(temporal, (16,), sender, prefill, 1), whole]
            add_state(
                own, "mamba", mine, state_layer_ids=[3, 3, 3], state_dim_per_tensor=[32 // prefill, 16 // prefill, 0],
                state_conv_shard_groups=[list(groups), None, None], state_slice_outer_counts=[outer, 1, 1],
            )  # fmt: skip
            here, session, reason = connected(own, peer)
            assert reason is None, reason
            assert here.maybe_send_extra(request(session, [4]), [[2]], None) == 0
        for found, one in zip(held, wanted, strict=True):
            expected = np.full_like(found, SENTINEL)
            expected[4] = one[2]
            np.testing.assert_array_equal(found, expected)


def mamba(side: Side, widths: Sequence[int], **fields: Any) -> None:
    add_state(side, "mamba", [np.zeros((ROWS, width), np.uint8) for width in widths], **fields)


@pytest.mark.parametrize(
    ("own", "peer", "match"),
    [
        ({"widths": [3]}, {"widths": [10]}, "3 and of 10"),  # A05: window 3, and 3 + draft 7
        ({"widths": [4, 4]}, {"widths": [4]}, "state_data_ptrs"),
        ({"widths": [4], "state_layer_ids": [1]}, {"widths": [4], "state_layer_ids": [2]}, "state_layer_ids"),
        ({"widths": [4, 4], "state_layer_ids": [1]}, {"widths": [4], "state_layer_ids": [1]}, "state_layer_ids"),
        ({"widths": [4, 4], "state_layer_ids": [1, 1]}, {"widths": [4], "state_layer_ids": [1]}, "state_layer_ids"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_any_byte_moves(
    own: dict[str, Any], peer: dict[str, Any], match: str
) -> None:
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    mamba(source, **own)
    mamba(destination, **peer)
    _, _, reason = connected(source, destination)
    assert reason is not None and match in reason


@pytest.mark.parametrize(
    ("own", "peer", "match"),
    [
        ({"dims": [4]}, {"dims": [4]}, "unlike width"),
        ({"dims": [8]}, {"dims": []}, "state_dim_per_tensor"),
        ({"dims": [0]}, {"dims": [4]}, "at source"),
        ({"dims": [8], "groups": [[8, 4]]}, {"dims": [4]}, "do not add up"),
        ({"dims": [8], "outer": [3]}, {"dims": [4]}, "are no 3 x 8"),
    ],
)
def test_shards_that_do_not_add_up_are_refused(own: dict[str, Any], peer: dict[str, Any], match: str) -> None:
    source, destination = Side(MHA, range(1), heads=4), Side(MHA, range(1), heads=4, tp=(0, 2))
    mamba(
        source, [16], state_dim_per_tensor=own["dims"], state_conv_shard_groups=own.get("groups", []),
        state_slice_outer_counts=own.get("outer", []),
    )  # fmt: skip
    mamba(destination, [8], state_dim_per_tensor=peer["dims"])
    _, _, reason = connected(source, destination)
    assert reason is not None and match in reason, reason


def test_another_order_of_components_is_refused() -> None:
    """SGLang tells components apart by their place alone."""
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    for side, kinds in ((source, ("swa", "dsa")), (destination, ("dsa", "swa"))):
        for kind in kinds:
            add_state(side, kind, [np.zeros((ROWS, 4), np.uint8)])
    _, _, reason = connected(source, destination)
    assert reason is not None and "state_types[0]" in reason


def test_a_draft_state_that_one_side_forgot_is_refused_a13() -> None:
    """Target and draft in one list, the draft behind: L + 1 against L."""
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    add_state(source, "dsa", [np.zeros((ROWS, 4), np.uint8)] * 3)
    add_state(destination, "dsa", [np.zeros((ROWS, 4), np.uint8)] * 4)
    _, _, reason = connected(source, destination)
    assert reason is not None and "state_data_ptrs[0]" in reason and "local 3, remote 4" in reason


@pytest.mark.parametrize("indices", [([1, 2], [3]), ([1], [])])
def test_page_lists_of_unequal_length_are_refused_c01(indices: tuple[list[int], list[int]]) -> None:
    """SGLang cuts the longer one, or sends nothing where one is empty."""
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    for side in (source, destination):
        add_state(side, "swa", [np.zeros((ROWS, 4), np.uint8)])
    here, session, reason = connected(source, destination)
    assert reason is None
    with pytest.raises(kp.UnequalPages):
        here.maybe_send_extra(request(session, indices[1]), [indices[0]], None)
    assert here.maybe_send_extra(request(session, []), [[]], None) == 0
    assert here.maybe_send_extra(request(session, [1]), [None], None) == 0


def test_a_recurrent_state_is_one_row() -> None:
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    for side in (source, destination):
        mamba(side, [4])
    here, session, reason = connected(source, destination)
    assert reason is None
    with pytest.raises(UnsupportedLayout, match="one row a request"):
        here.maybe_send_extra(request(session, [1]), [[1, 2]], None)


def test_other_states_between_unequal_ranks_are_refused() -> None:
    source, destination = Side(MHA, range(1), heads=4), Side(MHA, range(1), heads=4, tp=(0, 2))
    for side in (source, destination):
        add_state(side, "block_scale", [np.zeros((ROWS, 4), np.uint8)])
    _, _, reason = connected(source, destination)
    assert reason is not None and "block_scale" in reason


def test_a_kind_that_nobody_moves_is_named() -> None:
    source, destination = Side(MHA, range(1)), Side(MHA, range(1))
    for side in (source, destination):
        add_state(side, "tomorrow", [np.zeros((ROWS, 4), np.uint8)])
    here, session, reason = connected(source, destination)
    assert reason is None
    with pytest.raises(UnsupportedLayout, match="tomorrow"):
        here.maybe_send_extra(request(session, [1]), [[1]], None)
    with pytest.raises(UnsupportedLayout, match="not registered"):
        here.maybe_send_extra(request("nobody", [1]), [[1]], None)


def test_of_ranks_that_hold_the_same_state_the_first_brings_it() -> None:
    """Four prefill ranks with whole items, two decode ranks: each is read by two of them, and sent one copy."""
    here, there = Buffers((4096,), (8,), (80,)), Buffers((8192,), (8,), (80,))

    def brought(rank: int, size: int, readers: int) -> int:
        return len(
            list(
                state_rows(
                    [(0, 0)], here, there, 1, 2, shapes=[StateShape(0, 0)],
                    source_rank=(rank, size), destination_rank=(0, readers),
                )
            )
        )  # fmt: skip

    assert [brought(rank, 4, 2) for rank in range(4)] == [1, 0, 1, 0]
    assert [brought(rank, 2, 4) for rank in range(2)] == [1, 1]


def test_a_peer_that_registers_again_and_does_not_fit_is_served_no_more() -> None:
    """What it had said before is not used: another process may be at its buffers."""
    own, peer = Side(MHA, range(1)), Side(MHA, range(1))
    for side in (own, peer):
        add_state(side, "request_row", [np.full((ROWS, 4), SENTINEL, np.uint8)], state_layer_ids=[0])
    here, session, reason = connected(own, peer)
    assert reason is None and here.maybe_send_extra(request(session, [2]), [[1]], None) == 0
    peer.args.state_item_lens[0] = [5]
    reason = here.register(peer, session)
    assert reason is not None and "the buffer ends inside an item" in reason
    with pytest.raises(UnsupportedLayout, match="not registered"):
        here.maybe_send_extra(request(session, [2]), [[1]], None)
    with pytest.raises(UnsupportedLayout, match="not registered"):
        here.send_aux(request(session, [2]), 0, [])
