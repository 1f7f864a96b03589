"""What SGLang calls of its manager, and passes: a test that fails when the installed engine says something else.

`seeds` are the calls of the release before: the same without the newest arguments (A01).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from kv_transfer.integrations import sglang as ours
from kv_transfer.integrations.sglang.drain import FAILED, SUCCESS
from kv_transfer.integrations.sglang.holds import HOLD, HOLD_SECONDS
from kv_transfer.integrations.sglang.rooms import HoldingReceiver
from sglang.srt.disaggregation.ascend.conn import (
    AscendKVBootstrapServer,
    AscendKVManager,
    AscendKVReceiver,
    AscendKVSender,
    AscendStateType,
)
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVReceiver
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, MooncakeKVManager, TransferInfo
from sglang.srt.disaggregation.utils import setup_state_kv_args
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine
from sglang.srt.environ import envs

CALLS = (
    "init_engine", "register_buffer_to_engine", "teardown", "build_receiver_registration_message", "_make_worker_recv",
    "_validate_peer_state_layout", "requires_dcp_relayout", "prepare_dcp_token_item_lens", "get_mla_kv_ptrs_with_pp",
    "get_mha_kv_ptrs_with_pp", "send_kvcache", "send_kvcache_slice", "send_kvcache_dcp", "maybe_send_extra", "send_aux",
    "_transfer_data", "transfer_worker", "conclude_transfer", "poison_deferred_ack_room", "_maybe_ack_drained_abort",
    "_handle_deferred_abort_notification", "is_abort_release_safe", "clear_deferred_abort_state",
    "_handle_node_failure",
)  # fmt: skip
SEEDS = {
    "send_kvcache": (
        "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices", "executor", "dst_layer_ids",
    ),
    "get_mla_kv_ptrs_with_pp": ("src_kv_ptrs", "dst_kv_ptrs"),
}  # fmt: skip
# What our code asks of SGLang's own part of the manager.
ASKED = {
    "record_failure": ("bootstrap_room", "failure_reason"),
    "conclude_failure": ("bootstrap_room", "failure_reason", "targets"),
    "_send_slot_state": (
        "req", "src_ptrs", "src_item_lens", "dst_ptrs", "dst_item_lens", "src_indices", "dst_indices", "label",
    ),
    "_is_npu_dsa_layout": (),
    "check_status": ("bootstrap_room",),
    "update_status": ("bootstrap_room", "status"),
    "send_kv_status_message": ("targets", "bootstrap_room", "status", "failure_reason"),
    "_room_notify_targets": ("bootstrap_room",),
    "_unblacklist_session": ("session_id",),
}  # fmt: skip
FIELDS = (
    "engine_rank", "kv_data_ptrs", "kv_data_lens", "kv_item_lens", "kv_layer_ids", "kv_cache_dtype_str",
    "aux_data_ptrs", "aux_data_lens", "aux_item_lens", "state_types", "state_data_ptrs", "state_data_lens",
    "state_item_lens", "state_layer_ids", "state_dim_per_tensor", "state_slice_outer_counts",
    "state_conv_shard_groups", "kv_head_num", "total_kv_head_num", "page_size", "pp_rank", "prefill_start_layer",
    "prefill_end_layer", "mla_compression_ratios", "kv_buf_groups", "hidden_kv_layers", "draft_kv_layers",
    "num_draft_entries", "gpu_id", "is_hybrid_mla_backend",
)  # fmt: skip
REGISTERED = (
    "mooncake_session_id", "dst_kv_ptrs", "dst_aux_ptrs", "dst_state_data_ptrs", "dst_tp_rank", "dst_attn_tp_size",
    "dst_kv_item_len", "dst_state_item_lens", "dst_state_dim_per_tensor", "dst_kv_layer_ids", "dst_state_layer_ids",
    "dst_dcp_size", "dst_dcp_rank", "dst_kv_item_lens",
)  # fmt: skip


def parameters(call: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.kind) for one in inspect.signature(call).parameters.values() if one.name != "self"]


@pytest.mark.parametrize("name", CALLS)
def test_our_calls_have_sglangs_parameters(name: str) -> None:
    """Names, order and kinds; and what SGLang may leave out may be left out."""
    own, theirs = getattr(ours.PlannedTransfers, name), getattr(AscendKVManager, name)
    assert parameters(own) == parameters(theirs)
    for mine, other in zip(
        inspect.signature(own).parameters.values(), inspect.signature(theirs).parameters.values(), strict=True
    ):
        assert (mine.default is mine.empty) == (other.default is other.empty), mine.name


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_calls_are_served(name: str) -> None:
    """The parameters of the release before come first, and everything behind them may be left out."""
    found = list(inspect.signature(getattr(ours.PlannedTransfers, name)).parameters.values())[1:]
    assert tuple(one.name for one in found[: len(SEEDS[name])]) == SEEDS[name]
    assert all(one.default is not one.empty for one in found[len(SEEDS[name]) :])


@pytest.mark.parametrize("name", ASKED)
def test_what_we_ask_of_sglangs_manager_is_there(name: str) -> None:
    assert tuple(one for one, _ in parameters(getattr(AscendKVManager, name))) == ASKED[name]


def test_every_call_that_moves_bytes_is_ours() -> None:
    """Nothing of SGLang's reaches its engine's transfer calls by another way than `_transfer_data`."""
    made = ours.manager_class()
    assert issubclass(made, AscendKVManager) and ours.manager_class() is made and not inspect.isabstract(made)
    senders = [name for name in dir(MooncakeKVManager) if name.startswith("send_kvcache")]
    assert set(senders) <= {"send_kvcache", "send_kvcache_slice", "send_kvcache_dcp", "send_kvcache_staged"}
    for name in CALLS:
        assert getattr(made, name).__qualname__.split(".")[0] != "AscendKVManager", name


def test_the_set_of_classes_is_whole() -> None:
    for made, base in (
        (ours.sender_class(), AscendKVSender), (ours.receiver_class(), AscendKVReceiver),
        (ours.bootstrap_server_class(), AscendKVBootstrapServer),
    ):  # fmt: skip
        assert issubclass(made, base) and not inspect.isabstract(made)


def test_rooms_have_what_holding_their_pages_needs() -> None:
    """SGLang's receivers arm, say and repeat aborts; its queue asks the manager when pages are free."""
    assert (KVPoll.Failed, KVPoll.Success) == (FAILED, SUCCESS)
    for name in ("send_metadata", "abort", "clear", "_send_abort_notification"):
        assert callable(getattr(AscendKVReceiver, name)), name
    assert parameters(AscendKVReceiver._send_abort_notification) == parameters(HoldingReceiver._send_abort_notification)
    assert parameters(AscendKVReceiver._connect_to_bootstrap_server) == [
        ("bootstrap_info", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    assert parameters(CommonKVReceiver.disconnect_endpoint) == [("endpoint", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    assert {"room", "decode_ip", "decode_port", "generation"} == set(AbortNotification.__struct_fields__)
    for name in ("_defer_release", "resolve_deferred_releases", "pop_transferred"):
        assert callable(getattr(DecodeTransferQueue, name)), name
    text = inspect.getsource(DecodeTransferQueue)
    for name in ("is_abort_release_safe", "clear_deferred_abort_state", "ensure_abort_notified(force_arm=True)"):
        assert name in text, name
    assert HOLD in vars(type(envs)) and HOLD_SECONDS in vars(type(envs))


def test_sglangs_records_have_the_fields_that_we_read() -> None:
    assert set(FIELDS) <= set(KVArgs.__annotations__) | set(vars(KVArgs))
    assert set(REGISTERED) <= set(KVArgsRegisterInfo.__dataclass_fields__)
    assert {"mooncake_session_id", "dst_aux_index", "dst_state_indices"} <= set(TransferInfo.__dataclass_fields__)


def test_our_words_for_states_are_sglangs() -> None:
    from kv_transfer.integrations.sglang.words import C4_STATE, C128, MAMBA, PAGED, WINDOW

    theirs = {one.value for one in (*StateType, *AscendStateType)}
    assert {C4_STATE, C128, MAMBA, WINDOW, *PAGED, "dsa_tail"} == theirs


def test_the_engine_has_the_calls_of_sglangs() -> None:
    for name in ("batch_register", "batch_deregister", "batch_transfer_sync", "get_session_id", "send_probe"):
        own, theirs = (getattr(kind, name) for kind in (ours.SessionEngine, MooncakeTransferEngine))
        assert len(parameters(own)) == len(parameters(theirs)), name


def test_the_filling_of_states_has_sglangs_parameters() -> None:
    assert parameters(ours.setup_state_kv_args) == parameters(setup_state_kv_args)
