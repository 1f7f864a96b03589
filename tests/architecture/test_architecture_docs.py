"""The pages under docs/: every snippet runs, every table about the code agrees with it, every named path exists.

A page is one program: its ```python blocks in order, in a fresh process. A block whose first line is `# file: name.py`
is written beside the program instead. What follows `# -> ` on a line of the page must be printed, in that order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from kv_transfer import messages, states

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
LIFE_CYCLE = DOCS / "concepts" / "transfer-life-cycle.md"
DECISION = re.compile(r"\d{4}-\d{2}-\d{2}-[a-z0-9-]+\.md")
TABLES: Mapping[str, Mapping[Any, frozenset[Any]]] = {
    "SENDER_PHASE_STEPS": states.SENDER_PHASE_STEPS,
    "PEER_STEPS": states.PEER_STEPS,
    "RECEIVER_STEPS": states.RECEIVER_STEPS,
    "SENDER_STEPS": states.SENDER_STEPS,
}


def pages() -> list[Path]:
    return sorted(path for path in DOCS.rglob("*.md") if "evidence" not in path.relative_to(DOCS).parts)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


WITH_SNIPPETS = [page for page in pages() if blocks(page)]


def table_after(marker: str, page: Path) -> list[list[str]]:
    """The rows of the table that follows `<!-- checked: marker -->`, without its head."""
    _, found, rest = page.read_text().partition(f"<!-- checked: {marker} -->\n")
    assert found, f"{name_of(page)} has no table marked {marker}"
    rows = []
    for line in rest.lstrip("\n").splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert len(rows) > 2, f"{name_of(page)}: the table {marker} is empty"
    return rows[2:]


def test_there_are_pages_with_snippets() -> None:
    folders = {page.parent.name for page in WITH_SNIPPETS}
    assert {"concepts", "how-to"} <= folders
    assert len(WITH_SNIPPETS) >= 9


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=name_of)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    program: list[str] = []
    for block in blocks(page):
        file = re.match(r"# file: (\w+\.py)\n", block)
        if file is not None:
            (tmp_path / file[1]).write_text(block)
        else:
            program.append(block)
    (tmp_path / "page.py").write_text("\n".join(program))
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = iter(line.rstrip() for line in done.stdout.splitlines())
    for text in re.findall(r"# -> (.+)$", "\n".join(program), re.M):
        assert text.rstrip() in printed, f"not printed, or not in this order: {text}\n{done.stdout}"


@pytest.mark.parametrize("name", TABLES)
def test_the_state_tables_are_those_of_the_code(name: str) -> None:
    written = {row[0]: row[1] for row in table_after(name, LIFE_CYCLE)}
    steps = {
        str(state.value): ", ".join(sorted(str(after.value) for after in following)) or "–"
        for state, following in TABLES[name].items()
    }
    assert written == steps


def test_the_message_table_is_complete() -> None:
    union, _ = get_args(messages.Message)
    known = {model.model_fields["type"].default for model in get_args(union)}
    assert {row[0].strip("`") for row in table_after("messages", LIFE_CYCLE)} == known


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_names_files_that_exist(page: Path) -> None:
    for path in re.findall(r"`((?:packages|crates|examples|tests|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_has_one_title_and_closed_fences(page: Path) -> None:
    text = page.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    assert "```" not in prose, "a fence is not closed"
    assert len(re.findall(r"^# ", prose, re.M)) == 1


def test_decisions_are_dated() -> None:
    names = {path.name for path in (DOCS / "decisions").glob("*.md")} - {"index.md"}
    assert len(names) >= 5
    assert not [name for name in names if not DECISION.fullmatch(name)]
