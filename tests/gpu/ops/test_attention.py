"""`vkattn.attention` against the oracle: the grid of shapes, extreme scores, poison, layouts and strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.attention_cases import arrays, check
from vkattn.runtime.device import Device

HEADS = [(9, 3), (14, 2), (8, 1)]
Q_LENS = (1, 3, 33, 513)
KV_LENS = (1, 31, 65, 1000)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
@pytest.mark.parametrize("head_dim", [1, 7, 17, 80, 129, 256])
def test_grid_of_shapes(roomy_device: Device, rng: np.random.Generator, head_dim: int, heads: tuple[int, int],
                        dtype: Any) -> None:
    for q_len in Q_LENS:
        for kv_len in KV_LENS:
            if "SwiftShader" in roomy_device.info.name and heads != (9, 3) and q_len * kv_len > 10000:
                continue  # the largest sizes there with one head ratio only: ten times slower than lavapipe
            causal = (None, "top_left", "bottom_right")[(q_len + kv_len) % 3]
            check(roomy_device, arrays(rng, 1, heads, q_len, kv_len, head_dim, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 10), (64, 128), (5, 1), (1, 65), (130, 3)])
def test_value_dim_may_differ(device: Device, rng: np.random.Generator, head_dim: int, value_dim: int,
                              dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    check(device, arrays(rng, 2, (4, 2), 6, 37, head_dim, value_dim, kind, size=1.0))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_float32_query_goes_with_any_keys(device: Device, rng: np.random.Generator, kind: str) -> None:
    import ml_dtypes

    query, key, value = arrays(rng, 1, (6, 2), 5, 70, 33)
    half = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
    check(device, [query, key.astype(half), value.astype(half)], causal="bottom_right")


def test_group_heads_are_consecutive(device: Device) -> None:
    query = np.ones((1, 4, 1, 8), np.float32)
    key = np.ones((1, 2, 3, 8), np.float32)
    value = np.broadcast_to(np.arange(2, dtype=np.float32)[None, :, None, None], (1, 2, 3, 8))
    assert vkattn.attention(query, key, value, device=device)[0, :, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("heads"), [(40, 8), (24, 4), (28, 4), (64, 4), (20, 1), (70, 70)])
def test_any_group_size(device: Device, rng: np.random.Generator, heads: tuple[int, int]) -> None:
    check(device, arrays(rng, 1, heads, 3, 40, 12), causal="bottom_right")


@pytest.mark.parametrize("score", [150.0, -200.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_far_from_zero(device: Device, rng: np.random.Generator, score: float, dtype: Any) -> None:
    query, key, value = arrays(rng, 1, (2, 1), 4, 70, 128, dtype=dtype, size=0.1)
    size = np.sqrt(abs(score) * np.sqrt(128) / 128)
    query[...] = size + query
    key[...] = np.sign(score) * size + key
    check(device, [query, key, value])


def test_half_dot_products_beyond_the_range_of_half(device: Device, rng: np.random.Generator) -> None:
    query = np.full((1, 1, 3, 64), 40, np.float16)  # a dot product of 102400
    value = rng.standard_normal((1, 1, 50, 64)).astype(np.float16)
    out = check(device, [query, np.full((1, 1, 50, 64), 40, np.float16), value])
    np.testing.assert_allclose(out[0, 0, 0].astype(np.float64), value[0, 0].astype(np.float64).mean(axis=0), atol=1e-3)


def test_half_results_are_rounded_to_nearest_even_and_overflow_to_infinity(device: Device) -> None:
    exact = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 6e-8, 3e-8, 2.98e-8, -1e-5, 0, -0.0, 1e9,
                      2**-14 - 2**-26], np.float32)
    query, key = np.ones((1, 1, 1, 4), np.float16), np.ones((1, 1, 1, 4), np.float16)
    parts = exact.astype(np.float64)
    with np.errstate(over="ignore"):
        high = parts.astype(np.float16)
    one = vkattn.attention(query, key, np.where(np.isfinite(high), high, 0)[None, None, None], device=device)
    np.testing.assert_array_equal(one[0, 0, 0], np.where(np.isfinite(high), high, 0))
    # Two keys of equal weight: the mean of two halves, which half cannot hold exactly.
    pair = np.array([[1, 2**-24, 3 * 2**-24, 2048, 2050, -65504, 2**-14], [1 + 2**-10, 0, 0, 2049, 2052, -65504, 0]],
                    np.float16)
    key = np.ones((1, 1, 2, 4), np.float16)
    out = vkattn.attention(query, key, pair[None, None], device=device)
    mean = pair.astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(out[0, 0, 0], mean.astype(np.float16))


def test_equal_weights_over_many_keys_sum_to_one(device: Device) -> None:
    keys = 70000
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.ones((1, 1, keys, 4), np.float32)
    out, lse = vkattn.attention(query, key, np.ones((1, 1, keys, 1), np.float32), device=device, return_lse=True)
    np.testing.assert_allclose(out, 1, rtol=2e-6)
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)


def test_nothing_to_attend_gives_zero(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 2, (4, 2), 5, 3, 16)
    out = check(device, [query, key, value], causal="bottom_right")  # rows 0 and 1 are before the first key
    assert (out[:, :, :2] == 0).all()
    out = check(device, [query, key, value], kv_len=[0, 2])
    assert (out[0] == 0).all()
    out, lse = vkattn.attention(query, key[:, :, :0], value[:, :, :0], return_lse=True, device=device)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    assert out.dtype == lse.dtype == np.float32
    sinks = np.array([1, -2, 0.5, 3], np.float32)
    out, lse = vkattn.attention(query, key, value, kv_len=0, sinks=sinks, return_lse=True, device=device)
    assert (out == 0).all()
    assert (lse == sinks[None, :, None]).all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_empty_outputs(device: Device, shape: tuple[int, ...]) -> None:
    query = np.zeros(shape, np.float16)
    key = np.zeros((shape[0], max(shape[1], 1), 5, 8), np.float16)
    out, lse = vkattn.attention(query, key, key, return_lse=True, device=device)
    assert out.shape == shape
    assert lse.shape == shape[:3]
    assert out.dtype == np.float16


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_must_not_be_read_has_no_effect(device: Device, rng: np.random.Generator, poison: float,
                                             dtype: Any) -> None:
    query, key, value = arrays(rng, 2, (6, 2), 40, 150, 20, 24, dtype)
    kv_len = np.array([70, 129])
    mask = rng.random((2, 1, 40, 150)) < 0.7
    mask[:, :, :, 40:48] = False  # masked in the middle, for all rows
    mask[1, :, 7] = False  # a row with nothing
    options = {"mask": mask, "kv_len": kv_len, "causal": "bottom_right"}
    clean = check(device, [query, key, value], **options)
    bad_key, bad_value = key.copy(), value.copy()
    for batch, live in enumerate(kv_len):
        for array in (bad_key, bad_value):
            array[batch, :, live:] = poison
            array[batch, :, 40:48] = poison
    np.testing.assert_array_equal(check(device, [query, bad_key, bad_value], **options), clean)
    additive = np.where(mask, 0, -np.inf).astype(np.float32)
    np.testing.assert_array_equal(check(device, [query, bad_key, bad_value], **(options | {"mask": additive})), clean)


def test_poison_that_only_the_causal_mask_hides(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 1, (2, 2), 100, 100, 8)
    clean = check(device, [query, key, value], causal="top_left")
    key[:, :, 50:], value[:, :, 50:] = np.nan, np.nan
    out = vkattn.attention(query, key, value, causal="top_left", device=device)
    np.testing.assert_array_equal(out[:, :, :50], clean[:, :, :50])
    assert np.isnan(out[:, :, 50:]).all()


def test_infinite_values_that_are_attended_stay_infinite(device: Device) -> None:
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 100, 4), np.float32)
    value = np.zeros((1, 1, 100, 4), np.float32)
    value[0, 0, 3, 1], value[0, 0, 60, 2] = np.inf, -np.inf
    out = vkattn.attention(query, key, value, device=device)
    assert out[0, 0, 0].tolist() == [0, np.inf, -np.inf, 0]


def test_bshd_equals_bhsd(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 2, (6, 3), 10, 50, 20, 12, np.float16)
    swapped = [array.transpose(0, 2, 1, 3) for array in inputs]
    out = check(device, swapped, layout="bshd", causal="bottom_right")
    same = vkattn.attention(*inputs, causal="bottom_right", device=device)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), same)
    contiguous = [np.ascontiguousarray(array) for array in swapped]
    np.testing.assert_array_equal(check(device, contiguous, layout="bshd", causal="bottom_right"), out)


def test_strided_inputs(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 3, (2, 2), 64, 64, 24)
    views = [query[:, ::-1], key[:, :, ::2], value.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)[:, :, 1::2]]
    check(device, views)
    for view in views:
        view.setflags(write=False)
    check(device, views)


def test_outputs_are_fresh(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 4, 9, 8)
    first, first_lse = vkattn.attention(*inputs, return_lse=True, device=device)
    kept, kept_lse = first.copy(), first_lse.copy()
    vkattn.attention(*(2 * array for array in inputs), return_lse=True, device=device)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(first_lse, kept_lse)
    assert first.flags.owndata
    assert first.flags.writeable
