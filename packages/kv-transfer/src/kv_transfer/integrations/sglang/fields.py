"""Owns the kinds of `KVArgs`' fields: each is what SGLang 0.5.23 says it is, or is refused by name before it is used.

What the fields mean together is their users' (see `names`, `pages`, `rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kv_transfer.arguments import check_items, check_whole
from kv_transfer.errors import ArgumentError
from kv_transfer.integrations.sglang.names import check_list, entry_list, given_names, optional_list, refusal, stated

__all__ = ["check_fields", "dtype_word", "number_list"]

_TOP: Final = (1 << 64) - 1
_BUFFERS: Final = ("data_ptrs", "data_lens", "item_lens")
_NUMBERS: Final = (
    "engine_rank", "pp_rank", "kv_head_num", "total_kv_head_num", "prefill_start_layer", "prefill_end_layer",
    "hidden_kv_layers", "total_kv_layers", "draft_kv_layers", "num_draft_entries", "kv_buf_groups",
)  # fmt: skip
_LISTS: Final = (
    "kv_layer_ids", "kv_entry_names", "mla_compression_ratios", "state_types", "state_layer_ids",
    "state_dim_per_tensor", "state_conv_shard_groups", "state_slice_outer_counts",
)  # fmt: skip


def check_fields(kv_args: Any) -> None:
    """Refuses a `KVArgs` with a field of another kind.

    Raises:
        UnsupportedLayout: A list is none, holds what is no number, or is not as long as those parallel to it; or a
            number or a text is none.
    """
    for field in (*_LISTS, *(f"{kind}_{name}" for kind in ("kv", "aux", "state") for name in _BUFFERS)):
        if getattr(kv_args, field, None) is not None:
            check_list(field, getattr(kv_args, field))
    for kind in ("kv", "aux"):
        _parallel([(f"{kind}_{name}", number_list(kv_args, f"{kind}_{name}")) for name in _BUFFERS])
    for field in ("kv_layer_ids", "mla_compression_ratios"):
        _numbers(field, optional_list(kv_args, field))
    states = [(f"state_{name}", optional_list(kv_args, f"state_{name}")) for name in _BUFFERS]
    _parallel(states)
    for number in range(len(states[0][1])):
        _parallel([(f"{name}[{number}]", _numbers(f"{name}[{number}]", held[number])) for name, held in states])
    given_names(kv_args)
    for field in _NUMBERS:
        stated(kv_args, field)
    dtype_word(kv_args)
    if not stated(kv_args, "page_size"):
        raise refusal("page_size", None, "1 or more", "without it no page can be found", "set the tokens of a page")


def number_list(kv_args: Any, field: str) -> list[int]:
    """A list of `KVArgs` that has a number for every buffer.

    Raises:
        UnsupportedLayout: It is None, no list, or holds what is no whole number from 0 to 2**64 - 1.
    """
    return _numbers(field, entry_list(kv_args, field))


def dtype_word(kv_args: Any) -> str:
    """The word of the cache's dtype; empty where `KVArgs` says nothing.

    Raises:
        UnsupportedLayout: It is no text.
    """
    word = getattr(kv_args, "kv_cache_dtype_str", None)
    if word is not None and not isinstance(word, str):
        raise refusal("kv_cache_dtype_str", type(word).__name__, "a text", "no dtype", "give a text or None")
    return word or ""


def _numbers(field: str, values: Any) -> list[int]:
    try:
        return [check_whole(f"{field}[{i}]", value, _TOP) for i, value in enumerate(check_items(field, values))]
    except ArgumentError as error:
        words = ("whole numbers from 0 to 2**64 - 1", str(error).partition(";")[0], "publish numbers alone")
        raise refusal(field, error.local, *words) from None


def _parallel(lists: Sequence[tuple[str, Sequence[object]]]) -> None:
    """Refuses lists of unequal lengths."""
    lengths = {field: len(values) for field, values in lists}
    if len(set(lengths.values())) > 1:
        raise refusal(
            ", ".join(lengths), str(list(lengths.values())), "one length", "the lists are parallel to each other",
            "publish an address, a length and an item length for every buffer",
        )  # fmt: skip
