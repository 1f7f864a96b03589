"""vLLM's KV cache groups: layers that share a block table, and which blocks of a prompt each of them needs at decode.

Reads vLLM's specifications by their attributes and the names of their classes; it imports nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from kv_transfer.errors import UnsupportedLayout
from kv_transfer.groups import MAIN
from kv_transfer.integrations.vllm.words import Stretch

__all__ = ["BlockGroup", "Kind", "block_groups", "brought", "is_plain", "refuse"]

Kind: TypeAlias = Literal["full", "window", "states"]
_KINDS: dict[str, Kind] = {"FullAttentionSpec": "full", "SlidingWindowSpec": "window", "MambaSpec": "states"}


@dataclasses.dataclass(frozen=True)
class BlockGroup:
    """One of vLLM's KV cache groups.

    Attributes:
        name: What both sides call it.
        kind: What a block holds: K/V of its tokens, of which decode reads all or a window's, or a state of the request.
        block_size: Tokens of a block.
        window: Computed tokens that the next one attends to; None: all.
        layers: Names of its layers on this rank.
    """

    name: str
    kind: Kind
    block_size: int
    window: int | None = None
    layers: frozenset[str] = frozenset()

    def count(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def needed(self, table: Sequence[int], here: int, tokens: int) -> Stretch:
        """Blocks that decode has to be sent.

        Args:
            table: The request's block ids, in the order of the prompt.
            here: Tokens that decode has already.
            tokens: Of the prompt, as far as it is sent.
        """
        stop = self.count(tokens)
        if self.kind == "states":
            first = stop - 1  # the one that the last of these tokens was put into
        else:
            first = self.count(here)
            if self.window is not None:
                first = max(first, max(0, tokens - self.window) // self.block_size)
        return Stretch(first, tuple(table[first:stop]))


def block_groups(kv_cache_config: Any) -> tuple[BlockGroup, ...]:
    """The groups of a `KVCacheConfig`, in its order.

    Raises:
        UnsupportedLayout: A kind of group that is not moved, or blocks without tokens.
    """
    given = list(kv_cache_config.kv_cache_groups)
    found: list[BlockGroup] = []
    for number, group in enumerate(given):
        own, where = group.kv_cache_spec, f"kv_cache_groups[{number}]" if len(given) > 1 else "kv_cache_groups"
        inner = list(own.kv_cache_specs.values()) if hasattr(own, "kv_cache_specs") else []
        for spec in (own, *inner):
            if getattr(spec, "compress_ratio", 1) != 1:
                raise refuse(where, "compressed blocks are not moved", f"ratio {spec.compress_ratio}")
        size = own.block_size
        if not isinstance(size, int) or size < 1:
            raise refuse("block_size", "expected tokens, 1 or more", repr(size))
        kind, window = _kind(where, inner or [own])
        found.append(BlockGroup(kind, kind, size, window, frozenset(getattr(group, "layer_names", ()))))
    if not found:
        raise refuse("kv_cache_groups", "expected layers with a cache", "none")
    return tuple(_named(found))


def is_plain(groups: Sequence[BlockGroup]) -> bool:
    """Whether there is one block table, with a block for every token: what vLLM can compute again from the middle."""
    return len(groups) == 1 and groups[0].kind == "full"


def brought(groups: Sequence[BlockGroup], tokens: int) -> int:
    """Tokens of a prompt that come from prefill.

    vLLM computes a prompt's last token at decode in any case. A state must not hold it already, and a window must reach
    one token further back for it, so it is left out where a group has one.
    """
    return tokens if all(group.kind == "full" for group in groups) else tokens - 1


def refuse(where: str, what: str, got: object) -> UnsupportedLayout:
    """The refusal of something that is not moved."""
    return UnsupportedLayout(
        f"{where}: {what}, got {got}",
        local=str(got),
        consequence="bytes would land at wrong places, so nothing was registered",
        remedy="see kv_transfer.integrations.vllm for what is moved",
    )


def _kind(where: str, specs: Sequence[Any]) -> tuple[Kind, int | None]:
    """What the layers of one group hold, and the window that they share."""
    kinds = {_kind_of(where, spec) for spec in specs}
    if len(kinds) > 1:
        raise refuse(where, "expected layers of one kind", sorted(kinds))
    (kind,) = kinds
    if kind != "window":
        return kind, None
    windows = {spec.sliding_window for spec in specs}
    window = windows.pop()
    if windows:
        raise refuse(where, "expected layers of one window", sorted(map(str, (window, *windows))))
    if not isinstance(window, int) or window < 2:
        raise refuse(where, "expected a sliding window of 2 tokens or more", repr(window))
    return kind, window - 1


def _kind_of(where: str, spec: Any) -> Kind:
    known = [_KINDS[base.__name__] for base in type(spec).__mro__ if base.__name__ in _KINDS]
    if not known:
        raise refuse(
            where,
            "full attention, sliding windows and states are moved; start vLLM with --disable-hybrid-kv-cache-manager, "
            "which gives chunked attention one group with full attention",
            type(spec).__name__,
        )
    kind = known[0]
    if kind == "states" and spec.mamba_cache_mode == "align" and spec.num_speculative_blocks:
        raise refuse(
            where,
            "vLLM reuses speculative blocks of states in mamba_cache_mode 'align'; start it without prefix caching",
            f"{spec.num_speculative_blocks} speculative blocks",
        )
    return kind


def _named(found: Sequence[BlockGroup]) -> list[BlockGroup]:
    """One group is the transfer's main one; several are called by their kind, and numbered where it comes again."""
    if len(found) == 1:
        return [dataclasses.replace(found[0], name=MAIN)]
    named: list[BlockGroup] = []
    for group in found:
        number = 1 + sum(own.kind == group.kind for own in named)
        named.append(dataclasses.replace(group, name=group.kind if number == 1 else f"{group.kind} {number}"))
    return named
