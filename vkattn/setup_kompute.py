"""`python -m vkattn setup`: build kp 0.9.0 (Kompute), keep the wheel, and install it beside vkattn.

kp comes as sources that need settings, edits and tools (`_kompute_recipe` says which and why). A finished wheel is
kept in the cache folder ($VKATTN_CACHE, else ~/.cache/vkattn), so that the next environment on this machine gets it
in seconds, without a compiler or a network. Works without kp; standard library only.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _kompute_recipe as recipe
from .errors import OptionError
from .paths import cache_dir

BUILD_LOG_LINES = 25  # of a failed command's output that are printed; the rest stays in the log


class SetupError(Exception):
    """A step failed; the text gives the reason and, after "Hint:", the remedy. Never leaves `main`."""


@dataclass(frozen=True)
class Tool:
    """Something the build needs: what it is called, the Debian package that has it, and whether it is here."""

    name: str
    package: str
    found: bool


def say(message: str) -> None:
    """Print one step, at once."""
    print(f"[vkattn setup] {message}", flush=True)


def system_tag() -> str:
    """Return what a wheel built here is linked against: the system's release and its fmt library.

    A wheel of Debian 12 needs libfmt.so.9 and an older C++ runtime than Debian 13 has, where it is libfmt.so.10.
    """
    try:
        release = platform.freedesktop_os_release()
        system = f"{release['ID']}{release.get('VERSION_ID', '')}"
    except OSError:
        system = platform.system().lower()
    fmt = ctypes.util.find_library("fmt") or "nofmt"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", f"{system}-{fmt}")


def wheel_key() -> str:
    """Return the name of the cache folder whose wheel fits this interpreter, system and recipe."""
    pybind11 = recipe.BUILD_REQUIREMENTS[0].replace("==", "-")
    python = f"{sys.implementation.cache_tag}{sys.abiflags}-{sysconfig.get_platform()}"
    return f"kp{recipe.KP_VERSION}-{python}-{system_tag()}-{pybind11}-{recipe.recipe_digest()}"


def kp_problem() -> str | None:
    """Import kp in a fresh interpreter; return None if it is the right one, else what is wrong with it."""
    code = "import kp, importlib.metadata as m; print(m.version('kp'), m.version('numpy'), *(m.requires('kp') or []))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"the interpreter ended with status {done.returncode}"
    version, numpy_version, *requires = done.stdout.split()
    if version != recipe.KP_VERSION:
        return f"kp {version} is installed"
    if "numpy<2.0.0" in requires and int(numpy_version.split(".")[0]) >= 2:
        return f"kp {version} is installed, but it was built for numpy < 2 and numpy is {numpy_version}"
    return None


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _compiles(test: str) -> bool:
    """Tell whether the preprocessor expression ``test`` is true for the C++ compiler."""
    source = f"#if !({test})\n#error missing\n#endif\n"
    command = [*_compiler().split(), "-E", "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0


def build_tools() -> list[Tool]:
    """Look for everything the build needs."""
    compiler = _compiler().split()[0]
    has_compiler = shutil.which(compiler) is not None
    headers = {
        "the Vulkan C++ headers (vulkan/vulkan.hpp)": ("libvulkan-dev", "__has_include(<vulkan/vulkan.hpp>)"),
        "the fmt headers (fmt/core.h)": ("libfmt-dev", "__has_include(<fmt/core.h>)"),
    }
    python_header = Path(sysconfig.get_path("include")) / "Python.h"
    return [
        Tool(f"a C++ compiler ({compiler})", "g++", has_compiler),
        Tool("cmake", "cmake", shutil.which("cmake") is not None),
        Tool("make", "make", shutil.which("make") is not None),
        *(Tool(name, package, has_compiler and _compiles(test)) for name, (package, test) in headers.items()),
        Tool(f"the Python headers ({python_header})", "python3-dev", python_header.exists()),
        Tool("Python's venv and ensurepip", "python3-venv", importlib.util.find_spec("ensurepip") is not None),
    ]


def check_tools() -> None:
    """Raise SetupError that names each missing tool and the apt line that brings all of them."""
    missing = [tool for tool in build_tools() if not tool.found]
    if missing:
        names = "".join(f"\n  missing: {tool.name}" for tool in missing)
        packages = " ".join(tool.package for tool in missing)
        raise SetupError(
            f"kp cannot be built on this machine yet:{names}\n"
            f"Hint: on Debian or Ubuntu run, as root: apt-get install -y {packages}"
        )


def check_environment() -> None:
    """Raise SetupError if the running interpreter belongs to the system's package manager."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and marker.exists():
        raise SetupError(
            f"{sys.executable} is managed by the operating system ({marker}); packages cannot be installed there.\n"
            "Hint: make a virtual environment (python3 -m venv .venv), install vkattn there, and run setup with it."
        )


def _run(command: Sequence[str], log: Path, *, verbose: bool, env: Mapping[str, str] | None = None) -> None:
    """Run ``command`` with its output going to ``log`` (and to the screen if ``verbose``); raise SetupError."""
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        start = stream.tell()
        out = None if verbose else stream
        done = subprocess.run(command, stdout=out, stderr=out, env=env, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        with log.open(encoding="utf-8", errors="replace") as stream:
            stream.seek(start)
            tail = "".join(f"\n  | {line}" for line in stream.read().splitlines()[-BUILD_LOG_LINES:])
        raise SetupError(f"this command failed with status {done.returncode}: {' '.join(command)}{tail}")


def _pip_environment() -> dict[str, str]:
    """Return the environment for pip: the user's, less what would send packages elsewhere."""
    redirecting = {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_ONLY_BINARY", "PIP_NO_BINARY", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in redirecting}


def build_wheel(work: Path, log: Path, *, jobs: int, verbose: bool) -> Path:
    """Build the wheel in the empty folder ``work`` and return its path."""
    env = _pip_environment()
    say(f"making a build environment with {', '.join(recipe.BUILD_REQUIREMENTS)}")
    venv = work / "venv"
    _run([sys.executable, "-m", "venv", str(venv)], log, verbose=verbose, env=env)
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--retries", "2"]
    network = "Hint: this step needs the Python package index: check the network and pip's settings, and run it again."
    try:
        _run([*pip, "install", *recipe.BUILD_REQUIREMENTS], log, verbose=verbose, env=env)
        say(f"getting the sources of kp {recipe.KP_VERSION}")
        source = ["--no-deps", "--use-pep517", "--no-build-isolation", "--no-binary", "kp", f"kp=={recipe.KP_VERSION}"]
        _run([*pip, "download", "--dest", str(work), *source], log, verbose=verbose, env=env)
    except SetupError as error:
        raise SetupError(f"{error}\n{network}") from error

    with tarfile.open(work / f"kp-{recipe.KP_VERSION}.tar.gz") as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 brought it
        archive.extractall(work, **safely)  # type: ignore[arg-type]
    source_dir = work / f"kp-{recipe.KP_VERSION}"
    try:
        recipe.edit_sources(source_dir)
    except ValueError as error:
        raise SetupError(f"the sources are not those that this recipe is for: {error}") from error

    say(f"compiling with {jobs} jobs (one to three minutes)")
    cmakedir = subprocess.run(
        [python, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True, env=env
    ).stdout.strip()
    # kp's setup.py appends this variable letter by letter to a list: one digit arrives as one argument, two do not.
    env |= recipe.BUILD_SETTINGS | {"pybind11_DIR": cmakedir, "KOMPUTE_PYTHON_NUM_PARALLEL_THREADS": str(min(jobs, 9))}
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    wheels = work / "wheels"
    options = ["--no-deps", "--use-pep517", "--no-build-isolation", "--no-index", "--no-cache-dir", "-v"]
    _run([*pip, "wheel", *options, "--wheel-dir", str(wheels), str(source_dir)], log, verbose=verbose, env=env)
    return next(wheels.glob("kp-*.whl"))


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel kept in ``folder``, if there is one."""
    return next(iter(sorted(folder.glob("kp-*.whl"))), None)


def obtain_wheel(*, jobs: int, verbose: bool, rebuild: bool) -> tuple[Path, bool]:
    """Return (the wheel for this interpreter, whether it came out of the cache), building it if need be."""
    try:
        folder = cache_dir() / "kp" / wheel_key()
    except OptionError as error:
        raise SetupError(f"the built wheel cannot be kept: {error}") from error
    kept = cached_wheel(folder)
    if kept and not rebuild:
        say(f"found the wheel that was built before: {kept}")
        return kept, True
    check_tools()
    log = folder / "build.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"the built wheel cannot be kept in {folder}: {error.strerror}.\n"
            "Hint: let the environment variable VKATTN_CACHE name a folder that can be written."
        ) from error
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vkattn-kp-") as work:
        try:
            built = build_wheel(Path(work), log, jobs=jobs, verbose=verbose)
        except SetupError as error:
            raise SetupError(f"{error}\nThe whole log: {log}") from error
        partial = folder / f"{built.name}.{os.getpid()}.part"
        shutil.copy(built, partial)
    wheel = folder / built.name
    partial.replace(wheel)
    say(f"built in {time.monotonic() - started:.0f} s, kept as {wheel}")
    return wheel, False


def install_wheel(wheel: Path, *, verbose: bool) -> None:
    """Install ``wheel`` into the running interpreter's environment, with its own pip or, if it has none, another."""
    with tempfile.TemporaryDirectory(prefix="vkattn-pip-") as work:
        log = Path(work) / "pip.log"
        pip = [sys.executable, "-m", "pip"]
        if importlib.util.find_spec("pip") is None:
            if importlib.util.find_spec("ensurepip") is None:
                raise SetupError(f"{sys.executable} has neither pip nor ensurepip. Hint: install {wheel} there.")
            _run([sys.executable, "-m", "venv", f"{work}/venv"], log, verbose=verbose, env=_pip_environment())
            pip = [f"{work}/venv/bin/python", "-m", "pip", "--python", sys.executable]
        options = ["install", "--no-deps", "--no-index", "--force-reinstall", "--disable-pip-version-check"]
        _run([*pip, *options, str(wheel)], log, verbose=verbose, env=_pip_environment())


def setup(*, force: bool = False, verbose: bool = False, jobs: int | None = None) -> None:
    """Make ``import kp`` work in the running interpreter's environment, or raise SetupError."""
    problem = kp_problem()
    if problem is None and not force:
        say(f"kp {recipe.KP_VERSION} is installed and imports; nothing to do (--force builds it again)")
        return
    say(f"to be installed: kp {recipe.KP_VERSION}" + (f" ({problem})" if problem else ""))
    check_environment()
    if sys.platform != "linux":
        say(f"note: this is tested on Linux only, not on {sys.platform}")
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    wheel, was_cached = obtain_wheel(jobs=jobs, verbose=verbose, rebuild=force)
    while True:
        say(f"installing {wheel.name} into {sys.prefix}")
        install_wheel(wheel, verbose=verbose)
        problem = kp_problem()
        if problem is None:
            say(f"kp {recipe.KP_VERSION} imports")
            return
        if not was_cached:
            raise SetupError(f"kp was built and installed but cannot be used: {problem}")
        say(f"the kept wheel cannot be used here ({problem}); building it again")
        wheel, was_cached = obtain_wheel(jobs=jobs, verbose=verbose, rebuild=True)


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 if kp imports afterwards, else 1 with the reason on standard error."""
    try:
        setup(force=args.force, verbose=args.verbose, jobs=args.jobs)
    except SetupError as error:
        print(f"[vkattn setup] {error}", file=sys.stderr)
        return 1
    return 0
