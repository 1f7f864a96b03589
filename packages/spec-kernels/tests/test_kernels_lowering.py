"""Owns the proof that Triton's compiler takes every kernel, and that launches keep within Ascend's limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spec_kernels import tiling
from spec_kernels.tiling import grid, tile


@pytest.mark.timeout(400)
def test_every_kernel_compiles_without_a_device(tmp_path: Path) -> None:
    """The interpreter is more forgiving than the compiler; no GPU is needed to compile for one."""
    script = Path(__file__).with_name("lower_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), "cuda"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 25


@pytest.mark.parametrize("programs", [1, 65_535, 65_536, 384 * 196])
def test_grids_stay_within_the_limit_and_visit_each_block_once(programs: int) -> None:
    """384 sequences of 196 blocks are 75,264 programs (field_faults D17)."""
    (launched,) = grid(programs)
    assert launched <= 65_535
    visits = [work for program in range(launched) for work in range(program, programs, launched)]
    assert sorted(visits) == list(range(programs))


@pytest.mark.parametrize("elements", [0, 1, 3, 128 * 128, 10**6])
@pytest.mark.parametrize(("itemsize", "live"), [(4, 1), (8, 4), (8, 16)])
def test_tiles_stay_within_on_chip_memory(elements: int, itemsize: int, live: int) -> None:
    """A power of two that holds the axis, or the most that fits in 196,608 bytes (field_faults D18)."""
    size = tile(elements, itemsize=itemsize, live=live)
    assert size & (size - 1) == 0 and size * itemsize * live <= tiling.MAX_TILE_BYTES == 196_608
    assert size >= elements or size * 2 * itemsize * live > tiling.MAX_TILE_BYTES
