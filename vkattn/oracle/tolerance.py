"""How far a float32 computation of attention may be from the oracle: the bound that tests, check and examples share.

For each query row, a vector of value_dim elements, the error's L2 norm may be at most

    (1e-5 + 2^-22 m) |oracle|  +  one rounding of the output type

where ``m`` is `magnitude`: a float32 dot product of terms of size m has an absolute error of a few ``2^-24 m``, and an
absolute error of a score is a relative error of its weight. One rounding is ``u`` times the element, with u 2^-11 for
float16 and 2^-8 for bfloat16, or half the smallest subnormal step where the element is below the type's normal range.
float32 outputs are not rounded again, so u is 0.

A row whose terms cancel (nearly always one with a value_dim of 1 or 2) cannot be that good in float32: a weight has a
rounding error of its own and that of its score, and the error of ``sum_j p_j v_j`` scales with ``sum_j p_j |v_j|``, not
with the sum. Such a row is allowed ``2^-22 (1 + m) |sum_j p_j |v_j||`` more (docs/decisions/0001-tolerance.md); it is
looked at only where a row misses the bound above.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..layout import check_layout
from .attention import attention, magnitude
from .problem import as_bhsd

RELATIVE = 1e-5
PER_MAGNITUDE = 2.0**-22
#: Added where operands are multiplied in half precision on matrix units.
COOPMAT = 1e-3
#: Of each output dtype: the unit roundoff, the smallest normal number, half the smallest subnormal step.
ROUNDING = {
    "float32": (0.0, 0.0, 0.0),
    "float16": (2.0**-11, 2.0**-14, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-126, 2.0**-134),
}


def row_bounds(expected: np.ndarray, size: np.ndarray, dtype: str, *, coopmat: bool = False) -> np.ndarray:
    """Return the largest allowed L2 error of each row: ``[b, h, i]`` from ``expected [b, h, i, d]`` and m ``size``."""
    unit, normal, half_step = ROUNDING[dtype]
    relative = RELATIVE + PER_MAGNITUDE * size + (COOPMAT if coopmat else 0.0)
    before = relative * np.linalg.norm(expected, axis=-1)
    rounding = np.linalg.norm(np.where(np.abs(expected) < normal, half_step, unit * expected), axis=-1)
    # What is rounded is the kernel's value, which is itself off by as much as `before`. A row of zeros is exact.
    return np.where((expected == 0).all(axis=-1), 0.0, before * (1 + unit) + rounding)


def row_errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the L2 error of each row ``[b, h, i]``; infinity where ``actual`` is not finite."""
    got = actual.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.linalg.norm(got - expected, axis=-1)
    return np.where(np.isfinite(got).all(axis=-1), error, np.inf)


def cancellation(expected: np.ndarray, terms: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return what each row's bound gains where terms cancel; ``terms`` is the oracle's output for absolute values."""
    gained = PER_MAGNITUDE * (1 + size) * np.linalg.norm(terms, axis=-1)
    return np.where((expected == 0).all(axis=-1), 0.0, gained)


def lse_bounds(expected: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the largest allowed absolute error of each lse; 0 where the oracle's is -inf."""
    level = np.where(np.isneginf(expected), 0, expected)
    return np.where(np.isneginf(expected), 0, RELATIVE * (1 + np.abs(level)) + PER_MAGNITUDE * size)


def shares(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return each error as a share of its bound; 0 where the error is 0, above 1 where it is too large."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(error == 0, 0.0, error / bound)


def worst_share(
    actual: Any, query: Any, key: Any, value: Any, *, lse: Any = None, coopmat: bool = False, **options: Any
) -> float:
    """Compare an output with `attention` of the same inputs: the largest error of a row as a share of its bound.

    Parameters
    ----------
    actual : Array, as `attention` returns it for these inputs, in float32, float16 or bfloat16
    query, key, value, **options
        As for `attention`.
    lse : Array, float32, shape ``[batch_size, num_heads, q_len]``, or None
        Compared too if given.
    coopmat : bool
        Whether operands were multiplied in half precision on matrix units.

    Returns
    -------
    float : at most 1 if every row is within its bound; infinity if something is not finite that should be.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> oracle.worst_share(x, x, x, x)
    0.0
    """
    layout = check_layout(options.get("layout", "bhsd"))
    out, exact_lse = attention(query, key, value, return_lse=True, **options)
    expected, given = as_bhsd(out, "out", layout), as_bhsd(actual, "actual", layout)
    size = magnitude(query, key, **{name: option for name, option in options.items() if name != "sinks"})
    error = row_errors(given, expected)
    bound = row_bounds(expected, size, np.asarray(actual).dtype.name, coopmat=coopmat)
    if (error > bound).any():
        terms = as_bhsd(attention(query, key, np.abs(np.asarray(value)), **options), "out", layout)
        bound = bound + cancellation(expected, terms, size)
    worst = float(shares(error, bound).max(initial=0.0))
    if lse is not None:
        got, empty = np.asarray(lse, np.float64), np.isneginf(exact_lse)
        off = np.abs(np.where(empty, 0, got) - np.where(empty, 0, exact_lse))
        off = np.where(empty, np.where(np.isneginf(got), 0, np.inf), np.where(np.isfinite(got), off, np.inf))
        worst = max(worst, float(shares(off, lse_bounds(exact_lse, size)).max(initial=0.0)))
    return worst
