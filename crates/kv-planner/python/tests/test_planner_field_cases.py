"""The table of known faults: every case has a package, every named test exists, and the page is the generated one."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

CRATE = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("field_table", CRATE / "vectors/field_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = load()


@cache
def named_in(path: Path) -> frozenset[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rs":
        return frozenset(re.findall(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*fn (\w+)", text))
    walk = ast.walk(ast.parse(text))
    return frozenset(node.name for node in walk if isinstance(node, ast.FunctionDef) and node.name.startswith("test"))


@pytest.mark.parametrize("case", TABLE.cases(), ids=lambda case: case["id"])
def test_a_case_has_a_package_and_its_tests_exist(case: dict[str, object]) -> None:
    package, named = case["package"], case["tests"]
    assert isinstance(package, str) and isinstance(named, list)
    folder = CRATE if package == "kv-planner" else TABLE.ROOT / "packages" / package
    assert folder.is_dir(), f"{package} is no package"
    for name in named:
        file, test = name.split("::")
        assert test in named_in(TABLE.ROOT / file), f"{name} does not exist"
    if package == "kv-planner":
        assert TABLE.state(case) == "tested"


def test_cases_are_numbered_and_said_once() -> None:
    rows = TABLE.cases()
    assert len(rows) == 126
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert all(re.fullmatch(r"[A-H]\d\d", row["id"]) and 0 < len(row["words"]) < 70 for row in rows)


def test_the_page_is_what_the_generator_writes() -> None:
    assert TABLE.PAGE.read_text(encoding="utf-8") == TABLE.page()


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert "test_this_name_is_nowhere" not in named_in(Path(__file__))
    assert "test_the_page_is_what_the_generator_writes" in named_in(Path(__file__))
    assert "every_byte_arrives_once_and_nothing_else" in named_in(CRATE / "tests/laws.rs")
