"""How `split` cuts the keys of each item: into how many parts, of how many keys, and what that takes.

An item is a few query rows of one (batch, KV head). Its parts should fill the device, be whole rounds of a workgroup's
loop, and be few, as they are merged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..caps.model import DeviceInfo
from ..problem import Problem
from . import split_matrix
from .grid import iteration_limit, num_groups, row_tiles
from .manifest import Variant

#: Parts of one head's keys at most: one workgroup merges them.
MAX_SPLITS = 128

#: Keys that an invocation of shaders/attn_split_subgroup.comp takes at a time; a test ties them.
IN_FLIGHT = 4

#: Invocations on matrix units that are resident for each of `split_groups`: with 128 registers 512 are on a
#: multiprocessor of an NVIDIA H200, which has two of the latter.
MATRIX_RESIDENT = 256

#: Keys of a split at most, so that rounding stays far below the tolerance: each lane group adds a few hundred terms.
MAX_KEYS_PER_SPLIT = 8192


@dataclass(frozen=True)
class Shape:
    """The variant for a problem on a device, the query rows of an item, and the values of specialization constants."""

    kernel: Variant
    rows: int
    spec: tuple[int, ...] = ()


def most_splits(problem: Problem, chosen: Shape, info: DeviceInfo) -> Iterator[tuple[int, int]]:
    """Yield for each q_len the items, and the most splits at any length within the capacity."""
    info = filled(chosen, info)
    for q_len in range(1, problem.max_q_len + 1):
        items = row_tiles(problem, q_len, chosen.rows)
        splits = num_splits(items, problem.max_kv_len, info)
        if round_keys(chosen) > 1:  # whole rounds may make twice as many splits
            splits = min(2 * splits, splits_at_once(items, problem.max_kv_len, info))
        yield items, splits


def num_splits(items: int, max_kv_len: int, info: DeviceInfo) -> int:
    """Return into how many parts the keys of each item go: enough to fill the device, none too long or too short.

    They grow with the root of the keys, since merging them costs time too. Measured on an NVIDIA H200 with 8 KV heads:
    16 to 32 for 1024 to 8192 keys, and as many as are resident at once, 264 workgroups, for more.
    """
    wanted = max(round(math.sqrt(max_kv_len) / info.tuned.split_root_divisor), -(-max_kv_len // MAX_KEYS_PER_SPLIT))
    return min(max(wanted, 1), splits_at_once(items, max_kv_len, info))


def splits_at_once(items: int, max_kv_len: int, info: DeviceInfo) -> int:
    """Return into how many parts the keys of each item can go that are all computed at once, none of them too long."""
    most = max(info.tuned.split_groups // max(items, 1), -(-max_kv_len // MAX_KEYS_PER_SPLIT), 1)
    return min(most, MAX_SPLITS, max(max_kv_len, 1))


def round_keys(chosen: Shape) -> int:
    """Return the keys that a workgroup takes in one round of its loop, or 1 where whole rounds are not counted."""
    if chosen.kernel.kernel != "attn_split_subgroup":
        return 1
    return chosen.spec[0] // int(chosen.kernel.axes["lanes"].removeprefix("l")) * IN_FLIGHT


def keys_per_split(max_kv_len: int, splits: int, most: int, in_round: int) -> int:
    """Return the keys of each of about ``splits`` parts, of which there must not be more than ``most``.

    They are whole rounds of ``in_round``, so that no workgroup goes round once more for a few keys: on an NVIDIA H200
    32768 keys in 32 parts of 1024 took 51.4 us, in 33 of 993 53.1.
    """
    keys = max(-(-max_kv_len // splits) // in_round, 1) * in_round
    return keys if keys * most >= max_kv_len else -(-max_kv_len // (most * in_round)) * in_round


def filled(chosen: Shape, info: DeviceInfo) -> DeviceInfo:
    """Return ``info`` with the number of workgroups of ``chosen`` that fill the device as `split_groups`."""
    if chosen.kernel.kernel != split_matrix.KERNEL:
        return info
    return _with_groups(info, MATRIX_RESIDENT / chosen.spec[0])


@functools.lru_cache(maxsize=64)
def _with_groups(info: DeviceInfo, factor: float) -> DeviceInfo:
    return replace(info, tuning=replace(info.tuned, split_groups=int(info.tuned.split_groups * factor)))


def part_words(problem: Problem, rows: int) -> int:
    """Return the words of the state and the row of values that one split of one item leaves."""
    return rows * (1 + -(-problem.value_dim // 4)) * 4


def loops_are_too_long(problem: Problem, chosen: Shape, info: DeviceInfo) -> bool:
    """Return whether an invocation would go round its loops more often than the device lets it."""
    limit = iteration_limit(info)
    if limit is None:
        return False
    items = row_tiles(problem, problem.max_q_len, chosen.rows)
    splits = num_splits(items, problem.max_kv_len, filled(chosen, info))
    each, merge = split_iterations(problem, chosen.kernel, splits)
    taken = -(-items * splits // num_groups(info))
    return taken * each + min(taken, items) * merge > limit


def split_iterations(problem: Problem, kernel: Variant, splits: int) -> tuple[int, int]:
    """Return the most loop iterations of one split of one item, and those of the merge of an item."""
    keys = -(-problem.max_kv_len // splits)
    if kernel.kernel == "attn_split_lanes":  # a block of 32 keys: the keys twice, masks, and the loops around them
        return 200 + (keys // 32 + 1) * (64 + 16 + 16), 16 * splits
    return 1000 + (keys // 256 + 1) * (100 + -(-problem.head_dim // 4)), 2 * splits
