"""Ops of sgl_kernel_npu against plain loops; their schemas, refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, sgl_cache, sgl_sampling, transfer_state
from hypothesis import given, settings
from hypothesis import strategies as st

ASSIGN, UPDATE, COPY, EXTEND = sgl_cache.KERNELS
TREE, MASK = sgl_sampling.KERNELS
LOAD, BACKUP = transfer_state.KERNELS
INT32 = torch.int32


def randint(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_schemas_are_those_of_the_library() -> None:
    for schema in (*sgl_cache.SCHEMAS, *sgl_sampling.SCHEMAS, *transfer_state.SCHEMAS):
        name = schema.partition("(")[0]
        assert str(getattr(torch.ops.npu, name).default._schema) == f"npu::{schema}"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), wide=st.booleans(), spare=st.integers(0, 3))
def test_slot_tables(data: st.DataObject, wide: bool, spare: int) -> None:
    rows = data.draw(st.integers(0, 4))
    requests = data.draw(st.permutations(range(5)))[:rows]
    spans = [
        (start, start + data.draw(st.integers(0, 16))) for start in [data.draw(st.integers(0, 4)) for _ in requests]
    ]
    total = sum(end - start for start, end in spans)
    pool, slots = randint(1000, 5, 20, dtype=INT32), randint(1000, total + spare, seed=1, dtype=INT32)
    index = torch.tensor(requests, dtype=torch.int64 if wide else INT32)
    start, end = (torch.tensor([s[i] for s in spans], dtype=torch.int64) for i in (0, 1))
    wanted_pool, wanted_slots, at = pool.clone(), slots.clone(), 0
    for request, (first, last) in zip(requests, spans, strict=True):
        for position in range(first, last):
            wanted_pool[request, position], wanted_slots[at] = slots[at], pool[request, position]
            at += 1
    out = slots.clone()
    assert REGISTRY[UPDATE](index, pool, start, end, out) is out and torch.equal(out, wanted_slots)
    assert REGISTRY[ASSIGN](index, pool, start, end, slots) is pool and torch.equal(pool, wanted_pool)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([INT32, torch.int64, torch.float16]))
def test_slices_of_rows(data: st.DataObject, dtype: torch.dtype) -> None:
    rows = data.draw(st.integers(1, 4))
    out, src = randint(99, rows, 8, dtype=dtype), randint(99, rows, 6, seed=1, dtype=dtype)
    lengths = [data.draw(st.integers(0, 6)) for _ in range(rows)]
    starts = [[data.draw(st.integers(0, n - length)) for length in lengths] for n in (8, 6)]
    wanted = out.clone()
    for i, length in enumerate(lengths):
        for j in range(length):
            wanted[i, starts[0][i] + j] = src[i, starts[1][i] + j]
    offsets = [
        torch.tensor(x) for first in starts for x in (first, [a + n for a, n in zip(first, lengths, strict=True)])
    ]
    assert REGISTRY[COPY](out, src, *offsets) is True
    assert torch.equal(out, wanted)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 4, 16]))
def test_alloc_extend(data: st.DataObject, size: int) -> None:
    count = data.draw(st.integers(1, 4))
    before = [data.draw(st.integers(0, 3 * size)) for _ in range(count)]
    after = [n + data.draw(st.integers(0, 3 * size)) for n in before]
    needed = sum(-(-b // size) - -(-a // size) for a, b in zip(before, after, strict=True))
    free = [50 + page for page in torch.randperm(needed + 2, generator=torch.Generator().manual_seed(2)).tolist()]
    last = [1000 * size + (row * 10 * size) + (a - 1) % size for row, a in enumerate(before)]
    wanted, pages = [], list(free)
    for a, b, slot in zip(before, after, last, strict=True):
        for position in range(a, b):
            slot = pages.pop(0) * size if position % size == 0 else slot + 1
            wanted.append(slot)
    out, values = torch.full((len(wanted) + 1,), -7), torch.tensor([-9, -9])
    tensors = [torch.tensor(x) for x in (before, after, last, free)]
    REGISTRY[EXTEND](*tensors, size, out, values)
    assert out.tolist() == [*wanted, -7]
    opened = -(-after[-1] // size) > -(-before[-1] // size) and after[-1] % size != 0
    assert values.tolist() == [needed if opened else -9, -9]


def tree(topk: int, depth: int, width: int, seed: int) -> tuple[list[int], list[int], dict[int, int]]:
    """A random EAGLE tree: parent_list, selected_index, and each selected candidate's parent candidate (-1: root)."""
    random = torch.Generator().manual_seed(seed)
    parents, level = [-1], list(range(topk))
    above = dict.fromkeys(level, -1)
    for step in range(1, depth):
        grown = [level[i] for i in torch.randperm(len(level), generator=random)[:topk].tolist()]
        level = []
        for j, parent in enumerate(grown):
            group = (step - 1) * topk + 1 + j
            parents.append(parent)
            for child in range(group * topk, (group + 1) * topk):
                above[child] = parent
                level.append(child)
    chosen: list[int] = []
    while len(chosen) < width - 1:
        ready = [c for c, parent in above.items() if c not in chosen and (parent == -1 or parent in chosen)]
        chosen.append(ready[int(torch.randint(len(ready), (), generator=random))])
    return parents, sorted(chosen), {c: above[c] for c in chosen}


@settings(max_examples=60, deadline=None)
@given(
    topk=st.integers(1, 3), depth=st.integers(1, 4), width=st.integers(1, 6),
    lens=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 999),
)  # fmt: skip
def test_build_tree(topk: int, depth: int, width: int, lens: list[int], seed: int) -> None:
    width = min(width, 1 + topk * depth)
    trees = [tree(topk, depth, width, seed + i) for i in range(len(lens))]
    total = width * (sum(lens) + len(lens) * width)
    mask = torch.ones(total, dtype=torch.bool)
    outputs = [torch.full((len(lens), width), -5) for _ in range(4)]
    selected = torch.tensor([t[1] for t in trees], dtype=torch.int64).view(len(lens), width - 1)
    given_parents = torch.tensor([t[0] for t in trees])
    REGISTRY[TREE](given_parents, selected, torch.tensor(lens), mask, *outputs, topk, depth, width, 0)
    at = 0
    for request, length in enumerate(lens):
        _, chosen, above = trees[request]
        nodes = [-2, *chosen]  # node 0 is the root

        def ancestors(node: int, nodes: list[int] = nodes, above: dict[int, int] = above) -> list[int]:
            line = [node]
            while line[-1]:
                parent = above[nodes[line[-1]]]
                line.append(0 if parent == -1 else nodes.index(parent))
            return line

        for node in range(width):
            row = mask[at : at + length + width].tolist()
            at += length + width
            line = ancestors(node)
            assert row == [True] * length + [i in line for i in range(width)]
            assert outputs[0][request, node] == length + len(line) - 1
            assert outputs[1][request, node] == request * width + node
            children = [n for n in range(1, width) if ancestors(n)[1] == node]
            assert outputs[2][request, node] == (children[0] if children else -1)
            siblings = [n for n in range(node + 1, width) if node and ancestors(n)[1] == line[1]]
            assert outputs[3][request, node] == (siblings[0] if siblings else -1)


@settings(max_examples=40, deadline=None)
@given(
    words=st.integers(1, 3), cut=st.integers(0, 31), rows=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), some=st.booleans(),
)  # fmt: skip
def test_token_bitmask(words: int, cut: int, rows: int, dtype: torch.dtype, some: bool) -> None:
    vocabulary = 32 * words - cut
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (rows, words), generator=torch.Generator().manual_seed(2)).to(INT32)
    indices = torch.arange(0, rows, 2) if some else None
    wanted = logits.clone()
    for row in range(0, rows, 2 if some else 1):
        for token in range(vocabulary):
            if not (int(bits[row, token // 32]) >> (token % 32)) & 1:
                wanted[row, token] = -math.inf
    assert REGISTRY[MASK](logits, bits, indices) is logits and torch.equal(logits, wanted)


@pytest.mark.parametrize("turned", [False, True])
def test_states_move_between_device_and_host(turned: bool) -> None:
    layers, device_slots, host_slots = 3, 5, 4
    shapes = [(2, 3), (4,)]
    devices = [torch.randn(layers, device_slots, *shape).half() for shape in shapes]
    if turned:
        devices[0] = torch.randn(layers, device_slots, 3, 2).half().transpose(2, 3)
    hosts = [torch.zeros(host_slots, layers, 1, *shape).half() for shape in shapes]
    pairs = [(4, 0), (1, 3), (2, 1)]
    indices = [torch.tensor([pair[i] for pair in pairs], dtype=INT32) for i in (0, 1)]
    REGISTRY[BACKUP](devices, hosts, *indices, 2)
    for device, host in zip(devices, hosts, strict=True):
        for layer in range(layers):
            for slot in range(host_slots):
                source = next((d for d, h in pairs if h == slot), None)
                want = torch.zeros_like(host[slot, layer, 0]) if source is None else device[layer, source]
                assert torch.equal(host[slot, layer, 0], want)
    back = torch.zeros_like(devices[0][1])
    REGISTRY[LOAD](hosts[0], back, indices[1], indices[0], 1, 2)
    for slot in range(device_slots):
        moved = slot in [d for d, _ in pairs]
        assert torch.equal(back[slot], devices[0][1, slot] if moved else torch.zeros(2, 3).half())
    REGISTRY[LOAD](hosts[0], back[:0], indices[0][:0], indices[0][:0], 9, 2)


Call = tuple[str, list[Any]]


def call(op: str, names: str, defaults: dict[str, Any], over: dict[str, Any]) -> Call:
    return op, [(defaults | over)[name] for name in names.split()]


def loc(op: str = UPDATE, **over: Any) -> Call:
    options = {
        "req": torch.tensor([1, 0]), "pool": torch.zeros(2, 8, dtype=INT32), "start": torch.tensor([2, 0]),
        "end": torch.tensor([4, 1]), "out": torch.zeros(3, dtype=INT32),
    }  # fmt: skip
    return call(op, "req pool start end out", options, over)


def slices(**over: Any) -> Call:
    options = {"out": torch.zeros(2, 8), "src": torch.ones(2, 8), "a": torch.tensor([1, 2]), "b": torch.tensor([3, 3])}
    return call(COPY, "out src a b c d", options | {"c": options["a"], "d": options["b"]}, over)


def extend(**over: Any) -> Call:
    options = {
        "pre": torch.tensor([3]), "seq": torch.tensor([6]), "last": torch.tensor([10]), "free": torch.tensor([5]),
        "size": 4, "out": torch.zeros(3).long(), "values": torch.zeros(1).long(),
    }  # fmt: skip
    return call(EXTEND, "pre seq last free size out values", options, over)


def build(**over: Any) -> Call:
    options: dict[str, Any] = {name: torch.zeros(1, 3).long() for name in ("positions", "index", "next", "sibling")}
    options |= {
        "parents": torch.tensor([[-1, 0, 1]]), "selected": torch.tensor([[0, 2]]), "lens": torch.tensor([4]),
        "mask": torch.ones(21).bool(), "topk": 2, "depth": 2, "width": 3, "mode": 0,
    }  # fmt: skip
    return call(TREE, "parents selected lens mask positions index next sibling topk depth width mode", options, over)


def bitmask(**over: Any) -> Call:
    options = {"logits": torch.zeros(2, 40), "mask": torch.zeros(2, 2, dtype=INT32), "indices": None}
    return call(MASK, "logits mask indices", options, over)


def backup(**over: Any) -> Call:
    options = {
        "devices": [torch.zeros(3, 5, 4)], "hosts": [torch.zeros(4, 3, 1, 4)], "device": torch.tensor([1]),
        "host": torch.tensor([0]), "flags": 2,
    }  # fmt: skip
    return call(BACKUP, "devices hosts device host flags", options, over)


def load(**over: Any) -> Call:
    options = {
        "src": torch.zeros(4, 3, 1, 4), "dst": torch.zeros(5, 4), "host": torch.tensor([0]),
        "device": torch.tensor([1]), "layer": 1, "flags": 2,
    }  # fmt: skip
    return call(LOAD, "src dst host device layer flags", options, over)


REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("cache-loc-dtype", lambda: loc(pool=torch.zeros(2, 8).long())),
    ("cache-loc-dtype", lambda: loc(ASSIGN, req=torch.tensor([1.0, 0.0]))),
    ("cache-loc-dtype", lambda: loc(out=torch.zeros(3).long())),
    ("assign-shape", lambda: slices(src=torch.ones(3, 8))),
    ("assign-shape", lambda: slices(a=torch.tensor([1]))),
    ("assign-dtype", lambda: slices(src=torch.ones(2, 8).half())),
    ("assign-dtype", lambda: slices(a=torch.tensor([1, 2]).int())),
    ("alloc-dtype", lambda: extend(last=torch.tensor([10]).int())),
    ("alloc-dtype", lambda: extend(out=torch.zeros(3).int())),
    ("tree-dtype", lambda: build(lens=torch.tensor([4]).int())),
    ("tree-dtype", lambda: build(mask=torch.ones(21))),
    ("tree-shape", lambda: build(mask=torch.ones(20).bool())),
    ("tree-shape", lambda: build(parents=torch.tensor([[-1, 0]]))),
    ("tree-packed", lambda: build(mode=2)),
    ("tree-qlen", lambda: build(mode=1)),
    ("bitmask-logits", lambda: bitmask(logits=torch.zeros(2, 40).double())),
    ("bitmask-mask", lambda: bitmask(mask=torch.zeros(2, 1, dtype=INT32))),
    ("bitmask-mask", lambda: bitmask(mask=torch.zeros(2, 2))),
    ("bitmask-indices", lambda: bitmask(indices=torch.zeros(1, 1).long())),
    ("state-count", lambda: backup(hosts=[])),
    ("state-count", lambda: load(host=torch.tensor([0, 1]))),
    ("state-flags", lambda: backup(flags=0)),
    ("state-empty", lambda: load(src=torch.zeros(0, 3, 1, 4))),
    ("state-dtype", lambda: load(src=torch.zeros(4, 3, 1, 4).half())),
    ("state-shape", lambda: load(src=torch.zeros(4, 3, 2, 4))),
    ("state-shape", lambda: backup(hosts=[torch.zeros(4, 2, 1, 4)])),
    ("state-dense", lambda: load(dst=torch.zeros(5, 8)[:, ::2])),
    ("state-layer", lambda: load(layer=3)),
    ("state-index", lambda: load(device=torch.tensor([5]))),
    ("state-index", lambda: backup(host=torch.tensor([-1]))),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build_call = REFUSED[number]
    op, arguments = build_call()
    refuses(rule, op, *arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("op", [loc(), loc(ASSIGN), slices(), extend(), build(), bitmask(), backup(), load()])
def test_calls_within_the_limits_are_taken(op: Call) -> None:
    REGISTRY[op[0]](*op[1])


@pytest.mark.parametrize(
    "op",
    [
        loc(pool=torch.zeros(2, 20, dtype=INT32), start=torch.tensor([0, 0]), end=torch.tensor([17, 0])),
        loc(end=torch.tensor([9, 1])),
        loc(req=torch.tensor([2, 0])),
        loc(out=torch.zeros(2, dtype=INT32)),
        slices(b=torch.tensor([3, 9])),
        extend(seq=torch.tensor([9])),
        extend(out=torch.zeros(2).long()),
        build(selected=torch.tensor([[0, 4]])),
        bitmask(indices=torch.tensor([2])),
    ],
)
def test_what_the_library_leaves_unchecked_faults(op: Call) -> None:
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in op[1]]
    with pytest.raises(DeviceFault):
        REGISTRY[op[0]](*op[1])
    if op[0] in (ASSIGN, UPDATE, EXTEND, MASK):
        assert all(torch.equal(x, y) for x, y in zip(op[1], before, strict=True) if isinstance(x, torch.Tensor))
