"""Every example of docs/gallery.md runs as it stands and ends as the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu

PAGE = Path(__file__).parents[1] / "docs/gallery.md"
MAX_LINES = 10


def examples() -> Iterator[Any]:
    """Title, code that runs before, the example's code and its end, section by section."""
    text = PAGE.read_text()
    blocks = re.compile(r"```(python|text)\n(.*?)```", re.S)
    prelude = ""
    for section in re.split(r"^(?=##+ )", text, flags=re.M)[1:]:
        title = section.splitlines()[0]
        found = blocks.findall(section)
        if title.startswith("## "):
            prelude = "".join(code for _, code in found)
            continue
        (_, code), (kind, said) = found
        assert kind == "text"
        yield pytest.param(prelude, code, said, id=title.removeprefix("### "))


@pytest.fixture
def settled() -> Iterator[None]:
    """What an example leaves behind is dropped, and the time-out of others is as it was."""
    yield
    ascend_emulator.install(wait_seconds=10.0)
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            torch_npu.npu.synchronize()


@pytest.mark.parametrize(("prelude", "code", "said"), list(examples()))
def test_an_example_ends_as_the_page_says(prelude: str, code: str, said: str, side: Any, settled: None) -> None:
    assert len(code.splitlines()) <= MAX_LINES
    names: dict[str, Any] = {"ascend_emulator": ascend_emulator, "torch": torch, "torch_npu": torch_npu}
    names |= {"npu": torch_npu.npu, "side": side}
    exec(prelude, names)
    printed = io.StringIO()
    end = ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        end = printed.getvalue()
        torch_npu.npu.synchronize()
    except (ascend_emulator.EmulatorError, RuntimeError) as error:
        end = f"{type(error).__name__}: {error}"
    expected = r"\s+".join(".*".join(re.escape(part) for part in word.split("…")) for word in said.split())
    assert re.match(expected, end, re.S), f"expected\n{said}\ngot\n{end}"


def test_the_page_has_examples() -> None:
    assert len(list(examples())) >= 15
    assert "import ascend_emulator\nascend_emulator.install()\n" in PAGE.read_text()
