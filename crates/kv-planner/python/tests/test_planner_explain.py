"""`python -m kv_planner explain`: who sends what to whom, or all reasons why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest
from kv_planner import explain as ex
from kv_planner.explain.cli import run, schema
from pydantic import ValidationError


def described(
    components: list[dict[str, Any]], parallelism: dict[str, Any] | None = None, **model: Any
) -> dict[str, Any]:
    base = {"dtype": "bfloat16", "dims": 64}
    return {
        "model": {
            "fingerprint": "m", "page_size": 128, "components": [{**base, **own} for own in components], **model
        },
        "parallelism": parallelism or {},
    }  # fmt: skip


MHA: list[dict[str, Any]] = [
    {"component": "key", "layers": "0..60", "total_heads": 2},
    {"component": "value", "layers": "0..60", "total_heads": 2, "dims": 32},
    {"component": "key", "part": "draft", "layers": [61], "total_heads": 2},
]


def written(folder: Path, name: str, side: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(side if isinstance(side, str) else json.dumps(side), encoding="utf-8")
    return str(path)


def report(prefill: dict[str, Any], decode: dict[str, Any], pages: int = 1) -> ex.Report:
    sides = [ex.Deployment.model_validate_json(json.dumps(side)) for side in (prefill, decode)]
    return ex.explain(*sides, pages=pages)


def test_who_sends_what_to_whom() -> None:
    found = report(described(MHA, {"pipeline": 2}), described(MHA, {"tensor": 4}), pages=10)
    assert found.agrees and not found.differences
    assert [(own.source, own.destination) for own in found.transfers] == [(s, d) for s in range(2) for d in range(4)]
    first, last = found.transfers[0], found.transfers[-1]
    assert (first.layers, last.layers) == ({"target": "0..30"}, {"target": "31..60", "draft": "61"})
    assert [own.heads["key/target"] for own in found.transfers[:4]] == [["0..1"], ["0..1"], ["1..2"], ["1..2"]]
    page = 128 * 2 * (64 + 32)  # one head of K and V in a layer
    assert first.bytes_per_page == 31 * page
    assert last.bytes_per_page == 30 * page + 128 * 2 * 64
    assert first.bytes == 10 * first.bytes_per_page
    assert first.blocks_joined == first.blocks_scattered == 62 * 10 * 128
    assert not any(rank.idle for rank in found.prefill + found.decode)


def test_pages_that_lie_together_are_one_block_a_buffer() -> None:
    (own,) = report(described(MHA), described(MHA), pages=10).transfers
    assert (own.blocks_joined, own.blocks_scattered) == (123, 1230)


def test_surplus_replicas_are_idle() -> None:
    found = report(described(MHA, {"tensor": 4}), described(MHA))
    assert [rank.idle for rank in found.prefill] == [False, True, False, True]
    assert "prefill ranks without a transfer: 1 (" in found.text() and "3 (" in found.text()


def test_states_are_counted_once_a_request() -> None:
    """A convolution's window of three rows, in groups of 1 + 1 + 2 elements a head, over two and four ranks."""
    conv = {
        "component": "state", "layers": "0..2", "dtype": "uint8", "item_kind": "request_row", "total_heads": 8,
        "dims": 4, "rows": 3, "groups": [1, 1, 2],
    }  # fmt: skip
    found = report(described([conv], {"tensor": 2}), described([conv], {"tensor": 4}), pages=10)
    assert [(own.source, own.destination) for own in found.transfers] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for own in found.transfers:
        assert (own.bytes_per_page, own.bytes_per_request, own.bytes) == (0, 3 * 3 * 2 * 4, 3 * 3 * 2 * 4)
        assert own.blocks_joined == own.blocks_scattered == 3 * 3 * 3  # layers, rows, groups
    assert "72 bytes of states a request" in found.text()
    other = report(described([conv]), described([{**conv, "rows": 10, "groups": [2, 2]}]))
    assert [reason.field for reason in other.differences] == ["state/target.rows", "state/target.groups"]


def test_ranks_that_share_tokens() -> None:
    mla: list[dict[str, Any]] = [
        {"component": "latent", "layers": "0..3"},
        {"component": "index_key", "layers": "0..3/2", "dims": 16},
        {"component": "state", "layers": [0], "item_kind": "request_row", "dims": 8},
    ]
    found = report(described(mla), described(mla, {"context": 2}), pages=5)
    assert len(found.transfers) == 2
    latent, index, state = 4 * 128 * 64 * 2, 2 * 128 * 16 * 2, 16
    assert [own.bytes for own in found.transfers] == [3 * latent + 5 * index + state, 2 * latent + 5 * index + state]
    assert [own.bytes_per_request for own in found.transfers] == [state, state]
    refused = report(described(mla, {"context": 2}), described(mla))
    assert not refused.agrees and refused.differences[0].local == 2


def test_all_reasons_why_not_at_once() -> None:
    other: list[dict[str, Any]] = [{**MHA[0], "dtype": "int8"}, MHA[1]]
    found = report(described(MHA), described(other, page_size=64, kernel_block_size=16))
    fields = [own.field for own in found.differences]
    assert fields == ["page_size", "kernel_block_size", "key/target.dtype", "key/draft"]
    assert all(own.consequence and own.remedy for own in found.differences)
    text = found.text()
    assert text.startswith("refused: 4 reasons") and "local: 128" in text and "remote: 64" in text


def test_heads_that_do_not_split_are_a_refusal() -> None:
    odd: list[dict[str, Any]] = [{"component": "key", "layers": [0], "total_heads": 3}]
    found = report(described(odd), described(odd, {"tensor": 2}))
    (own,) = found.differences
    assert (own.field, own.local, own.remote) == ("total_heads", 3, 2)


def test_uneven_and_even_stages() -> None:
    ids: list[dict[str, Any]] = [
        {"component": "key", "layers": "0..9"},
        {"component": "key", "part": "draft", "layers": [10]},
    ]

    def stages(parallelism: dict[str, Any]) -> list[list[int]]:
        return [sorted(stage) for stage in ex.Deployment.model_validate(described(ids, parallelism)).stages()]

    assert stages({"pipeline": 3}) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10]]
    assert stages({"stages": ["0..1", "2..9, 10"]}) == [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9, 10]]
    with pytest.raises(ValueError, match="not both"):
        stages({"stages": ["0..10"], "pipeline": 1})
    with pytest.raises(ValueError, match="11 stages for 10 layers"):
        stages({"pipeline": 11})


@pytest.mark.parametrize("layers", ["0..", "a", "3..1..2", "0..5/0", "0..99999999", "", -1, [-1], [0.5], {}])
def test_layers_are_ids_or_spans(layers: object) -> None:
    with pytest.raises((ValidationError, kp.PlanError)):
        ex.Deployment.model_validate(described([{"component": "key", "layers": layers}])).layout()


class TestCommand:
    def test_agrees(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [written(tmp_path, "a", described(MHA, {"pipeline": 2})), written(tmp_path, "b", described(MHA))]
        assert run(["explain", *files, "--pages", "7"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("agrees: 2 ranks send to 1 ranks") and "7 pages" in text
        assert run(["explain", *files, "--json"]) == 0
        assert ex.Report.model_validate_json(capsys.readouterr().out).agrees

    def test_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [written(tmp_path, "a", described(MHA)), written(tmp_path, "b", described(MHA, page_size=64))]
        assert run(["explain", *files]) == 1
        assert "page_size" in capsys.readouterr().out
        assert run(["explain", *files, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["differences"][0]["field"] == "page_size"

    @pytest.mark.parametrize(
        ("side", "words"),
        [
            ("{", "Invalid JSON"),
            ("[]", "the file: Input should be an object"),
            (described([]), "model.components"),
            (described(MHA, surplus=1), "model.surplus"),
            (described(MHA, page_size="128"), "model.page_size"),
            (described(MHA, {"tensor": 0}), "parallelism.tensor"),
            (described(MHA, {"pipeline": 99}), "99 stages for 61 layers"),
            (described(MHA * 2), "key/target twice"),
            (described(MHA, {"stages": ["0..60"]}), "key/draft layer 61: held by no rank"),
        ],
    )
    def test_bad_input(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], side: object, words: str) -> None:
        files = [written(tmp_path, "a", described(MHA)), written(tmp_path, "b", side)]
        for pair in (files, files[::-1]):
            assert run(["explain", *pair]) == 2
            printed = capsys.readouterr()
            assert words in printed.err and not printed.out

    def test_both_bad_files_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["explain", str(tmp_path / "absent.json"), written(tmp_path, "b", "{")]) == 2
        assert "absent.json" in (text := capsys.readouterr().err) and "b.json" in text

    @pytest.mark.parametrize("arguments", [[], ["explain"], ["other"], ["explain", "a", "b", "--pages", "0"]])
    def test_bad_words(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(arguments) == 2
        assert "usage" in capsys.readouterr().err

    def test_the_published_schema_is_the_models(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (Path(ex.__file__).parent / "schema.json").read_text(encoding="utf-8") == schema()
        assert run(["schema"]) == 0
        assert json.loads(capsys.readouterr().out)["$defs"].keys() >= {"Deployment", "Report"}

    def test_as_a_process(self, tmp_path: Path) -> None:
        files = [written(tmp_path, name, described(MHA, {"tensor": size})) for name, size in (("a", 1), ("b", 2))]
        command = [sys.executable, "-m", "kv_planner", "explain", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("agrees") and not done.stderr

    def test_without_pydantic_the_extra_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError('gone', name='pydantic')", encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), *(entry for entry in [os.environ.get("PYTHONPATH")] if entry)])
        command = [sys.executable, "-m", "kv_planner", "schema"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 2 and "kv-planner[explain]" in done.stderr
