"""The list of operators that engines call: the document follows it and the registry, and its scan of source text."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_emulator.kernels import REGISTRY, engine_calls, engine_operators
from ascend_emulator.kernels.engine_operators import ENGINES, Row, has_kernel, rows, short

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine-operators.md"
SOURCE = """
import torch, torch_npu
from torch_npu import npu_swiglu, profiler

def forward(x):
    torch_npu.npu.synchronize()
    torch_npu.npu_rms_norm(x)
    torch_npu.atb.npu_paged_cache_load(x)
    torch.ops.npu.npu_quantize.default(x)
    torch.ops._C_ascend.npu_gemma_rms_norm(x)
    return torch.ops.aten.mul(x), x.npu_fast_gelu()
"""


def test_the_document_is_the_list_and_the_registry() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == engine_operators.render(), "run python -m ascend_emulator.kernels.engine_operators > docs/…"
    for row in rows():
        yes = row.operator in {name.partition(".")[0] for name in REGISTRY}
        assert f"| `{row.operator}` | {row.purpose} |" in text and yes is has_kernel(row.operator)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.operator)
def test_an_operator_without_a_kernel_says_why_and_no_other(row: Row) -> None:
    assert has_kernel(row.operator) is not bool(row.refusal)
    assert row.purpose


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "norm.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "norm.py").write_text(SOURCE.replace("rms_norm(", "geglu("), encoding="utf-8")
    return tmp_path


def test_what_source_names(tree: Path) -> None:
    names = ("_C_ascend::npu_gemma_rms_norm", "npu_paged_cache_load", "npu_quantize", "npu_rms_norm", "npu_swiglu")
    assert engine_calls.calls(tree) == dict.fromkeys(names, ("layers/norm.py",))


def test_a_difference_is_said(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_calls.main(["sglang", str(tree)]) == 1
    said = capsys.readouterr().out
    listed = {short(row.operator) for row in rows() if row.callers["sglang"]}
    assert len(said.splitlines()) == len(listed | set(engine_calls.calls(tree)))
    assert "npu_rms_norm: named by layers/norm.py; listed: srt/" in said


def test_no_difference_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine_calls.calls(tree)
    same = tuple(Row(f"npu::{name}" if "::" not in name else name, {"sglang": found[name]}, "x", "") for name in found)
    monkeypatch.setattr(engine_calls, "rows", lambda: same)
    assert engine_calls.differences(tree, "sglang") == []


@pytest.mark.parametrize("arguments", [[], ["sglang"], ["vllm", "."]])
def test_a_wrong_call_says_how(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_calls.main(arguments) == 2
    said = capsys.readouterr().err
    assert all(engine in said for engine in ENGINES)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["operator\tsglang\tvllm_ascend\tpurpose\trefusal", "npu::a\tx"], "2 columns"),
        (["operator\tpurpose\tsglang\tvllm_ascend\trefusal"], "expected the columns"),
        (["operator\tsglang\tvllm_ascend\tpurpose\trefusal", "npu::b\t\t\tx\t", "atb::a\t\t\tx\t"], "sort"),
        (["operator\tsglang\tvllm_ascend\tpurpose\trefusal", "npu::b\t\t\tx\t", "atb::b\t\t\tx\t"], "sort"),
    ],
)
def test_a_wrong_list_says_where(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine_operators.parse("\n".join(lines))
