"""The one tolerance of the tests (design.md, "Tolerance"), and the comparison with the oracle. Used by every test.

For each query row, a vector of value_dim elements, the error's L2 norm may be at most

    (1e-5 + 2^-22 m) |oracle|  +  one rounding of the output type

where ``m`` is `oracle.magnitude`: a float32 dot product of terms of size m has an absolute error of a few ``2^-24 m``,
and an absolute error of a score is a relative error of its weight. One rounding is ``u`` times the element, with u
2^-11 for float16 and 2^-8 for bfloat16, or half the smallest subnormal step where the element is below the type's
normal range. float32 outputs are not rounded again, so u is 0.

A row whose terms cancel (nearly always one with a value_dim of 1 or 2) cannot be that good in float32: a weight has a
rounding error of its own and that of its score, and the error of ``sum_j p_j v_j`` scales with ``sum_j p_j |v_j|``, not with the sum. Such a
row is allowed ``2^-22 (1 + m) |sum_j p_j |v_j||`` more (docs/decisions/0001-tolerance.md); `assert_matches_oracle` looks at
that only where a row misses the bound above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vkattn import oracle
from vkattn.layout import split_shape

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


def row_bounds(expected: np.ndarray, magnitude: np.ndarray, dtype: str, *, coopmat: bool = False) -> np.ndarray:
    """Return the largest allowed L2 error of each row: ``[b, h, i]`` from ``expected [b, h, i, d]`` (bhsd)."""
    unit, normal, half_step = ROUNDING[dtype]
    relative = RELATIVE + PER_MAGNITUDE * magnitude + (COOPMAT if coopmat else 0.0)
    before = relative * np.linalg.norm(expected, axis=-1)
    rounding = np.linalg.norm(np.where(np.abs(expected) < normal, half_step, unit * expected), axis=-1)
    # What is rounded is the kernel's value, which is itself off by as much as `before`. A row of zeros is exact.
    return np.where((expected == 0).all(axis=-1), 0.0, before * (1 + unit) + rounding)


def assert_close(
    actual: Any,
    expected: Any,
    magnitude: Any,
    *,
    layout: str = "bhsd",
    coopmat: bool = False,
    label: str = "out",
    terms: Callable[[], np.ndarray] | None = None,
) -> float:
    """Assert that an output is the oracle's, row by row; return the largest error as a share of its bound.

    Parameters
    ----------
    actual : float32, float16 or bfloat16, 4-D in ``layout``; the output under test. Its dtype sets the rounding.
    expected : float64, 4-D in ``layout``; the oracle's output for the same inputs.
    magnitude : float64, shape ``[batch, heads, q_len]``; `oracle.magnitude` for the same inputs.
    terms : returns the oracle's output for absolute values, 4-D in ``layout``; called if a row misses the first bound.

    A row that the oracle gives as exactly 0 must be exactly 0. Anything that is not finite fails.
    """
    given, wanted = np.asarray(actual), np.asarray(expected)
    assert given.shape == wanted.shape, f"{label} has shape {given.shape}, the oracle's is {wanted.shape}"
    dtype = given.dtype.name
    got = given.astype(np.float64)
    if layout == "bshd":
        got, wanted = got.transpose(0, 2, 1, 3), wanted.transpose(0, 2, 1, 3)
    assert np.isfinite(wanted).all(), f"the oracle's {label} is not finite: the test's inputs are wrong"
    size = np.asarray(magnitude, np.float64)
    bound = row_bounds(wanted, size, dtype, coopmat=coopmat)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.linalg.norm(got - wanted, axis=-1)
    error = np.where(np.isfinite(got).all(axis=-1), error, np.inf)
    if terms is not None and (error > bound).any():
        size_of_terms = terms() if layout == "bhsd" else terms().transpose(0, 2, 1, 3)
        cancelled = PER_MAGNITUDE * (1 + size) * np.linalg.norm(size_of_terms, axis=-1)
        bound = np.where((wanted == 0).all(axis=-1), bound, bound + cancelled)
    return _judge(error, bound, f"{label} ({dtype}, {layout})", lambda row: _describe(got[row], wanted[row], size[row]))


def assert_lse_close(actual: Any, expected: Any, magnitude: Any) -> float:
    """Assert that an lse ``[batch, heads, q_len]`` is the oracle's: -inf where that is -inf, else within its bound."""
    got, wanted = np.asarray(actual), np.asarray(expected)
    assert got.shape == wanted.shape, f"lse has shape {got.shape}, the oracle's is {wanted.shape}"
    assert got.dtype == np.float32, f"lse is {got.dtype}, not float32"
    empty = np.isneginf(wanted)
    assert np.isfinite(wanted[~empty]).all(), "the oracle's lse is not finite: the test's inputs are wrong"
    level = np.where(empty, 0, wanted)
    size = np.asarray(magnitude, np.float64)
    bound = np.where(empty, 0, RELATIVE * (1 + np.abs(level)) + PER_MAGNITUDE * size)
    usable = np.isfinite(got)
    error = np.where(usable, np.abs(np.where(usable, got, 0) - level), np.inf)
    error = np.where(empty, np.where(np.isneginf(got), 0, np.inf), error)
    return _judge(error, bound, "lse", lambda row: f"got {got[row]}, oracle {wanted[row]}, m {size[row]:.4g}")


def assert_matches_oracle(
    actual: Any, query: Any, key: Any, value: Any, *, lse: Any = None, coopmat: bool = False, **options: Any
) -> float:
    """Assert that ``actual`` (and ``lse``, if given) is `oracle.attention` of these arrays and options.

    Return the largest error of the output as a share of its bound.
    """
    layout = options.get("layout", "bhsd")
    expected, expected_lse = oracle.attention(query, key, value, return_lse=True, **options)
    size = oracle.magnitude(query, key, **{name: given for name, given in options.items() if name != "sinks"})
    assert np.asarray(actual).dtype == np.asarray(query).dtype, "the output's dtype is not the query's"
    share = assert_close(
        actual, expected, size, layout=layout, coopmat=coopmat,
        terms=lambda: oracle.attention(query, key, np.abs(np.asarray(value)), **options),
    )  # fmt: skip
    if lse is not None:
        batch, heads, tokens, _ = split_shape(np.shape(query), layout)
        assert np.shape(lse) == (batch, heads, tokens), f"lse has shape {np.shape(lse)}"
        assert_lse_close(lse, expected_lse, size)
    return share


def _judge(error: np.ndarray, bound: np.ndarray, what: str, describe: Any) -> float:
    """Raise AssertionError naming the worst row if any error is above its bound; return the worst share of a bound."""
    if error.size == 0:
        return 0.0
    is_wrong = ~(error <= bound)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(error == 0, 0.0, error / bound)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(share), share.shape))
    if is_wrong.any():
        raise AssertionError(
            f"{what}: {is_wrong.sum()} of {is_wrong.size} rows ({100 * is_wrong.mean():.3g} %) are off; worst row "
            f"(batch, head, row) = {worst}: error {error[worst]:.4g}, bound {bound[worst]:.4g}; {describe(worst)}"
        )
    return float(share[worst])


def _describe(got: np.ndarray, wanted: np.ndarray, size: float) -> str:
    """Return what a row holds, at its worst element."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(got - wanted)
    column = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
    count = int((~np.isfinite(got)).sum())
    return (
        f"m {size:.4g}, |oracle| {np.linalg.norm(wanted):.4g}, {count} of {got.size} elements not finite; "
        f"worst element {column}: got {got[column]:.9g}, oracle {wanted[column]:.9g}"
    )
