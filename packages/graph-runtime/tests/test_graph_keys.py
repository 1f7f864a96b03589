"""Keys read from the captured ops, instead of a list of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_runtime import DecodeRunner, OpRecord, UpdateSpec, get_device
from graph_runtime.errors import (
    KeyNotPassed,
    TensorValuedKey,
    UncoveredKey,
    UnknownUpdateKey,
    UpdateCountMismatch,
    UpdateSpecError,
)
from graph_runtime.keys import DerivedUpdate, UpdateKey, UpdateRole

V1 = OpRecord("npu_fused_infer_attention_score.out", ("actual_seq_lengths_kv",), absent=("actual_seq_lengths",))
V2 = OpRecord("npu_fused_infer_attention_score_v2.out", ("actual_seq_qlen", "actual_seq_kvlen"))
PAGED = OpRecord("_npu_paged_attention", ("context_lens",))


def naive_key(architecture: str) -> str:
    """The field's way: the op version is guessed from the architecture."""
    return UpdateKey.FIA_V2_KV.value if architecture in {"MiMoV2FlashForCausalLM"} else UpdateKey.FIA_V1_KV.value


def test_keys_follow_what_was_captured() -> None:
    """A-24: a model with sinks uses v2 and is in no list; the guess names a key that its ops do not take."""
    with pytest.raises(UnknownUpdateKey):
        UpdateSpec({naive_key("GptOssForCausalLM"): "kv"}, constant=["actual_seq_qlen"]).bind([V2])
    bound = DerivedUpdate("kv").bind([V1, V2, PAGED])
    assert bound.plan == ({"actual_seq_lengths_kv": "kv"}, {"actual_seq_kvlen": "kv"}, {"context_lens": "kv"})
    assert bound.constant == {"actual_seq_qlen"}
    both = DerivedUpdate("kv", query="q").bind([V2])
    assert both.plan == ({"actual_seq_qlen": "q", "actual_seq_kvlen": "kv"},) and not both.constant


def test_keys_of_the_enum_are_keys() -> None:
    spec = UpdateSpec({UpdateKey.FIA_V2_KV: "kv"}, constant=[UpdateKey.FIA_V2_QUERY])
    assert spec.bind([V2]).plan == ({"actual_seq_kvlen": "kv"},)
    assert "UpdateKey" not in repr(spec)
    assert {key.role for key in UpdateKey} == set(UpdateRole)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (OpRecord("fia", (), tensor_valued=("actual_seq_kvlen",)), TensorValuedKey),
        (OpRecord("fia", ("actual_seq_qlen",), absent=("actual_seq_kvlen",)), KeyNotPassed),
        (OpRecord("fia", ("actual_seq_qlen",)), UncoveredKey),
        (OpRecord("own", ("rows",)), UnknownUpdateKey),
    ],
)
def test_ops_whose_lengths_would_stay(record: OpRecord, error: type[Exception]) -> None:
    with pytest.raises(error):
        DerivedUpdate("kv").bind([V2, record])


def test_one_list_a_draft_step_counted() -> None:
    """A-42, A-08: naively one mapping is broadcast, and every step and layer gets the first step's lengths."""
    update = DerivedUpdate("kv", steps=3, ops_per_step=2)
    assert update.host_names == ("kv[0]", "kv[1]", "kv[2]")
    plan = update.bind([V1] * 6).plan
    assert [next(iter(own.values())) for own in plan] == ["kv[0]", "kv[0]", "kv[1]", "kv[1]", "kv[2]", "kv[2]"]
    assert {next(iter(own.values())) for own in UpdateSpec({UpdateKey.FIA_V1_KV: "kv"}).bind([V1] * 6).plan} == {"kv"}
    for ops in (1, 3, 5, 7):
        with pytest.raises(UpdateCountMismatch, match="3 steps of 2"):
            update.bind([V1] * ops)
    with pytest.raises(UnknownUpdateKey, match="none"):
        DerivedUpdate("kv").bind([])


@pytest.mark.parametrize("wrong", [{"kv": ""}, {"query": ""}, {"steps": 0}, {"ops_per_step": 0}])
def test_statements_without_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UpdateSpecError):
        DerivedUpdate(**wrong)


def test_in_a_runner(make: Callable[..., tuple[DecodeRunner, Any]]) -> None:
    device = get_device("cpu", updatable={"graph_test::attend": ("q_lens", "kv_lens")})
    cache = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(3))

    def forward(step: Any) -> torch.Tensor:
        table = torch.tensor([[1, 2]]).expand(step.bs, 2)
        attended: torch.Tensor = torch.ops.graph_test.attend(
            step.tensors["x"], cache, cache, table, [1] * step.bs, step.host["kv"]
        )
        return attended

    runner, _ = make(device=device, forward=forward, update=DerivedUpdate("kv"))
    runner.capture(progress=False)
    values = {"x": torch.ones(2, 2), "seq_lens": [1, 1]}
    for lens in ([1, 7], [8, 2]):
        replayed = runner.run(values, {"kv": lens}, 2, clone=True).output
        assert torch.equal(replayed, runner.run(values, {"kv": lens}, 2, eager=True).output)
        assert not torch.equal(replayed[0], replayed[1])
