"""SGLang's recorded blocks beside ours: the same calls on the same lists, compared byte by byte.

Where SGLang writes something else, the case is a row of the contract's list of faults, or one that `docs/concepts/
engines.md` names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from transfer_sglang import PAGE

from kv_transfer import TransferError
from kv_transfer.integrations.sglang import PlannedTransfers, SessionEngine

GOLDEN = json.loads((Path(__file__).parent / "golden/transfers.json").read_text(encoding="utf-8"))
SOURCE, DESTINATION, ITEMS = GOLDEN["source"], GOLDEN["destination"], GOLDEN["items"]
SHIFTS = (32, 40)
Map = dict[tuple[int, int], tuple[int, int]]


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=" ".join(str(value) for value in case.values())[:70]) for case in GOLDEN[name]]


def byte_map(blocks: Iterable[list[int]]) -> Map:
    """Destination (buffer, byte) to source (buffer, byte); no byte twice, unless with the same content."""
    found: Map = {}
    for own, start, other, to, count in blocks:
        for byte in range(count):
            here = (own, start + byte)
            assert found.setdefault((other, to + byte), here) == here
    return found


class Notes(PlannedTransfers):
    """Our manager over an engine that notes blocks; lists are made-up addresses."""

    def __init__(self, mla: bool, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1), **fields: Any) -> None:
        self.is_mla_backend, self.attn_tp_size, self.state_tp_size, self.pp_size = mla, tp[1], tp[1], pp[1]
        self.kv_args = SimpleNamespace(**{
            "engine_rank": tp[0], "page_size": PAGE, "kv_layer_ids": [], "mla_compression_ratios": None,
            "pp_rank": pp[0],
            "kv_data_lens": [1024 * item for item in fields.get("kv_item_lens", ())],
            "kv_data_ptrs": [], "kv_item_lens": [], "aux_data_ptrs": [], "aux_item_lens": [], "aux_data_lens": [],
            "state_types": [], **fields,
        })  # fmt: skip
        self.blocks: list[list[int]] = []
        engine: Any = SimpleNamespace(capabilities=SimpleNamespace(planner=lambda: None))
        self.engine = SessionEngine(engine)
        self.engine.move = self._note  # type: ignore[method-assign]
        self._begin()

    def _note(self, session: str, batches: Iterable[Any]) -> int:
        for batch in batches:
            for block in zip(batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist(), strict=True):
                places = [
                    [(at >> shift) - 1, at & ((1 << shift) - 1)] for at, shift in zip(block, SHIFTS, strict=False)
                ]
                self.blocks.append([*places[0], *places[1], block[2]])
        return 0

    def _is_npu_dsa_layout(self) -> bool:
        return getattr(self.kv_args, "kv_buf_groups", 1) == 3

    def answer(self, call: Any) -> Map | type[Exception]:
        try:
            assert call() == 0
        except (TransferError, kp.PlanError) as error:
            return type(error)
        return byte_map(self.blocks)


def at(count: int, side: int) -> list[int]:
    return [(entry + 1) << SHIFTS[side] for entry in range(count)]


def stage(case: dict[str, Any]) -> tuple[Notes, int]:
    items, cuts, number = ITEMS[case["kind"]], case["cuts"], case["stage"]
    total, own = sum(cuts), cuts[number]
    lens = [item for item in items for _ in range(own)] + [item for item in items for _ in range(case["draft"])]
    manager = Notes(
        case["kind"].startswith("mla"), pp=(number, len(cuts)), kv_data_ptrs=at(len(lens), 0), kv_item_lens=lens,
        kv_buf_groups=len(items), hidden_kv_layers=total, draft_kv_layers=case["drafts"][0],
        prefill_start_layer=sum(cuts[:number]), prefill_end_layer=sum(cuts[: number + 1]),
    )  # fmt: skip
    return manager, len(items) * (total + case["drafts"][1])


@pytest.mark.parametrize("case", cases("stages"))
@pytest.mark.parametrize("caller", ["today", "seeds"])
def test_pages_by_stage(case: dict[str, Any], caller: str) -> None:
    """`send_kvcache` over one stage and several, K and V, latents, index keys, drafts."""
    manager, count = stage(case)
    first = ITEMS[case["kind"]][0]
    more: tuple[Any, ...] = ([], None, first, 1) if caller == "today" else ([],)
    ours = manager.answer(
        lambda: manager.send_kvcache("x", np.array(SOURCE), at(count, 1), np.array(DESTINATION), None, *more)
    )
    if isinstance(ours, type):
        assert case["drafts"][0] > case["drafts"][1]
        return
    assert ours == expected_by_stage(case)
    theirs = None if case["blocks"] is None else byte_map(case["blocks"])
    if theirs != ours:
        assert not case["kind"].startswith("mla"), "A-25"  # K and V, stages that are unequal or have drafts
        assert len(case["cuts"]) > 1


def expected_by_stage(case: dict[str, Any]) -> Map:
    """By hand: entry by entry, page by page."""
    items, cuts, number = ITEMS[case["kind"]], case["cuts"], case["stage"]
    total, own, start = sum(cuts), cuts[number], sum(cuts[:number])
    blocks = []
    for group, item in enumerate(items):
        pairs = [(group * own + layer, group * total + start + layer) for layer in range(own)]
        base = (len(items) * own, len(items) * total)
        pairs += [
            (base[0] + group * case["draft"] + layer, base[1] + group * case["drafts"][1] + layer)
            for layer in range(case["draft"])
        ]
        for mine, theirs in pairs:
            blocks += [
                [mine, page * item, theirs, to * item, item] for page, to in zip(SOURCE, DESTINATION, strict=True)
            ]
    return byte_map(blocks)


def test_the_known_faults_of_stages_occur() -> None:
    differ = [case for case in GOLDEN["stages"] if case["blocks"] is None or not same(case)]
    assert {case["kind"] for case in differ} == {"mha", "wide"} and len(differ) >= 8


def same(case: dict[str, Any]) -> bool:
    return bool(byte_map(case["blocks"]) == expected_by_stage(case))


@pytest.mark.parametrize("case", cases("heads"))
def test_heads_between_unequal_ranks(case: dict[str, Any]) -> None:
    """`send_kvcache_slice`; every replica sends in SGLang, one of them here (B05); V has its own width (A-26)."""
    own, other = (max(1, case["heads"] // case[side]) for side in ("prefill", "decode"))
    items = ITEMS[case["kind"]]
    manager = Notes(
        False, (case["source"], case["prefill"]), kv_data_ptrs=at(2, 0), kv_item_lens=[own * item for item in items],
        kv_head_num=own, total_kv_head_num=case["heads"], prefill_start_layer=0, prefill_end_layer=1,
    )  # fmt: skip
    ours = manager.answer(
        lambda: manager.send_kvcache_slice(
            "x", np.array(SOURCE[:2]), at(2, 1), np.array(DESTINATION[:2]), case["rank"], case["decode"],
            other * items[0], None, [],
        )
    )  # fmt: skip
    replicas = max(1, case["prefill"] // case["heads"])
    readers = max(1, case["prefill"] // case["decode"])
    surplus = readers > 1 and case["source"] % replicas != 0 and case["source"] % readers != 0
    if surplus:
        assert ours == {}
        return
    theirs = byte_map(case["blocks"])
    if case["kind"] == "wide":  # K alone is where it should be
        assert not isinstance(ours, type)
        assert theirs != ours
        theirs, ours = ({key: held for key, held in found.items() if key[0] == 0} for found in (theirs, ours))
    assert ours == theirs


@pytest.mark.parametrize("case", cases("shares"))
def test_shares_of_a_context(case: dict[str, Any]) -> None:
    """`send_kvcache_dcp`, by page: equal in all cases."""
    items = ITEMS["mla3"]
    lens = [item for item in items for _ in range(2)]
    manager = Notes(
        True, kv_data_ptrs=at(6, 0), kv_item_lens=lens, kv_buf_groups=3, hidden_kv_layers=2, draft_kv_layers=0,
        prefill_start_layer=0, prefill_end_layer=2,
    )  # fmt: skip
    there = [item * (case["size"] if entry >= 4 else 1) for entry, item in enumerate(lens)]
    ours = manager.answer(
        lambda: manager.send_kvcache_dcp(
            "x", np.array(SOURCE[: case["pages"]]), at(6, 1), np.array(DESTINATION),
            dcp_token_item_lens=[item // PAGE for item in lens], dst_dcp_size=case["size"], dst_dcp_rank=case["rank"],
            src_page_offset=case["offset"], decode_prefix_len=case["prefix"], num_kv_tokens=case["pages"] * PAGE,
            executor=None, dst_layer_ids=[], dst_kv_item_lens=there,
        )
    )  # fmt: skip
    assert case["error"] is None and ours == byte_map(case["blocks"])


def state_manager(items: list[int], there: list[int], kind: str, ids: list[int], **more: Any) -> tuple[Notes, Any]:
    manager = Notes(
        more.get("mla", False), more.get("tp", (0, 1)), state_types=[kind], state_data_ptrs=[at(len(items), 0)],
        state_data_lens=[[item * 64 for item in items]], state_item_lens=[items], state_layer_ids=[ids],
        state_dim_per_tensor=[more.get("dims", [])], state_conv_shard_groups=[more.get("groups", [])],
        state_slice_outer_counts=[more.get("outer", [])], total_kv_head_num=16,
    )  # fmt: skip
    rank, size = more.get("peer", (0, 1))
    info = SimpleNamespace(
        mooncake_session_id="x", dst_kv_ptrs=[], dst_kv_item_lens=[], dst_kv_item_len=0, dst_kv_layer_ids=[],
        dst_aux_ptrs=[], dst_state_data_ptrs=[at(len(there), 1)], dst_state_item_lens=[there],
        dst_state_layer_ids=[ids], dst_state_dim_per_tensor=[more.get("wanted", [])], dst_tp_rank=rank,
        dst_attn_tp_size=size, dst_dcp_size=1, dst_dcp_rank=0,
    )  # fmt: skip
    return manager, info


@pytest.mark.parametrize("case", cases("states"))
def test_states(case: dict[str, Any]) -> None:
    """Windows, compressed groups, recurrent states. Lists of unequal length are cut in SGLang, refused here (C01)."""
    there = case.get("there", case["items"])
    manager, info = state_manager(case["items"], there, case["kind"], case.get("ids", []), mla=case.get("mla", False))
    own, to = case["indices"]
    reason = manager._validate_peer_state_layout(info)[1]
    if there != case["items"]:
        assert case["error"] == "RuntimeError" and reason is not None and "6 and of 8" in reason
        return
    assert reason is None
    request = SimpleNamespace(mooncake_session_id="x", dst_state_indices=[to])
    ours = manager.answer(lambda: manager.maybe_send_extra(request, [own], None))
    if len(own) != len(to):
        assert ours is kp.UnequalPages
        assert case["error"] == "RuntimeError" if case["kind"] == "dsv4_c128" else case["code"] == 0
    else:
        assert ours == byte_map(case["blocks"])


@pytest.mark.parametrize("case", cases("sharded"))
def test_recurrent_states_between_unequal_ranks(case: dict[str, Any]) -> None:
    """A convolution whose groups are sharded apart, of three rows."""
    own, other = case["prefill"], case["decode"]
    manager, info = state_manager(
        [3 * 32 * 2 // own, 16 * 5 // own], [3 * 32 * 2 // other, 16 * 5 // other], "mamba", [2, 2],
        tp=(case["source"], own), peer=(case["rank"], other), dims=[32 // own, 16 // own],
        wanted=[32 // other, 16 // other], groups=[[8, 8, 16], None], outer=[3, 1],
    )  # fmt: skip
    assert manager._validate_peer_state_layout(info) == (True, None)
    request = SimpleNamespace(mooncake_session_id="x", dst_state_indices=[[5]])
    ours = manager.answer(lambda: manager.maybe_send_extra(request, [[3]], None))
    assert ours == byte_map(case["blocks"])


@pytest.mark.parametrize("case", cases("aux"))
def test_auxiliary_rows(case: dict[str, Any]) -> None:
    """SGLang writes the buffers that both sides have, by place; one more or less is refused here."""
    items = case["items"]
    manager = Notes(
        False, aux_data_ptrs=at(len(items), 0), aux_item_lens=items, aux_data_lens=[item * 64 for item in items]
    )
    _, info = state_manager([], [], "mamba", [])
    info.dst_aux_ptrs = at(case["there"], 1)
    reason = manager._validate_peer_state_layout(info)[1]
    if case["there"] != len(items):
        assert reason is not None and "aux_data_ptrs" in reason and case["code"] == 0
        return
    assert reason is None
    request = SimpleNamespace(mooncake_session_id="x", dst_aux_index=case["to"])
    ours = manager.answer(lambda: manager.send_aux(request, case["from"], info.dst_aux_ptrs))
    assert ours == byte_map(case["blocks"])


def test_a_case_is_never_compared_with_nothing() -> None:
    for name in ("stages", "heads", "shares", "states", "sharded", "aux"):
        assert any(case["blocks"] for case in GOLDEN[name]), name
