"""The split family: decode and other short queries. What it supports, its variants, how keys are split.

The query rows of one KV head (group_size x q_len of them) go through its keys together, so each K and V byte is read
once for every ROWS rows. With few heads one workgroup to a head would leave most of a device idle: the keys are split,
and the last workgroup of a head to finish merges the parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..caps.model import DeviceInfo
from ..dtypes import AXIS
from ..problem import Problem
from .manifest import Variant, variant
from .support import device_reasons

NAME = "split"

#: Query rows of a KV head, q_len times group_size, beyond which each key would be read more than a few times.
MAX_ROWS = 64

#: Parts of one head's keys at most: MAX_SPLITS in shaders/include/split.glsl; a test ties them.
MAX_SPLITS = 128

#: Elements of a key or value row at most, and query rows of an item, in shaders/attn_split.comp; a test ties them.
MAX_DIM = 256
BASE_ROWS = 4

#: Workgroups that fill a device, by type.
TARGET_GROUPS = {"cpu": 8, "integrated": 128, "virtual": 512, "discrete": 528, "other": 128}

#: Keys of a split at most, so that rounding stays far below the tolerance: each lane group adds a few hundred terms.
MAX_KEYS_PER_SPLIT = 8192

#: Splits of one head grow with the root of its keys: merging them costs time too (measured: 16, 33 and 66 were best
#: for 4096, 32768 and 131072 keys on a GPU that 528 workgroups fill).
ROOT_DIVISOR = 5.0


@dataclass(frozen=True)
class Shape:
    """The variant for a problem on a device, its specialization constants, and the query rows of an item."""

    kernel: Variant
    rows: int
    spec: tuple[int, ...] = ()


def shape(problem: Problem, info: DeviceInfo) -> Shape:
    """Return the variant without subgroup operations, which every device can run."""
    query, key = AXIS[problem.query_dtype], AXIS[problem.key_dtype]
    return Shape(variant(f"attn_split_{query}_{key}"), BASE_ROWS)


def variants(problem: Problem, info: DeviceInfo) -> tuple[Variant, ...]:
    """Return the variant for ``problem``."""
    return (shape(problem, info).kernel,)


def not_supported_reasons(problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why this family cannot compute ``problem`` on the device; empty if it can."""
    rows = problem.max_q_len * problem.group_size
    reasons = []
    if rows > MAX_ROWS:
        reasons.append(f"q_len {problem.max_q_len} x group_size {problem.group_size} is {rows} query rows to a KV head; "
                       f"at most {MAX_ROWS}")
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim > MAX_DIM:
            reasons.append(f"{name} {dim}; at most {MAX_DIM}")
    return reasons + device_reasons(shape(problem, info).kernel, info)


@dataclass(frozen=True)
class Splitting:
    """How the keys of one run are split: into how many parts, of how many keys."""

    num_splits: int
    keys_per_split: int


def splitting(problem: Problem, rows: int, q_len: int, max_kv_len: int, info: DeviceInfo) -> Splitting:
    """Split ``max_kv_len`` keys so that a device is filled and no part is too long or too short."""
    items = num_items(problem, rows, q_len)
    wanted = min(TARGET_GROUPS[info.device_type] // max(items, 1), round(math.sqrt(max_kv_len) / ROOT_DIVISOR))
    wanted = max(wanted, -(-max_kv_len // MAX_KEYS_PER_SPLIT), 1)
    splits = min(wanted, MAX_SPLITS, max(max_kv_len, 1))
    return Splitting(splits, -(-max(max_kv_len, 1) // splits))


def num_items(problem: Problem, rows: int, q_len: int) -> int:
    """Return the (batch, KV head, chunk of ``rows`` query rows) triples."""
    return problem.batch_size * problem.num_kv_heads * -(-q_len * problem.group_size // rows)


def most_splits(problem: Problem, rows: int, q_len: int, max_kv_len: int, info: DeviceInfo) -> int:
    """Return the most splits that any run within these capacities has."""
    fewest_rows = splitting(problem, rows, 1, max_kv_len, info).num_splits
    return max(fewest_rows, splitting(problem, rows, q_len, max_kv_len, info).num_splits)


def part_words(problem: Problem, rows: int, splits: int, q_len: int) -> int:
    """Return the words of the buffer of parts: per item, split and row a vec4 of state and the row of values."""
    if splits == 1:
        return 4
    return num_items(problem, rows, q_len) * splits * rows * (1 + -(-problem.value_dim // 4)) * 4
