"""How SGLang slices decode's pointer lists for a stage of a model with compressed latents, by the layers' ratios."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.ascend.conn import AscendKVManager, AscendStateType

__all__ = ["record"]

RATIOS = ([0, 0, 4, 128, 4, 128, 4, 4], [4, 128] * 5 + [4], [128, 4, 4, 4, 0, 128, 4])
# (list, ratio of the layers that it has, groups of it)
LISTS = (("main", 4, 3), ("c128", 128, 1), ("c4_state", 4, 2))
TYPES = {"main": None, "c128": AscendStateType.DSV4_C128, "c4_state": AscendStateType.DSV4_C4_STATE}


def record() -> dict[str, Any]:
    """For each stage the positions in decode's list that its own entries go to, in order."""
    cases = []
    for ratios in RATIOS:
        for cut in range(1, len(ratios)):
            for start, stop in ((0, cut), (cut, len(ratios))):
                for name, ratio, groups in LISTS:
                    own = sum(found == ratio for found in ratios[start:stop])
                    manager = object.__new__(AscendKVManager)
                    manager.kv_args = SimpleNamespace(
                        mla_compression_ratios=ratios, prefill_start_layer=start, prefill_end_layer=stop
                    )
                    source, destination = list(range(groups * own)), list(range(groups * ratios.count(ratio)))
                    _, to, _ = manager.get_mla_kv_ptrs_with_pp(source, destination, TYPES[name])
                    cases.append({"ratios": ratios, "start": start, "stop": stop, "list": name, "positions": to})
    return {"cases": cases}
