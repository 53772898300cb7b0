"""Run each check that reads the tree without running it; called by scripts/run_tests.py as the part `static`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    ("layers", "scripts/check_layers.py"),
    ("generated GLSL", "scripts/gen_params.py", "--check"),
    ("shaders", "scripts/build_shaders.py", "--check"),
    ("baseline shaders", "benchmarks/decomposed/build.py", "--check"),
    ("ruff", "-m", "ruff", "check", "."),
    ("mypy", "-m", "mypy"),
)


def main() -> int:
    """Run them all, whatever the others say; return 1 if one of them is not content."""
    failed = 0
    for name, *command in CHECKS:
        started = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'} ({time.monotonic() - started:.1f} s)", flush=True)
        if done.returncode != 0:
            failed += 1
            print(done.stdout + done.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
