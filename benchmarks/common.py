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
                length: int, dtype: str = "float16", query_dtype: str | None = None,
                arrays: Sequence[np.ndarray] = ()) -> Step:
    """Return a step that has been run once, so that everything is compiled and the recording holds its lengths.

    ``arrays`` are query, keys and values (bhsd) of the step, of which the last row is the new one; random if empty.
    ``dtype`` is the cache's, and without ``query_dtype`` the query's and the new row's.
    """
    rng = np.random.default_rng(0)
    shapes = ((1, heads, 1, head_dim), (1, kv_heads, length, head_dim), (1, kv_heads, length, head_dim))
    given = query_dtype or dtype
    query_row, keys, values = (array.astype(numpy_dtype(given)).transpose(0, 2, 1, 3) for array in
                               arrays or [rng.standard_normal(shape, np.float32) for shape in shapes])
    cache = vkattn.KVCache(1, kv_heads, capacity, head_dim, dtype=dtype, device=device)
    cache.update(keys, values, 0)
    builder = vkattn.GraphBuilder(device)
    query, key, value = (builder.input(name, (1, 1, count, head_dim), given)
                         for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)))
    out = builder.sdpa_with_kv_cache(query, key, value, builder.kv_cache("cache", cache=cache),
                                     builder.position("input_pos"))
    builder.output("out", out)
    inputs = {"query": query_row, "key": keys[:, -1:], "value": values[:, -1:]}
    step = Step(builder.build(), inputs, length - 1)
    step.run()
    return step


def in_turn(functions: Sequence[Callable[[], None]], rounds: int, warm_up: int = 20,
            clock: Callable[[], float] = time.perf_counter) -> np.ndarray:
    """Return the seconds of each call, ``[rounds, functions]``: in turn, so that what disturbs one disturbs all."""
    for _ in range(warm_up):
        for function in functions:
            function()
    seconds = np.empty((rounds, len(functions)))
    for row in seconds:
        for index, function in enumerate(functions):
            start = clock()
            function()
            row[index] = clock() - start
    return seconds


def describe(device: vkattn.Device) -> str:
    """Return the device and its driver in a line."""
    info = device.info
    return f"{info.name} ({info.driver_name} {info.driver_info})"
