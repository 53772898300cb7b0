"""Where one algorithm takes over from another: the time of each by the number of query rows to a KV head.

`split_max_rows` of vkattn/_tuning and the order of `dispatch.PRIORITY` rest on this; docs/kernels.md has the results.
The same problem goes by each algorithm in turn, `split` beyond its limit too. On a GPU these are device timestamps of
the attention alone, behind boundaries, after warm-up. On a CPU they are CPU seconds of whole calls, copies included,
which other work on the machine hardly changes.

    python benchmarks/bench_thresholds.py [--rounds N] [--lengths S ...] [--batch B] [--heads H] [--kv-heads H]
                                          [--algorithms NAME ...] [--rows N ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from common import describe, in_turn

import vkattn
from vkattn.bench.clock import warm_up
from vkattn.bench.roofline import raise_clock
from vkattn.dispatch import ALGORITHMS
from vkattn.errors import NoKernelError

HEAD_DIM = 128
ROWS = (4, 8, 16, 32, 48, 64, 96, 128, 256)
#: Attentions in the graph of a GPU, and the seconds that it is warmed up for.
COPIES, WARM_UP = 16, 0.15


@dataclass(frozen=True)
class Case:
    """A problem: ``rows`` query rows to each KV head."""

    rows: int
    kv_len: int
    batch_size: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2

    def arrays(self) -> list[np.ndarray]:
        """Return queries, keys and values."""
        rng = np.random.default_rng(0)
        q_len = self.rows // (self.num_heads // self.num_kv_heads)
        shapes = ((self.num_heads, q_len), (self.num_kv_heads, self.kv_len), (self.num_kv_heads, self.kv_len))
        return [rng.standard_normal((self.batch_size, *shape, HEAD_DIM), np.float32).astype(np.float16)
                for shape in shapes]


def lift_limit(device: vkattn.Device) -> None:
    """Let `split` take more rows than the device's tuning says."""
    device.info = replace(device.info, tuning=replace(device.info.tuned, split_max_rows=max(ROWS)))


def cpu_seconds(device: vkattn.Device, case: Case, rounds: int, algorithms: Sequence[str]) -> dict[str, float]:
    """Return the median CPU seconds of a call of each algorithm that can compute it."""
    arrays, runs = case.arrays(), {}
    for name in algorithms:
        def run(algorithm: str = name) -> None:
            vkattn.attention(*arrays, causal="bottom_right", algorithm=algorithm, device=device)

        try:
            run()
            runs[name] = run
        except NoKernelError:
            pass
    return dict(zip(runs, np.median(in_turn(list(runs.values()), rounds, 1, time.process_time), axis=0), strict=True))


def device_seconds(device: vkattn.Device, case: Case, rounds: int, algorithms: Sequence[str]) -> dict[str, float]:
    """Return the median seconds on the device of each algorithm that can compute it."""
    arrays, seconds = case.arrays(), {}
    for name in algorithms:
        try:
            graph = graph_of(device, arrays, name)
        except NoKernelError:
            continue
        raise_clock(device)
        warm_up(lambda chosen=graph: chosen.run({}), WARM_UP)
        totals = np.zeros((rounds, COPIES))
        for row in totals:
            for span in graph.timings():
                if span.variant.startswith("attn_"):
                    row[int(span.node.removeprefix("copy_"))] += 1e-9 * span.nanoseconds
        seconds[name] = float(np.median(totals))
        graph.close()
    return seconds


def graph_of(device: vkattn.Device, arrays: list[np.ndarray], algorithm: str) -> vkattn.Graph:
    """Return a graph that computes the same attention `COPIES` times."""
    builder = vkattn.GraphBuilder(device)
    tensors = [builder.constant(name, array) for name, array in zip(("query", "key", "value"), arrays, strict=True)]
    for index in range(COPIES):
        out = builder.attention(*tensors, causal="bottom_right", algorithm=algorithm, name=f"copy_{index}")
    builder.output("out", out)
    return builder.build()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times of each algorithm by the number of query rows to a KV head.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args(arguments)
    with vkattn.Device() as device:
        lift_limit(device)
        measure, scale, unit = ((cpu_seconds, 1e3, "CPU ms of a call") if device.info.device_type == "cpu" else
                                (device_seconds, 1e6, "us on the device"))
        print(f"{describe(device)}; batch {args.batch}, {args.heads}/{args.kv_heads} heads of {HEAD_DIM}, float16; "
              f"medians of {args.rounds}, {unit}")
        for kv_len in args.lengths:
            print(f"{kv_len} keys".ljust(14) + "".join(name.rjust(12) for name in args.algorithms) + "   least")
            for rows in args.rows:
                case = Case(rows, kv_len, args.batch, args.heads, args.kv_heads)
                seconds = measure(device, case, args.rounds, args.algorithms)
                columns = "".join(f"{scale * seconds[name]:12.2f}" if name in seconds else "-".rjust(12)
                                  for name in args.algorithms)
                print(f"{rows:5} rows    {columns}   {min(seconds, key=lambda name: seconds[name])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
