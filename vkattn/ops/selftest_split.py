"""The self-test of the kernel that reads quantised rows on matrix units: short queries against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

from .. import oracle
from ..formats import QuantisedRows
from ..kernels import matrix, split
from ..kernels.manifest import Variant
from ..runtime.device import Device
from ..validate import attention_call
from .selftest_case import Sizes, fault


def judge(device: Device, kernel: Variant, rng: np.random.Generator) -> str:
    """Return what is wrong with ``kernel``, or ""."""
    for label, sizes, dtype, options in cases(matrix.WIDTHS[kernel.axes["width"]], rng):
        wrong = _judge_one(device, kernel, sizes, dtype, options, rng)
        if wrong:
            return f"{label}: {wrong}"
    return ""


def cases(width: int, rng: np.random.Generator) -> Iterator[tuple[str, Sizes, str, dict[str, Any]]]:
    """Yield (label, sizes, dtype of the queries, options): widths with and without a tail, groups, masks, all options.

    Keys enough for several splits of several tiles to a subgroup.
    """
    yield "decode", ((1, 3, 1, 1, 2345), width, width), "float16", {}
    yield "odd sizes", ((2, 5, 5, 3, 131), width - 9, width - 23), "float32", {
        "causal": "bottom_right", "kv_len": [131, 40]}
    mask = rng.random((2, 1, 2, 533)) < 0.6
    mask[..., 40:44], mask[..., 64:128], mask[0, :, 1] = False, False, False
    yield "bool mask", ((2, 8, 2, 2, 533), width // 2 + 1, width), "float32", {"mask": mask, "window": (400, 30),
                                                                               "q_offset": 450}
    added = rng.standard_normal((4, 1, 301)).astype(np.float32)
    added[rng.random(added.shape) < 0.2] = -np.inf
    yield "all options", ((1, 4, 1, 1, 301), width, width - 1), "float32", {
        "mask": added, "softcap": 12.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "q_offset": 300,
        "sinks": [1.0, -2.0, 0.0, 4.0], "scale": -0.3}


def _judge_one(device: Device, kernel: Variant, sizes: Sizes, dtype: str, options: dict[str, Any],
               rng: np.random.Generator) -> str:
    """Return what is wrong with one case, or "". The bound is that of sums in float32: codes are exact, and queries and
    weights have 22 bits.
    """
    (batch, heads, kv_heads, q_len, kv_len), head_dim, value_dim = sizes
    query = (2 * rng.standard_normal((batch, heads, q_len, head_dim), np.float32)).astype(dtype)
    exact, stored = [], []
    for dim in (head_dim, value_dim):
        rows = 2 * rng.standard_normal((batch, kv_heads, kv_len, dim), np.float32) + 0.5
        rows *= np.linspace(0.2, 1.5, kv_len, dtype=np.float32)[:, None]  # the row maximum moves on and on
        parts = oracle.quantize(rows, kernel.axes["key"])
        exact.append(oracle.dequantize(*parts))
        codes, scale, zero_point = parts
        mask = options.get("mask")
        if mask is not None and mask.dtype == np.bool_:  # what nobody attends must have no effect
            scale = scale.copy()
            scale[:, :, 41] = np.nan
        stored.append(QuantisedRows(codes, scale, zero_point))
    stand_ins = (np.broadcast_to(np.zeros(1, dtype), rows.shape) for rows in exact)
    call = attention_call(query, *stand_ins, return_lse=True, **options)
    problem = replace(call.problem, key_dtype=kernel.axes["key"], value_dtype=kernel.axes["key"])
    call = replace(call, problem=problem, key=stored[0], value=stored[1])
    return fault(device, call, family(kernel),
                 lambda out, lse: oracle.worst_share(out, query, *exact, lse=lse, **options))


def family(kernel: Variant) -> ModuleType:
    """Return an algorithm that is ``kernel`` and nothing else."""
    return cast(ModuleType, SimpleNamespace(
        NAME=f"self-test of {kernel.name}", scratch_words=split.scratch_words, cut=split.cut,
        passes=lambda problem, info: split.passes_of(split.matrix_shape(kernel, problem, info))))
