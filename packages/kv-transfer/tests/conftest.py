"""Makes the helper modules of this folder importable and says how the run is isolated."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_report_header() -> list[str]:
    from kv_transfer.isolation import current_isolation

    return [
        f"kv-transfer: this process is {current_isolation()}",
        "kv-transfer: Mooncake runs in child processes, inside a namespace of their own where the system allows",
    ]
