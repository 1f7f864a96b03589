"""Owns the proof of backend choice, of the device operator's documented limits, and of cold imports."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import spec_kernels as sk
import torch
from spec_kernels.capabilities import parse_version, toolkit_version
from spec_kernels.fia_rules import FiaShape, plan_fia

NPU = sk.Capabilities(torch_npu="2.12.0")
NONE = sk.Capabilities()


def test_choice_by_device() -> None:
    assert sk.choose("paged_attention", "cpu", capabilities=NPU) == "native"
    assert sk.choose("paged_attention", torch.device("cpu")) == "native"
    assert sk.choose("paged_attention", "npu:1", capabilities=NPU) == "npu"
    assert sk.choose("paged_attention", "npu", "native", capabilities=NPU) == "native"
    assert sk.choose("paged_attention", "npu", capabilities=NONE) == "native"
    assert sk.choose("fill_draft_extend_buffers", "npu", capabilities=NPU) == "native"


def test_an_ineligible_backend_lists_the_eligible_ones_and_reasons() -> None:
    with pytest.raises(sk.BackendError, match=r"\['npu', 'native'\].*triton-ascend is not installed"):
        sk.choose("paged_attention", "npu", "triton", capabilities=NPU)
    with pytest.raises(sk.BackendError, match="serves npu only"):
        sk.choose("paged_attention", "cpu", "npu", capabilities=NPU)
    with pytest.raises(sk.BackendError, match="torch_npu is not installed"):
        sk.choose("paged_attention", "npu", "npu", capabilities=NONE)
    with pytest.raises(sk.BackendError, match=r"needs torch_npu 2\.12\.0, found 2\.9\.0"):
        sk.choose("paged_attention", "npu", "npu", capabilities=sk.Capabilities(torch_npu="2.9.0"))


def test_torch_npu_that_cannot_be_loaded_is_not_eligible() -> None:
    """Installed beside no Ascend libraries, as on a build machine: said before a call, and found by a fresh process."""
    broken = sk.Capabilities(torch_npu="2.12.0", load_error="libhccl.so: cannot open shared object file")
    assert sk.choose("paged_attention", "npu", capabilities=broken) == "native"
    with pytest.raises(sk.BackendError, match=r"torch_npu 2\.12\.0 cannot be loaded: libhccl\.so"):
        sk.choose("paged_attention", "npu", "npu", capabilities=broken)
    code = (
        "import spec_kernels as sk\n"
        "print(sk.backends('paged_attention', 'npu')[0].reason)\n"
        "try:\n"
        "    import torch_npu\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('loads')\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reason, found = done.stdout.splitlines()[-2:]
    assert (reason == "None") == (found == "loads")


def test_the_toolkit_says_its_version(tmp_path: Path) -> None:
    assert toolkit_version(tmp_path) is None
    (tmp_path / "aarch64-linux").mkdir()
    note = tmp_path / "aarch64-linux/ascend_toolkit_install.info"
    note.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100\n")
    assert toolkit_version(tmp_path) == "8.5.0"


def test_limits_that_a_later_cann_lifted() -> None:
    packed = replace(BASE, heads=3, ragged=True, width=4)
    with pytest.raises(sk.UnsupportedByOp, match="widths out of"):
        plan_fia(packed, causal=True, cann="9.0.0")
    assert plan_fia(packed, causal=True, cann="9.1.0").layout == "TND"
    assert plan_fia(replace(packed, page_size=64), causal=True, cann="9.1.0").layout == "TND"
    latent = replace(BASE, dims=512, value_dims=512, rope=64, kv_heads=1, heads=8, page_size=32)
    with pytest.raises(sk.UnsupportedByOp, match="16 or 128 tokens"):
        plan_fia(latent, causal=True)
    assert plan_fia(latent, causal=True, cann="9.2").layout == "BSND"


def test_unknown_op() -> None:
    with pytest.raises(sk.UnknownOp, match="paged_attention"):
        sk.choose("attention", "cpu")


def test_status_of_every_backend() -> None:
    for op in sk.ops():
        statuses = sk.backends(op, "cpu", capabilities=NONE)
        assert [status.backend for status in statuses] == ["npu", "triton", "native"]
        assert [status.eligible for status in statuses] == [False, False, True]
        assert str(statuses[-1]) == f"{op} on native: eligible"


def test_an_absent_backend_has_a_reason() -> None:
    """Each op on an NPU that has everything: a backend serves, or says in words of its own why it does not exist."""
    everything = sk.Capabilities(torch_npu="2.12.0", triton_ascend="3.2.0", sgl_kernel_npu="2026.8")
    absent = [status for status in sk.backends(device="npu", capabilities=everything) if not status.eligible]
    assert all(str(status.reason).startswith(("sgl_kernel_npu's", "neither", "ranks exchange")) for status in absent)
    assert {status.op for status in absent if status.backend == "triton"} == {"expert_parallel_moe"}
    assert not [status for status in absent if status.backend == "native"]


def test_versions() -> None:
    assert parse_version("2.12.0.post3+cpu") == (2, 12, 0) and parse_version("unknown") == ()


BASE = FiaShape(4, 1, 9, 3, 64, 64, 128, 100, torch.float16)


def test_layouts_that_the_operator_accepts() -> None:
    assert plan_fia(BASE, causal=True).layout == "BSND" and plan_fia(BASE, causal=True).sparse_mode == 0
    chunk = replace(BASE, rows=1, width=300)
    assert plan_fia(chunk, causal=True).sparse_mode == 3 and plan_fia(chunk, causal=True).needs_mask
    assert plan_fia(chunk, causal=False).sparse_mode == 0
    wide = replace(BASE, dims=192, value_dims=128, dtype=torch.bfloat16)
    assert plan_fia(wide, causal=True).layout == "TND"
    assert plan_fia(replace(wide, dtype=torch.float16), causal=True).layout == "BSND"
    assert plan_fia(replace(BASE, value_dims=32), causal=True).layout == "BSND"
    assert plan_fia(replace(BASE, page_size=16), causal=True).layout == "BSND"
    assert plan_fia(replace(BASE, dims=192, value_dims=192, dtype=torch.bfloat16, longest=300_000), causal=True) == (
        plan_fia(replace(wide, longest=300_000), causal=True)
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 65_537}, "65536 rows"),
        ({"longest": 262_145}, "262144"),
        ({"blocks": 101}, "more blocks"),
        ({"width": 2, "heads": 256, "kv_heads": 8, "dims": 256, "value_dims": 256}, "65535"),
        ({"page_size": 528}, "16 to 512"),
        ({"page_size": 24}, "multiples of 16"),
        ({"width": 2, "page_size": 64}, "128, 256, 384 or 512"),
        ({"width": 2, "page_size": 640}, "128, 256, 384 or 512"),
        ({"dims": 72, "value_dims": 72}, "multiples of 16"),
        ({"dims": 528, "value_dims": 528}, "up to 512"),
        ({"heads": 260, "kv_heads": 4}, "256 heads"),
        ({"heads": 130, "kv_heads": 2}, "64 a KV head"),
        ({"heads": 256, "kv_heads": 256, "dims": 256, "value_dims": 256}, "65535"),
        ({"pages": 2**31 // (128 * 3 * 64) + 1}, "elements"),
    ],
)
def test_sizes_that_the_operator_refuses(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(sk.UnsupportedByOp, match=reason):
        plan_fia(replace(BASE, **changes), causal=True)  # type: ignore[arg-type]


def test_the_cache_of_a_layer_may_have_two_to_the_31_elements_less_one() -> None:
    fits = (2**31 - 1) // (128 * 3 * 64)
    assert plan_fia(replace(BASE, pages=fits), causal=True).layout == "BSND"


def test_float32_is_refused_with_a_typed_error() -> None:
    with pytest.raises(sk.DtypeError, match="float16") as caught:
        plan_fia(replace(BASE, dtype=torch.float32), causal=True)
    assert isinstance(caught.value, TypeError) and caught.value.given == torch.float32


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = (
        "import sys, torch, spec_kernels;"
        "assert torch.ops.spec_kernels.paged_attention and torch.ops.spec_kernels.fill_draft_extend_buffers;"
        "print([m for m in ('torch_npu', 'triton', 'sgl_kernel_npu', 'ascend_emulator') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    assert all(hasattr(sk, name) for name in sk.__all__)


def test_errors_survive_a_process_boundary() -> None:
    error = sk.LengthError("kv_lens[0]", given=-1, expected="0 or more", consequence="c", remedy="r")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is sk.LengthError and str(copy) == str(error) and isinstance(copy, ValueError)
