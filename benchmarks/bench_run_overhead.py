"""What the host adds to a decode step: `Graph.run` less the bare evaluation of the same recording.

The evaluation is timed in two ways: for real, in turn with `Graph.run`, and not at all (run with evaluations that do
nothing), which is free of the device's noise. The project's bound is 100 microseconds.

    python benchmarks/bench_run_overhead.py [rounds]
"""

from __future__ import annotations

import sys

import numpy as np
from common import decode_step, describe, in_turn

import vkattn


class Nothing:
    """Stands for a sequence: does nothing, but says what the canary expects."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words

    def eval(self) -> None:
        """Pretend that the last kernel has run."""
        self._words[1] = self._words[0]


def main(rounds: int) -> None:
    with vkattn.Device() as device:
        print(describe(device))
        step = decode_step(device, capacity=4096, length=16)
        run, bare = in_turn([step.run, step.evaluate], rounds).T
        recording = step.graph._latest
        sequences, recording._sequences = recording._sequences, [Nothing(recording._canary.words)]
        alone = in_turn([step.run], rounds)[:, 0]
        recording._sequences = sequences
        print(f"one layer, 24/8 heads, head_dim 128, float16, capacity 4096, length 16; medians of {rounds}")
        print(f"Graph.run            {1e6 * np.median(run):9.1f} us")
        print(f"bare evaluation      {1e6 * np.median(bare):9.1f} us")
        print(f"difference           {1e6 * (np.median(run) - np.median(bare)):9.1f} us, of pairs "
              f"{1e6 * np.median(run - bare):.1f} us")
        print(f"without evaluation   {1e6 * np.median(alone):9.1f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
