"""Where files are kept, and what is said where there is no such place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.fakes import fake_device_info
from vkattn import cli, info, setup_kompute
from vkattn.bench import tune
from vkattn.errors import OptionError
from vkattn.kernels import verdicts
from vkattn.kernels.manifest import variant
from vkattn.paths import cache_dir


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that nobody can make, whoever runs the tests: its parent is a file."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    folder = tmp_path / "file" / "folder"
    for name in ("VKATTN_CACHE", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.delenv("VKATTN_TUNING", raising=False)
    return folder


@pytest.fixture
def kp_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_kompute, "kp_problem", lambda: "no kp")
    monkeypatch.setattr(setup_kompute, "check_environment", lambda: None)
    monkeypatch.setattr(setup_kompute, "check_tools", lambda: None)


@pytest.mark.usefixtures("no_home")
def test_without_a_home_there_is_no_cache_folder() -> None:
    with pytest.raises(OptionError, match=r"no home\. Hint: .* VKATTN_CACHE"):
        cache_dir({})
    assert cache_dir({"VKATTN_CACHE": "/a"}) == Path("/a")


@pytest.mark.usefixtures("no_home")
def test_info_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info, "devices", lambda: [fake_device_info()])
    for as_json in (False, True):
        assert info.main(argparse.Namespace(device=None, json=as_json)) == 0
    text, _, report = capsys.readouterr().out.partition("{")
    assert "cache        none: the user has no home. Hint: VKATTN_CACHE" in text
    assert json.loads("{" + report)["cache"] is None


@pytest.mark.usefixtures("no_home", "kp_is_missing")
def test_setup_without_a_home(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["setup"]) == 1
    assert "the built wheel cannot be kept: there is no folder to keep files in" in capsys.readouterr().err


@pytest.mark.usefixtures("kp_is_missing")
def test_setup_where_nothing_can_be_written(blocked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["setup"]) == 1
    error = capsys.readouterr().err
    assert f"the built wheel cannot be kept in {blocked}" in error
    assert "Hint: let the environment variable VKATTN_CACHE name a folder that can be written." in error


def test_tune_says_before_it_measures_that_its_file_cannot_be_written(
    blocked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune, "Device", None)  # no device is opened
    assert cli.main(["tune"]) == 2
    assert f"the file {blocked / 'vkattn' / 'tuning.toml'} cannot be rewritten" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["no_home", "blocked"])
def test_verdicts_that_cannot_be_kept_hold_for_the_process(request: pytest.FixtureRequest, place: str) -> None:
    request.getfixturevalue(place)
    kernel, device = variant("fill"), fake_device_info(name="nowhere")
    assert verdicts.verdict(kernel, device) is None
    verdicts.note(kernel, device, "wrong")
    assert verdicts.verdict(kernel, device) == "wrong"
    verdicts.withdraw(kernel, device)
    assert verdicts.verdict(kernel, device) is None


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]) != 0
    assert str(tmp_path / "before.json") in capsys.readouterr().err
