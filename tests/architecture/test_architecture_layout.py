"""The shape of the repository: file sizes, what every package ships, what the README promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 400
DISTRIBUTIONS = {
    "kv-planner": ROOT / "crates/kv-planner/python",
    **{
        name: ROOT / "packages" / name
        for name in ("spec-kernels", "kv-pool", "kv-transfer", "graph-runtime", "ascend-emulator")
    },
}


def tracked() -> list[Path]:
    """Every file that git knows or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [ROOT / name for name in listing if (ROOT / name).is_file()]


def test_files_stay_small_or_say_why() -> None:
    code = [path for path in tracked() if path.suffix in {".py", ".pyi", ".rs", ".c", ".h", ".cpp"}]
    assert len(code) > 60
    too_long = []
    for path in code:
        text = path.read_text()
        if text.count("\n") > LIMIT and "Long because" not in text[:1500]:
            too_long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
    assert not too_long, too_long


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_package_ships_what_it_promises(name: str) -> None:
    folder = DISTRIBUTIONS[name]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == name
    assert project["requires-python"] == ">=3.10"
    assert project["readme"] == "README.md"
    assert (folder / "README.md").read_text().startswith(f"# {name}")
    assert list(folder.glob(f"**/{name.replace('-', '_')}/py.typed")), "no py.typed"
    version = project.get("version")
    if version is None:  # maturin takes it from the crate
        version = re.search(r'^version = "([^"]+)"', (folder / "Cargo.toml").read_text(), re.M)[1]  # type: ignore[index]
    assert version in (folder / "CHANGELOG.md").read_text(), f"{version} is not in the changelog"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_siblings_are_ranged(name: str) -> None:
    project = tomllib.loads((DISTRIBUTIONS[name] / "pyproject.toml").read_text())["project"]
    extras = [item for group in project.get("optional-dependencies", {}).values() for item in group]
    for requirement in [*project.get("dependencies", []), *extras]:
        sibling = next((other for other in DISTRIBUTIONS if requirement.startswith(other)), None)
        if sibling is not None:
            assert ">=" in requirement and "<" in requirement, f"{name}: {requirement}"


@pytest.mark.parametrize("name", ["kv-pool", "kv-transfer"])
def test_the_map_of_a_package_names_its_modules(name: str) -> None:
    _, _, rest = (DISTRIBUTIONS[name] / "README.md").read_text().partition("## What is where\n\n")
    table = rest.split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table)
    column = head.index("module")
    named = {module for row in rows for module in re.findall(r"`([a-z_]+)/?`", row[column])}
    assert len(named) >= 10
    source = DISTRIBUTIONS[name] / "src" / name.replace("-", "_")
    assert named <= {path.stem for path in source.iterdir()}


def test_the_readme_is_a_map() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 60
    for name in DISTRIBUTIONS:
        assert f"pip install {name}" in text or f'pip install "{name}' in text, f"no install line for {name}"
    assert "nox -s demo" in text and "nox -s tests" in text


def test_the_readme_snippet_runs(tmp_path: Path) -> None:
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert snippet is not None
    program = tmp_path / "snippet.py"
    program.write_text(snippet[1])
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_nothing_of_a_machine_is_committed() -> None:
    """No absolute path of a developer's machine, no registry's host."""
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w+|files\.pythonhosted|pypi\.org/simple|index\.crates")
    for path in tracked():
        if path.suffix in {".lock", ".png"} or path == Path(__file__):
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"
