"""Ranks with SGLang's `KVArgs` over memory whose bytes tell where they belong, and what must have arrived where.

A byte is a hash of (component, part, layer, page of the request, slot, head, byte of the head), so that a page of
another layer, another page order, another head or K taken for V cannot pass. Everything else is a sentinel.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np

from kv_transfer import create_engine
from kv_transfer.integrations.sglang import PlannedTransfers, SessionEngine, kv_args

PAGE, PAGES, SENTINEL = 4, 12, 0xEE
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One group of a pool: its component, and the bytes of a head and token."""

    component: str
    width: int


MHA = (Kind("key", 6), Kind("value", 4))
MLA = (Kind("latent", 8), Kind("rope", 3), Kind("index_key", 5))


def label(component: str, part: str, layer: int, page: int, heads: range, width: int) -> Bytes:
    """Shape: [PAGE, heads, width]."""
    seed = np.uint64(zlib.crc32(f"{component} {part} {layer} {page}".encode()))
    slot, head, byte = np.meshgrid(np.arange(PAGE), np.array(heads), np.arange(width), indexing="ij")
    mixed = seed * np.uint64(2654435761) + (slot * 7919 + head * 104729 + byte * 31).astype(np.uint64)
    found: Bytes = ((mixed ^ (mixed >> np.uint64(13))) % np.uint64(SENTINEL)).astype(np.uint8)
    return found


class Side:
    """One rank.

    Args:
        kinds: Groups of the pool, in SGLang's order.
        layers: Target layers of the stage.
        drafts: Draft layers.
        hidden: Target layers of the model.
        heads: Over all ranks.
        tp: Rank and size.
        pp: Stage and stages.
        skip: Components that only some layers have, with these layers.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        layers: range,
        *,
        drafts: int = 0,
        hidden: int | None = None,
        heads: int = 1,
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        skip: dict[str, Sequence[int]] | None = None,
    ) -> None:
        self.hidden = len(layers) if hidden is None else hidden
        self.own = range(*kp.split_heads(heads, tp_rank=tp[0], tp_size=tp[1]))
        self.pp, self.tp = pp, tp
        self.names: list[tuple[str, str, int]] = []
        self.kinds = {kind.component: kind for kind in kinds}
        for part, ids in (("target", layers), ("draft", range(self.hidden, self.hidden + drafts))):
            for kind in kinds:
                held = ids if part == "draft" or not skip else skip.get(kind.component, ids)
                self.names += [(kind.component, part, layer) for layer in ids if layer in held]
        self.memory = [
            np.full((PAGES, PAGE, len(self.own), self.kinds[name[0]].width), SENTINEL, np.uint8) for name in self.names
        ]
        self.aux = [np.full((5, 16), SENTINEL, np.uint8), np.full((5, 24), SENTINEL, np.uint8)]
        self.args = SimpleNamespace(
            engine_rank=tp[0], page_size=PAGE, kv_cache_dtype_str="uint8", pp_rank=pp[0],
            kv_data_ptrs=[one.ctypes.data for one in self.memory], kv_data_lens=[one.nbytes for one in self.memory],
            kv_item_lens=[one[0].nbytes for one in self.memory], kv_layer_ids=[],
            aux_data_ptrs=[one.ctypes.data for one in self.aux], aux_data_lens=[one.nbytes for one in self.aux],
            aux_item_lens=[one[0].nbytes for one in self.aux],
            state_types=[], state_data_ptrs=[], state_data_lens=[], state_item_lens=[], state_layer_ids=[],
            state_dim_per_tensor=[], state_conv_shard_groups=[], state_slice_outer_counts=[],
            kv_head_num=len(self.own), total_kv_head_num=heads,
            prefill_start_layer=layers.start, prefill_end_layer=layers.stop, hidden_kv_layers=self.hidden,
            draft_kv_layers=drafts, num_draft_entries=sum(name[1] == "draft" for name in self.names),
            kv_buf_groups=len(kinds), mla_compression_ratios=None, gpu_id=0,
        )  # fmt: skip

    def fill(self, pages: Sequence[int]) -> None:
        """Write the request's pages where this rank holds them."""
        for (component, part, layer), memory in zip(self.names, self.memory, strict=True):
            for number, page in enumerate(pages):
                memory[page] = label(component, part, layer, number, self.own, self.kinds[component].width)

    def check(self, pages: Sequence[int], arrived: Sequence[tuple[str, str, int]] | None = None) -> None:
        """Every byte of the request is there, and no other was touched."""
        for name, memory in zip(self.names, self.memory, strict=True):
            expected = np.full_like(memory, SENTINEL)
            if arrived is None or name in arrived:
                for number, page in enumerate(pages):
                    expected[page] = label(*name, number, self.own, self.kinds[name[0]].width)
            np.testing.assert_array_equal(memory, expected, err_msg=str(name))


def registration(side: Any, session: str, **changes: Any) -> Any:
    """What SGLang's `KVArgsRegisterInfo` holds of a rank."""
    args = side.args
    return SimpleNamespace(**{
        "mooncake_session_id": session, "dst_kv_ptrs": list(args.kv_data_ptrs),
        "dst_kv_item_lens": list(args.kv_item_lens), "dst_kv_item_len": args.kv_item_lens[0],
        "dst_kv_layer_ids": list(args.kv_layer_ids), "dst_aux_ptrs": list(args.aux_data_ptrs),
        "dst_state_data_ptrs": args.state_data_ptrs, "dst_state_item_lens": args.state_item_lens,
        "dst_state_layer_ids": args.state_layer_ids, "dst_state_dim_per_tensor": args.state_dim_per_tensor,
        "dst_tp_rank": side.tp[0], "dst_attn_tp_size": side.tp[1], "dst_dcp_size": 1, "dst_dcp_rank": 0,
        **changes,
    })  # fmt: skip


class Manager(PlannedTransfers):
    """The calls of this package's manager alone: a rank's `args`, `tp` and `pp`, and no control plane."""

    def __init__(self, side: Any, *, mla: bool) -> None:
        self.kv_args = side.args
        self.is_mla_backend = mla
        self.attn_tp_size = self.state_tp_size = side.tp[1]
        self.pp_size = side.pp[1]
        self.pp_rank = side.pp[0]
        self.reasons: list[str] = []
        self._begin()
        self.engine = SessionEngine(create_engine("loopback"))
        self.register_buffer_to_engine()

    def _is_npu_dsa_layout(self) -> bool:
        return self.is_mla_backend and getattr(self.kv_args, "kv_buf_groups", 1) == 3

    def register(self, peer: Any, session: str, said: Any = None, **changes: Any) -> str | None:
        """A peer's registration; the reason of a refusal, or None."""
        if said is not None:
            self._said[session] = said
        reason: str | None = self._validate_peer_state_layout(registration(peer, session, **changes))[1]
        return reason


def pair(source: Side, destination: Side, *, mla: bool) -> tuple[Manager, Manager]:
    """Managers of both sides; the caller closes their engines."""
    return Manager(source, mla=mla), Manager(destination, mla=mla)


def manifest(side: Side, *, mla: bool, **more: Any) -> kp.RankManifest:
    place = kp.Placement(tp_rank=side.tp[0], tp_size=side.tp[1], pp_rank=side.pp[0], pp_size=side.pp[1])
    return kv_args.manifest_of(side.args, mla=mla, placement=place, fingerprint="m", **more)
