"""SGLang 0.5.23 on emulated NPUs: the emulator first, then SGLang's own modules, unchanged, then the door is sealed.

Run by the session `engines`, in an environment of its own. Everything heavy is imported here, so that warnings of the
engine's imports are not those of a test.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import ascend_emulator
import pytest

ascend_emulator.install(check_order=True)

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "stand_ins")]

import engines_absent  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    engines_absent.install()
    import sglang.srt.disaggregation.ascend.conn
    import sglang.srt.hardware_backend.npu.allocator_npu
    import sglang.srt.hardware_backend.npu.attention.ascend_backend
    import sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend
    import sglang.srt.hardware_backend.npu.memory_pool_npu
    import sglang.srt.mem_cache.pool_host  # noqa: F401
    from sglang.srt.runtime_context import get_parallel
engines_absent.seal()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank alone, and no switch of the environment that a test did not set."""
    for name in ("ASCEND_USE_FIA", "SGLANG_USE_FIA_NZ", "SGLANG_NPU_USE_SCATTER_PA_KV_CACHE", "ASCEND_USE_FA"):
        monkeypatch.delenv(name, raising=False)
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_cp_size=1, attn_tp_size=1, dcp_enabled=False):
        yield
