"""Run tests under the Khronos validation layer and judge every message it writes; called by scripts/run_tests.py.

    python scripts/validation.py [--ci] [--run NAME ...] [pytest arguments]

Runs: `full`, synchronization validation with every boundary realised as a submission of its own, on lavapipe;
`gpu-assisted`, every access to a buffer checked against its bounds, on SwiftShader; `coherent` (only if named), the
default boundaries under synchronization validation, for what docs/hazards.md says of them. `--ci` leaves out the tests
that take long only because they compute much. With pytest arguments, those choose the tests.

Exit status 1 if a test fails, if a message is not in scripts/validation_allowed.toml, or if the layer did not report
the fault that is planted before the tests. The logs stay in .cache/validation. Needs what scripts/bootstrap.sh sets
up. docs/hazards.md tells what the layer can see and what it cannot.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run_tests import ROOT, parts
from validationlayer import child
from validationlayer.allowed import load
from validationlayer.messages import parse
from validationlayer.pipe import collected
from validationlayer.runs import LAYER, RUNS, Run
from validationlayer.verdict import judge, report

FOLDER = ROOT / ".cache" / "validation"
LIMIT_S, SHORT_LIMIT_S = 7200, 600  # after that a run is given up


def environment(run: Run, pipe: Path, leave_out: dict[str, str]) -> dict[str, str]:
    """Return the environment of a run: the part's driver and device, the layer, the boundaries, the plugin's words."""
    part = next(part for part in parts() if part.name == run.part)
    return part.environment() | {
        "VK_INSTANCE_LAYERS": LAYER,
        "VK_LAYER_SETTINGS_PATH": str(pipe.parent),
        "VKATTN_BOUNDARY": run.boundary,
        child.PIPE: str(pipe),
        child.PLANT: run.plant,
        child.LEAVE_OUT: "\n".join(leave_out),
    }


def execute(run: Run, short: bool, arguments: list[str]) -> tuple[bool, list[str]]:
    """Run the tests; return whether all is well, and the lines of the report."""
    folder = FOLDER / run.name
    folder.mkdir(parents=True, exist_ok=True)
    pipe, log_file = folder / "pipe", folder / "messages.log"
    (folder / "vk_layer_settings.txt").write_text(run.settings(pipe), encoding="utf-8")
    tests = arguments or (run.short if short else run.tests)
    leave_out = run.short_leave_out if short and not arguments else run.leave_out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "validationlayer.child", "-p", "no:cacheprovider", *tests]
    limit_s = SHORT_LIMIT_S if short else LIMIT_S
    started = time.monotonic()
    with collected(pipe, log_file):
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment(run, pipe, leave_out), timeout=limit_s,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            status, printed, end = done.returncode, done.stdout, ""
        except subprocess.TimeoutExpired as expired:
            status, printed, end = 1, expired.stdout or b"", f"\nnot finished after {limit_s} s"
    output = printed.decode(errors="replace") + end
    with log_file.open(encoding="utf-8", errors="replace") as stream:
        log = parse(stream)
    verdict = judge(log, run.name, run.feature, run.planted_id, load())
    lines = [] if status == 0 else output.splitlines()
    if status != 0:
        verdict.failures.append(f"pytest ended with status {status}")
    summary = output.strip().rpartition("\n")[2].strip("= ")
    result = "FAILED" if verdict.failures else "ok"
    lines.append(f"{run.name} on {run.part}: {result} ({time.monotonic() - started:.0f} s): {summary}")
    lines += [f"  {line}" for line in report(log, verdict)]
    lines += [f"    left out: {name} ({why})" for name, why in leave_out.items()]
    return not verdict.failures, lines


def main() -> int:
    """Run what is asked for."""
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/validation.py", description=__doc__, formatter_class=verbatim,
                                     allow_abbrev=False)
    parser.add_argument("--ci", action="store_true", help="a short selection of tests: about a minute in all")
    parser.add_argument("--run", action="append", choices=[run.name for run in RUNS],
                        help="only this run (may be given again); without it: full and gpu-assisted")
    args, arguments = parser.parse_known_args()
    wanted = args.run or ["full", "gpu-assisted"]
    chosen = [run for run in RUNS if run.name in wanted]
    good = True
    with ThreadPoolExecutor(max_workers=len(chosen)) as pool:
        for well, lines in pool.map(lambda run: execute(run, args.ci, arguments), chosen):
            good &= well
            print("\n".join(lines), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
