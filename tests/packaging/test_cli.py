"""The command line: what it offers, its exit statuses, and that it works before Kompute is there."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vkattn import __version__, cli
from vkattn.bench.problems import read_grid
from vkattn.errors import DeviceError

COMMANDS = ("setup", "info", "check", "bench", "tune", "demo")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vkattn", *arguments], capture_output=True, text=True, check=False)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"vkattn {__version__}\n")


def test_without_a_command_it_prints_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "usage: vkattn " + command in done.stdout


def test_an_unknown_command_is_wrong_usage() -> None:
    done = run("no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["setup", "--jobs", "x"], "argument --jobs: 'x' is no whole number"),
    (["setup", "--jobs", "0"], "argument --jobs: 0 is not at least 1"),
    (["bench", "--heads", "24/x"], "argument --heads: 'x' is no whole number"),
    (["bench", "--budget", "nan"], "argument --budget: 'nan' is no number of seconds"),
    (["bench", "--budget", "-1"], "argument --budget: '-1' is no number of seconds"),
])
def test_a_wrong_number_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--results", "x.json"], "--results without --plot draws nothing"),
    (["--graph", "--out", "x.json"], "--out is of the grid of problems"),
    (["--graph", "--peers", "none"], "--peers is of the grid of problems"),
])
def test_bench_ignores_no_option(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out


def test_the_help_of_bench_names_every_set() -> None:
    shown = " ".join(run("bench", "--help").stdout.split())
    named = re.search(r"sets of problems, in turn: ([\w, ]+) \(default", shown)
    assert named and set(named[1].split(", ")) == set(read_grid())


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_main_of_the_module_and_returns_its_status(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    module = cli.build_parser().parse_args([command]).module
    monkeypatch.setitem(sys.modules, f"vkattn.{module}", SimpleNamespace(main=lambda args: 7))
    assert cli.main([command]) == 7


def test_our_own_errors_are_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise DeviceError("No device.")

    monkeypatch.setitem(sys.modules, "vkattn.demo", SimpleNamespace(main=fail))
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "vkattn: DeviceError: No device.\n"
