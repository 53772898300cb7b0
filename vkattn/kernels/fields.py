"""Params words by name: what a single call, a node of a graph and an append to a cache fill in alike."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import formats_word
from ..layout import row_vecs
from ..mask import Window
from ..problem import Problem
from . import params

AXES = ("batch", "head", "row", "col")


def strides(name: str, values: Sequence[int]) -> dict[str, int]:
    """Return the words of a tensor's strides: three of them, or of a mask four."""
    return {f"{name}_stride_{axis}": value for axis, value in zip(AXES, values, strict=False)}


def sizes(problem: Problem, q_len: int, new_dtype: str = "float32") -> dict[str, int | float]:
    """Return the words of sizes and formats, for ``q_len`` live query rows; tensors start where they are bound."""
    return {
        "batch_size": problem.batch_size,
        "num_kv_heads": problem.num_kv_heads,
        "group_size": problem.group_size,
        "q_len": q_len,
        "head_vecs": -(-problem.head_dim // 4),
        "value_vecs": -(-problem.value_dim // 4),
        "out_vecs": row_vecs(problem.value_dim, problem.out_dtype),
        "formats": formats_word(problem.query_dtype, problem.key_dtype, problem.value_dtype, new_dtype),
        "key_offset": 0,
        "value_offset": 0,
    }


def score(scale: float, softcap: float | None, window: Window) -> dict[str, int | float]:
    """Return the words of a score's options."""
    left, right = (params.WINDOW_OFF if bound is None else bound for bound in window)
    return {"scale": scale, "softcap": softcap or 0.0, "window_left": left, "window_right": right}


def flags(mask: str | None, *, has_alibi: bool, has_sinks: bool, return_lse: bool, appends: bool = False) -> int:
    """Return the bits of the params word ``flags``; ``mask`` is None, "bool" or a float dtype."""
    bits = 0 if mask is None else params.FLAG_MASK_BITS if mask == "bool" else params.FLAG_MASK_FLOAT
    for is_set, bit in ((has_alibi, params.FLAG_ALIBI), (has_sinks, params.FLAG_SINKS), (return_lse, params.FLAG_LSE),
                        (appends, params.FLAG_APPEND)):
        bits |= bit if is_set else 0
    return bits
