"""`Graph`: a built graph. Its parts are made once; a run writes and reads live words only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import as_array
from ..errors import ClosedError, OptionError, PlanError
from ..formats import check_range
from ..graph.steps import Resource
from ..graph.values import Position, Value, live, lives
from ..mask import MAX_POSITION, as_integer
from ..runtime.device import Device
from ..runtime.recording import Recording
from ..validate import check_additive
from .assembly import Assembly, Plan
from .blocks import Block
from .host import as_input, bind_shape, read_scores, score_words
from .live import Live, view
from .report import Report, Row
from .timings import Span, Timings

#: Combinations of input shapes that a graph remembers.
MAX_LIVE = 256


class Graph(Assembly):
    """A graph that can be run for any lengths within its capacities. Made by `GraphBuilder.build`.

    Example
    -------
    >>> graph = builder.build()  # doctest: +SKIP
    >>> graph.run({"q": q, "k": k, "v": v}, input_pos=12)["out"]  # doctest: +SKIP
    """

    def __init__(self, device: Device, plan: Plan, resources: Mapping[Value, Resource]) -> None:
        self._live: dict[tuple[Any, ...], Live] = {}
        self._closed = False
        super().__init__(device, plan, resources)
        self._latest = self._longest
        device.close_first(self)

    def run(self, inputs: Mapping[str, Any], /, **dims_and_positions: Any) -> dict[str, np.ndarray]:
        """Run the graph for these inputs.

        Parameters
        ----------
        inputs : mapping of name -> Array
            One for each declared input, with its dtype; the sizes of its Dims are taken from its shape.
        **dims_and_positions : int, or integers ``[batch]``
            Every declared position, and Dims that no input's shape has.

        Returns
        -------
        dict of name -> Array : fresh arrays, one for each declared output

        Raises
        ------
        ShapeError, DTypeError, PlanError, OptionError
            Inputs or positions are missing, unknown, or do not fit.
        CapacityError
            A length is above its capacity. Nothing has run, and no cache has changed.
        """
        if self._closed:
            raise ClosedError("a graph was used after close().")
        self.device.check()
        arrays, live_parts = self._bind(inputs, dims_and_positions)
        dims, scalars = live_parts.dims, self._scalars(dims_and_positions)
        for name, array in zip(self._plan.inputs, arrays, strict=True):
            for dtype in self._plan.quantised_inputs.get(name, ()):
                check_range(name, array, dtype)
        with self.device.lock:
            notes = self._check_appends(dims, scalars)
            self._check_masks(arrays, dims, scalars)
            for place, array in zip(live_parts.inputs, arrays, strict=True):
                place.write(array)
            words = self._params.words
            words[self._counts_at : self._counts_at + len(live_parts.counts)] = live_parts.counts
            mode = "short" if live_parts.is_short else "long"
            chunks = 1
            for block in self._blocks.values():
                chunks = max(chunks, block.write(words, dims, scalars, mode))
            for name, index in self._copied_scores.items():
                words[self._counts_at + index] = score_words(self._plan.outputs[name], dims, scalars)
            self._latest = self._recording(mode, chunks)
            self._latest.run()
            for cache, position, tokens, layer in notes:
                cache.note_append(position, tokens, layer)
            return {name: live_parts.outputs[name].read() if value.kind == "tensor" else
                    read_scores(self._words_of(self._output_places[name]), value, dims, scalars)
                    for name, value in self._plan.outputs.items()}

    def _recording(self, mode: str, chunks: int) -> Recording:
        """Return the recording for a run: the shortest that has enough chunks."""
        mode = mode if (mode, 1) in self._recordings else "long"
        if chunks == 1:
            return self._recordings[mode, 1]
        return min(((count, recording) for (kind, count), recording in self._recordings.items()
                    if kind == mode and count >= chunks), key=lambda found: found[0])[1]

    def _bind(self, inputs: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[list[np.ndarray], Live]:
        """Return the inputs as arrays and what they make live, or raise where they do not fit the declarations."""
        plan = self._plan
        if not isinstance(inputs, Mapping):
            raise PlanError(f"`inputs` is a {type(inputs).__name__}; it must be a mapping of the names "
                            f"{sorted(plan.inputs)} to arrays.")
        if inputs.keys() != plan.inputs.keys():
            missing, extra = sorted(plan.inputs.keys() - inputs.keys()), sorted(inputs.keys() - plan.inputs.keys())
            raise PlanError(f"inputs missing: {missing}; inputs that were not declared: {extra}.")
        named: dict[str, int] = {}
        for name, size in given.items():
            if name in plan.dims:
                number = as_integer(size)
                if number is None:
                    raise PlanError(f"{name!r} is {size!r}; the size of a Dim must be an integer.")
                named[name] = number
            elif name not in plan.positions:
                raise PlanError(f"{name!r} is neither a position nor a Dim of this graph; those are "
                                f"{sorted([*plan.positions, *plan.dims])}.")
        arrays = [as_input(name, value, inputs[name]) for name, value in plan.inputs.items()]
        sizes = (*(array.shape for array in arrays), *named.items())
        found = self._live.get(sizes)
        if found is None:
            if len(self._live) >= MAX_LIVE:
                self._live.clear()
            found = self._live[sizes] = self._find_live(arrays, self._bind_sizes(arrays, named))
        return arrays, found

    def _find_live(self, arrays: list[np.ndarray], dims: dict[str, int]) -> Live:
        """Return what is live in runs whose inputs have the shapes of ``arrays``."""
        plan = self._plan
        inputs = tuple(view(self._words_of(self._resources[value]), array.shape, value.dtype)
                       for array, value in zip(arrays, plan.inputs.values(), strict=True))
        outputs = {name: view(self._words_of(self._output_places[name]), lives(value.shape, dims), value.dtype)
                   for name, value in plan.outputs.items() if value.kind == "tensor"}
        counts = [place.num_words for place in inputs]
        counts += [outputs[name].num_words if name in outputs else 0 for name in plan.outputs]
        is_short = all(block.is_short(dims) for block in self._blocks.values()
                       if isinstance(block, Block) and block.is_choosing)
        return Live(dims, is_short, inputs, outputs, np.array(counts, np.uint32))

    def _words_of(self, resource: Resource) -> np.ndarray:
        """Return the words of a resource in host memory."""
        buffer, start, stop = self._spots[resource.key]
        return buffer.words[start:stop]

    def _bind_sizes(self, arrays: list[np.ndarray], named: Mapping[str, int]) -> dict[str, int]:
        """Return the live Dims of a run, or raise where the shapes do not fit the declarations."""
        plan = self._plan
        dims: dict[str, int] = {}
        for name, size in named.items():
            bind_shape(name, (plan.dims[name],), (size,), dims)
        for array, (name, value) in zip(arrays, plan.inputs.items(), strict=True):
            bind_shape(name, value.shape, array.shape, dims)
        absent = sorted(plan.dims.keys() - dims.keys())
        if absent:
            raise PlanError(f"the sizes {absent} are in no input's shape; give them by name.")
        return dims

    def _scalars(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        result = {}
        for name in self._plan.positions:
            if name not in given:
                raise PlanError(f"position {name!r} is missing. Hint: run(inputs, {name}=...).")
            value = as_array(given[name], name)
            if value.dtype.kind not in "iu" or value.ndim > 1 or value.size == 0:
                raise OptionError(f"position {name!r} is {given[name]!r}; it must be an integer, or one for each batch "
                                  "entry.")
            numbers = value.reshape(-1).tolist()  # of few numbers Python is quicker than NumPy
            if min(numbers) < -MAX_POSITION or max(numbers) > MAX_POSITION:
                raise OptionError(f"position {name!r} is {given[name]!r}; it must be within +-{MAX_POSITION}.")
            result[name] = value.astype(np.int64).reshape(-1)
        return result

    def _check_appends(self, dims: Mapping[str, int], scalars: Mapping[str, np.ndarray]) -> list[tuple[Any, ...]]:
        """Check every append of this run in turn; return what to note in the caches once it has run."""
        notes: list[tuple[Any, ...]] = []
        lengths: dict[tuple[str, int], np.ndarray] = {}
        chosen_by: dict[tuple[str, int], int | Position] = {}
        for node, append in self._plan.appends.items():
            cache = self._plan.caches[append.cache]
            cache.check()
            layer = append.layer
            if isinstance(layer, Position):
                layer = cache.check_layer(int(layer.per_batch(scalars, 1)[0]))
                if cache.storage.place(layer)[0] != (append.group or 0):
                    raise OptionError(f"{node}: layer {layer} of cache {append.cache!r} is in another pair of buffers "
                                      "than the one that this graph is for.")
            place = (append.cache, layer)
            if chosen_by.setdefault(place, append.layer) != append.layer:
                raise PlanError(f"{node}: layer {layer} of cache {append.cache!r} is chosen by position "
                                f"{chosen_by[place]} too; each append of a run needs a layer of its own.")
            count = live(append.tokens, dims)
            start = cache.check_append(append.position.per_batch(scalars, cache.batch), count, layer,
                                       lengths.get(place))
            lengths[place] = start + count
            notes.append((cache, start, count, layer))
        return notes

    def _check_masks(self, arrays: list[np.ndarray], dims: Mapping[str, int],
                     scalars: Mapping[str, np.ndarray]) -> None:
        """Raise OptionError if a float mask that is an input or a constant holds NaN or plus infinity at a live key."""
        plan = self._plan
        if plan.float_masks:
            given = plan.constants | dict(zip(plan.inputs.values(), arrays, strict=True))
            for mask, spec in plan.float_masks:
                check_additive(given[mask], spec.lengths(dims, scalars)[0], mask.producer)

    def timings(self) -> Timings:
        """Run the last run's recording once more, with timestamps: node, kernel variant, nanoseconds of each dispatch.

        ``str(timings)`` is a table and ``timings.as_dict()`` is for JSON. The appends of that run are repeated at the
        same place, so caches do not change unless something else wrote there since. The recording with timestamps is
        made at the first call; the timestamps keep dispatches from overlapping.
        """
        if self._closed:
            raise ClosedError("a graph was used after close().")
        for cache in self._plan.caches.values():
            cache.check()
        spans = zip(self._latest.dispatches, self._latest.timings(), strict=True)
        return Timings(Span(dispatch.label, variant_name, span) for dispatch, (variant_name, span) in spans)

    @property
    def recording(self) -> Recording:
        """The recording of the last run (before the first: the longest), for measurements; it belongs to the graph."""
        if self._closed:
            raise ClosedError("a graph was used after close().")
        return self._latest

    def report(self) -> Report:
        """Return what the graph holds: buffers, scratch and who shares it, dispatches, pipelines."""
        if self._closed:
            raise ClosedError("a graph was used after close().")
        rows = [Row(buffer.name, buffer.kind, buffer.size_bytes) for buffer in self._buffers]
        shared = {}
        for need in self._needs:
            buffer, start, stop = self._spots[need.key]
            shared[_label(need.key)] = (buffer.name, 4 * start, 4 * (stop - start), need.first, need.last)
        full = self._longest
        return Report(rows, shared, {name: cache.nbytes for name, cache in self._plan.caches.items()},
                      full.num_dispatches, self._pipelines.count, full.num_segments, full.num_submissions)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this graph, its caches not counted."""
        return sum(buffer.allocated_bytes for buffer in self._buffers)

    def close(self) -> None:
        """Free the graph, and caches that were made for it alone."""
        if not self._closed:
            self._closed = True
            with self.device.lock:
                self._live.clear()
                self._free()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _label(key: Any) -> str:
    if isinstance(key, Value):
        return key.producer
    return " ".join(part.producer if isinstance(part, Value) else str(part) for part in key) if isinstance(
        key, tuple) else str(key)
