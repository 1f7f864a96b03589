"""The ledger of constraints: the document is the list, every row names a test that exists, and poses switch rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ascend_emulator.kernels import NOTES, RULES, ledger, pose
from ascend_emulator.kernels.rules import declare, holds

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def test_the_document_is_the_list() -> None:
    text = (HERE.parents[1] / "docs" / "refusals.md").read_text(encoding="utf-8")
    assert text == ledger.render(), "run python -m ascend_emulator.kernels.ledger > docs/refusals.md"
    assert all(f"`{rule}`" in text for rule in RULES)


def test_rows_name_tests_that_exist() -> None:
    for rule in RULES.values():
        assert (HERE / rule.test).is_file(), rule
    for row in NOTES:
        for word in row.decision.replace(",", " ").split():
            if word.startswith("test_") and word.endswith(".py"):
                assert (HERE / word).is_file() or (HERE / "npu" / word).is_file(), row


def test_an_id_is_used_once() -> None:
    with pytest.raises(ValueError, match="used twice"):
        declare("op", "source", "test", {"layout": ("this", "do that")})


@pytest.mark.parametrize(
    ("cann", "chip", "scope", "wanted"),
    [
        (None, None, pose.Scope(before=(8, 2), chips=("950",)), True),
        (None, "A2", pose.Scope(chips=("950",)), False),
        (None, "950", pose.Scope(chips=("950",)), True),
        ("8.1", None, pose.Scope(before=(8, 2)), True),
        ("8.2", None, pose.Scope(before=(8, 2)), False),
        ("8.5.1", "910C", pose.Scope(since=(9, 0), chips=("910C",)), False),
        ("9.0", "A3", pose.Scope(since=(9, 0), chips=("910C",)), True),
        ("9.0", None, pose.EVERYWHERE, True),
    ],
)
def test_scopes(cann: str | None, chip: str | None, scope: pose.Scope, wanted: bool) -> None:
    assert scope.holds(pose.set_pose(cann=cann, chip=chip)) is wanted


def test_every_rule_holds_without_a_pose() -> None:
    assert all(holds(rule) for rule in RULES)


@pytest.mark.parametrize("wrong", [{"cann": "7.0"}, {"cann": "nine"}, {"chip": "H100"}])
def test_unknown_poses(wrong: dict[str, str]) -> None:
    pose.set_pose(cann="9.0", chip="A3")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        pose.set_pose(**wrong)
    assert pose.current() == pose.Pose((9, 0), "910C")
