"""vLLM-Ascend 0.23 on emulated NPUs: the emulator first, then its own modules, unchanged.

Run by the session `engines_vllm`, in an environment of its own.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import ascend_emulator
import pytest
from kv_pool.integrations import vllm as integration

sys.path.insert(0, str(Path(__file__).parent))

ascend_emulator.install(check_order=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its packages import one another in a circle; this is an entry that works.
    importlib.import_module("vllm_ascend.ops.fused_moe.experts_selector")
    importlib.import_module("vllm_ascend.compilation.acl_graph")
    importlib.import_module("vllm_ascend.worker.block_table")
    importlib.import_module("vllm_ascend.attention.attention_v1")
    importlib.import_module("vllm_ascend.sample.rejection_sampler")
    importlib.import_module("vllm_ascend.spec_decode.llm_base_proposer")


@pytest.fixture(scope="session", autouse=True)
def tier_registered() -> None:
    """Our secondary tier, known to vLLM once a process."""
    integration.register()
