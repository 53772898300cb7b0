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


def load_runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/run_tests.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("run_tests_under_test", ROOT / "scripts" / "run_tests.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the runner with its logs in a folder of this test, and every driver taken as there."""
    module = load_runner(monkeypatch)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.txt")
    monkeypatch.setattr(module.Part, "environment", lambda part: {"VKATTN_PART": part.name})
    return module


def run_with(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], *arguments: str, ci: str = ""
) -> tuple[int, list[str]]:
    """Run the runner's main, one part at a time, with processes that end with the given statuses.

    Return (its status, the parts that ran).
    """
    ran: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        env = options["env"]
        name = next((name for name, (_, script, *_) in runner.CHECKS.items() if script in command), None)
        name = name or env["VKATTN_PART"]
        ran.append(name)
        stream = options.get("stdout")
        if stream:
            stream.write(f"some words of {name}\n=== last line of {name} ===\n".encode())
        if name not in runner.CHECKS and statuses.get(name, 0) >= 0:
            runner.record(name, "what pytest_parts.py notes")
        return subprocess.CompletedProcess(command, statuses.get(name, 0))

    monkeypatch.setattr(runner.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--jobs", "1", *arguments])
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


EVERY = ["swiftshader", "static", "unit", "lavapipe", "swiftshader-kernels", "validation"]
TESTS = ["swiftshader", "unit", "lavapipe", "swiftshader-kernels"]


def test_every_part_runs_the_longest_first(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(runner, monkeypatch, {}) == (0, EVERY)


@pytest.mark.parametrize("failing", EVERY)
@pytest.mark.parametrize("status", [1, 2, 5, -11])
def test_a_failure_in_any_part_is_the_exit_status_and_stops_nothing(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str, status: int
) -> None:
    assert run_with(runner, monkeypatch, {failing: status}, ci="true") == (1, EVERY)


def test_with_pytest_arguments_checks_run_only_if_they_are_named(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(runner, monkeypatch, {"static": 1}, "-k", "softmax") == (0, TESTS)
    named = ("--part", "static", "--part", "unit")
    assert run_with(runner, monkeypatch, {"static": 1, "unit": 5}, *named, "-k", "softmax") == (1, ["static", "unit"])


@pytest.mark.parametrize("name", EVERY)
def test_one_part_can_be_asked_for(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert run_with(runner, monkeypatch, {}, "--part", name) == (0, [name])


def test_a_selection_may_leave_a_part_empty_but_not_all(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(runner, monkeypatch, {"unit": 5}, "-k", "softmax")[0] == 0
    assert run_with(runner, monkeypatch, {"unit": 5}, "-k", "softmax", ci="true")[0] == 1
    assert run_with(runner, monkeypatch, dict.fromkeys(TESTS, 5), "-k", "nothing")[0] == 5
    assert run_with(runner, monkeypatch, {"unit": 5})[0] == 1


def test_what_each_part_found_comes_before_pytests_own_last_line(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_with(runner, monkeypatch, {"validation": 1, "lavapipe": -11})
    lines = capfd.readouterr().out.splitlines()
    assert lines[-8:] == [
        "what each part found:",
        "static: nothing to object to",
        "unit: what pytest_parts.py notes",
        "lavapipe: FAILED: the process was ended by SIGSEGV",
        "validation: FAILED: exit status 1, see above",
        "swiftshader-kernels: what pytest_parts.py notes",
        "swiftshader: what pytest_parts.py notes",
        "=== last line of swiftshader ===",
    ]
    words = [line for line in lines if line.startswith("some words")]
    assert words[-1] == "some words of swiftshader"
    assert sorted(words) == sorted(f"some words of {name}" for name in EVERY)  # as they end, which may be at once
    assert "lavapipe: ended with status -11 after 0 s" in lines


def test_a_crash_of_the_last_part_is_told_too(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_with(runner, monkeypatch, {"swiftshader": -6})
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "swiftshader: FAILED: the process was ended by SIGABRT"
    assert "=== last line of swiftshader ===" in lines


def test_parts_run_at_the_same_time(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of two processes waits for the file that the other makes."""
    wait = (
        "import sys, time, pathlib\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "end = time.monotonic() + 60\n"
        "while not pathlib.Path(sys.argv[2]).exists():\n"
        "    time.sleep(0.01)\n"
        "    assert time.monotonic() < end\n"
    )
    places = [str(tmp_path / name) for name in ("one", "other")]
    jobs = [
        runner.Job(name, name, [sys.executable, "-c", wait, *files], os.environ, False)
        for name, files in (("static", places), ("validation", places[::-1]))
    ]
    assert runner.run_all(jobs, 2) == {"static": 0, "validation": 0}


def test_jobs_must_be_positive(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        run_with(runner, monkeypatch, {}, "--jobs", "0")


def test_a_device_part_sees_its_driver_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "driver.json"
    driver.write_text("{}")
    monkeypatch.setenv("VKATTN_DEVICE", "another")
    monkeypatch.setenv("VKATTN_ANY_DEVICE", "1")
    env = load_runner(monkeypatch).Part("some", "gpu", "Some Device", (tmp_path / "missing", driver)).environment()
    assert (env["VKATTN_EXPECT_DEVICE"], env["VK_ICD_FILENAMES"]) == ("Some Device", str(driver))
    assert "VKATTN_DEVICE" not in env and "VKATTN_ANY_DEVICE" not in env


def test_a_missing_driver_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no driver file for some: .*missing\.json"):
        load_runner(monkeypatch).Part("some", "gpu", "Some Device", (tmp_path / "missing.json",)).environment()


def test_a_part_notes_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    results = tmp_path / "parts.txt"
    results.write_text("unit: 3 passed\n")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "scripts"),
        "VKATTN_PART": "some",
        "VKATTN_PART_RESULTS": str(results),
    }
    command = [sys.executable, "-m", "pytest", "-p", "pytest_parts", "-c", "/dev/null", "--rootdir", ".", "test_one.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 failed, 1 passed in" in done.stdout.splitlines()[-1]
    assert results.read_text().splitlines() == ["unit: 3 passed", "some: FAILED: 1 passed, 1 failed"]
