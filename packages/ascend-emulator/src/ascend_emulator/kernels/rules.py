"""The list of documented constraints: those that the kernels enforce, and those that they do not, with the reason.

This module owns the list and its wording; each family of ops declares its rows beside its checks, and ``ledger.py``
prints all of them as ``docs/refusals.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from . import pose
from .errors import OpRefused, Rule

META = "torch_npu 2.12.0, op_plugin/meta/_meta_registrations.py"
RULES: dict[str, Rule] = {}
NOTES: list[Note] = []


@dataclass(frozen=True)
class Note:
    """A constraint that is not enforced as written, or a decision where documents are silent.

    Attributes:
        op: op or family of ops.
        constraint: what is written, or which question is open.
        source: document that says so; "—" for none.
        decision: what the emulator does, and why.
    """

    op: str
    constraint: str
    source: str
    decision: str


def document(op: str) -> str:
    """Source of a constraint that the wheel's own document of an op names."""
    return f"torch_npu 2.12.0, _op_plugin_docs.py, {op}"


def online(op: str) -> str:
    """Source of a constraint that the op's page in op-plugin names (its documents of August 2026)."""
    return f"op-plugin 517f2e7, docs/zh/custom_APIs/torch_npu, {op}.md"


def declare(
    op: str,
    source: str,
    test: str,
    rows: dict[str, tuple[str, str]],
    scope: pose.Scope = pose.EVERYWHERE,
) -> None:
    """Adds enforced rules.

    Args:
        op: op or family of ops that they bind.
        source: document that says so.
        test: file of tests/kernels with a call that breaks each.
        rows: by rule id: what is allowed, and what a caller does about it.
        scope: releases and chips for which the rules hold.

    Raises:
        ValueError: an id is taken.
    """
    for rule_id, (allowed, remedy) in rows.items():
        if rule_id in RULES:
            raise ValueError(f"rule id {rule_id!r} is used twice")
        RULES[rule_id] = Rule(rule_id, op, allowed, source, remedy, test, scope)


def note(op: str, constraint: str, source: str, decision: str) -> None:
    """Adds a row that says why a constraint is not enforced as written."""
    NOTES.append(Note(op, constraint, source, decision))


def holds(rule_id: str) -> bool:
    """Whether a rule holds for the CANN release and chip that the emulator stands for."""
    return RULES[rule_id].scope.holds(pose.current())


def refuse(op: str, rule_id: str, argument: str, value: object) -> NoReturn:
    """Refuses a call.

    Args:
        op: full op name.
        rule_id: key of ``RULES``.
        argument: name of the refused argument.
        value: what was given.

    Raises:
        OpRefused: always.
    """
    raise OpRefused(op, argument, value, RULES[rule_id])
