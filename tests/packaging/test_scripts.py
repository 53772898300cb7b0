"""The two commands and the part runner: what can be tested of them without running everything again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("scripts/bootstrap.sh", "scripts/demo", "scripts/test", ".ci/run")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return scripts/run_tests.py as a module, its notes in a folder of this test, its own processes replaced."""
    spec = importlib.util.spec_from_file_location("run_tests_under_test", ROOT / "scripts" / "run_tests.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "parts.txt")
    monkeypatch.setattr(module, "run_static", lambda: True)
    module.real_run_validation = module.run_validation
    monkeypatch.setattr(module, "run_validation", lambda: True)
    return module


def run_with(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], *arguments: str, ci: str = ""
) -> tuple[int, list[str]]:
    """Run the runner's main with the given status of each part; return (its status, the parts that ran)."""
    ran: list[str] = []

    def run_part(part: object, pytest_arguments: list[str]) -> int:
        ran.append(part.name)
        return statuses.get(part.name, 0)

    monkeypatch.setattr(runner, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *arguments])
    monkeypatch.setenv("CI", ci)
    return runner.main(), ran


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_executable_and_valid_bash(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_bootstrap_without_a_role_is_wrong_usage() -> None:
    done = subprocess.run([ROOT / "scripts" / "bootstrap.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "demo|test" in done.stderr


def test_every_part_runs_and_devices_come_last(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(runner, monkeypatch, {}) == (0, ["unit", "lavapipe", "swiftshader"])


@pytest.mark.parametrize("failing", ["unit", "lavapipe", "swiftshader"])
@pytest.mark.parametrize("status", [1, 2, 5, -11])
def test_a_failure_in_any_part_is_the_exit_status_and_stops_nothing(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str, status: int
) -> None:
    assert run_with(runner, monkeypatch, {failing: status}, ci="true") == (1, ["unit", "lavapipe", "swiftshader"])


@pytest.mark.parametrize("name", ["run_static", "run_validation"])
def test_failing_checks_are_the_exit_status(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(runner, name, lambda: False)
    assert run_with(runner, monkeypatch, {}) == (1, ["unit", "lavapipe", "swiftshader"])
    assert run_with(runner, monkeypatch, {}, "-k", "softmax")[0] == 0, "with pytest arguments it does not run"


def test_validation_can_be_asked_for_alone(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(runner, "run_validation", lambda: not ran.append(True))
    assert run_with(runner, monkeypatch, {}, "--part", "validation") == (0, [])
    assert ran == [True]


@pytest.mark.parametrize(("status", "expected"), [(0, "validation: every message"), (1, "validation: FAILED: exit")])
def test_validation_leaves_a_line_for_the_summary(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int, expected: str
) -> None:
    monkeypatch.setattr(runner.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess([], status))
    assert runner.real_run_validation() == (status == 0)
    assert runner.RESULTS.read_text(encoding="utf-8").startswith(expected)


def test_a_selection_may_leave_a_part_empty_but_not_all(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(runner, monkeypatch, {"unit": 5}, "-k", "softmax")[0] == 0
    assert run_with(runner, monkeypatch, {"unit": 5}, "-k", "softmax", ci="true")[0] == 1
    assert run_with(runner, monkeypatch, dict.fromkeys(("unit", "lavapipe", "swiftshader"), 5), "-k", "nothing")[0] == 5
    assert run_with(runner, monkeypatch, {"unit": 5})[0] == 1


def test_one_part_can_be_asked_for(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(runner, monkeypatch, {}, "--part", "lavapipe") == (0, ["lavapipe"])


def test_a_device_part_sees_its_driver_only(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "driver.json"
    driver.write_text("{}")
    monkeypatch.setenv("VKATTN_DEVICE", "another")
    monkeypatch.setenv("VKATTN_ANY_DEVICE", "1")
    env = runner.Part("some", "gpu", "Some Device", (tmp_path / "missing.json", driver)).environment()
    assert (env["VKATTN_EXPECT_DEVICE"], env["VK_ICD_FILENAMES"]) == ("Some Device", str(driver))
    assert "VKATTN_DEVICE" not in env and "VKATTN_ANY_DEVICE" not in env


def test_a_missing_driver_stops_the_run(runner: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no driver file for some: .*missing\.json"):
        runner.Part("some", "gpu", "Some Device", (tmp_path / "missing.json",)).environment()


def test_the_last_part_repeats_the_earlier_ones_before_pytests_own_last_line(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_good(): pass\n")
    results = tmp_path / "parts.txt"
    results.write_text("unit: FAILED: 3 passed, 1 failed\n")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "scripts"),
        "VKATTN_PART": "last",
        "VKATTN_PART_RESULTS": str(results),
    }
    command = [sys.executable, "-m", "pytest", "-p", "pytest_parts", "-c", "/dev/null", "--rootdir", ".", "test_one.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "unit: FAILED: 3 passed, 1 failed" in lines
    assert "1 passed in" in lines[-1]
    assert results.read_text().splitlines()[1] == "last: 1 passed"
