"""Owns the proof of the planned draft-extend fill: it equals the op, in at most four launches."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import kv_planner as kp
import pytest
import spec_kernels as sk
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, ROWS, HIDDEN = 4, 4, 5


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that write memory of the plan's device buffers."""

    def __init__(self, plan: sk.DraftExtendPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {
            value.untyped_storage().data_ptr()
            for item in fields(plan.buffers)
            if (value := getattr(plan.buffers, item.name)) is not None
        }
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        mutated = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        if any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() in self.storages for a in mutated):
            self.names.append(str(func))
        return result


def make_plan(place: Any, ranks: int = 2) -> sk.DraftExtendPlan:
    layout = kp.RowLayout([kp.RowField(**field) for field in sk.draft_extend_fields(ROWS, WIDTH, ranks=ranks)])
    hidden = torch.full((ROWS * WIDTH, HIDDEN), 7.0, dtype=torch.float16, device=place.device)
    return sk.DraftExtendPlan(layout, place.device, hidden_states=hidden)


def make_batch(raw_bs: int, place: Any) -> sk.DraftExtendBatch:
    random = torch.Generator().manual_seed(raw_bs)

    def numbers(count: int, high: int = 900) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=random)

    tokens = raw_bs * WIDTH
    return sk.DraftExtendBatch(
        numbers(tokens), numbers(tokens), numbers(tokens), numbers(raw_bs), numbers(raw_bs), numbers(raw_bs, WIDTH),
        numbers(raw_bs, WIDTH + 1), torch.rand(raw_bs, generator=random),
        torch.randn(HIDDEN, tokens, generator=random).half().to(place.device).t(),
    )  # fmt: skip


def expected(raw_bs: int, place: Any) -> sk.DraftExtendBuffers:
    def garbage(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((count,), 9, dtype=dtype)

    tokens, small = ROWS * WIDTH, torch.int32
    buffers = sk.DraftExtendBuffers(
        garbage(tokens), garbage(tokens), garbage(tokens), garbage(ROWS, small), garbage(ROWS), garbage(ROWS, small),
        garbage(ROWS, small), garbage(ROWS), garbage(ROWS, torch.float32), torch.zeros(tokens, HIDDEN).half(),
        garbage(2, small), garbage(2, small),
    )  # fmt: skip
    batch = make_batch(raw_bs, place)
    assert batch.hidden_states is not None
    batch = replace(batch, hidden_states=batch.hidden_states.cpu())
    sk.fill_draft_extend_buffers(buffers, batch, bs=ROWS, width=WIDTH, num_front_tokens=0, seq_len_fill=1)
    return buffers


def test_it_equals_the_op_whatever_came_before_in_at_most_four_launches(place: Any) -> None:
    plan = make_plan(place)
    addresses = [getattr(plan.buffers, item.name).data_ptr() for item in fields(plan.buffers)]
    for raw_bs in (4, 2, 0, 1):
        with Launches(plan) as launches:
            plan.fill(make_batch(raw_bs, place), bs=ROWS, width=WIDTH, seq_len_fill=1)
        assert 1 <= len(launches.names) <= 4, launches.names
        for item in fields(plan.buffers):
            found, wanted = getattr(plan.buffers, item.name), getattr(expected(raw_bs, place), item.name)
            assert torch.equal(found.cpu(), wanted), item.name
    assert addresses == [getattr(plan.buffers, item.name).data_ptr() for item in fields(plan.buffers)]


def test_hidden_states_may_be_the_buffer(place: Any) -> None:
    plan = make_plan(place, ranks=0)
    plan.fill(make_batch(4, place), bs=ROWS, width=WIDTH, seq_len_fill=0)
    held = plan.buffers.hidden_states
    assert held is not None
    before = held.cpu().clone()
    batch = replace(make_batch(2, place), hidden_states=held[3:11])
    with Launches(plan) as launches:
        plan.fill(batch, bs=ROWS, width=WIDTH, seq_len_fill=0)
    assert len(launches.names) <= 4
    assert torch.equal(held.cpu(), torch.cat((before[3:11], torch.zeros(8, HIDDEN).half())))


def test_a_refused_fill_changes_nothing(place: Any) -> None:
    plan = make_plan(place)
    plan.fill(make_batch(4, place), bs=ROWS, width=WIDTH, seq_len_fill=0)
    before = [getattr(plan.buffers, item.name).cpu().clone() for item in fields(plan.buffers)]
    batch = make_batch(2, place)
    assert batch.hidden_states is not None
    options = {"bs": ROWS, "width": WIDTH, "seq_len_fill": 0}
    with pytest.raises(sk.TokenCountError, match="hidden_states"):
        plan.fill(replace(batch, hidden_states=batch.hidden_states[:5]), **options)
    with pytest.raises(sk.ShapeError, match="hidden_states"):
        plan.fill(replace(batch, hidden_states=batch.hidden_states[:, :4]), **options)
    with pytest.raises(sk.IndexWidthError, match="num_correct_drafts"):
        plan.fill(replace(batch, num_correct_drafts=torch.tensor([0, 4])), **options)
    after = [getattr(plan.buffers, item.name).cpu() for item in fields(plan.buffers)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    with pytest.raises(sk.ShapeError, match="layout"):
        sk.DraftExtendPlan(kp.RowLayout([kp.RowField("seq_lens", "int32", rows=4)]), place.device)
