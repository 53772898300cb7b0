"""Other packages of attention through Vulkan: aule-attention and computeml, each for what it can compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np

from .case import Inputs
from .clock import Spread, host_times, warm_up
from .peers import CPU_OPERATIONS, Outcome, checked, first_line, module
from .problems import BenchProblem

#: What the two packages take (aule-attention 0.5.0, computeml 0.4.4); beyond it they raise, or return garbage.
AULE_MOST_DIM = 64
COMPUTEML_MOST_DIM = 128


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what native code prints to nowhere."""
    saved = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


def aule_attention(problem: BenchProblem, inputs: Inputs, sets: int, seconds: float) -> Iterator[Outcome]:
    """Time ``aule.flash_attention`` on NumPy arrays, uploads and all: it has nothing else."""
    runner = "aule-attention"
    with _quiet():
        flash = module("aule").flash_attention
    if problem.head_dim > AULE_MOST_DIM or problem.head_dim % 4:
        yield Outcome(runner, reason=f"head_dim {problem.head_dim}; it takes multiples of 4 up to {AULE_MOST_DIM}")
        return
    if problem.num_operations > CPU_OPERATIONS:
        yield Outcome(runner, reason="too large: it takes seconds for each")
        return
    arrays = [array.astype(np.float32) for array in (inputs.query(0), inputs.rows(0, 0), inputs.rows(0, 1))]
    causal = problem.kind == "prefill" and problem.causal
    with _quiet():
        try:
            out = np.asarray(flash(*arrays, causal=causal))
            found = checked(runner, out, inputs,
                            lambda: Outcome(runner, call_ns=host_times(lambda: flash(*arrays, causal=causal), seconds)))
        except Exception as error:  # whatever it raises is the reason
            found = Outcome(runner, reason=first_line(error))
    yield found


def computeml(problem: BenchProblem, inputs: Inputs, sets: int, seconds: float) -> Iterator[Outcome]:
    """Time ``computeml.attention`` on tensors of its context: float32, one sequence, as many KV heads as heads."""
    runner, library = "computeml", module("computeml")
    for refused, why in ((problem.head_dim > COMPUTEML_MOST_DIM, f"head_dim {problem.head_dim}"),
                         (problem.batch_size > 1, "it has no batch"),
                         (problem.group_size > 1, "it has no grouped queries"),
                         (problem.num_operations > CPU_OPERATIONS, "too large")):
        if refused:
            yield Outcome(runner, reason=why)
            return
    attention = module("computeml.ops").attention
    context = library.Context()
    heads, width = problem.num_heads, problem.num_heads * problem.head_dim
    tensors = [context.asarray(np.swapaxes(array[0], 0, 1).reshape(-1, width).astype(np.float32))
               for array in (inputs.query(0), inputs.rows(0, 0), inputs.rows(0, 1))]
    causal = problem.kind == "prefill" and problem.causal

    def run() -> None:
        attention(*tensors, num_heads=heads, causal=causal)
        context.flush()

    def timed() -> float:
        with context.timed() as timer:
            attention(*tensors, num_heads=heads, causal=causal)
        return float(timer.gpu_us) * 1e3

    def measure() -> Outcome:
        warm_up(run, min(seconds, 0.7))
        return Outcome(runner, Spread.of(timed() for _ in range(9)), host_times(run, seconds), uses_matrix_units=False)

    try:
        out = attention(*tensors, num_heads=heads, causal=causal).numpy().reshape(-1, heads, problem.head_dim)
        yield checked(runner, np.swapaxes(out, 0, 1)[np.newaxis], inputs, measure)
    except Exception as error:  # whatever it raises is the reason
        yield Outcome(runner, reason=first_line(error))
