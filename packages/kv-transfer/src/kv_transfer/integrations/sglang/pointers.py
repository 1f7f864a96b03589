"""Owns the calls of SGLang's manager that slice a peer's pointer list for a stage; here by names, not by lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_transfer.integrations.sglang.names import (
    check_list,
    compressed_names,
    own_names,
    pair_entries,
    pair_with_peer,
    refusal,
)
from kv_transfer.integrations.sglang.rank import Rank
from kv_transfer.integrations.sglang.words import C4_STATE, C128, WINDOW, word

__all__ = ["Pointers"]

_COMPRESSED = {None: "main", C128: "c128", C4_STATE: "c4_state", WINDOW: "window"}


class Pointers(Rank):
    """The manager's part that pairs bare pointers."""

    def get_mla_kv_ptrs_with_pp(
        self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int], state_type: Any = None
    ) -> tuple[list[int], list[int], int]:
        """The peer's entry for each own one, of latents: own list, the peer's in its order, and its length.

        Args:
            src_kv_ptrs: One a buffer of this stage.
            dst_kv_ptrs: One a buffer of the peer.
            state_type: A state's kind, where models compress their latents unequally.

        Raises:
            UnsupportedLayout: Fields say too little, or contradict the lists.
            PlanError: An own buffer is missing at the peer.
        """
        check_list("src_kv_ptrs", src_kv_ptrs)
        check_list("dst_kv_ptrs", dst_kv_ptrs)
        args, kind = self.kv_args, None if state_type is None else word(state_type)
        ratios = getattr(args, "mla_compression_ratios", None)
        if ratios:
            pairs = self._compressed_pairs(list(ratios), len(src_kv_ptrs), len(dst_kv_ptrs), kind)
        elif kind is not None and len(src_kv_ptrs) == len(dst_kv_ptrs):
            pairs = tuple((entry, entry) for entry in range(len(src_kv_ptrs)))
        else:
            pairs = self._bare_pairs(src_kv_ptrs, dst_kv_ptrs, mla=True)
        return list(src_kv_ptrs), [dst_kv_ptrs[other] for _, other in pairs], len(pairs)

    def get_mha_kv_ptrs_with_pp(
        self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]
    ) -> tuple[list[int], list[int], list[int], list[int], int]:
        """Own K and V, the peer's K and V for them, and how many; drafts behind the target's layers in each.

        Raises:
            UnsupportedLayout: Fields say too little, or contradict the lists.
            PlanError: An own buffer is missing at the peer.
        """
        check_list("src_kv_ptrs", src_kv_ptrs)
        check_list("dst_kv_ptrs", dst_kv_ptrs)
        pairs = self._bare_pairs(src_kv_ptrs, dst_kv_ptrs, mla=False)
        names = own_names(self._of_length(len(src_kv_ptrs)), **{**self._local().stage, "mla": False})
        halves = [[pair for pair in pairs if names[pair[0]][0] == kind] for kind in ("key", "value")]
        lists = [
            [side[pair[i]] for pair in half] for i, side in enumerate((src_kv_ptrs, dst_kv_ptrs)) for half in halves
        ]
        return lists[0], lists[1], lists[2], lists[3], len(halves[0])

    def _bare_pairs(self, own: Sequence[int], other: Sequence[int], *, mla: bool) -> tuple[tuple[int, int], ...]:
        return pair_with_peer(self._of_length(len(own)), len(other), **{**self._local().stage, "mla": mla})

    def _of_length(self, entries: int) -> Any:
        """`KVArgs`, unless the caller's list is another one than theirs."""
        if entries == len(self.kv_args.kv_data_ptrs):
            return self.kv_args
        raise refusal(
            "src_kv_ptrs", entries, len(self.kv_args.kv_data_ptrs), "not the registered buffers", "pass kv_data_ptrs"
        )

    def _compressed_pairs(
        self, ratios: list[int], own: int, other: int, kind: str | None
    ) -> tuple[tuple[int, int], ...]:
        if kind not in _COMPRESSED:
            raise refusal("state_type", kind, sorted(filter(None, _COMPRESSED)), "no list of such a model", "name one")
        args, part = self.kv_args, _COMPRESSED[kind]
        source = tuple(compressed_names(ratios, range(args.prefill_start_layer, args.prefill_end_layer), part))
        whole = tuple(compressed_names(ratios, range(len(ratios)), part))
        found = {own: source, other: whole} if own != other else {own: whole if own == len(whole) else source}
        for field, count, names in (("src_kv_ptrs", own, found[own]), ("dst_kv_ptrs", other, found[other])):
            if count != len(names):
                raise refusal(field, count, len(names), f"no {part} list of these layers", "register every buffer once")
        return pair_entries(found[own], found[other])
