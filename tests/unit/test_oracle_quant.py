"""The oracle's quantisers: hand-worked rows, upstream's own operators, bounds of the error, rows not finite."""

from __future__ import annotations

import numpy as np
import pytest

from vkattn import oracle
from vkattn.errors import OptionError, ShapeError


def test_a_row_by_hand() -> None:
    """Lo -1, hi 1.55: scale 0.01; -1 has the code -128, so 0 has -28 and 1.55 has 127."""
    codes, scale, zero_point = oracle.quantize(np.array([-1.0, 0.0, 0.254, 1.55]), "int8")
    np.testing.assert_allclose(scale, 0.01, rtol=1e-6)
    assert codes.tolist() == [-128, -28, -3, 127]
    assert zero_point == -28
    np.testing.assert_allclose(oracle.dequantize(codes, scale, zero_point), [-1, 0, 0.25, 1.55], atol=1e-6)


@pytest.mark.parametrize(("row", "zero_point", "codes"), [
    ([0.0, 0.0], 127, [127, 127]),  # the least scale is 2^-23
    ([5.0, 5.0], -128, [127, 127]),  # the range reaches down to 0
    ([-5.0, -2.5], 127, [-128, 0]),  # and up to 0; half of it is a tie, rounded to even
])
def test_rows_of_one_sign_by_hand(row: list[float], zero_point: int, codes: list[int]) -> None:
    got, _, zero = oracle.quantize(np.array(row), "int8")
    assert zero == zero_point
    assert got.tolist() == codes


def test_blocks_by_hand() -> None:
    row = np.zeros(40)
    row[[0, 3, 32, 39]] = [127, -63.4, 0.25, -0.5]
    codes, scale, zero_point = oracle.quantize(row, "q8_0")
    assert zero_point is None
    assert scale.dtype == np.float16
    assert scale.tolist() == [1.0, float(np.float16(0.5 / 127))]
    assert codes[[0, 1, 3]].tolist() == [127, 0, -63]
    assert codes[[32, 39]].tolist() == [64, -127]
    codes, scale, _ = oracle.quantize(row, "q4_0")  # the largest magnitude is the code -8, whatever its sign
    assert scale.tolist() == [float(np.float16(-127 / 8)), 0.0625]
    assert codes[[0, 3, 32, 39]].tolist() == [-8, 4, 4, -8]


@pytest.mark.parametrize("dtype", ["int8", "q8_0", "q4_0"])
def test_the_error_of_an_element_is_half_a_step(rng: np.random.Generator, dtype: str) -> None:
    rows = 10.0 ** rng.uniform(-1, 3, (500, 1)) * rng.standard_normal((500, 77))
    codes, scale, zero_point = oracle.quantize(rows, dtype)
    error = np.abs(oracle.dequantize(codes, scale, zero_point) - rows.astype(np.float32))
    if dtype == "int8":
        step = scale.astype(np.float64)[:, None] * 2  # the zero point is rounded too: half a step more at one end
    else:
        step = np.repeat(np.abs(scale.astype(np.float64)), 32, axis=1)[:, :77]
        step *= 1.2 if dtype == "q8_0" else 2.01  # a scale's rounding counts 127 times; q4_0 has no code for +8
    assert (error <= step / 2 * (1 + 1e-6)).all()
    assert (error.max(axis=1) > 0).all()


def test_int8_is_upstreams(rng: np.random.Generator) -> None:
    """PyTorch's operators, which ExecuTorch's cache calls: they divide in float64, so a code may differ at a tie."""
    import torch
    import torch.ao.quantization.fx._decomposed

    rows = (10.0 ** rng.uniform(-5, 4, (2000, 1)) * rng.standard_normal((2000, 77))).astype(np.float32)
    rows[0], rows[1], rows[2], rows[3, 5] = 0, 4.5, -1e-3, 1e6
    given = torch.from_numpy(rows)
    ops = torch.ops.quantized_decomposed
    scale, zero_point = ops.choose_qparams_per_token_asymmetric(given, torch.int8)
    expected = ops.quantize_per_token(given, scale, zero_point, -128, 127, torch.int8).numpy()
    codes, own_scale, own_zero = oracle.quantize(rows, "int8")
    np.testing.assert_array_equal(own_scale, scale.numpy()[:, 0].astype(np.float32))
    np.testing.assert_array_equal(own_zero, zero_point.numpy()[:, 0])
    differs = codes != expected
    place = rows.astype(np.float64) / scale.numpy() + zero_point.numpy()
    at_tie = np.abs(place - np.floor(place) - 0.5) < 1e-4
    assert not (differs & ~at_tie).any()
    assert differs.mean() < 1e-4
    np.testing.assert_allclose(oracle.dequantize(codes, own_scale, own_zero)[~differs],
                               ((expected - zero_point.numpy()) * scale.numpy())[~differs])


@pytest.mark.parametrize("dtype", ["int8", "q8_0", "q4_0"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_row_or_block(dtype: str, bad: float) -> None:
    rows = np.ones((3, 64))
    rows[1, 40] = bad
    codes, scale, zero_point = oracle.quantize(rows, dtype)
    spoilt = oracle.dequantize(codes, scale, zero_point)
    assert np.isnan(spoilt[1, 32:]).all()
    assert np.isfinite(spoilt[[0, 2]]).all()
    assert np.isfinite(spoilt[1, :32]).all() == (dtype != "int8")


@pytest.mark.parametrize(("dtype", "largest"), [("q8_0", 127), ("q4_0", 8)])
def test_a_scale_stays_within_float16(dtype: str, largest: float) -> None:
    codes, scale, _ = oracle.quantize(np.array([1e9, -3e8, 0.0]), dtype)
    assert abs(float(scale[0])) == 65504
    assert oracle.dequantize(codes, scale)[0] == 65504 * largest


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="`dtype` is 'int4'; supported: 'int8', 'q8_0', 'q4_0'"):
        oracle.quantize(np.ones((2, 3)), "int4")
    with pytest.raises(ShapeError, match="`rows` is a single number"):
        oracle.quantize(1.0, "int8")
