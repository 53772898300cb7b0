"""All of the benchmarks on one device, within a time: decode of all layers, then the grid with its peers.

    python benchmarks/run_all.py --out DIR [--minutes 5.5] [--device NAME] [--quick]

Writes DIR/layers.json and DIR/grid.json (after each problem, so that a run that is ended leaves what it has), and
prints the tables of ``table.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from vkattn import cli  # noqa: E402

#: Seconds that the last problem of the grid may take after its time is up.
LAST_PROBLEM = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a part failed."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description="All benchmarks on one device.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.5)
    parser.add_argument("--device")
    parser.add_argument("--quick", action="store_true", help="few layers and the quick set: for software devices")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = ["--device", args.device] if args.device else []
    layers = ["--layers", "2", "--lengths", "250", "1000"] if args.quick else []
    command = [sys.executable, str(HERE / "bench_decomposed.py"), "--json", str(args.out / "layers.json")]
    status = subprocess.run([*command, *layers, *chosen], check=False).returncode
    budget = max(10.0, 60 * args.minutes - (time.perf_counter() - start) - LAST_PROBLEM)
    sets = ["--quick"] if args.quick else ["--sets", "targets", "scaling"]
    status |= cli.main(["bench", *sets, *chosen, "--budget", str(budget), "--out", str(args.out / "grid.json")])
    results = [str(path) for path in sorted(args.out.glob("*.json"))]
    subprocess.run([sys.executable, str(HERE / "table.py"), *results], check=False)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
