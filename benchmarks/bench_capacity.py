"""Decode in a cache of 8192 tokens and in one of 128, with 64 of them live: capacity that is not live costs nothing.

The project's bound is a ratio of 1.3 on lavapipe.

    python benchmarks/bench_capacity.py [rounds]
"""

from __future__ import annotations

import sys

import numpy as np
from common import decode_step, describe, in_turn

import vkattn

CAPACITIES = (128, 8192)
LENGTH = 64


def main(rounds: int) -> None:
    with vkattn.Device() as device:
        print(describe(device))
        steps = [decode_step(device, capacity=capacity, length=LENGTH) for capacity in CAPACITIES]
        seconds = in_turn([step.run for step in steps], rounds)
        small, large = np.median(seconds, axis=0)
        print(f"one layer, 24/8 heads, head_dim 128, float16, length {LENGTH}; medians of {rounds}")
        for capacity, median in zip(CAPACITIES, (small, large), strict=True):
            print(f"capacity {capacity:5}   {1e6 * median:9.1f} us")
        print(f"ratio            {large / small:9.3f}, of pairs {np.median(seconds[:, 1] / seconds[:, 0]):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
