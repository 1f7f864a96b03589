"""The public face: names, types, conversions, stubs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing import build_rank

ROOT = Path(__file__).parents[1]
LAYOUT = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=range(2), dtype="float16", total_heads=3, dims=64),
        kp.ComponentSpec(
            "value", layer_ids=[0, 1], dtype="float16", total_heads=3, dims=32, axes=("head", "token", "dim")
        ),
        kp.ComponentSpec("key", "draft", layer_ids=[2], dtype="int8", total_heads=1, dims=8),
    ],
    page_size=128,
    fingerprint="model",
)


def test_public_names() -> None:
    listed = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").split()
    assert sorted(kp.__all__) == sorted(listed)
    assert all(hasattr(kp, name) for name in kp.__all__)


def test_version_and_profile() -> None:
    assert kp.__version__ == "0.1.0"
    assert kp.BUILD_PROFILE in ("release", "debug")


def component(text: Any) -> kp.ComponentSpec:
    ratio = {"latent_c4": 4, "latent_c128": 128}.get(text, 1)
    return kp.ComponentSpec(text, layer_ids=[0], dtype="int8", total_heads=1, dims=1, compression=ratio)


@pytest.mark.parametrize(
    ("word", "make"),
    [
        (kp.Component, component),
        (kp.Part, lambda text: kp.ComponentSpec("key", text, layer_ids=[0], dtype="int8", total_heads=1, dims=1)),
        (kp.DType, lambda text: kp.RowField("a", text, rows=1)),
        (kp.ItemKind, lambda text: kp.Runs([], [], item_kind=text)),
        (kp.SpeculativeKind, lambda text: kp.kv_lengths(text, [], window=1)),
    ],
)
def test_literals_are_the_words_of_the_core(word: Any, make: Callable[[str], object]) -> None:
    words = [text for literal in get_args(word) for text in get_args(literal)]
    with pytest.raises(kp.ArgumentError) as caught:
        make("nonsense")
    assert caught.value.local == "nonsense"
    assert str(caught.value.remote).split(" | ") == words
    for text in words:
        make(text)


def test_axes_are_named_once_each() -> None:
    def make(axes: Any) -> kp.ComponentSpec:
        return kp.ComponentSpec("key", layer_ids=[0], dtype="int8", total_heads=1, dims=1, axes=axes)

    assert make(["dim", "head", "token"]).axes == ("dim", "head", "token")
    for listed in (("token", "head"), ("token", "token", "dim"), ("token", "head", "dim", "dim")):
        with pytest.raises(kp.LayoutError):
            make(listed)
    for foreign in ("token", ("token", "head", "lane"), 3):
        with pytest.raises(kp.ArgumentError):
            make(foreign)


def test_layout_attributes() -> None:
    value = LAYOUT.spec("value")
    assert (value.component, value.part, value.layer_ids, value.dtype) == ("value", "target", (0, 1), "float16")
    assert (value.total_heads, value.dims, value.axes, value.item_kind) == (3, 32, ("head", "token", "dim"), "page")
    assert (LAYOUT.page_size, LAYOUT.kernel_block_size, LAYOUT.fingerprint, LAYOUT.format_version) == (
        128,
        None,
        "model",
        1,
    )
    assert LAYOUT.item_bytes("key") == 128 * 3 * 64 * 2
    assert LAYOUT.item_bytes("value", heads=1) == 128 * 32 * 2
    assert LAYOUT.item_bytes("key", "draft") == 128 * 8
    assert LAYOUT.components == (LAYOUT.spec("key"), value, LAYOUT.spec("key", "draft"))
    with pytest.raises(kp.LayoutError, match="latent/target"):
        LAYOUT.spec("latent")
    with pytest.raises(kp.LayoutError, match="heads"):
        LAYOUT.item_bytes("key", heads=4)


def test_values_compare_hash_and_print() -> None:
    rank, twin = build_rank(LAYOUT, [0, 1, 2]), build_rank(LAYOUT, [0, 1, 2])
    other = build_rank(LAYOUT, [0, 1, 2], base=2**40)
    agreement = kp.agree(rank, other)
    runs = kp.Runs([1, 2], [3, 4])
    plan = kp.Plan(agreement.route(), runs)
    field = kp.RowField("ids", "int64", rows=4, fill=-1)
    pairs: list[tuple[object, object, object]] = [
        (rank, twin, other),
        (rank.entries[0], twin.entries[0], rank.entries[1]),
        (rank.placement, kp.Placement(), kp.Placement(tp_size=2)),
        (
            LAYOUT,
            kp.ModelLayout.from_json(LAYOUT.to_json()),
            kp.ModelLayout(LAYOUT.components, page_size=1, fingerprint="m"),
        ),
        (LAYOUT.components[0], LAYOUT.spec("key"), LAYOUT.spec("value")),
        (kp.Deployment([rank]), kp.Deployment([twin]), kp.Deployment([other])),
        (agreement, kp.agree(twin, other), agreement.reversed()),
        (agreement.route(), agreement.route(0, 0), agreement.reversed().route()),
        (agreement.route().pairs[0], agreement.route().pairs[0], agreement.route().pairs[1]),
        (runs, kp.Runs(np.array([1, 2]), [3, 4]), kp.Runs([1, 2], [4, 3])),
        (plan, kp.Plan(agreement.route(), runs), plan.slice(pages=(0, 1))),
        (kp.Capabilities(max_blocks=1), kp.Capabilities(max_blocks=1), kp.Capabilities()),
        (field, kp.RowField("ids", "int64", rows=4, fill=-1), kp.RowField("ids", "int64", rows=4)),
        (kp.RowLayout([field]), kp.RowLayout([field], alignment=64), kp.RowLayout([field], alignment=8)),
    ]
    for value, same, different in pairs:
        assert value == same and hash(value) == hash(same) and value != different and value != 1
        assert type(value).__name__ in repr(value)
        with pytest.raises(AttributeError):
            value.surplus = 1  # type: ignore[attr-defined]
    lowered = kp.lower(plan)
    assert lowered == kp.lower(plan, kp.Capabilities()) and lowered != kp.lower(plan.slice(pages=(0, 1)))
    assert lowered.batches[0] == kp.lower(plan).batches[0] and "blocks" in repr(lowered) + repr(lowered.batches[0])
    assert "key/draft layer 2" in str(plan)


def test_route_and_agreement_attributes() -> None:
    rank, other = build_rank(LAYOUT, [0, 1, 2]), build_rank(LAYOUT, [0, 1, 2], base=2**40)
    agreement = kp.agree(rank, other)
    assert (agreement.layout, agreement.local, agreement.remote) == (LAYOUT, (rank,), (other,))
    assert agreement.parts == ("target", "draft")
    route = agreement.route()
    assert (route.source, route.destination, len(route)) == (rank, other, 5)
    pair = route.pairs[-1]
    assert (pair.component, pair.part, pair.layer_id, pair.occurrence, pair.item_kind) == ("key", "draft", 2, 0, "page")
    assert (pair.source_entry, pair.destination_entry, pair.source_heads, pair.destination_heads) == (
        4,
        4,
        (0, 1),
        (0, 1),
    )
    assert (pair.rows, pair.row_bytes, pair.source_offset, pair.destination_offset) == (1, 1024, 0, 0)
    assert pair.source_row_stride == pair.destination_row_stride == 1024
    assert route.slice(parts=["draft"]).pairs == (pair,)
    assert route.slice(item_kinds=["token"]).pairs == ()
    for index in (1, 7):
        with pytest.raises(kp.ArgumentError):
            agreement.route(index)


def test_strided_pairs() -> None:
    split = [build_rank(LAYOUT, [0, 1, 2], kp.Placement(tp_rank=rank, tp_size=3), base=2**40) for rank in range(3)]
    pairs = kp.agree(build_rank(LAYOUT, [0, 1, 2]), split[2]).route().pairs
    key, value = pairs[0], pairs[2]
    assert (key.rows, key.row_bytes, key.source_offset, key.source_row_stride) == (128, 128, 256, 384)
    assert (key.destination_offset, key.destination_row_stride, key.source_heads, key.destination_heads) == (
        0,
        128,
        (2, 3),
        (0, 1),
    )
    assert (value.rows, value.row_bytes, value.source_offset) == (1, 128 * 64, 2 * 128 * 64)
    draft = pairs[4]
    assert (draft.part, draft.rows, draft.row_bytes) == ("draft", 1, 1024), "the only head goes to every rank"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_of_any_stride(dtype: type[np.signedinteger]) -> None:
    table = np.arange(24, dtype=dtype).reshape(4, 6)
    expected = kp.Runs([7, 13, 19], [23, 21, 19])
    assert kp.Runs(table[1:, 1], table[3, :0:-2]) == expected
    frozen = table[1:, 1].copy()
    frozen.setflags(write=False)
    assert kp.Runs(frozen, (23, 21, 19)) == expected
    raw = np.zeros(3 * np.dtype(dtype).itemsize + 1, dtype=np.uint8)
    skewed = raw[1:].view(dtype)
    skewed[:] = [7, 13, 19]
    assert kp.Runs(skewed, [23, 21, 19]) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((4, 2)), "expected a 1-D int32 or int64 array, got float64 of shape (4, 2)"),
        (np.zeros((2, 2), dtype=np.int64), "got int64 of shape (2, 2)"),
        (np.int64(3), "got int64"),
        (np.array(3), "got int64 of shape ()"),
        (np.zeros(2, dtype=np.uint64), "got uint64 of shape (2,)"),
        (np.zeros(2, dtype=np.dtype(">i8")), "got >i8 of shape (2,)"),
        ([1.5], "got list [1.5]"),
        ([2**63], "got list"),
        ("12", "got str '12'"),
        (None, "got NoneType None"),
    ],
)
def test_refused_arrays_name_argument_dtype_and_shape(value: Any, words: str) -> None:
    with pytest.raises(kp.ArgumentError) as caught:
        kp.Runs([1, 2], value)
    assert str(caught.value).startswith("destination_pages: expected a 1-D int32 or int64 array")
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [-1, 1.5, 2**64, "1", True, None, [1]])
def test_refused_numbers_name_the_argument(value: Any) -> None:
    with pytest.raises(kp.ArgumentError, match="tokens"):
        kp.page_count(value, 4)


def test_numpy_numbers_are_numbers() -> None:
    assert kp.page_count(np.int64(129), np.int32(64)) == 3
    assert (
        kp.BufferEntry(
            "key",
            "target",
            0,
            device="npu:1",
            address=2**64 - 1,
            nbytes=0,
            item_stride=0,
            item_bytes=0,
            head_range=(0, 0),
        ).address
        == 2**64 - 1
    )


def test_results_are_owned_and_read_only() -> None:
    plan = kp.Plan(
        kp.agree(build_rank(LAYOUT, [0, 1, 2]), build_rank(LAYOUT, [0, 1, 2], base=2**40)).route(), kp.Runs([1], [2])
    )
    arrays = [*kp.Runs([1], [2]).arrays(), kp.lower(plan).batches[0].source, kp.select_index([0], rows=2, width=1)]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_row_fields() -> None:
    layout = kp.RowLayout(
        [kp.RowField("ids", "int64", rows=4, fill=-1), kp.RowField("temperature", "float32", rows=4, width=2, fill=1.0)]
    )
    ids, temperature = layout.field("ids"), layout.field("temperature")
    assert (ids.name, ids.dtype, ids.rows, ids.width, ids.fill, ids.offset, ids.nbytes) == (
        "ids",
        "int64",
        4,
        1,
        -1,
        0,
        32,
    )
    assert (temperature.fill, temperature.offset, temperature.nbytes, layout.nbytes) == (1.0, 64, 32, 128)
    assert isinstance(temperature.fill, float) and layout.alignment == 64
    with pytest.raises(kp.RowLayoutError, match="unplaced"):
        _ = kp.RowField("ids", "int64", rows=4).offset
    with pytest.raises(kp.RowLayoutError, match="ids, temperature"):
        layout.field("positions")
    for dtype, fill in (("int32", 2**31), ("uint8", -1), ("bool", 2), ("int64", 0.5)):
        with pytest.raises(kp.RowLayoutError, match="fill"):
            kp.RowField("ids", dtype, rows=1, fill=fill)  # type: ignore[arg-type]
    assert kp.RowField("flag", "bool", rows=1, fill=True).fill == 1


def test_import_is_light() -> None:
    code = "import kv_planner, sys; print([m for m in ('torch', 'pydantic', 'hypothesis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "2 pairs, 3 page items in 2 runs" in printed
    assert "PrefixMatch(8 tokens, 0 on device, 8 on host) [1 2]" in printed
