"""The split family: decode and other short queries. What it supports, its variants, how keys are split.

The query rows of one KV head (group_size x q_len of them) go through its keys together, so each K and V byte is read
once for every ROWS rows. With few heads one workgroup to a head would leave most of a device idle: the keys are split,
and the last workgroup of a head to finish merges the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ..caps.model import DeviceInfo
from ..formats import is_plain, variant_axes
from ..layout import row_quads
from ..problem import Problem
from . import fields, matrix, params, split_cut, split_matrix
from .grid import row_tiles
from .manifest import Variant, load_manifest, variant
from .passes import Cut, Pass
from .split_cut import Shape, filled, keys_per_split, loops_are_too_long, most_splits, part_words
from .support import device_reasons
from .tiers import allowed_tiers

NAME = "split"

#: Query rows to a KV head at most; and those up to which it is always preferred, as it reads keys and values but once.
MAX_ROWS = 256
FEW_ROWS = 8

#: Elements of a key or value row at most, and query rows of an item, in shaders/attn_split.comp; a test ties them.
MAX_DIM = 256
BASE_ROWS = 4

#: Invocations of a workgroup, which are one subgroup, and elements of a row at most, of shaders/attn_split_lanes.comp.
LANES = 8
LANES_DIM = 128

#: Elements of a quantised row that an invocation of shaders/attn_split_quant_subgroup.comp holds.
UNIT = 16

#: Invocations of a workgroup of shaders/attn_split_subgroup.comp at least.
FEWEST_THREADS = 128

#: Invocations of a workgroup on matrix units, where the device allows them.
MATRIX_THREADS = 512


def shape(problem: Problem, info: DeviceInfo) -> Shape:
    """Return the variant to use: on matrix units if its self-test passed, else with subgroup shuffles, else without."""
    tiers = allowed_tiers()
    kernel = split_matrix.usable(problem, info, tiers)  # not remembered: a self-test may come yet
    return _shape(problem, info, tiers) if kernel is None else matrix_shape(kernel, problem, info)


def matrix_shape(kernel: Variant, problem: Problem, info: DeviceInfo) -> Shape:
    """Return how `split` uses ``kernel``, which multiplies on matrix units."""
    fits = fits_threads(kernel, MATRIX_THREADS, info)
    return Shape(kernel, BASE_ROWS, (MATRIX_THREADS if fits else FEWEST_THREADS,
                                     int(split_matrix.is_full(kernel, problem)), *constant_sizes(problem, info)))


def untested(problem: Problem, info: DeviceInfo) -> Variant | None:
    """Return the variant whose self-test decides which one is used, or None if nothing is left to decide."""
    return split_matrix.untested(problem, info, allowed_tiers())


@functools.lru_cache(maxsize=256)  # asked for in every run of a graph
def _shape(problem: Problem, info: DeviceInfo, tiers: frozenset[str]) -> Shape:
    query, key = variant_axes(problem.query_dtype, problem.key_dtype, problem.value_dtype)
    base = Shape(variant(f"attn_split_{query}_{key}"), BASE_ROWS)
    if "subgroup" not in tiers:
        return base
    if not info.tuned.split_subgroups:
        return _lanes_shape(problem, info) or base
    if not is_plain(problem.key_dtype, problem.value_dtype):
        return _quantised_shape(problem, info, key) or base
    quads = max(row_quads(problem.head_dim, problem.key_dtype), row_quads(problem.value_dim, problem.value_dtype))
    lanes = min(16, max(4, 1 << (quads - 1).bit_length()), info.subgroup_size)
    held = 1 << (-(-quads // lanes) - 1).bit_length()
    rows = 8 if problem.max_q_len * problem.group_size > 4 and lanes > 4 and held <= 2 else 4
    name = f"attn_split_subgroup_{query}_{key}_r{rows}_l{lanes}_q{held}"
    if name not in load_manifest() or device_reasons(variant(name), info):
        return base
    used_rows = min(rows, problem.max_q_len * problem.group_size)
    return Shape(variant(name), rows, (threads(variant(name), info), used_rows, *constant_sizes(problem, info)))


def constant_sizes(problem: Problem, info: DeviceInfo) -> tuple[int, ...]:
    """Return the sizes that are specialization constants too, in their order; 0 leaves one to the params.

    A GPU takes 2 to 8 % less with them. On a CPU each set of them would be compiled anew for seconds.
    """
    if info.device_type == "cpu":
        return (0,) * len(params.CONSTANT_SIZES)
    sizes = fields.sizes(problem, 1 if problem.max_q_len == 1 else 0)  # longer ones may be shorter in a run
    return tuple(int(sizes[name]) for name in params.CONSTANT_SIZES)


def _lanes_shape(problem: Problem, info: DeviceInfo) -> Shape | None:
    """Return the variant for devices that load for each invocation in turn, or None."""
    dims = (problem.head_dim, problem.value_dim)
    if not info.tuned.split_lanes or max(dims) > LANES_DIM:
        return None
    query, key = variant_axes(problem.query_dtype, problem.key_dtype, problem.value_dtype)
    kernel = variant(f"attn_split_lanes_{query}_{key}")
    if variant_reasons(kernel, info):
        return None
    chunks = (max(1, -(-dim // (4 * LANES))) for dim in dims)
    chosen = Shape(kernel, BASE_ROWS, (min(BASE_ROWS, problem.max_q_len * problem.group_size), *chunks))
    return None if loops_are_too_long(problem, chosen, info) else chosen


def threads(kernel: Variant, info: DeviceInfo) -> int:
    """Return the size of a workgroup of ``kernel``."""
    wanted = info.tuned.split_threads
    while wanted > FEWEST_THREADS and not fits_threads(kernel, wanted, info):
        wanted //= 2
    return wanted


def fits_threads(kernel: Variant, wanted: int, info: DeviceInfo) -> bool:
    """Return whether the device allows ``wanted`` invocations of ``kernel``, whose shared memory grows with them."""
    return (wanted <= min(info.max_workgroup_invocations, info.max_workgroup_size[0])
            and kernel.shared_bytes * wanted // FEWEST_THREADS <= info.max_shared_memory_bytes)


def _quantised_shape(problem: Problem, info: DeviceInfo, key: str) -> Shape | None:
    """Return the variant with subgroup shuffles for quantised keys and values of one format, or None.

    Mixed formats go without: their loads differ at run time, so none could be on the way before the first is used.
    """
    units = -(-max(problem.head_dim, problem.value_dim) // UNIT)
    lanes = max(4, 1 << (units - 1).bit_length())
    name = f"attn_split_quant_subgroup_{key}_l{lanes}"
    if name not in load_manifest() or variant_reasons(variant(name), info):
        return None
    return Shape(variant(name), BASE_ROWS, (FEWEST_THREADS, min(BASE_ROWS, problem.max_q_len * problem.group_size)))


def variants(problem: Problem, info: DeviceInfo) -> tuple[Variant, ...]:
    """Return the variant for ``problem``."""
    return (shape(problem, info).kernel,)


def variant_reasons(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why the device cannot run a variant of this family; empty if it can."""
    reasons, lanes = device_reasons(kernel, info), int(kernel.axes.get("lanes", "l0").removeprefix("l"))
    lanes = LANES if kernel.kernel == "attn_split_lanes" else lanes
    if lanes > info.subgroup_size:
        reasons.append(f"needs subgroups of {lanes} invocations, the device has {info.subgroup_size}")
    return reasons


def not_supported_reasons(problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why this family cannot compute ``problem`` on the device; empty if it can."""
    rows = problem.max_q_len * problem.group_size
    reasons = []
    if rows > MAX_ROWS:
        reasons.append(f"q_len {problem.max_q_len} x group_size {problem.group_size} is {rows} query rows to a KV "
                       f"head; at most {MAX_ROWS}")
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim > MAX_DIM:
            reasons.append(f"{name} {dim}; at most {MAX_DIM}")
    chosen = shape(problem, info)
    if loops_are_too_long(problem, chosen, info):
        items = row_tiles(problem, problem.max_q_len, chosen.rows)
        splits = split_cut.num_splits(items, problem.max_kv_len, filled(chosen, info))
        reasons.append(f"{items} items in {splits} splits go beyond the 65535 loop iterations of an invocation after "
                       "which llvmpipe ends loops without an error")
    return reasons + device_reasons(chosen.kernel, info)


def preferred_rows(problem: Problem, info: DeviceInfo) -> int:
    """Return the query rows to a KV head up to which "auto" prefers this family.

    Its time grows with the rows of all heads and entries together; that of other families does not, while their tiles
    do not fill the device.
    """
    tuned = info.tuned
    total = tuned.split_total_rows_matrix if matrix.may_take(problem, info) else tuned.split_total_rows
    return min(tuned.split_max_rows, max(FEW_ROWS, total // max(problem.batch_size * problem.num_kv_heads, 1)))


def is_passed_over(problem: Problem, info: DeviceInfo) -> bool:
    """Whether "auto" prefers other families for a problem that this one can compute."""
    return problem.max_q_len * problem.group_size > preferred_rows(problem, info)


def passes(problem: Problem, info: DeviceInfo) -> tuple[Pass, ...]:
    """Return the one pass; the subgroup form for floats can append the new rows of a cache before it reads them."""
    chosen = shape(problem, info)
    most = max(items * splits for items, splits in most_splits(problem, chosen, info))
    return tuple(replace(one, most_groups=most) for one in passes_of(chosen))


def passes_of(chosen: Shape) -> tuple[Pass, ...]:
    """Return the one pass of a variant."""
    tensors = ("query", "key", "value", "mask", "parts", "tickets", "out", "lse")
    if chosen.kernel.kernel != "attn_split_subgroup":
        return (Pass(chosen.kernel, tensors, chosen.spec),)
    return (Pass(chosen.kernel, (*tensors, "new_key", "new_value"), chosen.spec, appended=frozenset({"key", "value"}),
                 num_sizes=len(params.CONSTANT_SIZES)),)


def scratch_words(problem: Problem, info: DeviceInfo, budget_words: int) -> dict[str, int]:
    """Return the words of the parts (for any live lengths within the capacities) and of the ticket counters."""
    chosen = shape(problem, info)
    fewest = 1 if chosen.kernel.kernel == "attn_split_lanes" else 2
    most = max(items * splits if splits >= fewest else 0 for items, splits in most_splits(problem, chosen, info))
    return {"parts": max(most * part_words(problem, chosen.rows), 4),
            "tickets": row_tiles(problem, problem.max_q_len, chosen.rows)}


def cut(problem: Problem, q_len: int, max_kv_len: int, scratch: dict[str, int], info: DeviceInfo) -> Cut:
    """Return how the keys of a run of these live lengths are split; never into more parts than ``scratch`` holds."""
    return cutter(problem, scratch, info)(q_len, max_kv_len)


def cutter(problem: Problem, scratch: dict[str, int], info: DeviceInfo) -> Callable[[int, int], Cut]:
    """Return `cut` for live lengths alone, with what does not depend on them found once: a graph asks in every run."""
    chosen = shape(problem, info)
    rows, info, in_round = chosen.rows, filled(chosen, info), split_cut.round_keys(chosen)
    words = part_words(problem, rows)

    def cut_at(q_len: int, max_kv_len: int) -> Cut:
        items, live = row_tiles(problem, q_len, rows), max(max_kv_len, 1)
        room = max(scratch["parts"] // (max(items, 1) * words), 1)
        splits = min(split_cut.num_splits(items, live, info), room)
        most = min(max(split_cut.splits_at_once(items, live, info), splits), room)
        keys = keys_per_split(live, splits, most, in_round)
        return Cut({"num_splits": -(-live // keys), "keys_per_split": keys})

    return cut_at
