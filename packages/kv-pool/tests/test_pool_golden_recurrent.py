"""Owns the comparison of states of requests: SGLang 0.5.23's pool on an NPU, call by call, and ours with equal inputs.

`python tools/record_golden.py recurrent` records `golden/recurrent.json`: digests of whole buffers that began as
labels, whose formula is repeated here. Where SGLang does what is not done here, the recorded fact stands beside the
refusal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, LayoutMismatch, ModelLayout, Placement, agree
from kv_pool import DoubleFree, ForeignPage, OutOfPages, PageAllocator, PageError, SlotOutOfRange, StatePool
from kv_pool.hicache import HostPool, create_mover

GOLDEN = json.loads((Path(__file__).parent / "golden/recurrent.json").read_text(encoding="utf-8"))
LAYERS, ROWS = GOLDEN["layers"], GOLDEN["requests"] + 1
MISTAKES = GOLDEN["mistakes"]


def cases(having: str) -> pytest.MarkDecorator:
    found = [case for case in GOLDEN["cases"] if case[having]]
    assert found
    ids = [f"{case['model']}, {case['draft_tokens'] or 'no'} drafts" for case in found]
    return pytest.mark.parametrize("case", found, ids=ids)


def pool_of(case: dict[str, Any]) -> StatePool:
    """A conv state is one head that has its window first and its channels last."""
    layouts, shapes = {}, {}
    for kind, (dtype, shape, _, _) in case["kinds"].items():
        heads, *shape = shape[2:] if kind == "temporal" else (1, *shape[2:])
        spec = ComponentSpec(
            "state", layer_ids=LAYERS, dtype=dtype, total_heads=heads, dims=torch.Size(shape).numel(),
            item_kind="request_row",
        )  # fmt: skip
        layouts[kind], shapes[kind] = ModelLayout([spec], page_size=1, fingerprint=kind), shape
    return StatePool(layouts, requests=GOLDEN["requests"], device="cpu", shapes=shapes)


def labels(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    running = (torch.arange(tensor.numel()) * 7 + 31 * salt).remainder(509) - 254
    return running.to(tensor.dtype).view(tensor.shape)


def label(pool: StatePool) -> None:
    for salt, kind in enumerate(pool.kinds):
        storage = pool.kind(kind).storage("state")
        storage.copy_(labels(storage, salt))


def digest(*tensors: torch.Tensor) -> str:
    held = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(held).hexdigest()[:24]


def digests(pool: StatePool) -> dict[str, str]:
    return {kind: digest(pool.kind(kind).storage("state")) for kind in pool.kinds}


def rows(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@cases("kinds")
def test_shapes_dtypes_strides_and_entries_are_theirs(case: dict[str, Any]) -> None:
    """Row 0 is a row like any other in memory; a fresh pool holds zeros; work space of drafts has no entry."""
    pool = pool_of(case)
    assert list(pool.kinds) == list(case["kinds"])
    entries = []
    for kind, (dtype, shape, strides, nonzero) in case["kinds"].items():
        storage = pool.kind(kind).storage("state")
        layers = [pool.state(kind, layer) for layer in LAYERS]
        layers = [layer.squeeze(1) if kind != "temporal" else layer for layer in layers]
        assert str(storage.dtype) == f"torch.{dtype}"
        assert [len(layers), *layers[0].shape] == shape and {layer.stride() for layer in layers} == {(*strides[1:],)}
        assert [layer.storage_offset() for layer in layers] == [strides[0] * place for place in range(len(LAYERS))]
        assert nonzero == int(storage.count_nonzero()) == 0
        entries += [
            [kind, entry.address - storage.data_ptr(), entry.nbytes, entry.item_bytes]
            for entry in pool.kind(kind).manifest().entries
        ]
    assert entries == case["entries"]
    assert [entry.layer_id for kind in pool.kinds for entry in pool.kind(kind).manifest().entries] == case["layer_ids"]


@cases("life")
def test_every_call_leaves_the_bytes_of_theirs(case: dict[str, Any]) -> None:
    """Writes, clears, forks (rows that change places, one row twice), a copy to the host and back into other rows."""
    pool, theirs = pool_of(case), case["life"]
    label(pool)
    assert digests(pool) == theirs["labelled"]
    written = rows(GOLDEN["written"])
    for place, layer in enumerate(LAYERS):
        for salt, kind in enumerate(pool.kinds):
            view = pool.state(kind, layer)[: len(written)]
            pool.write(kind, layer, written, labels(view, 10 * place + salt))
    assert digests(pool) == theirs["written"]
    pool.clear(rows(GOLDEN["cleared"]))
    assert digests(pool) == theirs["cleared"]
    for name, (sources, targets) in GOLDEN["forks"].items():
        pool.copy(rows(sources), rows(targets))
        assert digests(pool) == theirs[name], name
    for kind in pool.kinds:
        held = pool.kind(kind)
        held.copy_in(GOLDEN["restored"], held.copy_out(GOLDEN["copied"]))
    assert digests(pool) == theirs["restored"]


@cases("hosts")
def test_the_host_holds_and_gives_back_the_bytes_of_theirs(case: dict[str, Any]) -> None:
    """One host pool a kind here, one for all there: equal shapes but for an axis of 1, equal pieces and flat pages.

    There row 0 of the host is a request's like any other.
    """
    for theirs in case["hosts"]:
        pool = pool_of(case)
        label(pool)
        hosts = {kind: HostPool(pool.kind(kind), pages=ROWS - 1, layout=theirs["layout"]) for kind in pool.kinds}
        storages = {kind: host.mirror("state").storage for kind, host in hosts.items()}
        for salt, storage in enumerate(storages.values()):
            storage.copy_(labels(storage, 70 + salt))
        for host in hosts.values():
            mover = create_mover("indexed", host)
            mover.backup(*GOLDEN["backed_up"])
        assert {kind: digest(storage) for kind, storage in storages.items()} == theirs["host"]
        there, device = GOLDEN["loaded"]
        for host in hosts.values():
            create_mover("indexed", host).load(device, there)
        assert digests(pool) == theirs["device"]
        assert {kind: [*storage.shape[:2], storage[0, 0].numel()] for kind, storage in storages.items()} == {
            kind: [*shape[:2], torch.Size(shape[2:]).numel()] for kind, shape in theirs["shapes"].items()
        }
        order = sorted(pool.kinds, key=lambda kind: kind != "temporal")  # theirs: it comes first
        pieces = [(kind, hosts[kind].mirror("state").host[page]) for page in there for kind in order]
        begin = {kind: storage.data_ptr() for kind, storage in storages.items()}
        assert [[kind, piece.data_ptr() - begin[kind]] for kind, piece in pieces] == theirs["places"]
        assert [piece.nbytes for _, piece in pieces] == theirs["sizes"]
        assert (theirs["first"], {int(host.allocator.alloc(1)[0]) for host in hosts.values()}) == (0, {1})
        assert digest(*(piece.reshape(-1).view(torch.uint8) for _, piece in pieces[: len(order)])) == theirs["flat"]


def rolled(windows: torch.Tensor, steps: list[int], drafts: int) -> torch.Tensor:
    """Windows that end with the last accepted draft; what falls out in front is no part of any state."""
    ended = windows.clone()
    for place, step in enumerate(steps):
        back = drafts - 1 - step
        if back:
            ended[place, :, back:] = windows[place, :, :-back]
    return ended


@cases("accepted")
def test_accepted_drafts_are_written_back_as_theirs(case: dict[str, Any]) -> None:
    """A verify step leaves a temporal state a draft in work space, and all drafts in the windows of the rows.

    What was accepted goes into the row of the request and, where one is kept there, into that of a checkpoint;
    requests that accepted nothing keep their rows.
    """
    drafts = case["draft_tokens"]
    dtype, shape = case["drafts"]["temporal"]
    work = labels(torch.empty(shape, dtype=getattr(torch, dtype)), 40)  # [layers, batch + 1, drafts, heads, ...]
    for accepted in case["accepted"]:
        pool = pool_of(case)
        label(pool)
        live = [place for place, step in enumerate(accepted["steps"]) if step >= 0]
        kept = [place for place, step in enumerate(accepted["track_steps"] or []) if step >= 0]
        for place, layer in enumerate(LAYERS):
            windows = pool.state("conv0", layer).clone()
            for where, steps, places in (
                (accepted["tracked"], accepted["track_steps"], kept),
                (accepted["rows"], accepted["steps"], live),
            ):
                if not places:
                    continue
                chosen = rows([where[one] for one in places])
                ends = [steps[one] for one in places]
                pool.write("temporal", layer, chosen, work[place, places, ends])
                own = windows[[accepted["rows"][one] for one in places]]
                pool.write("conv0", layer, chosen, rolled(own, ends, drafts))
        assert digests(pool) == accepted["digests"], accepted


def test_as_many_rows_are_handed_out_and_the_same_while_they_are_fresh() -> None:
    """Row 0 to nobody; too few is an error where SGLang returns nothing; released rows come first here, last there."""
    allocator = PageAllocator(ROWS, 1)
    ours: dict[int, int] = {}  # by theirs
    fresh = True
    for call, argument, answer, available in GOLDEN["slots"]:
        if call == "free":
            allocator.release([ours.pop(row) for row in argument])
            fresh = False
        elif answer is None:
            with pytest.raises(OutOfPages):
                allocator.alloc(argument)
        else:
            taken = allocator.alloc(argument).tolist()
            assert taken == answer or not fresh
            ours.update(zip(answer, taken, strict=True))
        assert allocator.available == available and 0 not in ours.values()
        assert len({*ours.values()}) == len(ours) == ROWS - 1 - available


def test_rows_freed_twice_or_never_taken_are_refused() -> None:
    """SGLang's lists grow: a slot has two owners, slot 0 has one, and the host has more rows than it has."""
    available, *handed_out = MISTAKES["freed twice"]
    assert available == GOLDEN["requests"] and handed_out.count(1) == 2
    assert MISTAKES["reserved freed"].count(0) == 1
    size, free = MISTAKES["host freed twice"]
    assert free == size + 1
    allocator = PageAllocator(ROWS, 1)
    taken = allocator.alloc(2)
    allocator.release(taken[:1])
    with pytest.raises(DoubleFree):
        allocator.release(taken[:1])
    with pytest.raises(ForeignPage):
        allocator.release([0])
    assert allocator.available == GOLDEN["requests"] - 1


def test_rows_that_do_not_exist_are_refused() -> None:
    """SGLang takes -1, its mark of an empty slot, for its last row, and one copy for as many rows as are named."""
    last = ROWS - 1
    assert (MISTAKES["fork of -1"], MISTAKES["fork into -1"], MISTAKES["clear of -1"]) == ([2], [last], [last])
    assert MISTAKES["one copy, three rows"] == [1, 2, 3]
    pool = pool_of(GOLDEN["cases"][0])
    label(pool)
    before = digests(pool)
    for sources, targets in (([-1], [2]), ([3], [-1]), ([ROWS], [2]), ([3], [ROWS])):
        with pytest.raises(SlotOutOfRange):
            pool.copy(rows(sources), rows(targets))
    with pytest.raises(SlotOutOfRange):
        pool.clear(rows([-1]))
    held = pool.kind("conv0")
    with pytest.raises(PageError):
        held.copy_in([1, 2, 3], held.copy_out([4]))
    assert digests(pool) == before


@cases("slices")
def test_conv_states_of_unequal_tp_are_refused(case: dict[str, Any]) -> None:
    """SGLang cuts them along the window, which comes first on an NPU, and the second rank writes behind the row.

    Of Kimi's it knows the axis. Here such ranks have other layouts; `kv_transfer.integrations.sglang` names the axis.
    """
    found, (window, channels) = case["slices"], case["kinds"]["conv0"][1][2:]
    number = found["kinds"].index("conv0")
    last = max(start + length for rank in found["blocks"][number] for _, start, length in rank)
    cut = (found["dims"][number], found["outer"][number], last > found["items"][number])
    assert cut == ((channels // 2, window, False) if case["model"] == "kimi" else (window, 1, True))
    ranks = []
    for size in (1, 2):
        spec = ComponentSpec(
            "state", layer_ids=LAYERS, dtype="bfloat16", total_heads=size, dims=window * channels // size,
            item_kind="request_row",
        )  # fmt: skip
        layout = ModelLayout([spec], page_size=1, fingerprint="conv")
        pool = StatePool({"conv": layout}, requests=3, device="cpu", placement=Placement(tp_size=size))
        ranks.append(pool.kind("conv").manifest())
    with pytest.raises(LayoutMismatch):
        agree(*ranks)
