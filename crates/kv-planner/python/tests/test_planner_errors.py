"""The catalogue of errors: every kind of the core has a class and an example here."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

import kv_planner as kp
import numpy as np
import pytest
from kv_planner import _native, errors
from kv_planner.testing import build_rank

LAYOUT = kp.ModelLayout(
    [kp.ComponentSpec("key", layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=2)], page_size=2, fingerprint="model"
)
WHOLE = build_rank(LAYOUT, [0, 1])


def plan() -> kp.Plan:
    return kp.Plan(kp.agree(WHOLE, build_rank(LAYOUT, [0, 1], base=2**40)).route(), kp.Runs([1, 3], [1, 2]))


def prefix() -> kp.PrefixIndex:
    """Equal calls give equal nodes."""
    index = kp.PrefixIndex(2, device_pages=8, host_pages=8)
    index.insert([1, 2, 3, 4], [1, 2])
    return index


def unlocked_twice() -> None:
    index = prefix()
    lock = index.lock(index.match([1, 2]))
    index.unlock(lock)
    index.unlock(lock)


EXAMPLES: dict[str, Callable[[], object]] = {
    "ArgumentError": lambda: kp.Runs(np.zeros((4, 2)), [1]),  # type: ignore[arg-type]
    "LayoutError": lambda: kp.ModelLayout([], page_size=1, fingerprint="model"),
    "PlacementError": lambda: kp.Placement(tp_rank=2, tp_size=2),
    "ManifestError": lambda: kp.RankManifest(LAYOUT, kp.Placement(), [WHOLE.entries[0], WHOLE.entries[0]]),
    "FormatError": lambda: kp.RankManifest.from_json("{"),
    "InconsistentDeployment": lambda: kp.Deployment([WHOLE, WHOLE]),
    "IncompleteDeployment": lambda: kp.Deployment([build_rank(LAYOUT, [0])]),
    "LayoutMismatch": lambda: kp.agree(
        WHOLE, build_rank(kp.ModelLayout(LAYOUT.components, page_size=4, fingerprint="other"), [0, 1])
    ),
    "UnsupportedPlacement": lambda: kp.agree(build_rank(LAYOUT, [0, 1], kp.Placement(dcp_size=2)), WHOLE),
    "UnnamedPointers": lambda: kp.name_pointers(LAYOUT, 1),
    "ContextMismatch": lambda: kp.Plan(
        plan().route, kp.page_interleaved([1], [1], page_size=2, dcp_rank=0, dcp_size=2, tokens=2)
    ),
    "RegionLimitExceeded": lambda: kp.Regions([(0, 1), (64, 1)], alignment=16, max_regions=1),
    "UnregisteredMemory": lambda: kp.lower(plan(), source_regions=kp.Regions([(64, 1)], alignment=16)),
    "HeadsDoNotSplit": lambda: kp.split_heads(3, tp_rank=0, tp_size=2),
    "UnequalPages": lambda: kp.Runs([1], []),
    "ReservedPage": lambda: kp.Runs([0], [1]),
    "PageOutOfRange": lambda: kp.Plan(plan().route, kp.Runs([6], [1])),
    "DuplicateDestination": lambda: kp.Runs([1, 2], [3, 3]),
    "ItemKindMismatch": lambda: kp.Plan(plan().route, kp.Runs([1], [1], item_kind="request_row")),
    "SliceError": lambda: plan().slice(layer_ids=[2]),
    "BlockLimitExceeded": lambda: kp.lower(plan(), kp.Capabilities(max_blocks=3)),
    "AddressOverflow": lambda: build_rank(LAYOUT, [0], base=2**64 - 8),
    "RowLayoutError": lambda: kp.RowLayout([]),
    "LengthError": lambda: kp.kv_lengths("mtp", [-1], window=4),
    "TokenOutOfRange": lambda: kp.page_hashes([1, -1], 2),
    "PageAlreadyHeld": lambda: prefix().insert([9, 9], [1]),
    "StaleNode": lambda: prefix().path(99),
    "TierOrder": lambda: prefix().backed_up(prefix().match([1, 2, 3, 4]).nodes[1:], [1]),
    "TierConflict": lambda: prefix().loaded(prefix().match([1, 2]).nodes, [3]),
    "LockError": lambda: unlocked_twice(),
    "AccountingError": lambda: kp.TierCounts(capacity=9, held=3, evictable=1, protected=1),
}


def test_every_kind_but_a_defect_of_our_own_has_an_example() -> None:
    assert sorted([*EXAMPLES, "InternalError"]) == sorted(_native.ERROR_KINDS)


def test_a_defect_is_a_runtime_error_too() -> None:
    assert issubclass(kp.InternalError, kp.PlanError) and issubclass(kp.InternalError, RuntimeError)
    error = kp.InternalError("text", local="a panic")
    assert pickle.loads(pickle.dumps(error)).local == "a panic"


def test_every_class_is_a_kind_or_a_base() -> None:
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, kp.PlanError)
    }
    assert classes - {"PlanError", "RunsError", "PrefixError"} == set(_native.ERROR_KINDS)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_errors_say_what_is_wrong_and_what_to_do(kind: str) -> None:
    with pytest.raises(getattr(kp, kind)) as caught:
        EXAMPLES[kind]()
    error = caught.value
    assert type(error).__name__ == kind
    assert isinstance(error, kp.PlanError) and isinstance(error, ValueError)
    assert error.consequence and error.remedy and error.local is not None
    assert error.remedy in str(error) and str(error.local) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert again.__dict__ == error.__dict__
    assert (type(again), str(again), again.local, again.remedy) == (type(error), str(error), error.local, error.remedy)


def test_runs_errors_share_a_base() -> None:
    for kind in ("UnequalPages", "ReservedPage", "PageOutOfRange", "DuplicateDestination"):
        assert issubclass(getattr(kp, kind), kp.RunsError)


def test_prefix_errors_share_a_base() -> None:
    for kind in ("PageAlreadyHeld", "StaleNode", "TierOrder", "TierConflict", "LockError", "AccountingError"):
        assert issubclass(getattr(kp, kind), kp.PrefixError)


def test_a_mismatch_holds_all_differences() -> None:
    with pytest.raises(kp.LayoutMismatch) as caught:
        EXAMPLES["LayoutMismatch"]()
    fields = [difference.field for difference in caught.value.differences]
    assert fields == ["fingerprint", "page_size", "kernel_block_size"]
    assert (caught.value.local, caught.value.remote) == ("model", "other")
    first = caught.value.differences[0]
    assert str(first) in str(caught.value)
    rebuilt = kp.Difference(first.field, first.local, first.remote, first.consequence, first.remedy)
    assert rebuilt == first and hash(rebuilt) == hash(first) and "fingerprint" in repr(first)
    assert rebuilt != kp.Difference(first.field, 3, None, first.consequence, first.remedy)


def test_what_goes_over_a_wire_survives_pickle() -> None:
    assert pickle.loads(pickle.dumps((LAYOUT, WHOLE))) == (LAYOUT, WHOLE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        LAYOUT.to_json(),
        WHOLE.to_json()[:-1],
        WHOLE.to_json().replace('"key"', '"keys"', 1),
        WHOLE.to_json().replace('"page_size":2', '"page_size":2.5'),
        WHOLE.to_json().replace('"page_size":2', '"page_size":-2'),
        WHOLE.to_json().replace('"page_size":2', '"page_size":99999999999999999999999'),
        WHOLE.to_json().replace('"page_size":2', '"page_size":2,"surplus":1'),
        WHOLE.to_json().replace('"page_size":2', '"page_size":4'),
        WHOLE.to_json().replace('"tp_size":1', '"tp_size":0'),
        WHOLE.to_json().replace('"total_heads":2', '"total_heads":1'),
        WHOLE.to_json().replace('"total_heads":2', '"total_heads":18446744073709551615'),
        WHOLE.to_json().replace('"layer_id":1', '"layer_id":0'),
        WHOLE.to_json().replace('"address":4096', '"address":18446744073709551615'),
    ],
)
def test_foreign_json_is_a_named_error(text: str) -> None:
    assert text != WHOLE.to_json()
    with pytest.raises(kp.PlanError):
        kp.RankManifest.from_json(text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: kp.ModelLayout(3, page_size=2, fingerprint="m"), "components: .*a sequence of ComponentSpec, got"),
        (lambda: kp.ModelLayout([3], page_size=2, fingerprint="m"), r"components\[0\]: .* ComponentSpec, got int 3"),
        (lambda: kp.RankManifest(LAYOUT, kp.Placement(), [WHOLE.entries[0], "key"]), r"entries\[1\]: .*got str 'key'"),
        (lambda: kp.Deployment([LAYOUT]), r"manifests\[0\]: expected RankManifest"),
        (lambda: kp.RowLayout([None]), r"fields\[0\]: expected RowField, got NoneType None"),
        (lambda: kp.StateRoute(3, source=(0, 1), destination=(0, 1)), r"groups: expected a sequence of pairs"),
        (lambda: kp.Regions(3), r"buffers: expected a sequence of pairs \(address, bytes\), got int 3"),
        (lambda: kp.pair_names(3, []), r"source: expected a sequence of names"),
        (lambda: kp.ComponentSpec("key", layer_ids=3, dtype="int8", total_heads=1, dims=1), "layer_ids: .*sequence"),
    ],
)  # fmt: skip
def test_a_sequence_of_something_else_is_named_with_its_position(call: Callable[[], object], text: str) -> None:
    with pytest.raises(kp.ArgumentError, match=text):
        call()
