"""Run the suite in parts; called by scripts/test when everything is set up.

    scripts/test [--part NAME ...] [--jobs N] [pytest arguments]

The parts: `static` (layers, shaders, ruff, mypy), `unit` (all tests that need no device), every test marked gpu with
each driver, `lavapipe` and `swiftshader` (but those marked once with the first only; those of single kernels are a
part of their own, `swiftshader-kernels`), and `validation` (scripts/validation.py --ci: tests under the Khronos
validation layer). Each part is a process of its own, told by VKATTN_EXPECT_DEVICE which device it must find. With
pytest arguments, `static` and `validation` run only if they are named, and a part in which nothing was selected is no
failure.

A part keeps little more than one core busy, so as many run at once as there are cores, or N. What each prints is shown
when it has ended, and lies in .cache/parts until then; one part alone is shown as it goes. The last device is shown
last, with what every part found before pytest's own last line, which is the last line printed. The exit status is 1 if
any part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "parts"
RESULTS = LOGS / "results.txt"  # scripts/pytest_parts.py adds to it
PYTEST_NOTHING_SELECTED = 5
PRINTING = threading.Lock()
SWIFTSHADER = (ROOT / ".cache" / "swiftshader" / "vk_swiftshader_icd.json",)

CHECKS = {
    "static": ("static checks", "scripts/static_checks.py"),
    "validation": ("tests under the Khronos validation layer", "scripts/validation.py", "--ci"),
}
#: In this order they start: the longest first, so that no core is idle at the end, and then what is over soon.
ORDER = ("swiftshader", "static", "unit", "lavapipe", "swiftshader-kernels", "validation")
#: In this order the summary tells of them.
NAMES = ("static", "unit", "lavapipe", "validation", "swiftshader-kernels", "swiftshader")


@dataclass(frozen=True)
class Part:
    """One pytest process: its name, the marker expression, and the driver it runs on."""

    name: str
    markers: str
    expect: str = ""
    drivers: tuple[Path, ...] = field(default=())

    def environment(self) -> dict[str, str]:
        """Return the environment that makes this driver the only one; without one, no device is expected."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("VKATTN_EXPECT")}
        for name in ("VKATTN_DEVICE", "VKATTN_ANY_DEVICE"):
            env.pop(name, None)
        if self.expect:
            driver = next((path for path in self.drivers if path.exists()), None)
            if driver is None:
                raise SystemExit(f"run_tests: no driver file for {self.name}: {[str(path) for path in self.drivers]}")
            env["VKATTN_EXPECT_DEVICE"] = self.expect
            env["VK_ICD_FILENAMES"] = env["VK_DRIVER_FILES"] = str(driver)  # the loader's old and new name for it
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "scripts"), env.get("PYTHONPATH")]))
        env["VKATTN_PART"] = self.name
        env["VKATTN_PART_RESULTS"] = str(RESULTS)
        return env


@dataclass(frozen=True)
class Job:
    """A part as a process. ``is_shown`` is whether what it prints is shown as it goes."""

    name: str
    title: str
    command: Sequence[str]
    env: Mapping[str, str]
    is_shown: bool

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"


def lavapipe_files() -> tuple[Path, ...]:
    """Return where drivers are announced on Debian and Fedora: lvp_icd.x86_64.json, lvp_icd.json."""
    return tuple(sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")))


def parts() -> tuple[Part, ...]:
    """Return the pytest parts."""
    return (
        Part("unit", "not gpu"),
        Part("lavapipe", "gpu", "llvmpipe", lavapipe_files()),
        Part("swiftshader-kernels", "kernel and not once", "SwiftShader", SWIFTSHADER),
        Part("swiftshader", "gpu and not kernel and not once", "SwiftShader", SWIFTSHADER),
    )


def make_jobs(wanted: Sequence[str], pytest_arguments: Sequence[str]) -> list[Job]:
    """Return the wanted parts in the order of starting; a driver that is not there stops the run here."""
    is_shown = len(wanted) == 1
    jobs = {}
    for name, (title, *command) in CHECKS.items():
        jobs[name] = Job(name, title, [sys.executable, *command], os.environ, is_shown)
    for part in parts():
        if part.name in wanted:
            options = ["-p", "pytest_parts", "-m", part.markers, "--durations=5",
                       "-o", f"cache_dir=.cache/pytest/{part.name}"]
            if sys.stdout.isatty():
                options.append("--color=yes")
            command = [sys.executable, "-m", "pytest", *options, *pytest_arguments]
            jobs[part.name] = Job(part.name, f"pytest: {part.name} ({part.markers})", command, part.environment(),
                                  is_shown)
    return [jobs[name] for name in ORDER if name in wanted]


def run_job(job: Job) -> int:
    """Run the process; return its exit status, or minus the signal that ended it, and see to its line in RESULTS."""
    started = time.monotonic()
    if job.is_shown:
        headline(job.title)
        status = subprocess.run(job.command, cwd=ROOT, env=job.env, check=False).returncode
    else:
        say(f"{job.name}: started")
        with job.log.open("wb") as stream:
            status = subprocess.run(job.command, cwd=ROOT, env=job.env, stdin=subprocess.DEVNULL, stdout=stream,
                                    stderr=subprocess.STDOUT, check=False).returncode
    if status < 0:
        record(job.name, f"FAILED: the process was ended by {signal.Signals(-status).name}")
    elif job.name in CHECKS:
        record(job.name, f"FAILED: exit status {status}, see above" if status else "nothing to object to")
    if not job.is_shown:
        say(f"{job.name}: ended with status {status} after {time.monotonic() - started:.0f} s")
    return status


def say(text: str) -> None:
    """Print whole lines: several threads do, and one that is cut by another could be taken for something else."""
    with PRINTING:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def record(name: str, text: str) -> None:
    """Add a line to RESULTS."""
    with RESULTS.open("a", encoding="utf-8") as stream:
        stream.write(f"{name}: {text}\n")


def results() -> list[str]:
    """Return the lines of RESULTS in the order of NAMES."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return sorted(lines, key=lambda line: NAMES.index(line.partition(":")[0]))


def headline(text: str) -> None:
    """Print a line that a reader of the log finds again."""
    say(f"\n######## {text}")


def show(job: Job, found: Sequence[str] = ()) -> None:
    """Print what the process printed, and ``found`` before its last line."""
    if not job.is_shown:
        headline(job.title)
        *lines, last = job.log.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
        if found:
            lines += ["", "what each part found:", *found]
        say("\n".join([*lines, last]))


def run_all(jobs: Sequence[Job], num_jobs: int) -> dict[str, int]:
    """Run every job, up to ``num_jobs`` at a time, show each when it has ended, and return their statuses.

    The one to be shown last waits for the others.
    """
    statuses: dict[str, int] = {}
    last = max((job for job in jobs if job.name not in CHECKS), key=lambda job: NAMES.index(job.name), default=None)
    with ThreadPoolExecutor(num_jobs) as pool:
        running = {pool.submit(run_job, job): job for job in jobs}
        try:
            for future in as_completed(running):
                statuses[running[future].name] = future.result()
                if running[future] is not last:
                    show(running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if last:
        crashed = statuses[last.name] < 0  # so that pytest did not get to its last line
        show(last, () if crashed else results())
        if crashed:
            say("\n".join(results()))
    return statuses


def main() -> int:
    """Run the parts that are asked for."""
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/test", description=__doc__, formatter_class=verbatim, allow_abbrev=False)
    parser.add_argument("--part", action="append", choices=NAMES, help="run only this part (may be given again)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many parts run at once")
    args, pytest_arguments = parser.parse_known_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; it must be at least 1")
    selective = bool(pytest_arguments) and not os.environ.get("CI")
    wanted = args.part or [name for name in NAMES if not (pytest_arguments and name in CHECKS)]
    LOGS.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("", encoding="utf-8")

    statuses = run_all(make_jobs(wanted, pytest_arguments), args.jobs)
    found = [status for name, status in statuses.items() if name not in CHECKS]
    if any(status for name, status in statuses.items() if name in CHECKS):
        return 1
    if found and all(status == PYTEST_NOTHING_SELECTED for status in found):
        return PYTEST_NOTHING_SELECTED
    return int(any(status not in ((0, PYTEST_NOTHING_SELECTED) if selective else (0,)) for status in found))


if __name__ == "__main__":
    raise SystemExit(main())
