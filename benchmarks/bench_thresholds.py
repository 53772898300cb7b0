"""Where one algorithm takes over from another: seconds of each by the number of query rows to a KV head.

What `kernels/split.py` calls MAX_ROWS, and the order of `dispatch.PRIORITY`, rest on this; docs/kernels.md has the
results. The same call goes by each algorithm in turn, `split` beyond its limit too. Seconds are of the whole call,
copies included, so that only differences between algorithms mean something; on a CPU they are CPU seconds, which other
work on the machine hardly changes.

    python benchmarks/bench_thresholds.py [rounds [kv_len ...]]
"""

from __future__ import annotations

import sys
import time
from unittest import mock

import numpy as np
from common import describe, in_turn

import vkattn
from vkattn.dispatch import ALGORITHMS
from vkattn.errors import NoKernelError
from vkattn.kernels import split

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
ROWS = (4, 8, 16, 32, 48, 64, 96, 128, 256)


def measure(device: vkattn.Device, rows: int, kv_len: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each algorithm that can compute ``rows`` query rows to a KV head."""
    rng = np.random.default_rng(0)
    q_len = rows // (HEADS // KV_HEADS)
    arrays = [rng.standard_normal((1, heads, tokens, HEAD_DIM), np.float32).astype(np.float16)
              for heads, tokens in ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))]
    runs = {}
    for name in ALGORITHMS:
        def run(algorithm: str = name) -> None:
            vkattn.attention(*arrays, causal="bottom_right", algorithm=algorithm, device=device)

        try:
            run()
            runs[name] = run
        except NoKernelError:
            pass
    clock = time.process_time if device.info.device_type == "cpu" else time.perf_counter
    return dict(zip(runs, np.median(in_turn(list(runs.values()), rounds, 1, clock), axis=0), strict=True))


def main(rounds: int, lengths: list[int]) -> None:
    with vkattn.Device() as device, mock.patch.object(split, "MAX_ROWS", max(ROWS)):
        print(f"{describe(device)}; {HEADS}/{KV_HEADS} heads, head_dim {HEAD_DIM}, float16; medians of {rounds}, in ms")
        for kv_len in lengths:
            print(f"{kv_len} keys".ljust(14) + "".join(name.rjust(12) for name in ALGORITHMS) + "   least")
            for rows in ROWS:
                seconds = measure(device, rows, kv_len, rounds)
                columns = "".join(f"{1e3 * seconds[name]:12.2f}" if name in seconds else "-".rjust(12)
                                  for name in ALGORITHMS)
                print(f"{rows:5} rows    {columns}   {min(seconds, key=lambda name: seconds[name])}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, [int(text) for text in sys.argv[2:]] or [1024, 4096])
