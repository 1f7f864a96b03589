"""Where a GPU is present: compiles every Triton kernel, and runs the tests of every op there.

The tests choose their places themselves; here they must have found the GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parent


def main() -> int:
    """0 when everything compiled and agreed."""
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was run")
        return 1
    print(torch.cuda.get_device_name(0), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = [sys.executable, "-m", "pytest", "-q", str(TESTS), f"--ignore={TESTS / 'npu'}", "-k", "cuda"]
    commands = [[sys.executable, str(TESTS / "lower_kernels.py"), "cuda"], [*tests, *sys.argv[1:]]]
    return max(subprocess.run(command, env=environment, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
