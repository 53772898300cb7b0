"""What others take for the same problems, in the same process: each peer is optional, and checked before it is timed.

A peer is a function that yields one `Outcome` for each of its ways: a name, the spread of the device's time or of the
host's, or the reason why there is none. Peers that share a GPU with vkattn get the same rotating input sets.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import oracle
from .case import Inputs
from .clock import Spread, host_times
from .problems import BenchProblem

#: Relative L2 error of a sampled row beyond which a peer's figure is not taken: its own rounding is not ours to judge.
MOST_ERROR = 2e-2

#: Operations beyond which a peer on the CPU is not asked: waiting for it would say nothing new.
CPU_OPERATIONS = 5e8


@dataclass(frozen=True)
class Outcome:
    """One way of a peer for one problem: times, or the reason why there are none.

    ``uses_matrix_units`` says by which rate its arithmetic is bound; None is not known.
    """

    runner: str
    device_ns: Spread | None = None
    call_ns: Spread | None = None
    reason: str = ""
    uses_matrix_units: bool | None = None


Peer = Callable[[BenchProblem, Inputs, int, float], Iterator[Outcome]]


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__


def sampled_error(out: np.ndarray, inputs: Inputs) -> float:
    """Return the largest relative L2 error of rows of the first and last head and token of set 0."""
    given = inputs.problem
    query, key, value = inputs.query(0), inputs.rows(0, 0), inputs.rows(0, 1)
    worst = 0.0
    for batch, head in {(0, 0), (given.batch_size - 1, given.num_heads - 1)}:
        of_kv = head // given.group_size
        for row in {0, given.q_len - 1}:
            at = (slice(batch, batch + 1), slice(head, head + 1), slice(row, row + 1))
            options: dict[str, Any] = {}
            if given.kind == "prefill" and given.causal:
                options = {"causal": "top_left", "q_offset": row}
            expected = oracle.attention(query[at], *(array[batch : batch + 1, of_kv : of_kv + 1] for array in
                                                     (key, value)), **options)
            error = np.linalg.norm(np.asarray(out[at], np.float64) - expected) / np.linalg.norm(expected)
            worst = max(worst, float(error) if np.isfinite(error) else math.inf)
    return worst


def checked(runner: str, out: np.ndarray, inputs: Inputs, measure: Callable[[], Outcome]) -> Outcome:
    """Return what ``measure`` finds if ``out`` is right, else the reason."""
    error = sampled_error(out, inputs)
    if not error <= MOST_ERROR:
        return Outcome(runner, reason=f"wrong: the relative error of a row is {error:.2g}")
    return measure()


def module(name: str) -> Any:
    """Return a foreign module, or raise ImportError."""
    return importlib.import_module(name)


def numpy_float32(problem: BenchProblem, inputs: Inputs, sets: int, seconds: float) -> Iterator[Outcome]:
    """Time the formula in float32 NumPy, heads in groups, on the host."""
    if problem.num_operations > CPU_OPERATIONS:
        yield Outcome("numpy", reason=f"{problem.num_operations:.1g} operations are too many for it")
        return
    shape = (problem.batch_size, problem.num_kv_heads, problem.group_size * problem.q_len, problem.head_dim)
    query = inputs.query(0).astype(np.float32).reshape(shape) / np.float32(math.sqrt(problem.head_dim))
    key, value = (inputs.rows(0, part).astype(np.float32) for part in (0, 1))
    hidden = None
    if problem.kind == "prefill" and problem.causal:
        hidden = np.tile(~np.tri(problem.q_len, problem.length, dtype=bool), (problem.group_size, 1))

    def run() -> np.ndarray:
        scores = query @ np.swapaxes(key, 2, 3)
        if hidden is not None:
            scores[..., hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.asarray(scores @ value)

    out = run().reshape(problem.batch_size, problem.num_heads, problem.q_len, problem.head_dim)
    yield checked("numpy", out, inputs, lambda: Outcome("numpy", call_ns=host_times(run, seconds)))
