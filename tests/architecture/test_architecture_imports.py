"""Who may import whom, and what importing a package may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kv_planner": ROOT / "crates/kv-planner/python/py/kv_planner",
    "spec_kernels": ROOT / "packages/spec-kernels/src/spec_kernels",
    "kv_pool": ROOT / "packages/kv-pool/src/kv_pool",
    "kv_transfer": ROOT / "packages/kv-transfer/src/kv_transfer",
    "graph_runtime": ROOT / "packages/graph-runtime/src/graph_runtime",
    "ascend_emulator": ROOT / "packages/ascend-emulator/src/ascend_emulator",
}
HEAVY = {"torch_npu", "triton", "sgl_kernel_npu", "memfabric_hybrid", "mooncake", "nixl", "sglang", "vllm"}
LEAVES = {"npu", "triton", "engines", "devices", "integrations"}
NO_TORCH = {"kv_planner", "kv_transfer"}


def imports(path: Path) -> set[str]:
    """Top-level names of everything that `path` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def sources(package: str) -> list[Path]:
    files = sorted([*PACKAGES[package].rglob("*.py"), *PACKAGES[package].rglob("*.pyi")])
    assert files, f"no sources found for {package}"
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_the_planner_of_their_siblings(package: str) -> None:
    allowed = {package, "kv_planner"} if package != "ascend_emulator" else {package}
    for path in sources(package):
        siblings = imports(path) & set(PACKAGES)
        assert siblings <= allowed, f"{path.relative_to(ROOT)} imports {sorted(siblings - allowed)}"


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "ascend_emulator"])
def test_heavy_libraries_are_imported_in_leaves_only(package: str) -> None:
    for path in sources(package):
        heavy = imports(path) & HEAVY
        folders = set(path.relative_to(PACKAGES[package]).parts[:-1]) | {path.stem}
        assert not heavy or folders & LEAVES, (
            f"{path.relative_to(ROOT)} imports {sorted(heavy)} outside {sorted(LEAVES)}"
        )


@pytest.mark.parametrize("package", sorted(NO_TORCH))
def test_planner_and_transfer_never_name_torch(package: str) -> None:
    for path in sources(package):
        assert "torch" not in imports(path), path.relative_to(ROOT)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_cold_import_loads_nothing_heavy(package: str) -> None:
    """In a fresh process, so that what this test run has loaded does not count."""
    forbidden = HEAVY | ({"torch"} if package in NO_TORCH | {"ascend_emulator"} else set())
    program = f"import sys, {package}; print(*sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_judge_of_the_demo_imports_nothing_of_ours() -> None:
    for name in ("reference.py", "weights.py", "tokenizer.py"):
        assert not imports(ROOT / "examples/disaggregated_serving" / name) & set(PACKAGES), name
