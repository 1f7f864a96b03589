"""What SGLang's Ascend manager writes: the blocks of its sends, by stage, by heads, by shares, of states and of rows.

Its calls run unchanged on lists of made-up addresses, and its engine notes what it is asked to write. A block is
[source buffer, offset in it, destination buffer, offset in it, bytes].
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.ascend.conn import AscendKVManager, AscendStateType
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

__all__ = ["record"]

PAGE = 4
SHIFTS = (32, 40)
SOURCE, DESTINATION = [3, 4, 5, 9, 2], [7, 8, 1, 2, 6]
ITEMS = {"mha": (96, 96), "wide": (192, 128), "mla2": (64, 16), "mla3": (64, 16, 32)}


class _Notes:
    """An engine that writes nothing down but what it was asked for."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []

    def batch_transfer_sync(
        self, session: str, source: Sequence[int], destination: Sequence[int], nbytes: Sequence[int]
    ) -> int:
        for own, other, count in zip(source, destination, nbytes, strict=True):
            self.blocks.append([*_place(int(own), SHIFTS[0]), *_place(int(other), SHIFTS[1]), int(count)])
        return 0


@contextlib.contextmanager
def _published() -> Iterator[None]:
    context = get_context()
    before = (context._server_args, context._config_bags)
    context.set_server_args(ServerArgs(model_path="none"))
    try:
        yield
    finally:
        context._server_args, context._config_bags = before


def _manager(mla: bool, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1), **fields: Any) -> Any:
    manager = object.__new__(AscendKVManager)
    vars(manager).update(
        engine=_Notes(), is_mla_backend=mla, is_hybrid_mla_backend=False, attn_tp_size=tp[1], state_tp_size=tp[1],
        pp_size=pp[1], dcp_size=1, enable_custom_mem_pool=False, custom_mem_pool_type=None,
        state_strides_validated=set(), enable_deferred_decode_kv_release=False,
        max_transfer_batch_indices=0, request_status={1: 1}, kv_shard_size=1,
        kv_args=SimpleNamespace(
            engine_rank=tp[0], page_size=PAGE, kv_layer_ids=[], mla_compression_ratios=None, num_draft_entries=0,
            aux_data_ptrs=[], aux_item_lens=[], state_types=[], state_data_ptrs=[], state_item_lens=[],
            state_layer_ids=[], state_dim_per_tensor=[], state_conv_shard_groups=[], state_slice_outer_counts=[],
            **fields,
        ),
    )  # fmt: skip
    return manager


def _at(count: int, shift: int) -> list[int]:
    return [(entry + 1) << shift for entry in range(count)]


def _place(address: int, shift: int) -> list[int]:
    """The buffer of an address, and the offset in it."""
    return [(address >> shift) - 1, address & ((1 << shift) - 1)]


def _answer(case: dict[str, Any], manager: Any, call: Any, pp_last: bool = True) -> dict[str, Any]:
    """The case with SGLang's blocks, or the error."""
    group = SimpleNamespace(is_last_rank=pp_last)
    try:
        with (
            get_parallel().override(pp_group=group, attn_cp_size=1, attn_cp_rank=0),
            _published(),
            concurrent.futures.ThreadPoolExecutor(1) as executor,
        ):
            code = call(executor)
        return {**case, "blocks": manager.engine.blocks, "code": code, "error": None}
    except (IndexError, RuntimeError, ValueError) as error:
        return {**case, "blocks": None, "code": None, "error": type(error).__name__}


def _stages() -> Iterator[dict[str, Any]]:
    for kind in ITEMS:
        for cuts in ((3,), (2, 1), (1, 2), (2, 2)):
            for drafts in ((0, 0), (0, 1), (1, 1)):
                for stage in range(len(cuts)):
                    yield {
                        "kind": kind, "cuts": list(cuts), "stage": stage, "drafts": list(drafts),
                        "draft": drafts[0] if stage == len(cuts) - 1 else 0,
                    }  # fmt: skip


def _by_stage(case: dict[str, Any]) -> dict[str, Any]:
    items, cuts, stage = ITEMS[case["kind"]], case["cuts"], case["stage"]
    mla, total, own = case["kind"].startswith("mla"), sum(case["cuts"]), case["cuts"][stage]
    lens = [item for item in items for _ in range(own)] + [item for item in items for _ in range(case["draft"])]
    count = len(items) * (total + case["drafts"][1])
    manager = _manager(
        mla, pp=(stage, len(cuts)), kv_data_ptrs=_at(len(lens), SHIFTS[0]), kv_item_lens=lens, kv_buf_groups=len(items),
        hidden_kv_layers=total, draft_kv_layers=case["drafts"][0], prefill_start_layer=sum(cuts[:stage]),
        prefill_end_layer=sum(cuts[: stage + 1]),
    )  # fmt: skip
    return _answer(
        case, manager,
        lambda executor: manager.send_kvcache(
            "peer", np.array(SOURCE, np.int32), _at(count, SHIFTS[1]), np.array(DESTINATION, np.int32), executor, [],
            dst_kv_item_len=items[0], dst_attn_tp_size=1,
        ),
        stage == len(cuts) - 1,
    )  # fmt: skip


def _ratios() -> Iterator[dict[str, Any]]:
    for kind in ("mha", "wide"):
        for heads in (2, 4):
            for prefill in (1, 2, 4):
                for decode in (1, 2, 4):
                    if prefill != decode:
                        for rank in range(decode):
                            readers = max(1, prefill // decode)
                            first = rank * readers if prefill > decode else rank // (decode // prefill)
                            for source in range(first, first + readers):
                                yield {
                                    "kind": kind, "heads": heads, "prefill": prefill, "decode": decode,
                                    "source": source, "rank": rank,
                                }  # fmt: skip


def _by_heads(case: dict[str, Any]) -> dict[str, Any]:
    """One layer; an item's bytes are those of `ITEMS` for one head."""
    own, other = (max(1, case["heads"] // case[side]) for side in ("prefill", "decode"))
    items = ITEMS[case["kind"]]
    manager = _manager(
        False, (case["source"], case["prefill"]), kv_data_ptrs=_at(2, SHIFTS[0]),
        kv_item_lens=[own * item for item in items], kv_head_num=own,
        total_kv_head_num=case["heads"], prefill_start_layer=0, prefill_end_layer=1,
    )  # fmt: skip
    return _answer(
        case, manager,
        lambda executor: manager.send_kvcache_slice(
            "peer", np.array(SOURCE[:2], np.int32), _at(2, SHIFTS[1]), np.array(DESTINATION[:2], np.int32),
            case["rank"], case["decode"], other * items[0], executor, [],
        ),
    )  # fmt: skip


def _by_share(case: dict[str, Any]) -> dict[str, Any]:
    items = ITEMS["mla3"]
    lens = [item for item in items for _ in range(2)]
    manager = _manager(
        True, kv_data_ptrs=_at(6, SHIFTS[0]), kv_item_lens=lens, kv_buf_groups=3, hidden_kv_layers=2, draft_kv_layers=0,
        prefill_start_layer=0, prefill_end_layer=2,
    )  # fmt: skip
    manager._dcp_remote_decode_layout = [False] * 4 + [True] * 2
    there = [item * (case["size"] if entry >= 4 else 1) for entry, item in enumerate(lens)]
    return _answer(
        case, manager,
        lambda executor: manager.send_kvcache_dcp(
            "peer", np.array(SOURCE[: case["pages"]], np.int32), _at(6, SHIFTS[1]), np.array(DESTINATION, np.int32),
            dcp_token_item_lens=[item // PAGE for item in lens], dst_dcp_size=case["size"], dst_dcp_rank=case["rank"],
            src_page_offset=case["offset"], decode_prefix_len=case["prefix"], num_kv_tokens=case["pages"] * PAGE,
            executor=executor, dst_layer_ids=[], dst_kv_item_lens=there,
        ),
    )  # fmt: skip


def _shares() -> Iterator[dict[str, Any]]:
    for size in (2, 4):
        for rank in range(size):
            for pages, offset, prefix in ((5, 0, 0), (3, 2, 0), (5, 0, 2 * PAGE * size), (0, 0, 0)):
                yield {"size": size, "rank": rank, "pages": pages, "offset": offset, "prefix": prefix}


STATES: tuple[dict[str, Any], ...] = (
    {"kind": StateType.SWA, "items": [8, 8, 6, 6], "indices": [[1, 2, 5], [4, 5, 3]]},
    {"kind": StateType.SWA, "items": [8, 6], "indices": [[1, 2, 5], [4, 5]]},
    {"kind": StateType.SWA, "items": [8, 6], "indices": [[1, 2], []]},
    {"kind": AscendStateType.DSV4_C128, "items": [8, 8], "indices": [[1, 2], [4, 5]], "mla": True},
    {"kind": AscendStateType.DSV4_C128, "items": [8, 8], "indices": [[1, 2], [4]], "mla": True},
    {"kind": StateType.MAMBA, "items": [10, 6, 10, 6], "ids": [1, 4, 1, 4], "indices": [[3], [5]]},
    {"kind": StateType.MAMBA, "items": [10, 6], "there": [10, 8], "indices": [[3], [5]]},
)


def _state(case: dict[str, Any]) -> dict[str, Any]:
    items, ids = case["items"], case.get("ids", [])
    manager = _manager(
        case.get("mla", False), prefill_start_layer=0, prefill_end_layer=len(items) // 2, kv_data_ptrs=[],
        kv_item_lens=[], kv_buf_groups=1, hidden_kv_layers=len(items),
    )  # fmt: skip
    args = manager.kv_args
    args.state_types, args.state_data_ptrs = [case["kind"]], [_at(len(items), SHIFTS[0])]
    args.state_item_lens, args.state_layer_ids = [items], [ids]
    there = case.get("there", items)
    info = SimpleNamespace(
        dst_state_data_ptrs=[_at(len(there), SHIFTS[1])], dst_state_item_lens=[there], dst_state_layer_ids=[ids],
        dst_state_dim_per_tensor=[[]], dst_attn_tp_size=1, dst_tp_rank=0,
    )  # fmt: skip
    request = SimpleNamespace(mooncake_session_id="peer", dst_state_indices=[case["indices"][1]], room=1)
    shown = {**case, "kind": case["kind"].value}
    return _answer(
        shown, manager, lambda executor: manager.maybe_send_extra(request, [case["indices"][0]], executor, info)
    )


def _sharded(case: dict[str, Any]) -> dict[str, Any]:
    """A convolution of groups [8, 8, 16] with 3 rows of 2 bytes, and a state of 16 heads of 5 bytes."""
    own, other = case["prefill"], case["decode"]
    items = ([3 * 32 * 2 // own, 16 * 5 // own], [3 * 32 * 2 // other, 16 * 5 // other])
    manager = _manager(False, (case["source"], own))
    args = manager.kv_args
    args.state_types, args.state_data_ptrs, args.state_item_lens = [StateType.MAMBA], [_at(2, SHIFTS[0])], [items[0]]
    args.state_layer_ids, args.state_dim_per_tensor = [[2, 2]], [[32 // own, 16 // own]]
    args.state_conv_shard_groups, args.state_slice_outer_counts = [[[8, 8, 16], None]], [[3, 1]]
    info = SimpleNamespace(
        dst_state_data_ptrs=[_at(2, SHIFTS[1])], dst_state_item_lens=[items[1]], dst_state_layer_ids=[[2, 2]],
        dst_state_dim_per_tensor=[[32 // other, 16 // other]], dst_attn_tp_size=other, dst_tp_rank=case["rank"],
    )  # fmt: skip
    request = SimpleNamespace(mooncake_session_id="peer", dst_state_indices=[[5]], room=1)
    return _answer(case, manager, lambda executor: manager.maybe_send_extra(request, [[3]], executor, info))


def _shards() -> Iterator[dict[str, Any]]:
    for prefill, decode in ((1, 2), (2, 4), (2, 1), (4, 2)):
        for rank in range(decode):
            readers = max(1, prefill // decode)
            first = rank * readers if prefill > decode else rank // (decode // prefill)
            for source in range(first, first + readers):
                yield {"prefill": prefill, "decode": decode, "source": source, "rank": rank}


def _aux(case: dict[str, Any]) -> dict[str, Any]:
    manager = _manager(False)
    manager.kv_args.aux_data_ptrs, manager.kv_args.aux_item_lens = _at(len(case["items"]), SHIFTS[0]), case["items"]
    request = SimpleNamespace(mooncake_session_id="peer", dst_aux_index=case["to"])
    return _answer(
        case, manager, lambda executor: manager.send_aux(request, case["from"], _at(case["there"], SHIFTS[1]))
    )


def record() -> dict[str, Any]:
    """Blocks of every kind of send."""
    return {
        "page_size": PAGE, "source": SOURCE, "destination": DESTINATION, "items": ITEMS,
        "stages": [_by_stage(case) for case in _stages()],
        "heads": [_by_heads(case) for case in _ratios()],
        "shares": [_by_share(case) for case in _shares()],
        "states": [_state(case) for case in STATES],
        "sharded": [_sharded(case) for case in _shards()],
        "aux": [
            _aux({"items": items, "there": there, "from": 2, "to": 5})
            for items, there in (([64, 256, 8], 3), ([64, 256, 8], 2), ([64, 256], 3))
        ],
    }  # fmt: skip
