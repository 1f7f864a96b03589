"""Every field of SGLang's `KVArgs`: a value of another kind is refused by name, before memory is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing.odd_values import ODD
from transfer_sglang import MHA, MLA, Manager, Side, manifest

import kv_transfer as kt

NUMBERS = (
    "page_size", "engine_rank", "pp_rank", "kv_head_num", "total_kv_head_num", "prefill_start_layer",
    "prefill_end_layer", "hidden_kv_layers", "total_kv_layers", "draft_kv_layers", "num_draft_entries", "kv_buf_groups",
)  # fmt: skip
BUFFERS = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
LISTS = (
    *BUFFERS, "kv_layer_ids", "kv_entry_names", "aux_data_ptrs", "aux_data_lens", "aux_item_lens", "state_types",
    "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids", "state_dim_per_tensor",
    "state_conv_shard_groups", "state_slice_outer_counts", "mla_compression_ratios",
)  # fmt: skip
READ_BY_A_MANIFEST = (*BUFFERS, "kv_layer_ids", "kv_entry_names", "page_size", "kv_head_num", "kv_cache_dtype_str")
ITEMS: dict[str, Any] = {
    "none": None, "true": True, "negative": -1, "fraction": 1.5, "text": "x", "list": [1], "2**64": 2**64,
    "without words": (1, 2, 3, 4), "without a number": ("key", "target", 0, None),
    "with a bool": ("key", "target", True, 0),
}  # fmt: skip


def odd(field: str) -> Iterator[tuple[str, Any]]:
    """Values that a field does not take."""
    taken = {"None", "0"} if field in NUMBERS else {"empty list"}
    if field == "page_size":
        taken = set()
    if field not in (*NUMBERS, *BUFFERS) and not field.startswith("aux_"):
        taken |= {"None"}
    if field == "kv_cache_dtype_str":
        taken = {"None", "text", "empty text", "half a pair"}
    if field in BUFFERS or field.startswith("aux_"):
        taken -= {"empty list"}
    if field.startswith("state_") and field not in ("state_data_ptrs", "state_data_lens", "state_item_lens"):
        taken |= {"bools", "ragged", "fractions"}  # lists of what the states' own users read
    yield from ((what, value) for what, value in ODD.items() if what not in taken)
    if field in LISTS and not field.startswith("state_"):
        yield from ((f"items: {what}", [value] * 4) for what, value in ITEMS.items())
        yield "an array of floats", np.full(4, 1.5)
        yield "an array of bools", np.full(4, True)


def wrongs(field: str, make: Callable[[Side], object], *, mla: bool) -> list[str]:
    """Values that are not refused by name."""
    found = []
    for what, value in odd(field):
        side = Side(MLA[:2] if mla else MHA, range(2), heads=1 if mla else 2)
        setattr(side.args, field, value)
        try:
            made = make(side)
            found.append(f"{field}={what} was taken")
            if isinstance(made, Manager):
                made.engine.close()
        except (kt.TransferError, kp.PlanError) as error:
            if field not in str(error):
                found.append(f"{field}={what} does not name it: {error}")
        except Exception as error:  # what this walk is for
            found.append(f"{field}={what}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("field", [*NUMBERS, *LISTS, "kv_cache_dtype_str"])
def test_a_manager_opens_no_memory_of_odd_fields(field: str, mla: bool) -> None:
    assert wrongs(field, lambda side: Manager(side, mla=mla), mla=mla) == []


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("field", READ_BY_A_MANIFEST)
def test_a_manifest_is_made_of_no_odd_fields(field: str, mla: bool) -> None:
    assert wrongs(field, lambda side: manifest(side, mla=mla), mla=mla) == []


def test_numpy_numbers_are_numbers() -> None:
    side = Side(MHA, range(2), heads=2)
    plain = manifest(side, mla=False)
    for field in BUFFERS:
        setattr(side.args, field, [np.uint64(value) for value in getattr(side.args, field)])
    side.args.page_size = np.int32(side.args.page_size)
    assert manifest(side, mla=False) == plain
    Manager(side, mla=False).engine.close()
