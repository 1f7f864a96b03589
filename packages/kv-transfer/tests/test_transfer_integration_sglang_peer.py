"""What a decode rank registers: the frame of ours behind SGLang's, settings, and words that are none."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_sglang import MHA, MLA, Manager, Side

from kv_transfer import ArgumentError, EngineError, EngineUnavailable, ProtocolError
from kv_transfer.engines.memfabric import MemfabricEngine
from kv_transfer.engines.mooncake import MooncakeEngine
from kv_transfer.errors import MessageTooLarge, ProtocolVersionError
from kv_transfer.integrations.sglang import plugin, settings
from kv_transfer.integrations.sglang.published import MOST_BYTES, Published, decode
from kv_transfer.integrations.sglang.settings import ENGINE, OPTIONS, create_session_engine


def published(side: Side, *, mla: bool = False) -> Published:
    manager = Manager(side, mla=mla)
    manager.engine.close()
    return manager._published()


def test_a_rank_says_what_sglangs_frames_leave_out() -> None:
    side = Side(MLA, range(2), drafts=1)
    side.args.draft_kv_layers = 1
    found = decode(published(side, mla=True).encode())
    assert [(name[0], name[1], name[2]) for name in found.names] == side.names
    assert found.page_size == 4 and found.kv_nbytes == tuple(side.args.kv_data_lens)
    assert found.aux_item_bytes == (16, 24) and found.aux_nbytes == (80, 120)


def test_ids_of_sglangs_own_are_left_to_its_frame() -> None:
    side = Side(MHA, range(2))
    side.args.kv_layer_ids = [0, 1, 0, 1]
    assert published(side).names == ()


def test_a_list_without_names_is_registered_as_it_is() -> None:
    side = Side(MLA, range(2))
    side.args.kv_buf_groups = None
    assert published(side, mla=True).names == ()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"v": 2}, ProtocolVersionError),
        ({"page_size": 0}, ProtocolError),
        ({"page_size": "4"}, ProtocolError),
        ({"kv_nbytes": [-1]}, ProtocolError),
        ({"kv_nbytes": [2**63]}, ProtocolError),
        ({"names": [["latent", "target", 0]]}, ProtocolError),
        ({"names": [["weights", "target", 0, 0]]}, ProtocolError),
        ({"more": 1}, ProtocolError),
    ],
)
def test_frames_that_are_none_are_named(change: dict[str, Any], kind: type[Exception]) -> None:
    frame = {"v": 1, "page_size": 4, **change}
    with pytest.raises(kind):
        decode(json.dumps(frame).encode())


def test_a_frame_too_long_is_not_read() -> None:
    with pytest.raises(MessageTooLarge):
        decode(b" " * (MOST_BYTES + 1))


_WORD = st.sampled_from(["latent", "target", "draft", "key", "", "\u00e9", "9" * 40])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORD, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.binary(max_size=64)
    | st.fixed_dictionaries(
        {"v": st.just(1) | _JSON, "page_size": st.integers(1, 9) | _JSON},
        optional={"names": _JSON, "kv_nbytes": _JSON, "aux_nbytes": _JSON, "state_types": _JSON, "dtype": _JSON},
    ).map(lambda words: json.dumps(words).encode())
)
def test_whatever_arrives_is_a_frame_or_a_named_error(frame: bytes) -> None:
    try:
        found = decode(frame)
    except ProtocolError:
        return
    assert decode(found.encode()) == found


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page_size": 8}, "page_size"),
        ({"dtype": "fp8_e4m3"}, "kv_cache_dtype"),  # H12, H13
        ({"names": (("key", "target", 0, 0),)}, "the peer's names"),
        ({"kv_nbytes": (1,)}, "kv_data_lens"),
        ({"aux_item_bytes": (16,)}, "item_lens"),
    ],
)
def test_what_a_peer_says_of_itself_is_compared(change: dict[str, Any], match: str) -> None:
    """Before a room is served; the reason goes to every room of the peer."""
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here = Manager(own, mla=False)
    said = published(peer).model_copy(update=change)
    reason = here.register(peer, "kv-transfer/1/loopback/x:1", said=said)
    here.engine.close()
    assert reason is not None and match in reason, reason


def test_a_peer_whose_frame_is_none_is_refused() -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here = Manager(own, mla=False)
    reason = here.register(peer, "x", said=ProtocolError("registration frame: what"))
    here.engine.close()
    assert reason is not None and "registration frame" in reason


def test_the_item_length_of_a_state_must_fit_sglangs_frame() -> None:
    """A-39: a state over 4 GiB ends SGLang's receiver with struct.error."""
    side = Side(MHA, range(1))
    here = Manager(side, mla=False)
    side.args.state_item_lens = [[1 << 32]]
    with pytest.raises(ValueError, match="32 bits"):
        here.build_receiver_registration_message()
    here.engine.close()


@pytest.mark.parametrize("name", ["none", "", "loopback"])
def test_the_engine_is_a_setting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    manager = SimpleNamespace(local_ip="127.0.0.1", disaggregation_mode=SimpleNamespace(value="decode"))
    monkeypatch.setenv(ENGINE, name)
    monkeypatch.setenv(OPTIONS, '{"max_entries_per_batch": 7}')
    if name == "loopback":
        made = create_session_engine(manager)
        assert made.engine.capabilities.max_entries_per_batch == 7
        made.close()
    elif name:
        with pytest.raises(EngineError, match="'none'"):
            create_session_engine(manager)
    else:
        with pytest.raises(ArgumentError, match=ENGINE):
            create_session_engine(manager)


@pytest.mark.parametrize("name", ["mooncake", "memfabric", "nixl"])
def test_the_address_and_the_store_are_sglangs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What SGLang's own Ascend engine reads of its environment, given to ours by its options' names."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(settings, "create_engine", lambda engine, **options: asked.update(options, engine=engine))
    monkeypatch.setenv(ENGINE, name)
    monkeypatch.setenv(OPTIONS, '{"workers": 2}')
    monkeypatch.setenv("ASCEND_MF_STORE_URL", "tcp://10.0.0.1:24669")
    create_session_engine(
        SimpleNamespace(
            local_ip="10.0.0.7",
            disaggregation_mode=SimpleNamespace(value="prefill"),
            kv_args=SimpleNamespace(gpu_id=3),
        )
    )
    own = {} if name == "nixl" else {"hostname": "10.0.0.7"}
    store = {"store_url": "tcp://10.0.0.1:24669", "role": "Prefill", "device_id": 3} if name == "memfabric" else {}
    assert asked == {"engine": name, "workers": 2, **own, **store}
    kind: Any = {"mooncake": MooncakeEngine, "memfabric": MemfabricEngine, "nixl": None}[name]
    assert kind is None or asked.keys() - {"engine"} <= set(inspect.signature(kind).parameters)


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_options_that_are_no_object_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENGINE, "loopback")
    monkeypatch.setenv(OPTIONS, text)
    with pytest.raises(ArgumentError, match=OPTIONS):
        create_session_engine(SimpleNamespace(local_ip="127.0.0.1"))


def test_a_tp_size_of_none_is_refused_at_registration() -> None:
    own, peer = Side(MHA, range(2)), Side(MHA, range(2))
    here = Manager(own, mla=False)
    reason = here.register(peer, "x", dst_attn_tp_size=None)
    here.engine.close()
    assert reason is not None and "dst_attn_tp_size" in reason


def test_unequal_ranks_need_a_number_of_heads() -> None:
    own, peer = Side(MHA, range(2), heads=4), Side(MHA, range(2), heads=4, tp=(1, 2))
    own.args.total_kv_head_num = own.args.kv_head_num = 0
    here = Manager(own, mla=False)
    reason = here.register(peer, "x")
    here.engine.close()
    assert reason is not None and "total_kv_head_num" in reason


@pytest.mark.parametrize(("prefill", "decode", "heads"), [(3, 2, 4), (2, 1, 3), (1, 4, 3)])
def test_heads_that_do_not_split_are_refused(prefill: int, decode: int, heads: int) -> None:
    """A-48: SGLang assumes that everything divides."""
    own, peer = Side(MHA, range(1)), Side(MHA, range(1))
    own.args.total_kv_head_num = heads
    here = Manager(own, mla=False)
    here.attn_tp_size = prefill
    reason = here.register(peer, "x", dst_attn_tp_size=decode)
    here.engine.close()
    assert reason is not None and "total_heads" in reason, reason


def test_sixty_four_bit_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """B10, D01: pages of 149,760 bytes, past 2^31 and past 2^32; nothing wraps, and what would is refused."""
    own = Side(MHA, range(1))
    here = Manager(own, mla=False)
    item, base = 149_760, 1 << 40
    own.args.kv_item_lens = [item, item]
    own.args.kv_data_lens = [item * 123_932] * 2
    own.args.kv_data_ptrs = [base, base + (1 << 38)]
    plan = here._local().plan([base + (1 << 41), base + (1 << 41) + (1 << 38)], [item, item], here._local().ranks(0, 1))
    batches = list(plan.batches(np.array([123_931]), np.array([14_340])))
    assert [int(n) for batch in batches for n in batch.source] == [at + 18_559_906_560 for at in own.args.kv_data_ptrs]
    assert int(batches[0].destination[0]) == base + (1 << 41) + 2_147_558_400
    here.engine.close()


def test_the_plugin_is_an_entry_point_that_can_be_called() -> None:
    """SGLang loads it by this name in each of its processes."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'\[project\.entry-points\."sglang\.srt\.plugins"\]\nkv_transfer = "([\w.]+):(\w+)"', text)
    assert found is not None
    assert callable(getattr(importlib.import_module(found[1]), found[2]))


def test_without_a_setting_the_plugin_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE, raising=False)
    plugin()  # asks nothing of SGLang, which is not installed here
    monkeypatch.setenv(ENGINE, "loopback")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(EngineUnavailable, match="SGLang"):
        plugin()
