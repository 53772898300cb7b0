"""`Graph`: a built graph. Buffers, pipelines and recordings are made once; a run writes and reads live words only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ClosedError, OptionError, PlanError
from ..graph.hazards import segments
from ..graph.memory import Need, Spot, arena_words, padded, place
from ..graph.node import Binding, Dispatch
from ..graph.steps import Base, Resource, Step
from ..graph.values import Dim, Position, Size, Value, live
from ..kernels.manifest import variant
from ..kernels.params import COUNT_IS_PUSHED
from ..kernels.three_pass import CHUNKS_PER_SUBMISSION
from ..mask import MAX_POSITION
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from ..runtime.recording import Recording
from .host import as_input, bind_shape, output_words, read_output, write_input
from .plan import clear
from .report import Report, Row
from .spec import Block, DimsBlock
from .timings import Span, Timings

HOST_POOLS = ("input", "output")

class Append(NamedTuple):
    """An append to a cache: its name in the graph, where row 0 goes, rows, the layer, and the group of buffers."""

    cache: str
    position: Position
    tokens: Size
    layer: int | Position
    group: int | None


@dataclass
class Plan:
    """What a builder has declared."""

    inputs: dict[str, Value] = field(default_factory=dict)
    constants: dict[Value, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    output_at: dict[str, int] = field(default_factory=dict)
    positions: list[str] = field(default_factory=list)
    dims: dict[str, Dim] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    own_caches: list[Any] = field(default_factory=list)
    cache_places: dict[Any, tuple[Buffer, int]] = field(default_factory=dict)
    #: By node.
    appends: dict[str, Append] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Graph:
    """A graph that can be run for any lengths within its capacities. Made by `GraphBuilder.build`.

    Example
    -------
    >>> graph = builder.build()  # doctest: +SKIP
    >>> graph.run({"q": q, "k": k, "v": v}, input_pos=12)["out"]  # doctest: +SKIP
    """

    def __init__(self, device: Device, plan: Plan, resources: Mapping[Value, Resource]) -> None:
        self.device = device
        self._plan = plan
        self._resources = dict(resources)
        self._buffers: list[Buffer] = []
        self._spots: dict[Any, tuple[Buffer, int, int]] = {}
        #: By mode ("short" or "long") and the chunks of query rows that are recorded.
        self._recordings: dict[tuple[str, int], Recording] = {}
        self._closed = False
        try:
            with device.lock:
                self._build()
        except Exception:
            self._free()
            raise
        device.close_first(self)

    # --- building ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        device, plan = self.device, self._plan
        steps = self._steps()
        self._blocks, params_words = self._make_blocks(steps)
        self._params = self._buffer("params", max(params_words + len(plan.inputs) + len(plan.outputs), 4), "host")
        self._counts_at = params_words
        self._zero = self._buffer("nothing", 4, "storage")
        self._place(steps)
        for block in self._blocks.values():
            block.prepare(self._params.words)
        self._upload_constants()
        self._pipelines = device.pipelines()
        modes = {"long", *(step.mode for step in steps if step.mode)}
        for mode in sorted(modes):
            chosen = [step for step in steps if step.mode in ("", mode)]
            for count in {1, max((step.chunk for step in chosen), default=0) + 1}:
                dispatches = [self._dispatch(step) for step in chosen if step.chunk < count]
                self._recordings[mode, count] = device.recording(segments(dispatches), self._pipelines)
        for recording in self._recordings.values():  # the driver compiles at the first evaluation; nothing is live
            recording.run()
        self._latest = self._longest

    def _steps(self) -> list[Step]:
        """Return the plan's steps with uploads before and copies to outputs between them."""
        plan, result = self._plan, []
        near: dict[Any, Resource] = {}
        if not self.device.info.is_unified:
            for index, value in enumerate(plan.inputs.values()):
                source = self._resources[value]
                near[source.key] = Resource((value, "near"), source.words, "arena")
                result.append(self._copy(f"upload {value.producer}", source, near[source.key], index))
        read_later: dict[Any, int] = {}
        for at, step in enumerate(plan.steps):
            for resource, _ in step.touched():
                read_later[resource.key] = at
        copies: dict[int, list[Step]] = {}
        direct: dict[Any, Resource] = {}
        self._output_places: dict[str, Resource] = {}
        #: Outputs whose live words a run copies, with the index of the word that counts them.
        self._copied: dict[str, int] = {}
        for index, (name, value) in enumerate(plan.outputs.items(), start=len(plan.inputs)):
            source = self._resources[value]
            if source.key in direct:  # a second name for the same value
                self._output_places[name] = direct[source.key]
                continue
            target = Resource((name, "output"), source.words, "output")
            self._output_places[name] = target
            is_last = read_later[source.key] < plan.output_at[name] and not any(
                self._reads(step, source) for step in plan.steps)
            if is_last and value.kind == "tensor":
                direct[source.key] = target
            else:
                self._copied[name] = index
                copies.setdefault(plan.output_at[name], []).append(self._copy(f"output {name}", source, target, index))
        for at, step in enumerate(plan.steps):
            result += copies.get(at, [])
            swapped = tuple(direct.get(r.key) or near.get(r.key) or r for r in step.resources)
            result.append(Step(**{**step.__dict__, "resources": swapped}))
        return result + copies.get(len(plan.steps), [])

    @staticmethod
    def _reads(step: Step, resource: Resource) -> bool:
        return any(touched.key == resource.key and declared.reads
                   for touched, declared in zip(step.resources, step.variant.bindings, strict=True))

    def _copy(self, node: str, source: Resource, target: Resource, index: int) -> Step:
        """Return a copy of as many words as the params word ``index`` behind the blocks says in a run."""
        params = Resource("params", 0, "params")
        bases = (Base("src_offset", 1, 1), Base("dst_offset", 2, 1))
        return Step(node, variant("copy"), (params, source, target), bases, None, {"count_index": index, "count": 0},
                    min(512, self.device.info.max_workgroup_count[0]))

    def _make_blocks(self, steps: list[Step]) -> tuple[dict[Any, Block | DimsBlock], int]:
        """Return the params block of each different spec, and the words of all."""
        blocks: dict[Any, Block | DimsBlock] = {}
        words = 0
        for step in steps:
            key = step.block.sizes if isinstance(step.block, DimsBlock) else step.block
            if key is None or key in blocks:
                continue
            blocks[key] = (DimsBlock(step.block.sizes, words) if isinstance(step.block, DimsBlock)
                           else Block(step.block, words, self.device.info))  # type: ignore[arg-type]
            words += padded(blocks[key].num_words)
        return blocks, words

    def _buffer(self, name: str, num_words: int, kind: str) -> Buffer:
        self._buffers.append(self.device.buffer(num_words, kind, name))  # type: ignore[arg-type]
        return self._buffers[-1]

    def _place(self, steps: list[Step]) -> None:
        """Give every resource its buffer and words; temporaries share by their lifetimes."""
        limit = self.device.info.max_storage_buffer_range // 4
        spans: dict[Any, list[Any]] = {}
        for at, step in enumerate(steps):
            for resource in step.resources:
                span = spans.setdefault(resource.key, [resource, at, at])
                span[2] = at
        self._needs = [Need(key, resource.words, first, last)
                       for key, (resource, first, last) in spans.items() if resource.pool == "arena"]
        spots = place(self._needs, limit)
        arenas = [self._buffer(f"arena {index}", words, "storage")
                  for index, words in enumerate(arena_words(spots.values()))]
        self._spots |= {key: (arenas[spot.arena], spot.start, spot.stop) for key, spot in spots.items()}
        for pool in (*HOST_POOLS, "constant", "zeroed"):
            kind = "host" if pool in HOST_POOLS else "storage"
            always = [Need(key, resource.words, 0, 0) for key, (resource, _, _) in spans.items()
                      if resource.pool == pool]
            fixed: dict[Any, Spot] = place(always, limit)
            buffers = [self._buffer(f"{pool}s {index}", words, kind)
                       for index, words in enumerate(arena_words(fixed.values()))]
            for buffer in buffers if pool == "zeroed" else ():
                clear(self.device, buffer)
            self._spots |= {key: (buffers[spot.arena], spot.start, spot.stop) for key, spot in fixed.items()}
        for key, (buffer, start) in self._plan.cache_places.items():
            if key in spans:
                self._spots[key] = (buffer, start, start + spans[key][0].words)
        self._spots["params"] = (self._params, 0, self._params.num_words)
        self._spots["nothing"] = (self._zero, 0, 0)

    def _dispatch(self, step: Step) -> Dispatch:
        bindings, starts = [], []
        for resource in step.resources:
            buffer, start, stop = self._spots[resource.key]
            bindings.append(Binding(buffer, (start, stop)))
            starts.append(start)
        push = dict(step.push)
        for base in step.bases:
            push[base.push] = starts[base.binding] // base.unit_words
        if step.block is not None:
            key = step.block.sizes if isinstance(step.block, DimsBlock) else step.block
            push["params_base"] = self._blocks[key].base
        elif push.get("count_index", COUNT_IS_PUSHED) != COUNT_IS_PUSHED:
            push["count_index"] += self._counts_at
        return Dispatch(step.variant, tuple(bindings), push, step.groups, step.chunk // CHUNKS_PER_SUBMISSION,
                        step.code, step.node, step.spec)

    def _upload_constants(self) -> None:
        for value, array in self._plan.constants.items():
            buffer, start, _ = self._spots[self._resources[value].key]
            staging = self.device.buffer(self._resources[value].words, "host", f"upload of {value.producer}")
            count = write_input(staging.words, array, value.dtype)
            push = {"count_index": COUNT_IS_PUSHED, "count": count, "src_offset": 0, "dst_offset": start}
            bindings = (Binding(staging), Binding(staging), Binding(buffer))
            recording = self.device.recording([[Dispatch(variant("copy"), bindings, push, 64)]])
            recording.run()
            recording.close()
            staging.destroy()

    # --- running ----------------------------------------------------------------------------------------------------

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
        arrays, dims = self._bind(inputs, dims_and_positions)
        scalars = self._scalars(dims_and_positions)
        with self.device.lock:
            notes = self._check_appends(dims, scalars)
            for index, (name, array) in enumerate(arrays.items()):
                buffer, start, stop = self._spots[self._resources[self._plan.inputs[name]].key]
                count = write_input(buffer.words[start:stop], array, self._plan.inputs[name].dtype)
                self._params.words[self._counts_at + index] = count
            mode = "short" if all(block.is_short(dims) for block in self._blocks.values()) else "long"
            chunks = 1
            for block in self._blocks.values():
                chunks = max(chunks, block.write(self._params.words, dims, scalars, mode))
            for name, index in self._copied.items():
                self._params.words[self._counts_at + index] = output_words(self._plan.outputs[name], dims, scalars)
            self._latest = self._recording(mode, chunks)
            self._latest.run()
            for cache, position, tokens, layer in notes:
                cache.note_append(position, tokens, layer)
            results = {}
            for name, value in self._plan.outputs.items():
                buffer, start, _ = self._spots[self._output_places[name].key]
                count = output_words(value, dims, scalars)
                results[name] = read_output(buffer.words[start : start + count], value, dims, scalars)
        return results

    def _recording(self, mode: str, chunks: int) -> Recording:
        """Return the recording for a run: the shortest that has enough chunks."""
        mode = mode if (mode, 1) in self._recordings else "long"
        return min(((count, recording) for (kind, count), recording in self._recordings.items()
                    if kind == mode and count >= chunks), key=lambda found: found[0])[1]

    @property
    def _longest(self) -> Recording:
        return self._recordings["long", max(count for mode, count in self._recordings if mode == "long")]

    def _bind(
        self, inputs: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return the inputs as arrays and the live Dims, or raise where they do not fit the declarations."""
        plan = self._plan
        if inputs.keys() != plan.inputs.keys():
            missing, extra = sorted(plan.inputs.keys() - inputs.keys()), sorted(inputs.keys() - plan.inputs.keys())
            raise PlanError(f"inputs missing: {missing}; inputs that were not declared: {extra}.")
        dims: dict[str, int] = {}
        for name, size in given.items():
            if name in plan.dims:
                bind_shape(name, (plan.dims[name],), (int(size),), dims)
            elif name not in plan.positions:
                raise PlanError(f"{name!r} is neither a position nor a Dim of this graph; those are "
                                f"{sorted([*plan.positions, *plan.dims])}.")
        arrays = {}
        for name, value in plan.inputs.items():
            arrays[name] = as_input(name, value, inputs[name])
            bind_shape(name, value.shape, arrays[name].shape, dims)
        absent = sorted(plan.dims.keys() - dims.keys())
        if absent:
            raise PlanError(f"the sizes {absent} are in no input's shape; give them by name.")
        return arrays, dims

    def _scalars(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        result = {}
        for name in self._plan.positions:
            if name not in given:
                raise PlanError(f"position {name!r} is missing. Hint: run(inputs, {name}=...).")
            value = np.asarray(given[name])
            if value.dtype.kind not in "iu" or value.ndim > 1 or value.size == 0:
                raise OptionError(f"position {name!r} is {given[name]!r}; it must be an integer, or one for each batch "
                                  "entry.")
            if int(value.min()) < -MAX_POSITION or int(value.max()) > MAX_POSITION:
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

    # --- looking ----------------------------------------------------------------------------------------------------

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
                self._free()

    def _free(self) -> None:
        for recording in self._recordings.values():
            recording.close()
        self._recordings = {}
        if hasattr(self, "_pipelines"):
            self._pipelines.close()
        for buffer in self._buffers:
            buffer.destroy()
        for cache in self._plan.own_caches:
            cache.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


def _label(key: Any) -> str:
    if isinstance(key, Value):
        return key.producer
    return " ".join(part.producer if isinstance(part, Value) else str(part) for part in key) if isinstance(
        key, tuple) else str(key)
