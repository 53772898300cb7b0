"""Run the suite in parts; called by scripts/test when everything is set up.

    scripts/test [--part NAME ...] [pytest arguments]

The parts, in this order: `static` (layers, shaders, ruff, mypy), `unit` (all tests that need no device), then every
test marked gpu once per driver: `lavapipe`, `swiftshader`, and between them `validation` (scripts/validation.py --ci:
tests under the Khronos validation layer). Each device is a process of its own, told by VKATTN_EXPECT_DEVICE which
device it must find. With pytest arguments, `static` and `validation` run only if they are named, and a part in which
nothing was selected is no failure. What each part found is repeated in the summary of the last one, so that pytest's
own last line is the last line printed; the exit status is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "test-parts.txt"  # read by scripts/pytest_parts.py
PYTEST_NOTHING_SELECTED = 5

STATIC_CHECKS = (
    ("layers", "scripts/check_layers.py"),
    ("generated GLSL", "scripts/gen_params.py", "--check"),
    ("shaders", "scripts/build_shaders.py", "--check"),
    ("baseline shaders", "benchmarks/decomposed/build.py", "--check"),
    ("ruff", "-m", "ruff", "check", "."),
    ("mypy", "-m", "mypy"),
)


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


def lavapipe_files() -> tuple[Path, ...]:
    """Return where drivers are announced on Debian and Fedora: lvp_icd.x86_64.json, lvp_icd.json."""
    return tuple(sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")))


def parts() -> tuple[Part, ...]:
    """Return the pytest parts in the order of running."""
    return (
        Part("unit", "not gpu"),
        Part("lavapipe", "gpu", "llvmpipe", lavapipe_files()),
        Part("swiftshader", "gpu", "SwiftShader", (ROOT / ".cache" / "swiftshader" / "vk_swiftshader_icd.json",)),
    )


def record(name: str, text: str) -> None:
    """Add a line for the summary of the last part."""
    with RESULTS.open("a", encoding="utf-8") as stream:
        stream.write(f"{name}: {text}\n")


def run_static() -> bool:
    """Run each static check; return whether all of them are content."""
    failed = []
    for name, *command in STATIC_CHECKS:
        started = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'} ({time.monotonic() - started:.1f} s)", flush=True)
        if done.returncode != 0:
            failed.append(name)
            print(done.stdout + done.stderr, flush=True)
    record("static", f"FAILED: {', '.join(failed)}" if failed else f"{len(STATIC_CHECKS)} checks passed")
    return not failed


def run_part(part: Part, pytest_arguments: list[str]) -> int:
    """Run one pytest process; return its exit status, or minus the signal that ended it."""
    options = ["-p", "pytest_parts", "-m", part.markers, "--durations=5"]
    command = [sys.executable, "-m", "pytest", *options, *pytest_arguments]
    status = subprocess.run(command, cwd=ROOT, env=part.environment(), check=False).returncode
    if status < 0:
        record(part.name, f"FAILED: the process was ended by {signal.Signals(-status).name}")
    return status


def run_validation() -> bool:
    """Run tests under the validation layer; return whether it wrote nothing that is not allowed."""
    status = subprocess.run([sys.executable, "scripts/validation.py", "--ci"], cwd=ROOT, check=False).returncode
    record("validation", f"FAILED: exit status {status}, see above" if status else "every message is an allowed one")
    return status == 0


def headline(text: str) -> None:
    """Print a line that a reader of the log finds again."""
    print(f"\n######## {text}", flush=True)


def main() -> int:
    """Run the parts that are asked for."""
    *first, last = parts()
    names = ("static", *(part.name for part in first), "validation", last.name)
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/test", description=__doc__, formatter_class=verbatim, allow_abbrev=False)
    parser.add_argument("--part", action="append", choices=names, help="run only this part (may be given again)")
    args, pytest_arguments = parser.parse_known_args()
    selective = bool(pytest_arguments) and not os.environ.get("CI")
    not_pytest = {"static", "validation"} if pytest_arguments else set()
    wanted = args.part or [name for name in names if name not in not_pytest]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("", encoding="utf-8")

    failed = False
    statuses = []
    if "static" in wanted:
        headline("static checks")
        failed |= not run_static()
    for part in (*first, last):
        if part is last and "validation" in wanted:
            headline("tests under the Khronos validation layer")
            failed |= not run_validation()
        if part.name in wanted:
            headline(f"pytest: {part.name} ({part.markers})")
            status = run_part(part, pytest_arguments)
            statuses.append(status)
            failed |= status not in ((0, PYTEST_NOTHING_SELECTED) if selective else (0,))
    if statuses and statuses[-1] < 0:  # pytest did not get to its summary
        print(RESULTS.read_text(encoding="utf-8"), end="")
    if statuses and all(status == PYTEST_NOTHING_SELECTED for status in statuses):
        return PYTEST_NOTHING_SELECTED
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
