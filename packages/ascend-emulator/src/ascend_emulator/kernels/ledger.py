"""docs/refusals.md as text: every row of ``rules.RULES`` and ``rules.NOTES``, printed for people.

This module owns the form of the document alone. ``python -m ascend_emulator.kernels.ledger > docs/refusals.md`` writes
it; a test compares.
"""

from __future__ import annotations

import sys

from . import NOTES, RULES

HEAD = """# What the emulated operators refuse

Written by `python -m ascend_emulator.kernels.ledger`; do not edit. One row a constraint: what is allowed, who says
so, and the test that shows a call breaking it being refused. The rows with an id are the list that error texts
quote, kept beside each op's checks in `src/ascend_emulator/kernels/`. The rows without an id say what is documented
and not refused, and why. FIA stands for `npu_fused_infer_attention_score` and `npu_fused_infer_attention_score_v2`
with their `.out` and workspace forms. Every error is an `OpRefused` (code 161002) unless the row says otherwise.
Documents are those inside the torch_npu 2.12.0 wheel and the pages of op-plugin (commit 517f2e7, August 2026).

Every row holds unless `ascend_emulator.install(cann=…, chip=…)` names a release or a chip for which the column
"holds for" says otherwise. Chips: 910B (Atlas A2), 910C (Atlas A3), 950 (A5).

Where the two documents of FIA differ, the wider one holds for both versions: both are doors to one kernel, version
1's text is the older one, and engines call version 1 in the forms that only version 2's text allows.

| id | op | constraint | holds for | source | enforced by, or why not |
| --- | --- | --- | --- | --- | --- |
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("npu_fused_infer_attention_score[_v2]", "FIA")


def render() -> str:
    """The document. Rows are sorted by op, as declared within one."""
    rows: list[tuple[str, str]] = []
    for rule in RULES.values():
        cells = [f"`{rule.id}`", rule.op, rule.allowed, str(rule.scope), rule.source, rule.test]
        rows.append((rule.op, "| " + " | ".join(map(_cell, cells)) + " |"))
    for note in NOTES:
        cells = [note.op, note.constraint, "all", note.source, note.decision]
        rows.append((note.op, "| | " + " | ".join(map(_cell, cells)) + " |"))
    rows.sort(key=lambda row: row[0].split("::")[-1].lstrip("_"))
    return HEAD + "\n".join(row for _, row in rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
