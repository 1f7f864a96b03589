"""The package as users meet it: cold import, public names, the README's snippet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kv_transfer

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "torch_npu", "mooncake", "nixl", "zmq", "pydantic", "numpy", "kv_planner"]


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing() -> None:
    assert _python(f"import kv_transfer, sys; print([m for m in {HEAVY} if m in sys.modules])").strip() == "[]"


def test_using_everything_loads_no_engine_and_no_torch() -> None:
    loaded = _python(
        "import kv_transfer, sys\nfor name in kv_transfer.__all__: getattr(kv_transfer, name)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'torch_npu', 'mooncake') or '.engines.' in m])"
    )
    assert loaded.strip() == "[]"


def test_the_integration_of_vllm_needs_neither_vllm_nor_torch_to_be_imported() -> None:
    said = _python(
        "import sys\nsys.modules['vllm'] = None\nimport kv_transfer.integrations.vllm as own\n"
        "assert own.Settings(directory='tcp://127.0.0.1:1').engine == 'mooncake' and 'torch' not in sys.modules\n"
        "try:\n    own.KvTransferConnector\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "install vLLM 0.23 beside kv-transfer" in said


def test_public_names_are_the_listed_ones() -> None:
    listed = (ROOT / "tests" / "transfer_public_names.txt").read_text().split()
    assert sorted(kv_transfer.__all__) == sorted(listed)
    assert set(kv_transfer.__all__) == set(kv_transfer._MODULES)
    assert set(kv_transfer.__all__) <= set(dir(kv_transfer))


def test_the_snippet_of_the_readme_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        assert "TransferResult(room=0" in _python(snippet)


def test_no_file_is_long() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path
