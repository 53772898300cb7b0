"""benchmarks/table.py and targets.py: figures to Markdown, verdicts on targets, and tables put into a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table, targets
from vkattn.bench.clock import Spread
from vkattn.bench.problems import BenchProblem, read_grid
from vkattn.bench.results import Row, document, row
from vkattn.bench.roofline import Roofline

ROOFLINE = Roofline(4000.0, 60000.0, 700000.0, "a product")
LONG = BenchProblem("decode", "Llama-3.2-3B", 24, 8, 128, 131072)
SHORT = BenchProblem("decode", "Llama-3.2-3B", 24, 8, 128, 4096)


def found(problem: BenchProblem, runner: str, nanoseconds: float, **more: Any) -> Row:
    return row(problem, runner, ROOFLINE, device_ns=Spread.of([nanoseconds]), **more)


def layers(way: str, nanoseconds: float, length: int = 2048) -> dict[str, Any]:
    spread = Spread.of([nanoseconds]).as_dict()
    return {"problem": {"length": length}, "way": way, "dispatches": 28, "device_ns": spread, "recording_ns": spread,
            "call_ns": spread}


def verdicts(rows: list[Row]) -> dict[str, str]:
    by_key = {row.key: row for row in rows}
    return {target.what: targets.judge(target, by_key)[2] for target in targets.TARGETS
            if target.problem in (LONG.name, SHORT.name) or "131072" in target.problem}


def test_every_target_is_a_problem_of_the_grid() -> None:
    names = {problem.name for problem in read_grid()["targets"]}
    assert {target.problem for target in targets.TARGETS} == names
    assert {target.of_problem for target in targets.TARGETS} <= {*names, ""}


def test_a_target_against_a_peer() -> None:
    peer = found(SHORT, "torch cuda cudnn", 16_000)
    assert verdicts([found(SHORT, "vkattn auto", 19_900), peer])["1.25 x cuDNN"] == "reached"
    assert verdicts([found(SHORT, "vkattn auto", 20_100), peer])["1.25 x cuDNN"] == "not reached"
    missing = row(SHORT, "torch cuda cudnn", ROOFLINE, reason="no CUDA")
    assert "no CUDA" in verdicts([found(SHORT, "vkattn auto", 1.0), missing])["1.25 x cuDNN"]


def test_a_target_against_the_limit_and_another_problem() -> None:
    limit = ROOFLINE.limit_ns(LONG)
    int8 = BenchProblem("decode", "Llama-3.2-3B", 24, 8, 128, 131072, dtype="int8")
    said = verdicts([found(LONG, "vkattn auto", limit / 0.93), found(int8, "vkattn auto", 0.61 * limit / 0.93)])
    assert said["92% of the copy bandwidth"] == "reached"
    assert said["0.60 x float16"] == "not reached"
    assert said["0.40 x float16"] == "not measured"
    assert verdicts([found(LONG, "vkattn auto", limit / 0.91)])["92% of the copy bandwidth"] == "not reached"


def test_the_layers_targets() -> None:
    auto = found(SHORT, "vkattn split", 19_900, auto=True)
    assert "| vkattn auto | 1.25 x cuDNN | 19.9 | 20 | reached |" in targets.targets_table(
        [auto, found(SHORT, "torch cuda cudnn", 16_000)], [])
    assert targets.other_names(found(SHORT, "vkattn coopmat", 1.0, auto=True, variants=["attn_coopmat2_f16_d128"])) == [
        "vkattn auto", "vkattn coopmat2"]
    streamed = found(SHORT, "vkattn split", 21_300, auto=True, streamed_ns=Spread.of([16_600.0]))
    assert "not reached; back to back (16.6) reached" in targets.targets_table(
        [streamed, found(SHORT, "torch cuda cudnn", 16_000)], [])
    text = targets.targets_table([], [layers("decomposed", 5e6), layers("three_pass", 1.9e6), layers("split", 1e6),
                                      layers("decomposed", 1.0, 250), layers("split", 1.0, 250)])
    assert "reached: 5.0 times as fast" in text
    assert "not reached: 1.9 times as fast" in text


def test_the_grid_has_a_line_for_each_problem_and_a_column_for_each_runner() -> None:
    limit = ROOFLINE.limit_ns(SHORT)
    rows = [found(SHORT, "vkattn split", 2 * limit, auto=True, call_ns=Spread.of([600_000.0])),
            found(SHORT, "torch cuda flash", 24_000),
            row(SHORT, "numpy", ROOFLINE, call_ns=Spread.of([9e6])), row(LONG, "vkattn auto", ROOFLINE, reason="no")]
    lines = table.grid_table(rows, "decode").splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == 8
    assert len(lines) == 3
    assert "torch cuda flash" in lines[0] and "| **8.39** | 50% | 600.0 | 24 | (9000) |" in lines[2]
    assert table.left_out(rows) == f"- no (1: {LONG.name} by vkattn auto)"


def test_tables_go_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin gpu decode -->\nold\n<!-- end gpu decode -->\nafter\n"
                    "<!-- begin cpu decode -->\nstays\n<!-- end cpu decode -->\n")
    grid, step = tmp_path / "grid.json", tmp_path / "layers.json"
    header = {"device": "a GPU", "driver": "1", "host_cores": 2, "roofline": ROOFLINE.as_dict()}
    grid.write_text(json.dumps(document(header, [found(SHORT, "vkattn auto", 20_000.0)])))
    step.write_text(json.dumps({"format": 1, "decomposed": [layers("split", 1e6)]}))
    for _ in range(2):  # the second time changes nothing
        table.main([str(grid), str(step), "--into", str(page)])
        text = page.read_text()
        assert "old" not in text and "| 24/8 D128 S4096 B1 float16 |" in text
        assert text.startswith("before\n<!-- begin gpu decode -->\n| decode |") and "stays" in text
        assert text.count("begin gpu decode") == 1


def test_without_markers_everything_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "layers.json"
    step.write_text(json.dumps({"format": 1, "decomposed": [layers("split", 1e6), layers("decomposed", 7e6)]}))
    table.main([str(step)])
    assert "| 2048 | decomposed | 28 | 7000 | 7000 | 7000 | 7.00 |" in capsys.readouterr().out
