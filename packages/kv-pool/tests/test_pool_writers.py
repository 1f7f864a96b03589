"""Owns the proof that writers equal the plain loop on a CPU, and that they refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pool import (
    AliasedRows,
    DeviceMismatch,
    DtypeMismatch,
    PoolSizeError,
    RowMismatch,
    SlotOutOfRange,
    UnknownWriter,
    WidthMismatch,
    create_writer,
    narrow_slots,
    writer_names,
)
from kv_pool.writers import Writer
from kv_pool.writers.index import IndexWriter, index_write

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_index_writer_equals_loop(
    check_writer: Callable[..., None], dtype: torch.dtype, slot_dtype: torch.dtype, strided: bool
) -> None:
    check_writer(IndexWriter(), "cpu", dtype, slot_dtype=slot_dtype, strided=strided)


def _case(**changes: Any) -> dict[str, torch.Tensor]:
    case = {
        "key_cache": torch.zeros(3, 4, 2, 8),
        "value_cache": torch.zeros(3, 4, 2, 6),
        "slots": torch.tensor([4, 9]),
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 6),
    }
    return {**case, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "argument"),
    [
        ({"value": torch.ones(2, 2, 8)}, WidthMismatch, "value"),
        ({"key": torch.ones(2, 2, 6)}, WidthMismatch, "key"),
        ({"key": torch.ones(2, 16)}, WidthMismatch, "key"),
        ({"key": torch.ones(2, 1, 8)}, WidthMismatch, "key"),
        ({"key": torch.ones(3, 2, 8)}, RowMismatch, "key"),
        ({"value": torch.ones(1, 2, 6)}, RowMismatch, "value"),
        ({"slots": torch.tensor([[4, 9]])}, RowMismatch, "slots"),
        ({"slots": torch.tensor([4, 9], dtype=torch.int16)}, DtypeMismatch, "slots"),
        ({"slots": torch.tensor([True, False])}, DtypeMismatch, "slots"),
        ({"slots": torch.tensor([4.0, 9.0])}, DtypeMismatch, "slots"),
        ({"key": torch.ones(2, 2, 8, dtype=torch.float16)}, DtypeMismatch, "key"),
        ({"value": torch.ones(2, 2, 6, device="meta")}, DeviceMismatch, "value"),
        ({"slots": torch.tensor([4, 12])}, SlotOutOfRange, "slots"),
        ({"slots": torch.tensor([-1, 4])}, SlotOutOfRange, "slots"),
        ({"slots": torch.tensor([4, 2**32 + 4])}, SlotOutOfRange, "slots"),
    ],
)
def test_refusals_name_the_argument_and_write_nothing(
    changes: dict[str, torch.Tensor], error: type[Exception], argument: str
) -> None:
    case = _case(**changes)
    with pytest.raises(error) as caught:
        IndexWriter().write(**case)
    assert caught.value.argument == argument  # type: ignore[attr-defined]
    assert not case["key_cache"].any() and not case["value_cache"].any()


def test_no_rows_change_nothing() -> None:
    case = _case(slots=torch.zeros(0, dtype=torch.int64), key=torch.ones(0, 2, 8), value=torch.ones(0, 2, 6))
    IndexWriter().write(**case)
    assert not case["key_cache"].any() and not case["value_cache"].any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_distinct_slots(as_bits: Callable[[torch.Tensor], torch.Tensor], data: st.DataObject) -> None:
    pages, page_size = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    heads, dims, value_dims = (data.draw(st.integers(1, 3)) for _ in range(3))
    slots = data.draw(st.lists(st.integers(0, pages * page_size - 1), unique=True))
    key_cache, value_cache = (
        torch.zeros(pages, page_size, heads, dims),
        torch.zeros(pages, page_size, heads, value_dims),
    )
    key = torch.arange(len(slots) * heads * dims).reshape(-1, heads, dims).float() + 1
    value = -torch.arange(len(slots) * heads * value_dims).reshape(-1, heads, value_dims).float() - 1
    IndexWriter().write(key_cache, value_cache, torch.tensor(slots, dtype=torch.int32), key, value)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        expected = torch.zeros_like(cache)
        for token, slot in enumerate(slots):
            expected[slot // page_size, slot % page_size] = rows[token]
        assert torch.equal(as_bits(cache), as_bits(expected))


def test_index_write_is_a_sound_custom_op() -> None:
    case = _case()
    torch.library.opcheck(
        index_write, (case["slots"], case["key"], case["value"], case["key_cache"], case["value_cache"])
    )


def test_index_write_compiles_as_one_mutation() -> None:
    case = _case()

    def step(slots: torch.Tensor, key: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        index_write(slots, key, case["value"], cache, case["value_cache"])
        return cache.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert compiled(case["slots"], case["key"], case["key_cache"]) == 32
    assert case["key_cache"].sum() == 32


def test_choice_of_a_writer() -> None:
    assert writer_names("cpu") == ("index",)
    assert set(writer_names("npu")) == {"index", "scatter_nd", "reshape_and_cache"}
    writer = create_writer("auto", torch.device("cpu"), num_slots=8)
    assert isinstance(writer, Writer) and writer.name == "index"
    with pytest.raises(UnknownWriter, match="scatter_nd"):
        create_writer("scatter_nd", torch.device("cpu"), num_slots=8)
    with pytest.raises(UnknownWriter):
        create_writer("nonsense", torch.device("cpu"), num_slots=8)  # type: ignore[arg-type]


def test_narrowing_raises_instead_of_wrapping() -> None:
    assert narrow_slots([0, 2**31 - 1]).dtype.name == "int32"
    with pytest.raises(SlotOutOfRange, match="2147483648"):
        narrow_slots([5, 2**31])
    with pytest.raises(SlotOutOfRange):
        narrow_slots([-1])


def test_pool_too_large_for_the_writers_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexWriter, "max_slots", 2**31)
    create_writer("index", torch.device("cpu"), num_slots=2**31)
    with pytest.raises(PoolSizeError, match="wrap"):
        create_writer("index", torch.device("cpu"), num_slots=2**31 + 1)


@pytest.mark.parametrize("argument", ["key", "value"])
@pytest.mark.parametrize("source", ["key_cache", "value_cache"])
@pytest.mark.parametrize("pages", [(1, 2), (2, 3)])
def test_rows_of_the_layers_own_memory_are_refused_and_nothing_is_written(
    argument: str, source: str, pages: tuple[int, int]
) -> None:
    """Whether or not the rows read are those written: at a replay the slots are others."""
    case = _case(value_cache=torch.zeros(3, 4, 2, 8), value=torch.ones(2, 2, 8))
    own = case[source].view(-1, 2, 8)[pages[0] * 4 : pages[1] * 4 : 2]
    with pytest.raises(AliasedRows, match="clone") as caught:
        IndexWriter().write(**{**case, argument: own})
    assert caught.value.argument == argument
    assert not case["key_cache"].any() and not case["value_cache"].any()
    IndexWriter().write(**{**case, argument: own.clone()})


def test_rows_of_another_layer_are_stored() -> None:
    storage = torch.zeros(2, 3, 4, 2, 8)
    storage[1, 1] = 5
    case = _case(key_cache=storage[0], key=storage[1].view(-1, 2, 8)[4:6])
    IndexWriter().write(**case)
    assert storage[0].view(-1, 2, 8)[[4, 9]].eq(5).all() and storage[0].sum() == 5 * 2 * 16
