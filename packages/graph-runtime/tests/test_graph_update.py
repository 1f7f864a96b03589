"""Update keys: every way of not fitting the captured ops is an error, at capture or before replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_runtime import OpRecord, UpdateSpec, get_device
from graph_runtime.errors import (
    HostListError,
    KeyNotPassed,
    MissingUpdate,
    TensorValuedKey,
    UncoveredKey,
    UnknownUpdateKey,
    UpdateCountMismatch,
    UpdateLengthMismatch,
    UpdatePending,
    UpdateSpecError,
)

_FIA = OpRecord(
    "fia_v2.out", ("actual_seq_qlen", "actual_seq_kvlen"), (), (), {"actual_seq_qlen": 2, "actual_seq_kvlen": 2}
)
_V1 = OpRecord("fia_v1.out", ("actual_seq_lengths_kv",), (), ("actual_seq_lengths",), {"actual_seq_lengths_kv": 2})
_BAKED = OpRecord("paged", (), ("context_lens",), ())


def _kv_only(**changes: Any) -> UpdateSpec:
    return UpdateSpec({"actual_seq_kvlen": "kv"}, constant=["actual_seq_qlen"], **changes)


def test_broadcast_to_every_record() -> None:
    bound = _kv_only().bind([_FIA, _FIA])
    assert bound.values({"kv": [1, 2]}) == [{"actual_seq_kvlen": [1, 2]}] * 2
    assert _kv_only().host_names == ("kv",)


def test_ops_of_two_versions_take_their_own_key() -> None:
    spec = UpdateSpec({"actual_seq_kvlen": "kv", "actual_seq_lengths_kv": "kv"}, constant=["actual_seq_qlen"])
    assert spec.bind([_FIA, _V1]).values({"kv": [3, 4]}) == [
        {"actual_seq_kvlen": [3, 4]},
        {"actual_seq_lengths_kv": [3, 4]},
    ]


@pytest.mark.parametrize(
    ("spec", "records", "error", "word"),
    [
        (UpdateSpec({"actual_seq_lengths_kv": "kv"}), [_FIA], UnknownUpdateKey, "actual_seq_kvlen"),
        (UpdateSpec({"actual_seq_kvlen": "kv"}), [], UnknownUpdateKey, "no updatable op"),
        (UpdateSpec([{"nonsense": "kv"}]), [_V1], UnknownUpdateKey, "nonsense"),
        (UpdateSpec({"context_lens": "kv"}), [_BAKED], TensorValuedKey, "baked"),
        (UpdateSpec({"actual_seq_lengths": "q", "actual_seq_lengths_kv": "kv"}), [_V1], KeyNotPassed, "silently"),
        (UpdateSpec({"actual_seq_kvlen": "kv"}), [_FIA], UncoveredKey, "actual_seq_qlen"),
        (UpdateSpec(), [_V1], UncoveredKey, "actual_seq_lengths_kv"),
        (UpdateSpec([{"actual_seq_lengths_kv": "kv"}]), [_V1, _V1], UpdateCountMismatch, "2 mappings"),
    ],
)
def test_statements_that_do_not_fit(
    spec: UpdateSpec, records: list[OpRecord], error: type[UpdateSpecError], word: str
) -> None:
    with pytest.raises(error, match=word) as caught:
        spec.bind(records)
    assert isinstance(caught.value, UpdateSpecError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("keys", [{"": "kv"}, {"k": ""}, {"q": "kv"}])
def test_statements_that_make_no_sense(keys: dict[str, str]) -> None:
    with pytest.raises(UpdateSpecError):
        UpdateSpec(keys, constant=["q"])


def _capture(**keywords: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    device = get_device("cpu", updatable={"graph_test::scale_optional": ("lens", "more")})
    x = torch.tensor([[1.0], [10.0]])
    graph, output = device.capture(lambda: torch.ops.graph_test.scale_optional(x, **keywords))
    return graph, x, output


def test_an_update_reaches_the_next_replay_and_only_one() -> None:
    graph, x, output = _capture(lens=[0, 0])
    assert graph.records == (OpRecord("graph_test::scale_optional", ("lens",), (), ("more",), {"lens": 2}),)
    with pytest.raises(MissingUpdate, match="wait for ever"):
        graph.replay()
    graph.update({"lens": [2, 3]})
    with pytest.raises(UpdatePending):
        graph.update({"lens": [4, 5]})
    graph.replay()
    assert output.tolist() == [[2.0], [30.0]]
    with pytest.raises(MissingUpdate):
        graph.replay()
    x.copy_(torch.tensor([[2.0], [3.0]]))
    graph.update([{"lens": np.array([4, 5])}])
    graph.replay()
    assert output.tolist() == [[8.0], [15.0]]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"lens": [1, 2, 3]}, UpdateLengthMismatch),
        ({"lens": [1]}, UpdateLengthMismatch),
        ({"lens": [1, -1]}, HostListError),
        ({"lens": [1, 2.0]}, HostListError),
        ({"lens": [1, True]}, HostListError),
        ({"lens": "ab"}, HostListError),
        ({"lens": 3}, HostListError),
        ({"lens": torch.zeros(2, dtype=torch.int32, device="meta")}, HostListError),
        ({"kv": [1, 2]}, UnknownUpdateKey),
        ({"lens": [1, 2], "more": [1, 2]}, KeyNotPassed),
        ({}, UncoveredKey),
        ([], UpdateCountMismatch),
        ([{"lens": [1, 2]}, {"lens": [1, 2]}], UpdateCountMismatch),
        ([{"kv": [1, 2]}], UnknownUpdateKey),
    ],
)
def test_a_refused_update_changes_nothing(values: Any, error: type[Exception]) -> None:
    graph, _, output = _capture(lens=[0, 0])
    graph.update({"lens": [2, 3]})
    graph.replay()
    with pytest.raises(error):
        graph.update(values)
    with pytest.raises(MissingUpdate):
        graph.replay()
    assert graph.broken is None
    graph.update({"lens": [1, 1]})
    graph.replay()
    assert output.tolist() == [[1.0], [10.0]]


def test_constant_keys_keep_the_value_of_capture() -> None:
    graph, _, output = _capture(lens=[1, 1], more=[5, 6])
    with pytest.raises(UncoveredKey, match="more"):
        graph.update({"lens": [2, 2]})
    graph.update({"lens": [2, 2]}, constant=["more"])
    graph.replay()
    assert output.tolist() == [[7.0], [26.0]]


def test_lists_are_copied() -> None:
    graph, _, output = _capture(lens=[0, 0])
    lens = [2, 2]
    graph.update({"lens": lens})
    lens[0] = 99
    graph.replay()
    assert output.tolist() == [[2.0], [20.0]]


def test_one_update_an_op_for_draft_steps() -> None:
    """E13: three draft steps from length 100 see 101, 102, 103."""
    device = get_device("cpu", updatable={"graph_test::scale": ("lens",)})
    x = torch.ones(1, 1)
    graph, output = device.capture(lambda: torch.cat([torch.ops.graph_test.scale(x, [0]) for _ in range(3)]))
    spec = UpdateSpec([{"lens": f"step{step}"} for step in range(3)])
    bound = spec.bind(graph.records)
    assert spec.host_names == ("step0", "step1", "step2")
    graph.update(bound.values({f"step{step}": [100 + step + 1] for step in range(3)}))
    graph.replay()
    assert output.flatten().tolist() == [101.0, 102.0, 103.0]
