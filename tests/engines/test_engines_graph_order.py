"""The golden file of graph-runtime, the order of calls of SGLang's backend, is still what SGLang does."""

from __future__ import annotations

import os

from engines_order import GOLDEN, dump, record


def test_the_file_is_what_the_engine_does() -> None:
    text = dump(record())
    if os.environ.get("ENGINES_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(text, encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == text
