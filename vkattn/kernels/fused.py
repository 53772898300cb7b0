"""The fused kernels, attn_fused and attn_fused_subgroup: prefill in one dispatch. What they support, variants, sizes.

Scores never leave the workgroup, so the memory that a problem needs beyond its arrays does not grow with it. Each
workgroup takes a row tile and a chunk of value_dim after another; wider values are computed in chunks, each with scores
of its own. Software devices load for each invocation in turn, so that a load costs them as much as a hundred
multiply-adds; for them there is a kernel that loads less and shares by subgroup shuffles.
"""

from __future__ import annotations

from collections.abc import Callable

from ..caps.model import DeviceInfo
from ..formats import variant_axes
from ..problem import Problem
from .grid import items_that_fit, row_tiles, too_long
from .manifest import Variant, load_manifest, variant
from .passes import Cut, Pass, even_cut
from .support import device_reasons
from .three_pass import DISPATCH_SECONDS, MULTIPLY_ADDS_PER_SECOND
from .tiers import allowed_tiers

NAME = "fused"

#: Query rows of a tile (by the axis `tile`) and elements of value_dim of a chunk (by `width`) in
#: shaders/attn_fused.comp, and both in shaders/attn_fused_subgroup.comp. Tests tie them to the shaders.
BLOCK_ROWS = {"small": 64, "large": 64, "tall": 128}
BLOCK_WIDTH = {"w64": 64, "w128": 128}
SUBGROUP_BLOCK_ROWS = 128
SUBGROUP_BLOCK_WIDTH = 128

#: Tall tiles from which on they are taken, so that they fill a large GPU: a multiprocessor takes one at a time.
FEWEST_TALL_TILES = 256

#: Keys up to which `attn_fused` adds up a row without compensation; the longest row of equal values that it then may
#: have is off by a third of the tolerance (docs/decisions/0006-fused-on-a-gpu.md).
PLAIN_KEYS = 16384

#: Invocations of a subgroup that attn_fused_subgroup needs: as many lanes load keys for all.
SUBGROUP_LANES = 8


def candidates(problem: Problem, info: DeviceInfo) -> list[tuple[Variant, list[str]]]:
    """Return each variant that can compute ``problem``, best first, with the reasons why the device cannot run it."""
    dtypes = "_".join(variant_axes(problem.query_dtype, problem.key_dtype, problem.value_dtype))
    width = "w64" if problem.value_dim <= BLOCK_WIDTH["w64"] else "w128"
    names = [f"attn_fused_{dtypes}_{width}_large", f"attn_fused_{dtypes}_w64_small"]
    tall = f"attn_fused_{dtypes}_{width}_tall"
    if tall in load_manifest():
        names.insert(0 if row_tiles(problem, problem.max_q_len, BLOCK_ROWS["tall"]) >= FEWEST_TALL_TILES else 1, tall)
    if not info.tuned.fused_large_tiles:
        names.reverse()
    if info.tuned.fused_subgroups and "subgroup" in allowed_tiers():
        names.insert(0, f"attn_fused_subgroup_{dtypes}")
    return [(variant(name), variant_reasons(variant(name), info)) for name in names]


def variant_reasons(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why the device cannot run a variant of this family; empty if it can."""
    reasons = device_reasons(kernel, info)
    if kernel.kernel == "attn_fused_subgroup" and info.subgroup_size < SUBGROUP_LANES:
        reasons.append(f"needs subgroups of {SUBGROUP_LANES} invocations, the device has {info.subgroup_size}")
    return reasons


def variants(problem: Problem, info: DeviceInfo) -> tuple[Variant]:
    """Return the first candidate that the device can run on as many keys, else on fewer, else the last one."""
    all_of_them = candidates(problem, info)
    able = [kernel for kernel, reasons in all_of_them if not reasons] or [all_of_them[-1][0]]
    return (next((kernel for kernel in able if not loop_reasons(kernel, problem, info)), able[0]),)


def loop_reasons(kernel: Variant, problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why ``kernel`` cannot go through as many keys on the device; empty if it can."""
    worst = item_iterations(problem, problem.max_kv_len, kernel)
    return [too_long(f"kv_len {problem.max_kv_len}", worst)] if items_that_fit(worst, info) == 0 else []


def not_supported_reasons(problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why this family cannot compute ``problem`` on the device; empty if it can. Any size will do."""
    kernel = variants(problem, info)[0]
    return variant_reasons(kernel, info) + loop_reasons(kernel, problem, info)


def item_iterations(problem: Problem, max_kv_len: int, kernel: Variant) -> int:
    """Return the most loop iterations of one item: per block of keys those of head_dim, masks, softmax and values.

    A loop that does not go round counts as one. For the subgroup form it is assumed that values are not finite, which
    takes 8 rounds more for each of their vecs.
    """
    head_vecs, value_vecs = -(-problem.head_dim // 4), min(-(-problem.value_dim // 4), 32)
    if kernel.kernel == "attn_fused_subgroup":
        blocks, sums = max_kv_len // 32 + 2, max_kv_len // 1024 + 2
        return 1000 + blocks * (81 + head_vecs + 10 * value_vecs) + sums * 8 * (value_vecs + 2)
    return 100 + (max_kv_len // 32 + 2) * (140 + 5 * -(-head_vecs // 4))


def block_rows(kernel: Variant) -> int:
    """Return the query rows of a tile of ``kernel``."""
    return SUBGROUP_BLOCK_ROWS if kernel.kernel == "attn_fused_subgroup" else BLOCK_ROWS[kernel.axes["tile"]]


def passes(problem: Problem, info: DeviceInfo) -> tuple[Pass, ...]:
    """Return the one pass; its recording is repeated for each chunk of query rows."""
    kernel = variants(problem, info)[0]
    spec = (int(problem.max_kv_len > PLAIN_KEYS),) if kernel.spec else ()
    items = row_tiles(problem, problem.max_q_len, block_rows(kernel)) * -(-problem.value_dim // 64)
    return (Pass(kernel, ("query", "key", "value", "mask", "out", "lse"), spec, most_groups=items),)


def scratch_words(problem: Problem, info: DeviceInfo, budget_words: int) -> dict[str, int]:
    """Return no buffer at all: scores stay in the workgroups."""
    return {}


def cut(problem: Problem, q_len: int, max_kv_len: int, scratch: dict[str, int], info: DeviceInfo) -> Cut:
    """Return how the rows of a run are cut so that no dispatch is long: desktop drivers reset a GPU that is busy."""
    return cutter(problem, scratch, info)(q_len, max_kv_len)


def cutter(problem: Problem, scratch: dict[str, int], info: DeviceInfo) -> Callable[[int, int], Cut]:
    """Return `cut` for live lengths alone, for the kernel that is chosen now."""
    kernel = variants(problem, info)[0]
    rows = block_rows(kernel)

    def cut_at(q_len: int, max_kv_len: int) -> Cut:
        tiles = row_tiles(problem, q_len, rows)
        work = rows * max(max_kv_len, 1) * (problem.head_dim + problem.value_dim)
        short = max(1, int(DISPATCH_SECONDS * MULTIPLY_ADDS_PER_SECOND[info.device_type] / work))
        loops = items_that_fit(item_iterations(problem, max_kv_len, kernel), info)
        chunks_of_values = -(-problem.value_dim // 64)
        fit = tiles if loops is None else loops // chunks_of_values
        return even_cut(tiles, max(1, min(short, fit, tiles)))

    return cut_at
