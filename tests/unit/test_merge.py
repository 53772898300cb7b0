"""`vkattn.merge_states`: two halves of the keys make the whole, by the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import vkattn
from vkattn import oracle
from vkattn.errors import DTypeError, ShapeError


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parts_make_the_whole(rng: np.random.Generator, layout: str, dtype: type) -> None:
    query = rng.standard_normal((2, 6, 5, 16)) * 4
    key, value = rng.standard_normal((2, 2, 3, 40, 16))
    swap = (lambda array: array) if layout == "bhsd" else (lambda array: array.swapaxes(1, 2))
    parts = []
    for keys in (slice(0, 13), slice(13, 40)):
        out, lse = oracle.attention(swap(query), swap(key[:, :, keys]), swap(value[:, :, keys]), layout=layout,
                                    return_lse=True)
        parts += [out.astype(dtype), lse.astype(np.float32)]
    out, lse = vkattn.merge_states(*parts, layout=layout)
    whole, whole_lse = oracle.attention(swap(query), swap(key), swap(value), layout=layout, return_lse=True)
    assert out.dtype == dtype
    np.testing.assert_allclose(out, whole, atol=1e-6 if dtype == np.float32 else 2e-3)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


def test_rows_with_nothing() -> None:
    out, lse = np.ones((1, 1, 3, 2), np.float32), np.zeros((1, 1, 3), np.float32)
    empty, none = np.zeros_like(out), np.full_like(lse, -np.inf)
    merged, total = vkattn.merge_states(out, lse, empty, none)
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(total, lse)
    merged, total = vkattn.merge_states(empty, none, empty, none)
    assert (merged == 0).all()
    assert (total == -np.inf).all()


def test_lse_far_apart_and_far_from_zero() -> None:
    one = np.ones((1, 1, 1, 1), np.float32)
    lse = np.full((1, 1, 1), 1e4, np.float32)
    merged, total = vkattn.merge_states(one, lse, 3 * one, lse)
    assert merged.item() == 2
    np.testing.assert_allclose(total, 1e4 + np.log(2), rtol=1e-7)
    merged, total = vkattn.merge_states(one, lse, 3 * one, -lse)
    assert (merged.item(), total.item()) == (1, 1e4)


def test_a_row_that_is_no_number_stays_one() -> None:
    """Its lse is NaN too, as `attention` returns it: a finite lse, or none, would let the next merge lose it."""
    out, lse = np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    broken, broken_lse = out.copy(), lse.copy()
    broken[0, 1, 2], broken_lse[0, 1, 2] = np.nan, np.nan
    for parts in ((out, lse, broken, broken_lse), (broken, broken_lse, out, lse),
                  (broken, broken_lse, np.zeros_like(out), np.full_like(lse, -np.inf))):
        merged, total = vkattn.merge_states(*parts)
        np.testing.assert_array_equal(np.isnan(merged), np.isnan(broken))
        np.testing.assert_array_equal(np.isnan(total), np.isnan(broken_lse))
        again, whole = vkattn.merge_states(merged, total, out, lse)
        np.testing.assert_array_equal(np.isnan(again), np.isnan(broken))
        np.testing.assert_array_equal(np.isnan(whole), np.isnan(broken_lse))


def test_what_weighs_nothing_has_no_effect() -> None:
    """An accumulator that nothing was added to may hold anything; so may a part that is far below the other."""
    one, lse = np.ones((1, 1, 2, 3), np.float32), np.zeros((1, 1, 2), np.float32)
    largest = np.finfo(np.float32).max
    for anything, its_lse in ((np.nan, -np.inf), (np.inf, -np.inf), (np.inf, -1e4), (7.0, -largest)):
        other, other_lse = np.full_like(one, anything), np.full_like(lse, its_lse)
        for parts in ((one, lse, other, other_lse), (other, other_lse, one, lse)):
            merged, total = vkattn.merge_states(*parts)
            np.testing.assert_array_equal(merged, one)
            np.testing.assert_array_equal(total, lse)
    top = np.full_like(lse, largest)
    merged, total = vkattn.merge_states(one, top, 3 * one, -top)
    np.testing.assert_array_equal(merged, one)
    np.testing.assert_array_equal(total, top)


def test_wrong_arguments() -> None:
    out, lse = np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    with pytest.raises(ShapeError, match="do not fit"):
        vkattn.merge_states(out, lse, out[:, :1], lse)
    with pytest.raises(ShapeError, match="bshd"):
        vkattn.merge_states(out, lse, out, lse, layout="bshd")
    with pytest.raises(DTypeError, match="out_a"):
        vkattn.merge_states(out.astype(np.float64), lse, out, lse)
    for other in (np.float16, np.int64):
        with pytest.raises(DTypeError, match=r"`out_a` is float32 but `out_b` is .*; they must have the same dtype"):
            vkattn.merge_states(out, lse, out.astype(other), lse)
