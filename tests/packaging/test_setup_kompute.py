"""`vkattn setup` without its long part: keys, edits, tools, refusals. scripts/test itself does the long part."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from vkattn import _kompute_recipe as recipe
from vkattn import setup_kompute
from vkattn.setup_kompute import SetupError

SETUP_PY = """
        cmake_args = ['-DKOMPUTE_OPT_BUILD_PYTHON=ON',
                      '-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON'
                      '-DPYTHON_EXECUTABLE=' + sys.executable]
    install_requires=[
        "numpy<2.0.0"
    ],
"""
CMAKE = 'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -Wall -Wextra -Wpedantic -Werror")\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "setup.py").write_text(SETUP_PY)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    return tmp_path


@pytest.fixture
def no_kp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let setup believe that kp does not import."""
    monkeypatch.setattr(setup_kompute, "kp_problem", lambda: "ModuleNotFoundError: No module named 'kp'")


def arguments(*, force: bool = False) -> argparse.Namespace:
    return argparse.Namespace(force=force, verbose=False, jobs=None)


def test_edits_pass_the_interpreter_to_cmake_and_allow_numpy_2(sources: Path) -> None:
    recipe.edit_sources(sources)
    text = (sources / "setup.py").read_text()
    assert "VERSION_CHECK=ON',\n                      '-DPYTHON_EXECUTABLE='" in text
    assert '"numpy"\n' in text
    assert "-Werror" not in (sources / "CMakeLists.txt").read_text()


def test_other_sources_are_refused(sources: Path) -> None:
    recipe.edit_sources(sources)
    with pytest.raises(ValueError, match=r"setup\.py of kp 0\.9\.0 holds .* 0 times"):
        recipe.edit_sources(sources)


def test_key_tells_apart_what_a_wheel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    key = setup_kompute.wheel_key()
    assert key == setup_kompute.wheel_key()
    assert "/" not in key and sys.implementation.cache_tag in key
    changed = set()
    for name, value in {"cache_tag": "cpython-399"}.items():
        with monkeypatch.context() as patch:
            patch.setattr(sys.implementation, name, value)
            changed.add(setup_kompute.wheel_key())
    for target, name, value in (
        (recipe, "KP_VERSION", "0.9.1"),
        (recipe, "recipe_digest", lambda: "another"),
        (setup_kompute, "system_tag", lambda: "debian14-libfmt.so.11"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            changed.add(setup_kompute.wheel_key())
    assert len(changed) == 4 and key not in changed


def test_system_tag_names_the_release_and_fmt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": "debian", "VERSION_ID": "13"})
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.10")
    assert setup_kompute.system_tag() == "debian13-libfmt.so.10"


def test_cache_folder_follows_the_environment() -> None:
    assert setup_kompute.cache_dir({"VKATTN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert setup_kompute.cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/vkattn")
    assert setup_kompute.cache_dir({}) == Path.home() / ".cache" / "vkattn"


def test_missing_tools_are_named_with_the_line_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_kp: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VKATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(setup_kompute, "check_environment", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    assert setup_kompute.main(arguments()) == 1
    error = capsys.readouterr().err
    assert "missing: cmake" in error and "vulkan/vulkan.hpp" in error
    assert "apt-get install -y g++ cmake make libvulkan-dev libfmt-dev" in error
    assert not (tmp_path / "cache").exists()


def test_every_tool_is_found_on_a_machine_that_is_set_up() -> None:
    assert [tool.name for tool in setup_kompute.build_tools() if not tool.found] == []


def test_the_systems_own_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_kp: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").write_text("")
    monkeypatch.setattr(setup_kompute.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert setup_kompute.main(arguments()) == 1
    error = capsys.readouterr().err
    assert "managed by the operating system" in error and "python3 -m venv" in error


def test_nothing_is_done_when_kp_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(setup_kompute, "kp_problem", lambda: None)
    monkeypatch.setattr(setup_kompute, "obtain_wheel", None)
    assert setup_kompute.main(arguments()) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_kept_wheel_that_does_not_import_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problems = iter(["not there", "libfmt.so.9: cannot open shared object file", None])
    rebuilds = []

    def obtain(*, jobs: int, verbose: bool, rebuild: bool) -> tuple[Path, bool]:
        rebuilds.append(rebuild)
        return tmp_path / "kp-0.9.0.whl", not rebuild

    monkeypatch.setattr(setup_kompute, "kp_problem", lambda: next(problems))
    monkeypatch.setattr(setup_kompute, "check_environment", lambda: None)
    monkeypatch.setattr(setup_kompute, "obtain_wheel", obtain)
    monkeypatch.setattr(setup_kompute, "install_wheel", lambda wheel, verbose: None)
    setup_kompute.setup()
    assert rebuilds == [False, True]


def test_a_new_wheel_that_does_not_import_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_kompute, "kp_problem", lambda: "undefined symbol")
    monkeypatch.setattr(setup_kompute, "check_environment", lambda: None)
    monkeypatch.setattr(setup_kompute, "obtain_wheel", lambda **options: (tmp_path / "kp-0.9.0.whl", False))
    monkeypatch.setattr(setup_kompute, "install_wheel", lambda wheel, verbose: None)
    with pytest.raises(SetupError, match="undefined symbol"):
        setup_kompute.setup()


def fake_run(log: list[str], fail_at: str = "") -> object:
    """Return a stand-in for setup_kompute._run that makes what the commands would make."""

    def run(command: list[str], path: Path, *, verbose: bool, env: dict[str, str] | None = None) -> None:
        step = next(word for word in ("venv", "install", "download", "wheel") if word in command)
        log.append(step)
        if step == fail_at:
            raise SetupError(f"this command failed with status 1: {step}")
        if step == "download":
            work = Path(command[command.index("--dest") + 1])
            tree = work / "made" / "kp-0.9.0"
            tree.mkdir(parents=True)
            (tree / "setup.py").write_text(SETUP_PY)
            (tree / "CMakeLists.txt").write_text(CMAKE)
            with tarfile.open(work / "kp-0.9.0.tar.gz", "w:gz") as archive:
                archive.add(tree, arcname="kp-0.9.0")
        if step == "wheel":
            assert env is not None
            assert all(env[name] == value for name, value in recipe.BUILD_SETTINGS.items())
            assert env["pybind11_DIR"] == "/cmake/files"
            wheels = Path(command[command.index("--wheel-dir") + 1])
            wheels.mkdir()
            (wheels / "kp-0.9.0-cp311-cp311-linux_x86_64.whl").write_text("built")

    return run


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let a build run without pip, compiler or network; return the list of its steps."""
    steps: list[str] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        if "--cmakedir" in command:
            return subprocess.CompletedProcess(command, 0, "/cmake/files\n", "")
        return real(command, **options)

    monkeypatch.setenv("VKATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(setup_kompute.subprocess, "run", run)
    monkeypatch.setattr(setup_kompute, "check_tools", lambda: None)
    monkeypatch.setattr(setup_kompute, "_run", fake_run(steps))
    return steps


def test_a_wheel_is_built_once_and_then_kept(fake_build: list[str]) -> None:
    first, was_cached = setup_kompute.obtain_wheel(jobs=2, verbose=False, rebuild=False)
    assert (fake_build, was_cached, first.read_text()) == (["venv", "install", "download", "wheel"], False, "built")
    again, was_cached = setup_kompute.obtain_wheel(jobs=2, verbose=False, rebuild=False)
    assert (len(fake_build), was_cached, again) == (4, True, first)
    assert sorted(path.name for path in first.parent.iterdir()) == ["build.log", first.name]
    setup_kompute.obtain_wheel(jobs=2, verbose=False, rebuild=True)
    assert len(fake_build) == 8


@pytest.mark.parametrize(("step", "is_network"), [("install", True), ("download", True), ("wheel", False)])
def test_a_failed_step_says_whether_the_network_is_needed(
    monkeypatch: pytest.MonkeyPatch, fake_build: list[str], step: str, is_network: bool
) -> None:
    monkeypatch.setattr(setup_kompute, "_run", fake_run(fake_build, fail_at=step))
    with pytest.raises(SetupError, match="status 1") as caught:
        setup_kompute.obtain_wheel(jobs=2, verbose=False, rebuild=False)
    assert ("check the network" in str(caught.value)) == is_network
    assert "build.log" in str(caught.value)
    assert setup_kompute.cached_wheel(setup_kompute.cache_dir() / "kp" / setup_kompute.wheel_key()) is None


def test_a_failing_command_shows_the_end_of_its_output(tmp_path: Path) -> None:
    code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(SetupError, match="status 3") as caught:
        setup_kompute._run([sys.executable, "-c", code], tmp_path / "log", verbose=False)
    assert "line 99" in str(caught.value)
    assert "line 1\n" not in str(caught.value)
    assert "line 1\n" in (tmp_path / "log").read_text()
