"""What the benchmarks share: a decode step as a graph, and medians of functions that are timed in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vkattn
from vkattn.dtypes import numpy_dtype
from vkattn.ops.graph import Graph


@dataclass(frozen=True)
class Step:
    """A graph that decodes one token with a cache whose first ``length`` - 1 rows are live, and what it is run with."""

    graph: Graph
    inputs: dict[str, np.ndarray]
    position: int

    def run(self) -> None:
        """Append the same row again and attend."""
        self.graph.run(self.inputs, input_pos=self.position)

    def evaluate(self) -> None:
        """Evaluate the bare recordings of the last run: no inputs, no parameters, no outputs."""
        for sequence in self.graph._latest._sequences:
            sequence.eval()


def decode_step(device: vkattn.Device, *, heads: int = 24, kv_heads: int = 8, head_dim: int = 128, capacity: int,
                length: int, dtype: str = "float16") -> Step:
    """Return a step that has been run once, so that everything is compiled and the recording holds its lengths."""
    rng = np.random.default_rng(0)

    def array(tokens: int, count: int) -> np.ndarray:
        return rng.standard_normal((1, tokens, count, head_dim), np.float32).astype(numpy_dtype(dtype))

    cache = vkattn.KVCache(1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
    cache.update(array(length, kv_heads), array(length, kv_heads), 0)
    builder = vkattn.GraphBuilder(device)
    query, key, value = (builder.input(name, (1, 1, count, head_dim), dtype)
                         for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)))
    out = builder.sdpa_with_kv_cache(query, key, value, builder.kv_cache("cache", cache=cache),
                                     builder.position("input_pos"))
    builder.output("out", out)
    inputs = {"query": array(1, heads), "key": array(1, kv_heads), "value": array(1, kv_heads)}
    step = Step(builder.build(), inputs, length - 1)
    step.run()
    return step


def in_turn(functions: Sequence[Callable[[], None]], rounds: int, warm_up: int = 20) -> np.ndarray:
    """Return the seconds of each call, ``[rounds, functions]``: in turn, so that what disturbs one disturbs all."""
    for _ in range(warm_up):
        for function in functions:
            function()
    seconds = np.empty((rounds, len(functions)))
    for row in seconds:
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            row[index] = time.perf_counter() - start
    return seconds


def describe(device: vkattn.Device) -> str:
    """Return the device and its driver in a line."""
    info = device.info
    return f"{info.name} ({info.driver_name} {info.driver_info})"
