"""The tolerance itself: what it lets pass, what it does not, and what it says."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.tolerance import assert_close, assert_lse_close, assert_matches_oracle
from vkattn import oracle

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows(rng, shape=(1, 2, 3, 8), dtype=np.float64):
    return rng.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [1.0, 6e4, 1e-4, 3e-7], ids=str)
def test_one_rounding_passes_whatever_the_level(rng, dtype, level):
    expected = rng.uniform(-level, level, (4, 8, 16, 33))
    assert_close(expected.astype(DTYPES[dtype]), expected, np.zeros((4, 8, 16)))


@pytest.mark.parametrize(("dtype", "spacing"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_two_spacings_in_every_element_do_not_pass(rng, dtype, spacing):
    expected = rng.uniform(1, 2, (1, 1, 2, 8)).astype(DTYPES[dtype]).astype(np.float64)
    for spacings in (1.5, 2):
        with pytest.raises(AssertionError, match="2 of 2 rows"):
            assert_close((expected + spacings * spacing).astype(DTYPES[dtype]), expected, np.zeros((1, 1, 2)))


@pytest.mark.parametrize(("size", "relative"), [(0.0, 1e-5), (150.0, 1e-5 + 150 * 2.0**-22)])
def test_the_bound_is_relative_to_the_row_and_grows_with_its_magnitude(rng, size, relative):
    expected = rows(rng) * 100
    sizes = np.full(expected.shape[:3], size)
    share = assert_close((expected * (1 + 0.9 * relative)).astype(np.float32), expected, sizes)
    assert share == pytest.approx(0.9, abs=0.05)
    with pytest.raises(AssertionError, match="are off"):
        assert_close((expected * (1 + 1.1 * relative)).astype(np.float32), expected, sizes)


def test_coopmat_adds_its_share(rng):
    expected = rows(rng)
    sizes = np.zeros(expected.shape[:3])
    assert_close((expected * (1 + 9e-4)).astype(np.float32), expected, sizes, coopmat=True)
    with pytest.raises(AssertionError):
        assert_close((expected * (1 + 9e-4)).astype(np.float32), expected, sizes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_wrong_row_is_named_by_batch_head_and_row(rng, layout):
    expected = rows(rng, (2, 3, 5, 8))
    actual = expected.astype(np.float32)
    actual[1, 2, 4, 3] += 0.5
    if layout == "bshd":
        expected, actual = expected.transpose(0, 2, 1, 3), actual.transpose(0, 2, 1, 3)
    with pytest.raises(AssertionError, match=r"1 of 30 rows \(3\.33 %\).*\(1, 2, 4\): error 0\.5, .*worst element 3: "):
        assert_close(actual, expected, np.zeros((2, 3, 5)), layout=layout)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_fails(rng, wrong):
    expected = rows(rng)
    actual = expected.astype(np.float32)
    actual[0, 1, 2, 0] = wrong
    with pytest.raises(AssertionError, match=r"\(0, 1, 2\): error inf.*1 of 8 elements not finite"):
        assert_close(actual, expected, np.full((1, 2, 3), 1e9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_must_be_exact(dtype):
    expected = np.zeros((1, 1, 2, 4))
    actual = expected.astype(DTYPES[dtype])
    assert assert_close(actual, expected, np.ones((1, 1, 2))) == 0
    actual[0, 0, 1, 2] = np.float16(6e-8) if dtype == "float16" else 1e-38
    with pytest.raises(AssertionError, match=r"\(0, 0, 1\)"):
        assert_close(actual, expected, np.ones((1, 1, 2)))


def test_shape_and_oracle_are_checked(rng):
    expected = rows(rng)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(expected[0].astype(np.float32), expected, np.zeros((1, 2, 3)))
    with pytest.raises(AssertionError, match="test's inputs"):
        assert_close(expected.astype(np.float32), np.full_like(expected, np.nan), np.zeros((1, 2, 3)))


def test_lse():
    expected = np.array([[[-np.inf, 100.0, 0.0]]])
    sizes = np.array([[[0.0, 100.0, 0.0]]])
    good = expected.astype(np.float32)
    good[0, 0, 1:] += np.float32([9e-4, 9e-6])
    assert_lse_close(good, expected, sizes)
    for column, wrong in [(0, -100.0), (0, np.nan), (1, np.nan), (1, -np.inf), (1, 100.002), (2, 2e-5)]:
        bad = expected.astype(np.float32)
        bad[0, 0, column] = wrong
        with pytest.raises(AssertionError, match=rf"lse: 1 of 3 rows .*\(0, 0, {column}\)"):
            assert_lse_close(bad, expected, sizes)
    with pytest.raises(AssertionError, match="float64"):
        assert_lse_close(expected, expected, sizes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_matches_oracle(rng, layout):
    shapes = [(1, 4, 3, 5), (1, 2, 3, 5), (1, 2, 3, 6)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if layout == "bshd":
        arrays = [np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for array in arrays]
    options = {"causal": "top_left", "sinks": np.ones(4, np.float32), "layout": layout}
    out, lse = (a.astype(np.float32) for a in oracle.attention(*arrays, return_lse=True, **options))
    assert assert_matches_oracle(out, *arrays, lse=lse, **options) < 0.1
    with pytest.raises(AssertionError, match="lse"):
        assert_matches_oracle(out, *arrays, lse=lse + np.float32(1e-3), **options)
    with pytest.raises(AssertionError, match="dtype"):
        assert_matches_oracle(out.astype(np.float16), *arrays, **options)
    for change in ({"causal": "bottom_right", "kv_len": 2}, {"sinks": None}, {"scale": 0.4}):
        with pytest.raises(AssertionError, match="are off"):
            assert_matches_oracle(out, *arrays, **{**options, **change})
