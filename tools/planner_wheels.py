"""Builds the planner's sdist and its abi3 wheels with manylinux tags, for x86_64 and aarch64.

Zig links both against the glibc of manylinux2014, whatever this machine has. The standard library of the other
architecture comes from rustup where its target is installed, else from Debian's packages (`debian_rust`); where neither
can be had, that wheel is left out and the last lines say so, with the reasons.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from debian_rust import Unavailable, provide

ROOT = Path(__file__).resolve().parents[1]
CRATE = ROOT / "crates/kv-planner"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")


def _rustc(*arguments: str) -> str:
    return subprocess.run(["rustc", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _toolchain(target: str, folder: Path) -> dict[str, str]:
    """Variables for a build of `target`.

    Raises:
        Unavailable: with every way that was tried.
    """
    if Path(_rustc("--print", "target-libdir", "--target", target)).is_dir():
        print(f"{target}: {_rustc('--version')}", flush=True)
        return {}
    tried = [f"rustup: the target is not installed (`rustup target add {target}` needs rustup's server)"]
    host = re.search(r"^host: (\S+)", _rustc("-vV"), re.M)
    minimum = re.search(r'^rust-version = "([\d.]+)"', (CRATE / "Cargo.toml").read_text(), re.M)
    assert host and minimum, "rustc names its host, and the crate its oldest Rust"
    try:
        found = provide(folder, target, host=host[1], minimum=minimum[1])
    except Unavailable as error:
        raise Unavailable("\n".join([*tried, f"Debian: {error}"])) from error
    print(f"{target}: Debian's {found.version}", flush=True)
    # A target folder of its own: cargo would rebuild the other compiler's files at every change of compiler.
    return {**found.env, "CARGO_TARGET_DIR": str(CRATE / "target/debian")}


def main() -> int:
    """Build everything that can be built; 0 unless a build fails or `--require-all` finds one missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toolchains", type=Path, required=True, help="folder for compilers from Debian's packages")
    parser.add_argument("--require-all", action="store_true", help="a wheel that cannot be built is a failure")
    options = parser.parse_args()
    shell = CRATE / "python"
    subprocess.run(["maturin", "sdist", "--out", options.out.resolve()], cwd=shell, check=True)
    left_out = {}
    for target in TARGETS:
        try:
            env = _toolchain(target, options.toolchains.resolve())
        except Unavailable as error:
            left_out[target] = str(error)
            continue
        command = ["maturin", "build", "--release", "--locked", "--zig", "--target", target]
        command += ["--compatibility", "manylinux2014", "--out", str(options.out.resolve())]
        subprocess.run(command, cwd=shell, env={**os.environ, **env}, check=True)
    for target, reasons in left_out.items():
        print(f"\n!!! NO WHEEL OF kv-planner FOR {target} !!!\n{reasons}", flush=True)
    return 1 if left_out and options.require_all else 0


if __name__ == "__main__":
    sys.exit(main())
