"""One problem on a device by one algorithm: several input sets in one graph, a check, and recordings to time.

Each set has queries, keys and values of its own; together they are larger than a cache of the device, as far as memory
allows. For decode they are the layers of a `KVCache`, for prefill constants. The graph is run once, and rows of its
first and last set are compared with the oracle. Then the dispatches of attention alone are recorded again, one set
after another, each in a segment of its own, with outputs in the device's memory as other libraries have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from .. import oracle
from ..cache.kv_cache import KVCache
from ..graph.hazards import segments
from ..graph.node import Binding, Dispatch
from ..ops.attention import attention
from ..ops.builder import GraphBuilder
from ..ops.cached import sdpa_with_kv_cache
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from ..runtime.recording import Recording
from .clock import Spread, warm_up, warm_up_seconds
from .inputs import Pool
from .problems import BenchProblem
from .roofline import raise_clock

#: Bytes over which the input sets of a problem are spread, and how many there are at most, by device type.
SPREAD_BYTES = {"cpu": 64 << 20, "integrated": 64 << 20, "virtual": 256 << 20, "discrete": 256 << 20, "other": 64 << 20}
MOST_SETS = {"cpu": 4, "integrated": 30, "virtual": 60, "discrete": 60, "other": 30}

#: Executions in a recording at most, and the seconds that one recording may take: a busy GPU must answer its screen.
MOST_EXECUTIONS = 60
RECORDING_SECONDS = 0.15

#: The part of a recording whose first executions are not counted: the device was idle before.
RAMP = 6

#: Recordings that are timed at most.
MOST_RUNS = 7

#: Input sets from which dispatches are timed back to back: with fewer there would be a boundary after nearly each.
LEAST_STREAMED = 4

#: Elements of the keys that are uploaded in one call.
UPLOAD_ELEMENTS = 1 << 24

POOL_SEED = 2026


def num_sets(problem: BenchProblem, device_type: str) -> int:
    """Return the input sets of a problem on a device of this type."""
    return max(1, min(MOST_SETS[device_type], -(-SPREAD_BYTES[device_type] // problem.num_bytes)))


class Inputs:
    """The arrays of each set, the same for whoever computes them. Queries are doubled so that scores differ more."""

    def __init__(self, problem: BenchProblem, pool: Pool) -> None:
        self.problem = problem
        self._pool = pool

    def query(self, index: int) -> np.ndarray:
        """Return queries ``[batch, num_heads, q_len, head_dim]``."""
        given = self.problem
        shape = (given.batch_size, given.num_heads, given.q_len, given.head_dim)
        return 2 * self._pool.array(shape, given.query_dtype, 3 * index)

    def rows(self, index: int, part: int, dtype: str | None = None) -> np.ndarray:
        """Return the keys (``part`` 0) or values (1): ``[batch, num_kv_heads, length, head_dim]``."""
        given = self.problem
        shape = (given.batch_size, given.num_kv_heads, given.length, given.head_dim)
        return self._pool.array(shape, dtype or given.query_dtype, 3 * index + 1 + part)


class Case:
    """A problem by one algorithm, ready to be checked and timed; `close` frees it.

    Raises VkattnError if the library refuses the problem; the message is the reason.
    """

    def __init__(self, device: Device, problem: BenchProblem, algorithm: str, pool: Pool) -> None:
        self.device, self.problem, self.algorithm = device, problem, algorithm
        self.inputs = Inputs(problem, pool)
        self.sets = num_sets(problem, device.info.device_type)
        self.cache: KVCache | None = None
        self._recordings: list[Recording] = []
        self._pipelines = device.pipelines()
        self._twins: dict[tuple[int, int], Buffer] = {}
        self._pace = 1.0
        try:
            if problem.kind == "decode":
                self._fill_cache()
            self._build()
        except BaseException:
            self.close()
            raise

    def _fill_cache(self) -> None:
        """Make a cache with a layer for each set, and write all rows but the last, which the graph appends."""
        given = self.problem
        self.cache = KVCache(given.batch_size, given.num_kv_heads, given.length, given.head_dim, num_layers=self.sets,
                             dtype=given.dtype, device=self.device)
        step = max(1, UPLOAD_ELEMENTS // (given.batch_size * given.num_kv_heads * given.head_dim))
        for index in range(self.sets):
            key, value = (np.swapaxes(self.inputs.rows(index, part), 1, 2) for part in (0, 1))
            for start in range(0, given.length - 1, step):
                stop = min(start + step, given.length - 1)
                self.cache.update(key[:, start:stop], value[:, start:stop], start, index)

    def _build(self) -> None:
        given, builder = self.problem, GraphBuilder(self.device)
        if self.cache is not None:
            cache, position = builder.kv_cache("cache", cache=self.cache), builder.position("position")
        checked = {0, self.sets - 1}
        for index in range(self.sets):
            query = self.inputs.query(index)
            parts = [self.inputs.rows(index, part) for part in (0, 1)]
            if self.cache is not None:
                arrays = [np.swapaxes(array[:, :, -1:], 1, 2) for array in (query, *parts)]
            else:
                arrays = [query, *parts]
            query_value, key, value = (builder.constant(f"{name}_{index}", array)
                                       for name, array in zip("qkv", arrays, strict=True))
            if self.cache is not None:
                out = builder.sdpa_with_kv_cache(query_value, key, value, cache, position, layer=index,
                                                 algorithm=self.algorithm, name=f"set_{index}")
            else:
                out = builder.attention(query_value, key, value, causal="top_left" if given.causal else None,
                                        algorithm=self.algorithm, name=f"set_{index}")
            if index in checked:
                builder.output(f"out_{index}", out)
        #: What computes it: `algorithm`, or if that is "auto" what the library chose for this many rows.
        self.chosen = builder.algorithms_of("set_0")[-1]
        self.graph = builder.build()

    def rebuild(self) -> None:
        """Build the graph again for what the device's info says now; the cache stays as it is."""
        self._free_graph()
        self._build()

    def run(self) -> dict[int, np.ndarray]:
        """Run the graph; return the outputs of the first and the last set, ``[batch, num_heads, q_len, head_dim]``."""
        is_decode = self.problem.kind == "decode"
        outputs = self.graph.run({}, **({"position": self.problem.length - 1} if is_decode else {}))
        return {int(name.removeprefix("out_")): np.swapaxes(out, 1, 2) if is_decode else out
                for name, out in outputs.items()}

    def worst_share(self) -> float:
        """Compare sampled rows of the first and the last set with the oracle: the largest share of a bound."""
        uses_matrix_units = self.uses_matrix_units
        return max(self._share(index, out, uses_matrix_units) for index, out in self.run().items())

    def _share(self, index: int, out: np.ndarray, uses_matrix_units: bool) -> float:
        """Compare the rows of a KV head each of the first and the last batch entry."""
        given = self.problem
        query = self.inputs.query(index)
        parts = [self.inputs.rows(index, part) for part in (0, 1)]
        if self.cache is not None and given.is_quantised:
            parts = [np.swapaxes(array, 1, 2) for array in self.cache.read(index)]
        worst = 0.0
        for batch, head in {(0, 0), (given.batch_size - 1, given.num_kv_heads - 1)}:
            heads = slice(head * given.group_size, (head + 1) * given.group_size)
            key, value = (array[batch : batch + 1, head : head + 1] for array in parts)
            for row in sorted({0, given.q_len // 2, given.q_len - 1}):
                rows = slice(row, row + 1)
                options: dict[str, Any] = {}
                if given.kind == "prefill" and given.causal:
                    options = {"causal": "top_left", "q_offset": row}
                worst = max(worst, oracle.worst_share(
                    out[batch : batch + 1, heads, rows], query[batch : batch + 1, heads, rows], key, value,
                    coopmat=uses_matrix_units, **options))
        return worst

    def _executions(self) -> list[list[Dispatch]]:
        """Return the dispatches of attention of each set, with outputs in the device's memory."""
        found: dict[str, list[Dispatch]] = {}
        for dispatch in self.graph.recording.dispatches:
            if dispatch.variant.kernel.startswith("attn_"):
                found.setdefault(dispatch.label, []).append(self._with_outputs_near(dispatch))
        return [found[f"set_{index}"] for index in range(self.sets)]

    def _with_outputs_near(self, dispatch: Dispatch) -> Dispatch:
        """Return a dispatch that writes into the device's memory where it wrote into the host's."""
        bindings = list(dispatch.bindings)
        for at, declared in enumerate(dispatch.variant.bindings):
            buffer = bindings[at].buffer
            if declared.access == "write" and buffer.kind == "host":
                bindings[at] = Binding(self._twin(buffer), bindings[at].region)
        return replace(dispatch, bindings=tuple(bindings))

    def _twin(self, buffer: Buffer, index: int = 0) -> Buffer:
        """Return a buffer of the device's memory that stands for ``buffer`` in set ``index``."""
        key = (id(buffer), index)
        if key not in self._twins:
            self._twins[key] = self.device.buffer(buffer.num_words, "storage", f"{buffer.name} (near)")
        return self._twins[key]

    @property
    def variants(self) -> list[str]:
        """The kernel variants that compute it."""
        return list(dict.fromkeys(dispatch.variant.name for dispatch in self._executions()[0]))

    @property
    def uses_matrix_units(self) -> bool:
        """Whether operands are multiplied in half precision."""
        return any(name.startswith("attn_coopmat") for name in self.variants)

    def _record(self, count: int) -> tuple[Recording, list[int]]:
        """Record ``count`` executions, each dispatch behind a boundary; return also the dispatches of each."""
        executions = self._executions()
        chosen = [executions[index % len(executions)] for index in range(count)]
        alone = [[dispatch] for execution in chosen for dispatch in execution]
        return self._recording(alone), [len(execution) for execution in chosen]

    def _recording(self, together: list[list[Dispatch]]) -> Recording:
        self._recordings.append(self.device.recording(together, self._pipelines))
        return self._recordings[-1]

    def device_times(self, seconds: float) -> Spread:
        """Warm up, then time executions on the device for about ``seconds``, each dispatch behind a boundary."""
        raise_clock(self.device)
        first, _ = self._record(min(self.sets, 4))
        self._pace = warm_up(first.run, warm_up_seconds(self.device.info) / 7) / min(self.sets, 4)
        recording, counts = self._record(self._count)
        return self._timed(recording, counts, seconds)

    def streamed_times(self, seconds: float) -> Spread | None:
        """Time executions back to back: they are of different sets and may overlap at their ends.

        A boundary comes only before a set is used again. None where an execution is several dispatches, which depend on
        each other, or where there are few sets. Call `device_times` before.
        """
        executions = self._executions()
        if len(executions) < LEAST_STREAMED or any(len(execution) > 1 for execution in executions):
            return None
        dispatches = [self._with_memory_of_its_own(execution[0], index) for index, execution in enumerate(executions)]
        chosen = [dispatches[index % len(dispatches)] for index in range(self._count)]
        return self._timed(self._recording(segments(chosen)), [1] * len(chosen), seconds, overlap=True)

    @property
    def _count(self) -> int:
        """Executions of a recording."""
        return max(1, min(MOST_EXECUTIONS, int(RECORDING_SECONDS / self._pace)))

    def _with_memory_of_its_own(self, dispatch: Dispatch, index: int) -> Dispatch:
        """Return a dispatch whose scratch and outputs are not those of another set; counters are so anyway."""
        bindings = list(dispatch.bindings)
        for at, declared in enumerate(dispatch.variant.bindings):
            if declared.name == "parts" or declared.access == "write":
                bindings[at] = Binding(self._twin(bindings[at].buffer, index), bindings[at].region)
        return replace(dispatch, bindings=tuple(bindings))

    def _timed(self, recording: Recording, counts: list[int], seconds: float, overlap: bool = False) -> Spread:
        """Warm up, and time executions of ``counts`` dispatches; of those that ``overlap`` a recording's mean only."""
        pace = warm_up(recording.run, warm_up_seconds(self.device.info))
        recording.timings()  # makes the recording with timestamps
        found: list[float] = []
        for _ in range(max(3, min(MOST_RUNS, int(seconds / pace) + 1))):
            spans = iter(nanoseconds for _, nanoseconds in recording.timings())
            times = [sum(islice(spans, size)) for size in counts]
            counted = times[len(times) // RAMP :]
            found += [sum(counted) / len(counted)] if overlap else counted
        return Spread.of(found)

    def call(self) -> Callable[[], object]:
        """Return the whole call as a user makes it, on NumPy arrays: of the first set, by this algorithm or "auto"."""
        given = self.problem
        query, key, value = self.inputs.query(0), self.inputs.rows(0, 0), self.inputs.rows(0, 1)
        if self.cache is None:
            return lambda: attention(query, key, value, causal="top_left" if given.causal else None,
                                     algorithm=self.algorithm, device=self.device)
        query, key, value = (np.ascontiguousarray(np.swapaxes(array[:, :, -1:], 1, 2)) for array in
                             (query, key, value))
        layer = self.cache.layer(0)
        return lambda: sdpa_with_kv_cache(query, key, value, layer, given.length - 1, algorithm=self.algorithm)

    def _free_graph(self) -> None:
        """Free the graph and what was recorded of it."""
        for recording in self._recordings:
            recording.close()
        self._pipelines.close()
        self._pipelines = self.device.pipelines()
        for buffer in self._twins.values():
            buffer.destroy()
        self._recordings, self._twins = [], {}
        if hasattr(self, "graph"):
            self.graph.close()

    def close(self) -> None:
        """Free everything."""
        self._free_graph()
        if self.cache is not None:
            self.cache.close()
