"""From an attention node to steps: the three passes, and the append to a cache. Used by the graph builder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..caps.model import DeviceInfo
from ..dtypes import AXIS
from ..graph.memory import ALIGN_WORDS
from ..graph.steps import Base, Resource, Step
from ..graph.values import capacity
from ..kernels.manifest import variant
from ..kernels.three_pass import variants
from ..layout import words_per_vec
from .plan import GROUPS
from .spec import AttentionSpec

VEC4_WORDS = 4


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
    return replace(spec, score_words=needed if whole else min(needed, limit), whole=whole)


def three_passes(node: str, spec: AttentionSpec, tensors: Tensors, info: DeviceInfo) -> list[Step]:
    """Return the passes of each chunk at capacity; a run uses as many chunks as it has rows for."""
    chunks = spec.cut(capacity(spec.q_len), capacity(spec.kv_len), info).num_chunks
    steps = []
    for chunk in range(chunks):
        steps += [weights_step(node, spec, tensors, info, chunk), softmax_step(node, spec, tensors, info, chunk),
                  output_step(node, spec, tensors, info, chunk)]
    return steps


def _groups(info: DeviceInfo) -> int:
    return min(GROUPS[info.device_type], info.max_workgroup_count[0])


def weights_step(node: str, spec: AttentionSpec, tensors: Tensors, info: DeviceInfo, chunk: int = 0) -> Step:
    """Return pass 1."""
    kernel, _, _ = variants(spec.problem)
    bases = (Base("query_base", 1, words_per_vec(spec.query_dtype)), Base("key_base", 2, words_per_vec(spec.key_dtype)),
             Base("mask_base", 3, 1), Base("scores_base", 4, VEC4_WORDS))
    resources = (tensors.params, tensors.query, tensors.key, tensors.mask, tensors.scores)
    return Step(node, kernel, resources, bases, spec, {"chunk": chunk}, _groups(info), chunk)


def softmax_step(node: str, spec: AttentionSpec, tensors: Tensors, info: DeviceInfo, chunk: int = 0) -> Step:
    """Return pass 2."""
    bases = (Base("scores_base", 1, VEC4_WORDS), Base("lse_base", 2, 1))
    resources = (tensors.params, tensors.scores, tensors.lse)
    return Step(node, variant("attn_softmax"), resources, bases, spec, {"chunk": chunk}, _groups(info), chunk)


def output_step(node: str, spec: AttentionSpec, tensors: Tensors, info: DeviceInfo, chunk: int = 0) -> Step:
    """Return pass 3."""
    _, _, kernel = variants(spec.problem)
    bases = (Base("probs_base", 1, VEC4_WORDS), Base("value_base", 2, words_per_vec(spec.key_dtype)),
             Base("out_base", 3, words_per_vec(spec.query_dtype)))
    resources = (tensors.params, tensors.scores, tensors.value, tensors.out)
    return Step(node, kernel, resources, bases, spec, {"chunk": chunk}, _groups(info), chunk)


def append_step(node: str, spec: AttentionSpec, new: tuple[Resource, Resource], cache: tuple[Resource, Resource],
                params: Resource, info: DeviceInfo) -> Step:
    """Return the append of new key and value rows to a layer of a cache."""
    kernel = variant(f"kv_append_{AXIS[spec.new_dtype]}_{AXIS[spec.key_dtype]}")
    new_unit, unit = words_per_vec(spec.new_dtype), words_per_vec(spec.key_dtype)
    bases = (Base("new_key_base", 1, new_unit), Base("new_value_base", 2, new_unit), Base("key_base", 3, unit),
             Base("value_base", 4, unit))
    return Step(node, kernel, (params, *new, *cache), bases, spec, {}, min(_groups(info), 256))
