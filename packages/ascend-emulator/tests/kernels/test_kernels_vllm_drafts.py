"""vLLM-Ascend's drafting ops against plain loops, their schemas, refusals and faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, OpRefused, vllm_drafts
from hypothesis import given, settings
from hypothesis import strategies as st

EAGLE, NGRAM, VOCABULARY = vllm_drafts.KERNELS
I32 = torch.int32


def i32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=I32)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_drafts.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4), shift=st.booleans())
def test_eagle_inputs_place_by_place(data: st.DataObject, slots: int, shift: bool) -> None:
    lens = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    lost = [data.draw(st.integers(0, n - 1)) for n in lens]
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    ends = [starts[i] + n - 1 - lost[i] for i, n in enumerate(lens)]
    tokens, spare = list(range(100, 100 + sum(lens))), data.draw(st.integers(0, 3))
    bases = [data.draw(st.integers(0, 9)) for _ in lens]
    positions = [base + j for base, n in zip(bases, lens, strict=True) for j in range(n)]
    following = [900 + i for i in range(len(lens))]
    wanted: list[tuple[int, int, int, int]] = []
    new, mapping = [], [0] * len(tokens)
    for i, n in enumerate(lens):
        accepted = tokens[starts[i] + (1 if shift else 0) : ends[i] + 1]
        base = positions[starts[i]]
        if shift:
            for j in range(n):
                mapping[starts[i] + j] = len(wanted) + j
        new += [len(wanted) + len(accepted) + j for j in range(slots)]
        row = [(t, 0, 0) for t in accepted] + [(following[i], 0, 0)] + [(7, 0, 1)] * (slots - 1)
        wanted += [(t, base + j, r, d) for j, (t, r, d) in enumerate(row)] + [(5, 0, 1, 0)] * lost[i]
    wanted += [(0, 0, 0, 0)] * spare
    got = REGISTRY[EAGLE](
        i32(*tokens), i32(*positions), i32(*following), i32(*starts), i32(*ends), 5, 7, slots, shift, len(wanted)
    )
    assert [x.dtype for x in got] == [I32, I32, torch.int8, torch.int8, I32, I32]
    assert list(zip(*(x.tolist() for x in got[:4]), strict=True)) == wanted
    assert got[4].tolist() == new and got[5].tolist() == mapping


@settings(max_examples=80, deadline=None)
@given(data=st.data(), k=st.integers(1, 3), least=st.integers(1, 2), more=st.integers(0, 2), flags=st.booleans())
def test_ngram_drafts_row_by_row(data: st.DataObject, k: int, least: int, more: int, flags: bool) -> None:
    rows, width, vocabulary = data.draw(st.integers(1, 3)), 10, 4
    lengths = [data.draw(st.integers(1, width)) for _ in range(rows)]
    tokens = [[data.draw(st.integers(0, 2)) for _ in range(width)] for _ in range(rows)]
    sampled = [[data.draw(st.sampled_from([0, 1, 2, 3])) for _ in range(2)] for _ in range(rows)]
    cut = [data.draw(st.integers(0, 2)) for _ in range(rows)]
    sampled = [
        [t if j < n else data.draw(st.sampled_from([-1, 4])) for j, t in enumerate(row)]
        for row, n in zip(sampled, cut, strict=True)
    ]
    discard = [data.draw(st.booleans()) for _ in range(rows)]
    given_tokens = i32(*tokens)
    mask = torch.tensor(discard) if flags else i32(*map(int, discard))
    out, following, drafts, counts = REGISTRY[NGRAM](
        given_tokens, i32(*lengths), i32(*sampled), mask, vocabulary, least, least + more, k
    )
    assert out is given_tokens
    for i in range(rows):
        new = [] if discard[i] else sampled[i][: min(cut[i], width - lengths[i])]
        row = tokens[i][: lengths[i]] + new
        assert out[i].tolist() == row + tokens[i][len(row) :]
        assert following[i] == (row[-1] if new or row else 0)
        draft: list[int] = []
        for length in range(least, least + more + 1):
            places = [p for p in range(len(row) - length) if row[p : p + length] == row[len(row) - length :]]
            if new and places:
                draft = row[places[0] + length :][:k]
                break
        assert drafts[i].tolist() == draft + [-1] * (k - len(draft)) and counts[i] == len(draft)


@settings(max_examples=40, deadline=None)
@given(bounds=st.lists(st.integers(0, 30), min_size=4, max_size=4), padding=st.integers(0, 3))
def test_rows_of_a_vocabulary_shard(bounds: list[int], padding: int) -> None:
    first, end, added, added_end = sorted(bounds)
    rows, mask = REGISTRY[VOCABULARY](torch.arange(32, dtype=I32).view(4, 8), first, end, padding, added, added_end)
    assert rows.dtype == I32 and mask.dtype == torch.bool
    for token in range(32):
        row = mask.view(-1)[token], rows.view(-1)[token]
        if first <= token < end:
            assert row == (False, token - first)
        elif added <= token < added_end:
            assert row == (False, end - first + padding + token - added)
        else:
            assert row == (True, 0)


def eagle(**over: Any) -> list[Any]:
    options: dict[str, Any] = {
        "tokens": i32(1, 2, 3), "positions": i32(0, 1, 2), "next": i32(9), "starts": i32(0, 3), "ends": i32(2),
        "pad": 0, "draft": 7, "slots": 2, "shift": False, "total": 5,
    }  # fmt: skip
    return list((options | over).values())


def ngram(**over: Any) -> list[Any]:
    options: dict[str, Any] = {
        "tokens": torch.zeros(2, 6, dtype=I32), "lens": i32(2, 3), "sampled": i32([1], [2]), "mask": i32(0, 0),
        "vocabulary": 9, "least": 1, "most": 2, "k": 2,
    }  # fmt: skip
    return list((options | over).values())


REFUSED: list[tuple[str, str, list[Any]]] = [
    ("eagle-dtype", EAGLE, eagle(positions=torch.tensor([0, 1, 2]))),
    ("eagle-dtype", EAGLE, eagle(tokens=i32([1, 2, 3]))),
    ("eagle-count", EAGLE, eagle(next=i32(9, 9))),
    ("eagle-count", EAGLE, eagle(positions=i32(0, 1))),
    ("eagle-range", EAGLE, eagle(pad=2**31)),
    ("eagle-range", EAGLE, eagle(draft=-(2**40))),
    ("eagle-range", EAGLE, eagle(slots=-1)),
    ("eagle-range", EAGLE, eagle(total=2**40)),
    ("ngram-dtype", NGRAM, ngram(lens=torch.tensor([2, 3]))),
    ("ngram-dtype", NGRAM, ngram(lens=torch.tensor([True, True]))),
    ("ngram-shape", NGRAM, ngram(sampled=i32([1]))),
    ("ngram-shape", NGRAM, ngram(tokens=torch.zeros(6, 2, dtype=I32).T)),
    ("ngram-range", NGRAM, ngram(least=0)),
    ("ngram-range", NGRAM, ngram(least=3)),
    ("ngram-range", NGRAM, ngram(k=-1)),
    ("vocabulary-dtype", VOCABULARY, [torch.tensor([1]), 0, 4, 0, 4, 4]),
    ("vocabulary-range", VOCABULARY, [i32(1), 0, 4, 0, 3, 4]),
    ("vocabulary-range", VOCABULARY, [i32(1), 0, 4, -1, 4, 4]),
    ("vocabulary-range", VOCABULARY, [i32(1), 0, 4, 2**40, 4, 4]),
]


@pytest.mark.parametrize(("rule", "op", "call"), REFUSED)
def test_it_refuses(refuses: Callable[..., None], rule: str, op: str, call: list[Any]) -> None:
    refuses(rule, op, *call)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {r.id for r in RULES.values() if r.test == Path(__file__).name}


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (EAGLE, eagle(total=4)),
        (EAGLE, eagle(slots=2**31 - 1)),
        (EAGLE, eagle(starts=i32(0, 4))),
        (EAGLE, eagle(starts=i32(3, 3))),
        (NGRAM, ngram(lens=i32(2, 7))),
    ],
)
def test_ranges_outside_the_tensors_fault(op: str, call: list[Any]) -> None:
    REGISTRY[EAGLE](*eagle())
    REGISTRY[NGRAM](*ngram())
    with pytest.raises(DeviceFault, match="request"):
        REGISTRY[op](*call)


@pytest.mark.parametrize(("op", "change"), [(EAGLE, {"slots": -1}), (EAGLE, {"total": -1}), (NGRAM, {"k": -1})])
def test_sizes_are_refused_before_outputs_are_made(op: str, change: dict[str, int]) -> None:
    call = eagle(**change) if op == EAGLE else ngram(**change)
    arguments = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in call]
    with pytest.raises(OpRefused, match="range"):
        getattr(torch.ops._C_ascend, op.partition("::")[2])(*arguments)
