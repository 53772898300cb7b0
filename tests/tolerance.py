"""The comparison with the oracle, row by row; the bounds are those of `vkattn.oracle.tolerance`. Used by every test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vkattn import oracle
from vkattn.layout import split_shape
from vkattn.oracle.tolerance import cancellation, lse_bounds, row_bounds, row_errors, shares

#: Whether "auto" may multiply halves on matrix units here, which the tolerance allows 1e-3 for. The fixture `device`
#: says so of a device that has them and is no CPU.
matrix_units = False

__all__ = ["Expected", "assert_close", "assert_lse_close", "assert_matches_oracle", "row_bounds"]


def assert_close(
    actual: Any,
    expected: Any,
    magnitude: Any,
    *,
    layout: str = "bhsd",
    coopmat: bool | None = None,
    label: str = "out",
    terms: Callable[[], np.ndarray] | None = None,
) -> float:
    """Assert that an output is the oracle's, row by row; return the largest error as a share of its bound.

    Parameters
    ----------
    actual : float32, float16 or bfloat16, 4-D in ``layout``; the output under test. Its dtype sets the rounding.
    expected : float64, 4-D in ``layout``; the oracle's output for the same inputs.
    magnitude : float64, shape ``[batch, heads, q_len]``; `oracle.magnitude` for the same inputs.
    coopmat : whether matrix units multiplied halves; None if they may have, as `matrix_units` and the dtype say.
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
    if coopmat is None:
        coopmat = matrix_units and dtype != "float32"
    bound = row_bounds(wanted, size, dtype, coopmat=coopmat)
    error = row_errors(got, wanted)
    if terms is not None and (error > bound).any():
        size_of_terms = terms() if layout == "bhsd" else terms().transpose(0, 2, 1, 3)
        bound = bound + cancellation(wanted, size_of_terms, size)
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
    bound = lse_bounds(wanted, size)
    usable = np.isfinite(got)
    error = np.where(usable, np.abs(np.where(usable, got, 0) - level), np.inf)
    error = np.where(empty, np.where(np.isneginf(got), 0, np.inf), error)
    return _judge(error, bound, "lse", lambda row: f"got {got[row]}, oracle {wanted[row]}, m {size[row]:.4g}")


class Expected:
    """What the oracle says to one call, computed once, for all that is to be compared with it."""

    def __init__(self, query: Any, key: Any, value: Any, **options: Any) -> None:
        self._arrays, self._options = (query, key, value), options
        self._layout = options.get("layout", "bhsd")
        self._dtype = np.asarray(query).dtype
        self.out, self.lse = oracle.attention(query, key, value, return_lse=True, **options)
        self._size = oracle.magnitude(
            query, key, **{name: given for name, given in options.items() if name != "sinks"})

    def check(self, actual: Any, lse: Any = None, *, coopmat: bool | None = None) -> float:
        """Assert that ``actual`` (and ``lse``, if given) is the oracle's; return the worst share of a bound."""
        assert np.asarray(actual).dtype == self._dtype, "the output's dtype is not the query's"
        share = assert_close(actual, self.out, self._size, layout=self._layout, coopmat=coopmat, terms=self._terms)
        if lse is not None:
            batch, heads, tokens, _ = split_shape(np.shape(self._arrays[0]), self._layout)
            assert np.shape(lse) == (batch, heads, tokens), f"lse has shape {np.shape(lse)}"
            assert_lse_close(lse, self.lse, self._size)
        return share

    def _terms(self) -> np.ndarray:
        query, key, value = self._arrays
        return oracle.attention(query, key, np.abs(np.asarray(value)), **self._options)


def assert_matches_oracle(
    actual: Any, query: Any, key: Any, value: Any, *, lse: Any = None, coopmat: bool | None = None, **options: Any
) -> float:
    """Assert that ``actual`` (and ``lse``, if given) is `oracle.attention` of these arrays and options.

    Return the largest error of the output as a share of its bound.
    """
    return Expected(query, key, value, **options).check(actual, lse, coopmat=coopmat)


def _judge(error: np.ndarray, bound: np.ndarray, what: str, describe: Any) -> float:
    """Raise AssertionError naming the worst row if any error is above its bound; return the worst share of a bound."""
    if error.size == 0:
        return 0.0
    is_wrong = ~(error <= bound)
    share = shares(error, bound)
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
