"""explain: who sends what to whom, how long it takes, and a picture of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from kv_planner.explain import Deployment

from kv_transfer.doctor import EngineReport
from kv_transfer.errors import ArgumentError
from kv_transfer.explain import Side, explain, read_side
from kv_transfer.picture import draw

MODEL = {
    "fingerprint": "m",
    "page_size": 16,
    "components": [
        {"component": kind, "layers": "0..3", "dtype": "bfloat16", "total_heads": 2, "dims": 64}
        for kind in ("key", "value")
    ],
}
FAST = EngineReport(
    name="fast", works=True, cross_process=True, megabytes_per_second=1000.0, microseconds_per_block=0.0
)
SLOW = EngineReport(
    name="slow", works=True, cross_process=True, megabytes_per_second=1000.0, microseconds_per_block=50.0
)
BROKEN = EngineReport(name="broken", works=False, problem="absent")


def _side(**parallelism: object) -> Deployment:
    return Deployment.model_validate({"model": MODEL, "parallelism": parallelism})


def test_the_slowest_rank_sets_the_time() -> None:
    found = explain(_side(pipeline=2), _side(), pages=8, engines=[FAST, SLOW, BROKEN])
    moved = [move.bytes for move in found.plan.transfers]
    assert len(moved) == 2 and len(set(moved)) == 1
    fast, slow = found.estimates
    # Both stages send at once, but one rank receives them both.
    assert fast.seconds_joined == pytest.approx(2 * moved[0] / 1e9)
    blocks = sum(move.blocks_scattered for move in found.plan.transfers)
    assert blocks == 2 * 2 * 2 * 8
    assert slow.seconds_scattered == pytest.approx(2 * moved[0] / 1e9 + blocks * 50e-6)
    assert slow.seconds_joined < slow.seconds_scattered
    assert "slow: " in found.text() and "at 1000 MB/s and 50.0 µs a block" in found.text()
    assert "broken" not in found.text() and "for decode 0, at" in found.text()
    assert fast.slowest == "decode 0" and "bytes on average" not in found.text()
    assert explain(_side(), _side(pipeline=2), engines=[FAST]).estimates[0].slowest == "prefill 0"
    # Unequal tensor-parallel sizes: every token's head goes by itself.
    assert "blocks hold 128 bytes on average" in explain(_side(tensor=2), _side(), engines=[FAST]).text()


def test_sides_that_do_not_fit_have_reasons_and_no_times(tmp_path: Path) -> None:
    other = {**MODEL, "page_size": 32}
    found = explain(_side(), Deployment.model_validate({"model": other}), engines=[FAST])
    assert not found.plan.agrees and found.estimates == ()
    assert "page_size" in found.text()
    with pytest.raises(ValueError, match="do not agree"):
        draw(found.plan, tmp_path / "none.png")


def _groups(window: int, *, pipeline: bool = False) -> Side:
    """Layers 0 and 2 attend to everything, 1 and 3 to a window; two stages of two layers each, or one."""
    parallel = {"stages": [[0, 1], [2, 3]]} if pipeline else {}

    def group(layers: list[int], heads: int) -> dict[str, object]:
        spec = {"component": "latent", "layers": layers, "dtype": "uint8", "total_heads": heads, "dims": 10}
        model = {"fingerprint": "m", "page_size": 16, "components": [spec]}
        return {"model": model, "parallelism": parallel}

    return Side.model_validate(
        {"groups": {"full": group([0, 2], 1), "window": group([1, 3], 1)}, "windows": {"window": window}}
    )


def test_groups_have_plans_of_their_own_and_one_time(tmp_path: Path) -> None:
    """10 pages of 16 tokens; the last 40 tokens begin in page 7: 3 pages of the window."""
    found = explain(_groups(40, pipeline=True), _groups(40), pages=10, engines=[FAST])
    assert {name: own.pages for name, own in found.groups.items()} == {"full": 10, "window": 3}
    assert [(move.source, move.bytes) for move in found.plan.transfers] == [(0, 13 * 160), (1, 13 * 160)]
    assert found.estimates[0].seconds_joined == pytest.approx(2 * 13 * 160 / 1e9)
    text = found.text()
    assert "group window: 3 pages, those of the last 40 tokens" in text and "group full: 10 pages" in text
    assert "all groups: prefill 0 -> decode 0 2,080 bytes, prefill 1 -> decode 0 2,080 bytes" in text
    path = tmp_path / "side.json"
    path.write_text(_groups(40).model_dump_json())
    assert read_side(path) == _groups(40)
    draw(found.plan, tmp_path / "plan.png")
    path.write_text(_groups(40).model_copy(update={"windows": {"other": 1}}).model_dump_json())
    with pytest.raises(ValueError, match=r"windows: .* of groups"):
        read_side(path)


def test_groups_that_do_not_fit_are_refused_together() -> None:
    here, there = _groups(40), _groups(48)
    groups = {"full": here.groups["full"], "c4": here.groups["window"]}
    found = explain(here, there)
    assert [(own.field, own.local, own.remote) for own in found.plan.differences] == [("group 'window'.window", 40, 48)]
    assert not found.plan.agrees and "group 'window'.window" in found.text()
    found = explain(here, here.model_copy(update={"groups": groups, "windows": {}}))
    assert [own.field for own in found.plan.differences] == ["group 'c4'", "group 'window'", "group 'window'.window"]
    other = {**MODEL, "page_size": 32}
    wide = Side(groups={"full": Deployment.model_validate({"model": other}), "window": here.groups["window"]})
    narrow = Side(groups={"full": Deployment.model_validate({"model": MODEL}), "window": here.groups["window"]})
    fields = [own.field for own in explain(wide, narrow).plan.differences]
    assert fields == ["group 'full': page_size", "group 'full': kernel_block_size"]


def test_the_picture_names_every_rank_and_every_transfer(tmp_path: Path) -> None:
    found = explain(_side(pipeline=2, tensor=4), _side(tensor=2), pages=3)
    path = tmp_path / "plan.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(found.plan, path)
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    for rank in (*found.plan.prefill, *found.plan.decode):
        assert rank.place in text
    assert text.count("MB") == len(found.plan.transfers) > 2
    assert any(rank.idle for rank in found.plan.prefill) == ("(nothing)" in text)


def test_the_command_line(tmp_path: Path) -> None:
    for name, side in (("p", _side(pipeline=2)), ("d", _side())):
        (tmp_path / f"{name}.json").write_text(side.model_dump_json())
    (tmp_path / "bad.json").write_text("{}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kv_transfer", "explain", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            cwd=tmp_path,
            env=dict(os.environ),
        )

    done = run("p.json", "d.json", "--pages", "4", "--engine", "loopback", "--json", "--picture", "plan.png")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["plan"]["agrees"] and [own["engine"] for own in report["estimates"]] == ["loopback"]
    assert report["estimates"][0]["seconds_joined"] > 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    done = run("p.json", "bad.json")
    assert done.returncode == 2 and "bad.json: model: Field required" in done.stderr
    assert run("p.json", "d.json", "--engine", "rdma").returncode == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "bytes", "deep"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "side.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"side\.json: no JSON: "):
        read_side(path)


@pytest.mark.parametrize("name", ["plan", "plan.xyz", "a\0b.png", "\ud800.png"])
def test_a_picture_that_has_no_format_or_no_name_is_refused(tmp_path: Path, name: str) -> None:
    plan = explain(_side(), _side()).plan
    with pytest.raises(ArgumentError, match="path"):
        draw(plan, tmp_path / name)
    for odd in (None, 5, str(tmp_path / "plan.png")):
        with pytest.raises(ArgumentError, match="path"):
            draw(plan, odd)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="report"):
            draw(odd, tmp_path / "plan.png")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
