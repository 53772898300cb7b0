"""What the host adds to a decode step: `Graph.run` less the evaluation of its recording. The bound is 100 microseconds.

Three figures: a run less the evaluation inside it; a run less an evaluation that follows another at once, which holds
also what a device loses when it waits for work (threads of a software device go to sleep); and a run whose evaluation
does nothing, which is free of the device's noise.

    python benchmarks/bench_run_overhead.py [rounds]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from common import Step, decode_step, describe, in_turn

import vkattn


class Timed:
    """A sequence that notes how long its evaluations take."""

    def __init__(self, sequence: Any) -> None:
        self._sequence, self.seconds = sequence, 0.0

    def eval(self) -> None:
        """Evaluate the sequence."""
        started = time.perf_counter()
        self._sequence.eval()
        self.seconds += time.perf_counter() - started


def host_seconds(step: Step, rounds: int) -> np.ndarray:
    """Return the seconds of each run that were not spent in evaluations."""
    recording = step.graph._latest
    sequences, recording._sequences = recording._sequences, [Timed(sequence) for sequence in recording._sequences]
    result = np.empty(rounds)
    for i in range(rounds):
        started = time.perf_counter()
        step.run()
        result[i] = time.perf_counter() - started - sum(timed.seconds for timed in recording._sequences)
        for timed in recording._sequences:
            timed.seconds = 0.0
    recording._sequences = sequences
    return result


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
        host = host_seconds(step, rounds)
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
        print(f"host side of a run   {1e6 * np.median(host):9.1f} us: a run less the evaluation inside it")
        print(f"without evaluation   {1e6 * np.median(alone):9.1f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
