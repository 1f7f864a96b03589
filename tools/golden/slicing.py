"""How SGLang pairs a prefill stage's bare pointer list with a decode rank's: MHA and MLA, with and without drafts.

A case says how the lists were built; an answer is the pairs of positions in them, or the error. Pointers are positions:
SGLang only slices the lists. What the pairs should be is the planner's question, not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.runtime_context import get_parallel

__all__ = ["record"]

# (case, layers of each prefill stage); decode holds all layers.
STAGES = (
    ("one stage", (4,)),
    ("two even", (2, 2)),
    ("uneven 3+2", (3, 2)),
    ("uneven 4+3+3", (4, 3, 3)),
    ("61 as 31+30", (31, 30)),
    ("94 over four", (24, 24, 23, 23)),
    ("target layers equal a stage with draft", (1, 1)),
)
DRAFTS = ((0, 0), (0, 1), (1, 1), (1, 0), (0, 2), (2, 2), (3, 3))


def _manager(start: int, layers: int, *, groups: int, hidden: int, draft: int) -> Any:
    manager = object.__new__(AscendKVManager)
    manager.kv_args = SimpleNamespace(
        prefill_start_layer=start, prefill_end_layer=start + layers, kv_buf_groups=groups, hidden_kv_layers=hidden,
        draft_kv_layers=draft, mla_compression_ratios=None,
    )  # fmt: skip
    return manager


def _case(name: str, stages: tuple[int, ...], stage: int, drafts: tuple[int, int], groups: int) -> dict[str, Any]:
    total, last = sum(stages), stage == len(stages) - 1
    source_draft = drafts[0] if last else 0
    return {
        "name": f"{name}, stage {stage}, drafts {drafts[0]}/{drafts[1]}",
        "groups": groups, "start": sum(stages[:stage]), "layers": stages[stage], "total": total, "last": last,
        "configured_draft": drafts[0], "source_draft": source_draft, "destination_draft": drafts[1],
        "source_entries": groups * (stages[stage] + source_draft), "destination_entries": groups * (total + drafts[1]),
    }  # fmt: skip


def _cases(groups: int) -> Iterator[dict[str, Any]]:
    for name, stages in STAGES:
        for drafts in DRAFTS:
            for stage in range(len(stages)):
                yield _case(name, stages, stage, drafts, groups)


def _mha(case: dict[str, Any]) -> list[list[int]]:
    manager = _manager(case["start"], case["layers"], groups=2, hidden=case["total"], draft=0)
    source, destination = list(range(case["source_entries"])), list(range(case["destination_entries"]))
    keys, values, to_keys, to_values, count = manager.get_mha_kv_ptrs_with_pp(source, destination)
    pairs = [[keys[layer], to_keys[layer]] for layer in range(count)]
    return pairs + [[values[layer], to_values[layer]] for layer in range(count)]


def _mla(case: dict[str, Any]) -> list[list[int]]:
    manager = _manager(
        case["start"], case["layers"], groups=case["groups"], hidden=case["total"], draft=case["configured_draft"]
    )
    source, destination = list(range(case["source_entries"])), list(range(case["destination_entries"]))
    with get_parallel().override(pp_group=SimpleNamespace(is_last_rank=case["last"])):
        own, other, count = manager.get_mla_kv_ptrs_with_pp(source, destination)
    return [[own[entry], other[entry]] for entry in range(count)]


def _runs(pairs: list[list[int]]) -> list[list[int]]:
    """[source, destination, count], for neighbours that go to neighbours."""
    runs: list[list[int]] = []
    for source, destination in pairs:
        if runs and [source, destination] == [runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]]:
            runs[-1][2] += 1
        else:
            runs.append([source, destination, 1])
    return runs


def _answer(case: dict[str, Any], call: Any) -> dict[str, Any]:
    try:
        return {**case, "pairs": _runs(call(case)), "error": None}
    except IndexError as error:  # a list that is too short
        return {**case, "pairs": None, "error": type(error).__name__}


def record() -> dict[str, Any]:
    """Every case with SGLang's pairs as runs [source, destination, count]."""
    return {
        "mha": [_answer(case, _mha) for case in _cases(2)],
        "mla": [_answer(case, _mla) for groups in (2, 3) for case in _cases(groups)],
    }
