"""`vkattn tune` on the device, made short: what it finds is written, and read when the device is opened again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vkattn import cli
from vkattn.bench import case, clock, tune
from vkattn.bench.problems import BenchProblem
from vkattn.caps.tuning import read_tables
from vkattn.errors import OptionError
from vkattn.runtime.device import Device

pytestmark = pytest.mark.once

TINY = {"decode": [BenchProblem("decode", "test", 3, 1, 16, 130)],
        "prefill": [BenchProblem("prefill", "test", 2, 2, 16, 33)]}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clock, "WARM_UP_SECONDS", dict.fromkeys(clock.WARM_UP_SECONDS, 0.001))
    monkeypatch.setattr(case, "MOST_SETS", dict.fromkeys(case.MOST_SETS, 2))
    monkeypatch.setattr(case, "RECORDING_SECONDS", 0.001)
    monkeypatch.setattr(tune, "SECONDS", 0.001)
    monkeypatch.setattr(tune, "tune_problems", lambda device_type, is_quick: TINY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("VKATTN_TUNING")


def test_what_is_found_is_kept_and_read(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each candidate of two numbers is run for real; the times are made up, so that twice the divisor wins."""
    real = tune.Bench.__call__
    divisor = device.info.tuned.split_root_divisor

    def timed(bench: tune.Bench, knob: tune.Knob, tuning: tune.Tuning, again: bool) -> float:
        assert real(bench, knob, tuning, again) > 0
        return 1000 - 100 * (tuning.split_root_divisor == 2 * divisor)

    monkeypatch.setattr(tune, "KNOBS", tune.KNOBS[3:5])  # one for each kind of problem: SwiftShader compiles slowly
    monkeypatch.setattr(tune.Bench, "__call__", timed)
    arguments = ["tune", "--device", device.info.name]
    path = tmp_path / "vkattn" / "tuning.toml"
    assert cli.main(arguments) == 0
    assert f"split_root_divisor = {2 * divisor}" in capsys.readouterr().out
    assert read_tables(path) == {device.info.name: {"split_root_divisor": 2 * divisor}}
    with Device(device.info.index) as again:
        assert again.info.tuned == replace(device.info.tuned, split_root_divisor=2 * divisor)


def test_a_dry_run_writes_nothing(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune.Bench, "__call__", lambda bench, knob, tuning, again: 1.0 / tuning.split_groups)
    assert cli.main(["tune", "--device", device.info.name, "--dry-run"]) == 0
    assert not (tmp_path / "vkattn").exists()


def test_a_broken_file_stops_the_opening(device: Device, tmp_path: Path) -> None:
    (tmp_path / "vkattn").mkdir()
    (tmp_path / "vkattn" / "tuning.toml").write_text("[x]\nfaster = true\n")
    with pytest.raises(OptionError, match="has the keys faster"):
        Device(device.info.index)


def test_no_file_to_write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VKATTN_TUNING", "")
    assert cli.main(["tune"]) == 2
    assert "VKATTN_TUNING is empty" in capsys.readouterr().err
