"""From an attention node to steps: its algorithms, the three passes singly, and the append to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cache.append import append_groups, append_kernel
from ..caps.model import DeviceInfo
from ..dispatch import by_name, choose
from ..errors import NoKernelError
from ..graph.memory import ALIGN_WORDS
from ..graph.steps import Base, Resource, Step
from ..graph.values import capacity
from ..kernels import split
from ..kernels.grid import num_groups
from ..kernels.passes import Pass, unit_words
from ..kernels.three_pass import MULTIPLY_ADDS_PER_SECOND, passes, tiles_that_fit
from ..layout import words_per_vec
from ..problem import Problem
from .spec import AttentionSpec, short_problem

#: The three passes, in the order of `three_pass.passes`.
WEIGHTS, SOFTMAX, OUTPUT = range(3)


@dataclass(frozen=True)
class Tensors:
    """The resources of an attention node; ``nothing`` stands for a mask or lse that is not there."""

    params: Resource
    query: Resource
    key: Resource
    value: Resource
    mask: Resource
    scores: Resource
    lse: Resource
    out: Resource


def with_scores(spec: AttentionSpec, info: DeviceInfo, budget_words: int, whole: bool) -> AttentionSpec:
    """Return ``spec`` with the words of its score buffer: all of the matrix if ``whole``, else within the budget."""
    q_len, keys = capacity(spec.q_len), capacity(spec.kv_len)
    limit = info.max_storage_buffer_range // 4 if whole else min(info.max_storage_buffer_range // 4, budget_words)
    limit -= limit % ALIGN_WORDS
    cut = replace(spec, score_words=limit).cut(q_len, keys, info)
    needed = cut.row_tiles * cut.tile_words
    most = tiles_that_fit(spec.problem, keys, info) if whole else None
    if most is not None and cut.row_tiles > most:
        raise NoKernelError(f"{cut.row_tiles} tiles of query rows at once go beyond the 65535 loop iterations of an "
                            "invocation after which llvmpipe ends loops without an error. Hint: declare one attention "
                            "node, which goes in chunks.")
    return replace(spec, score_words=needed if whole else min(needed, limit), whole=whole)


def with_algorithms(spec: AttentionSpec, info: DeviceInfo, budget_words: int, algorithm: str) -> AttentionSpec:
    """Return ``spec`` with what computes it: one algorithm, or one for short runs and one for long ones.

    Raises
    ------
    NoKernelError, OptionError
        As `choose`.
    """
    problem, names = spec.problem, []
    limit = split.preferred_rows(problem, info)
    short = short_problem(problem, limit)
    if (algorithm == "auto" and problem.max_q_len > short.max_q_len and limit >= problem.group_size
            and not split.not_supported_reasons(short, info)):
        names.append(split.NAME)
    names.append(choose(problem, info, algorithm).NAME)
    spec = replace(spec, algorithms=tuple(names), short_rows=limit)
    room = info.max_storage_buffer_range // 4
    room -= room % ALIGN_WORDS
    scratch: dict[str, int] = {}
    for name in names:
        scratch |= by_name(name).scratch_words(spec.problem_of(name), info, min(room, budget_words))
    return replace(spec, scratch=tuple(sorted(scratch.items())))


def attend(node: str, spec: AttentionSpec, tensors: Mapping[str, Resource], info: DeviceInfo) -> list[Step]:
    """Return the steps of each algorithm and chunk at capacity; a run uses those that it has work for."""
    steps = []
    for index, name in enumerate(spec.algorithms):
        module, problem = by_name(name), spec.problem_of(name)
        mode = ("short", "long")[index] if len(spec.algorithms) > 1 else ""
        chunks = module.cut(problem, problem.max_q_len, problem.max_kv_len, dict(spec.scratch), info).num_chunks
        parts = module.passes(problem, info)
        seconds = multiply_adds(problem) / MULTIPLY_ADDS_PER_SECOND[info.device_type] / (chunks * len(parts))
        for chunk in range(chunks):
            for one in parts:
                resources = tuple(tensors[tensor] for tensor in ("params", *one.tensors))
                push = {"chunk": chunk} if "chunk" in one.kernel.push else {}
                unwritten = frozenset() if spec.appends else one.appended
                steps.append(Step(node, one.kernel, resources, bases_of(one, problem), spec, push, one.groups(info),
                                  chunk, mode, one.spec, unwritten=unwritten, seconds=seconds))
    return steps


def bases_of(one: Pass, problem: Problem) -> tuple[Base, ...]:
    """Return the push constants that tell a pass where each of its tensors starts."""
    return tuple(Base(one.base(tensor), at, unit_words(tensor, problem))
                 for at, tensor in enumerate(one.tensors, start=1))


def multiply_adds(problem: Problem) -> int:
    """Return the multiply-adds of a problem at capacity, nothing masked."""
    scores = problem.batch_size * problem.num_heads * problem.max_q_len * problem.max_kv_len
    return scores * (problem.head_dim + problem.value_dim)


def can_append(spec: AttentionSpec, info: DeviceInfo) -> bool:
    """Whether the algorithm for short runs writes the new rows of a cache itself, so that one dispatch does all."""
    name = spec.algorithms[0]
    first = by_name(name).passes(spec.problem_of(name), info)[0]
    return bool(first.appended) and spec.new_dtype == spec.query_dtype


def pass_step(node: str, spec: AttentionSpec, number: int, tensors: Tensors, info: DeviceInfo) -> Step:
    """Return one of the three passes by itself: `WEIGHTS`, `SOFTMAX` or `OUTPUT`."""
    one = passes(spec.problem)[number]
    resources = tuple(getattr(tensors, name) for name in ("params", *one.tensors))
    return Step(node, one.kernel, resources, bases_of(one, spec.problem), spec, {"chunk": 0}, num_groups(info))


def append_step(node: str, spec: AttentionSpec, new: tuple[Resource, Resource], cache: tuple[Resource, Resource],
                params: Resource, info: DeviceInfo, mode: str = "") -> Step:
    """Return the append of new key and value rows to a layer of a cache."""
    kernel = append_kernel(spec.new_dtype, (spec.key_dtype, spec.stored_value_dtype))
    new_unit, unit = words_per_vec(spec.new_dtype), unit_words("key", spec.problem)
    bases = (Base("new_key_base", 1, new_unit), Base("new_value_base", 2, new_unit), Base("key_base", 3, unit),
             Base("value_base", 4, unit))
    rows = spec.batch_size * spec.num_kv_heads * capacity(spec.new_len)
    groups = append_groups(rows, (spec.head_dim, spec.value_dim), (spec.key_dtype, spec.stored_value_dtype))
    return Step(node, kernel, (params, *new, *cache), bases, spec, {}, min(num_groups(info), groups, 256), mode=mode)
