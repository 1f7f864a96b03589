"""Runs the long proofs of one package with their full counts, and writes what came out under `docs/evidence/`.

Property tests in Python (Hypothesis) get `--factor` times the examples that they ask for, those in Rust (proptest)
`--cases` each; a script `*_soak.py` among a package's tests runs with its own counts. It defines no proof: those lie
beside the code, and `nox -s tests` runs a seeded slice of them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benching import machine

ROOT = Path(__file__).resolve().parents[1]
CRATE = ROOT / "crates/kv-planner"


@dataclass(frozen=True)
class Part:
    """One run of a test tool.

    Attributes:
        title: what ran.
        command: as typed at the repository's root, less the interpreter's path.
        counts: lines for the table.
        ok: whether everything passed.
        seconds: wall time.
        tail: last lines, kept when something failed.
    """

    title: str
    command: str
    counts: list[tuple[str, str]]
    ok: bool
    seconds: float
    tail: str


def _run(command: list[str], env: dict[str, str]) -> tuple[int, str, float]:
    print("$", *(f"{name}={value}" for name, value in env.items()), *command, flush=True)
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines), time.monotonic() - began


def _shown(command: list[str], env: dict[str, str]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in env.items()), *command])


def rust(cases: int, seed: int) -> Part:
    """All proptest laws of the planner's crate; other Rust tests run along."""
    env = {"PROPTEST_CASES": str(cases), "PROPTEST_RNG_SEED": str(seed)}
    command = ["cargo", "test", "--release", "--manifest-path", "crates/kv-planner/Cargo.toml", "--tests"]
    code, output, seconds = _run(command, env)
    passed = sum(int(count) for count in re.findall(r"test result: \w+\. (\d+) passed", output))
    laws = 0
    for path in [*CRATE.glob("tests/*.rs"), *CRATE.glob("src/**/*.rs")]:
        _, *blocks = re.split(r"^\s*proptest! \{", path.read_text(), flags=re.M)
        laws += sum(block.count("#[test]") for block in blocks)
    counts = [("Rust tests passed", f"{passed}"), ("laws among them (proptest)", f"{laws} × {cases:,} cases")]
    return Part(
        "Rust, building included", _shown(command, env), counts, code == 0 and passed > 0, seconds, _tail(output)
    )


def python(title: str, paths: list[str], factor: int, seed: int) -> Part:
    """All Hypothesis tests and state machines below some paths."""
    env = {"SOAK_FACTOR": str(factor)}
    command = ["python", "-m", "kv_transfer.isolation", "--", "python", "-m", "pytest", "-q", "-n2", *paths]
    command += ["-p", "soak_plugin", "--hypothesis-show-statistics", f"--hypothesis-seed={seed}", "-o", "timeout=0"]
    search = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    code, output, seconds = _run(command, {**env, "PYTHONPATH": search})
    examples = sum(int(count) for count in re.findall(r"(\d+) passing", output))
    invalid = sum(int(count) for count in re.findall(r"(\d+) invalid", output))
    passed = sum(int(count) for count in re.findall(r"(\d+) passed", output))
    counts = [("property tests passed", f"{passed}"), ("examples that passed", f"{examples:,}")]
    counts += [("examples that a test's assumption refused", f"{invalid:,}")]
    return Part(title, _shown(command, env), counts, code == 0 and examples > 0, seconds, _tail(output))


def script(path: str, seed: int) -> Part:
    """A proof that is no property test: a script that prints `count: what | figure` and leaves with 0 if it held."""
    command = ["python", path, "--seed", str(seed)]
    code, output, seconds = _run(command, {})
    counts = [(what, figure) for what, figure in re.findall(r"^count: (.*) \| (.*)$", output, flags=re.M)]
    return Part("Long runs", _shown(command, {}), counts, code == 0 and bool(counts), seconds, _tail(output))


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-60:])


def write(package: str, parts: list[Part], seed: int) -> Path:
    """The evidence: commands, counts, durations, results, machine."""
    day = datetime.date.today().isoformat()
    result = "all passed" if all(part.ok for part in parts) else "FAILED"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [f"# Soak of {package}, {day}: {result}", "", f"Sources: {commit}. Seed: {seed}. Machine: {facts}.", ""]
    for part in parts:
        lines += [f"## {part.title}: {'passed' if part.ok else 'FAILED'} in {part.seconds:.0f} s", ""]
        lines += ["```", part.command, "```", "", "| what | count |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in part.counts]
        lines.append("")
        if not part.ok:
            lines += ["```", part.tail.replace(str(ROOT), "."), "```", ""]
    path = ROOT / "docs/evidence" / f"{package}-soak-{day}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def main() -> int:
    """Run and write; 0 when everything passed."""
    parser = argparse.ArgumentParser(prog="nox -s soak --", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--factor", type=int, default=100, help="times the examples of a Python test (%(default)s)")
    parser.add_argument("--cases", type=int, default=10_000, help="cases of a Rust law (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    folder = Path("crates/kv-planner/python" if options.package == "kv-planner" else f"packages/{options.package}")
    tests, npu = ROOT / folder / "tests", ROOT / folder / "tests/npu"
    if not tests.is_dir():
        parser.error(f"no such package: {options.package}")
    parts = []
    if options.package == "kv-planner":
        parts.append(rust(options.cases, options.seed))
    runs = [("Python", [str(folder / "tests"), *([f"--ignore={folder / 'tests/npu'}"] if npu.is_dir() else [])])]
    if any("hypothesis" in path.read_text() for path in npu.rglob("*.py")):
        runs.append(("Python, emulated NPU", [str(folder / "tests/npu")]))
    parts += [script(str(path.relative_to(ROOT)), options.seed) for path in sorted(tests.glob("*_soak.py"))]
    parts += [python(title, paths, options.factor, options.seed) for title, paths in runs]
    path = write(options.package, parts, options.seed)
    print(f"written: {path.relative_to(ROOT)}")
    return 0 if all(part.ok for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
