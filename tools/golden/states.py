"""Which parts of a recurrent state SGLang's ranks send for unequal TP, with and without groups sharded apart."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks

__all__ = ["record"]

GROUPS = ([8, 8, 16], [16], [8, 24], [32, 8, 8])


def _senders(prefill: int, decode: int, rank: int) -> list[int]:
    """The prefill ranks that a decode rank reads from, as the rank mapping has it."""
    if decode >= prefill:
        return [rank // (decode // prefill)]
    ratio = prefill // decode
    return list(range(rank * ratio, (rank + 1) * ratio))


def record() -> dict[str, Any]:
    """For each decode rank [source rank, source start, destination start, length], in channels of the ranks."""
    cases = []
    for groups in GROUPS:
        for prefill in (1, 2, 4, 8):
            for decode in (1, 2, 4, 8):
                source, destination = sum(groups) // prefill, sum(groups) // decode
                for apart in (True, False):
                    ranks = []
                    for rank in range(decode):
                        ranks.append(
                            [
                                [sender, *block]
                                for sender in _senders(prefill, decode, rank)
                                for block in compute_mamba_state_slice_blocks(
                                    source, destination, prefill, decode, rank, sender, groups if apart else None
                                )
                            ]
                        )
                    cases.append(
                        {"groups": groups, "prefill": prefill, "decode": decode, "apart": apart, "ranks": ranks}
                    )
    return {"cases": cases}
