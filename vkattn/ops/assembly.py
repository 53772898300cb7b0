"""What a graph is made of: `Assembly` turns a declared plan into buffers, pipelines and recordings, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..cache.move import copy_words, run_once
from ..graph.hazards import segments
from ..graph.memory import Need, Spot, arena_words, padded, place
from ..graph.node import Binding, Dispatch
from ..graph.steps import FAR_PARAMS, NEAR_PARAMS, Base, Resource, Step, submissions
from ..graph.values import Dim, Position, Size, Value
from ..kernels.manifest import variant
from ..kernels.params import COUNT_IS_PUSHED
from ..kernels.three_pass import CHUNKS_PER_SUBMISSION, DISPATCH_SECONDS
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from ..runtime.recording import Recording
from .blocks import Block, DimsBlock
from .live import view
from .plan import clear, params_copy
from .spec import AttentionSpec

HOST_POOLS = ("input", "output")

#: What a submission may take by estimate: desktop drivers reset a GPU that is busy for seconds.
SUBMISSION_SECONDS = CHUNKS_PER_SUBMISSION * DISPATCH_SECONDS


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
    #: Formats of the quantised caches to which an input is appended as it is given.
    quantised_inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Float masks that every run looks at, each with what attends through it: nodes that are alike are one.
    float_masks: set[tuple[Value, AttentionSpec]] = field(default_factory=set)
    cache_places: dict[Any, tuple[Buffer, int]] = field(default_factory=dict)
    #: By node.
    appends: dict[str, Append] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Assembly:
    """The buffers, pipelines and recordings of a plan. Base of `Graph`, which runs them."""

    def __init__(self, device: Device, plan: Plan, resources: Mapping[Value, Resource]) -> None:
        self.device = device
        self._plan = plan
        self._resources = dict(resources)
        self._buffers: list[Buffer] = []
        self._spots: dict[Any, tuple[Buffer, int, int]] = {}
        #: By mode ("short" or "long") and the chunks of query rows that are recorded.
        self._recordings: dict[tuple[str, int], Recording] = {}
        try:
            with device.lock:
                self._build()
        except Exception:
            self._free()
            raise

    def _build(self) -> None:
        device, plan = self.device, self._plan
        steps = self._steps()
        self._blocks, params_words = self._make_blocks(steps)
        if params_words and not device.info.is_unified:
            steps.insert(0, self._params_upload(params_words))
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
                live = [step for step in chosen if step.chunk < count]
                numbers = submissions(live, SUBMISSION_SECONDS)
                dispatches = [self._dispatch(step, number) for step, number in zip(live, numbers, strict=True)]
                self._recordings[mode, count] = device.recording(segments(dispatches), self._pipelines)
        for recording in self._recordings.values():  # the driver compiles at the first evaluation; nothing is live
            recording.run()

    def _steps(self) -> list[Step]:
        """Return the plan's steps with uploads before and copies to outputs between them."""
        plan, result = self._plan, []
        near: dict[Any, Resource] = {}
        if not self.device.info.is_unified:
            near[FAR_PARAMS.key] = NEAR_PARAMS
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
        #: Scores that a run copies to an output, with the index of the word that counts them.
        self._copied_scores: dict[str, int] = {}
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
                if value.kind != "tensor":
                    self._copied_scores[name] = index
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
        bases = (Base("src_offset", 1, 1), Base("dst_offset", 2, 1))
        push = {"count_index": index, "count": 0}
        return Step(node, variant("copy"), (FAR_PARAMS, source, target), bases, None, push,
                    min(512, self.device.info.max_workgroup_count[0]))

    @staticmethod
    def _params_upload(num_words: int) -> Step:
        """Return the copy of all params blocks into the device's memory."""
        return Step("upload params", variant("copy"), (FAR_PARAMS, FAR_PARAMS, NEAR_PARAMS), (), None,
                    *params_copy(num_words))

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
        self._spots[FAR_PARAMS.key] = (self._params, 0, self._params.num_words)
        if NEAR_PARAMS.key in spans:
            near = self._buffer("params (device)", self._params.num_words, "storage")
            self._spots[NEAR_PARAMS.key] = (near, 0, near.num_words)
        self._spots["nothing"] = (self._zero, 0, 0)

    def _dispatch(self, step: Step, submission: int) -> Dispatch:
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
        return Dispatch(step.variant, tuple(bindings), push, step.groups, submission,
                        step.code, step.node, step.spec, step.unwritten)

    def _upload_constants(self) -> None:
        for value, array in self._plan.constants.items():
            buffer, start, _ = self._spots[self._resources[value].key]
            staging = self.device.buffer(self._resources[value].words, "host", f"upload of {value.producer}")
            live = view(staging.words, array.shape, value.dtype)
            live.write(array)
            try:
                run_once(self.device, [copy_words(staging, buffer, 0, start, live.num_words)])
            finally:
                staging.destroy()

    @property
    def _longest(self) -> Recording:
        return self._recordings["long", max(count for mode, count in self._recordings if mode == "long")]

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
