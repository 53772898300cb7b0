"""The oracle's KV cache: what is written where, and what is attended."""

from __future__ import annotations

import numpy as np
import pytest

from vkattn import oracle
from vkattn.errors import CapacityError, OptionError, ShapeError


def arrays(rng, layout="bshd", batch=2, q_len=3, heads=4, kv_heads=2, capacity=9, dim=5, value_dim=4, dtype=np.float32):
    """Return query, key, value and two caches full of NaN."""
    shapes = [(batch, q_len, heads, dim), (batch, q_len, kv_heads, dim), (batch, q_len, kv_heads, value_dim)]
    new = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    caches = [np.full((batch, capacity, kv_heads, last), np.nan, dtype) for last in (dim, value_dim)]
    both = [*new, *caches]
    return both if layout == "bshd" else [array.transpose(0, 2, 1, 3) for array in both]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("steps", [[3, 1, 1, 4], [1, 1, 1], [9], [5, 4]])
def test_steps_are_causal_attention_over_everything_so_far(rng, steps, layout):
    token_axis = 1 if layout == "bshd" else 2
    key_cache, value_cache = arrays(rng, layout)[3:]
    seen, start = ([], []), 0
    for q_len in steps:
        query, key, value, *_ = arrays(rng, layout, q_len=q_len)
        before = key_cache.copy()
        out, lse, key_cache, value_cache = oracle.sdpa_with_kv_cache(
            query, key, value, key_cache, value_cache, start, layout=layout, return_lse=True
        )
        assert not np.isnan(key_cache.take(range(start + q_len), token_axis)).any()
        np.testing.assert_array_equal(
            key_cache.take(range(start + q_len, 9), token_axis), before.take(range(start + q_len, 9), token_axis)
        )
        start += q_len
        for past, new in zip(seen, (key, value), strict=True):
            past.append(new)
        everything = [np.concatenate(past, token_axis) for past in seen]
        expected = oracle.attention(query, *everything, causal="bottom_right", layout=layout, return_lse=True)
        np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-12)


def test_row_s_attends_keys_up_to_input_pos_plus_s():
    query = np.zeros((1, 3, 1, 1))
    key, value = np.zeros((1, 3, 1, 1)), np.array([2.0, 3.0, 4.0]).reshape(1, 3, 1, 1)
    cache = np.array([0.0, 1.0, 99.0, 99.0, 99.0, 99.0]).reshape(1, 6, 1, 1)
    out, _, after = oracle.sdpa_with_kv_cache(query, key, value, np.zeros((1, 6, 1, 1)), cache, 2)
    np.testing.assert_allclose(out.ravel(), [1, 1.5, 2])
    assert after.ravel().tolist() == [0, 1, 2, 3, 4, 99]
    assert cache.ravel().tolist() == [0, 1, 99, 99, 99, 99]  # the given cache is not modified


def test_each_batch_entry_has_its_own_input_pos(rng):
    query, key, value, key_cache, value_cache = arrays(rng)
    key_cache[:], value_cache[:] = 0.5, 2.0
    key_cache[0, 1:], key_cache[1, 6:] = np.nan, np.nan
    value_cache[0, 1:], value_cache[1, 6:] = np.nan, np.nan
    together, *_ = oracle.sdpa_with_kv_cache(query, key, value, key_cache, value_cache, [1, 6])
    for batch, start in enumerate([1, 6]):
        one = [array[[batch]] for array in (query, key, value, key_cache, value_cache)]
        alone, *_ = oracle.sdpa_with_kv_cache(*one, start)
        np.testing.assert_allclose(together[batch], alone[0], rtol=1e-13)


def test_a_mask_without_causal_alone_decides(rng):
    query, key, value, key_cache, value_cache = arrays(rng)
    key_cache[:, :2], value_cache[:, :2] = 0.1, 0.2
    mask = np.zeros((3, 9), bool)
    mask[:, 4] = True  # the newest key only, which no causal mask would let rows 0 and 1 see
    out, *_ = oracle.sdpa_with_kv_cache(query, key, value, key_cache, value_cache, 2, mask=mask, causal=None)
    np.testing.assert_allclose(out, np.repeat(np.repeat(value[:, 2:3], 3, axis=1), 2, axis=2), rtol=1e-6)
    both, *_ = oracle.sdpa_with_kv_cache(query, key, value, key_cache, value_cache, 2, mask=mask)
    assert not both[:, :2].any()
    np.testing.assert_allclose(both[:, 2], out[:, 2])


def test_mask_columns_beyond_the_live_length_are_not_read(rng):
    given = arrays(rng)
    mask = rng.normal(size=(3, 9))
    short, *_ = oracle.sdpa_with_kv_cache(*given, 0, mask=mask[:, :3])
    mask[:, 3:] = np.nan
    long, *_ = oracle.sdpa_with_kv_cache(*given, 0, mask=mask)
    np.testing.assert_array_equal(short, long)
    with pytest.raises(ShapeError, match="at least 3"):
        oracle.sdpa_with_kv_cache(*given, 0, mask=mask[:, :2])


def test_options_are_passed_on(rng):
    query, key, value, key_cache, value_cache = arrays(rng)
    key_cache[:, :4], value_cache[:, :4] = rng.normal(size=(2, 4, 2, 5)), rng.normal(size=(2, 4, 2, 4))
    options = {"window": (2, None), "softcap": 2.0, "scale": 0.3, "sinks": np.ones(4), "alibi_slopes": np.ones(4) / 4}
    out, *_ = oracle.sdpa_with_kv_cache(query, key, value, key_cache, value_cache, 4, **options)
    full = [np.concatenate([cache[:, :4], new], 1) for cache, new in ((key_cache, key), (value_cache, value))]
    expected = oracle.attention(query, *full, causal="bottom_right", layout="bshd", **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)


def test_new_rows_take_the_dtype_of_the_cache(rng):
    given = arrays(rng, dtype=np.float16)
    out, key_cache, value_cache = oracle.sdpa_with_kv_cache(*given, 0)
    assert key_cache.dtype == value_cache.dtype == np.float16
    np.testing.assert_array_equal(key_cache[:, :3], given[1].astype(np.float16))
    rounded = [array.astype(np.float16) for array in given[1:3]]
    expected = oracle.attention(given[0], *rounded, causal="bottom_right", layout="bshd")
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)


def test_filling_the_cache_exactly_works_and_one_more_does_not(rng):
    given = arrays(rng)
    oracle.sdpa_with_kv_cache(*(np.nan_to_num(array) for array in given), 6)
    with pytest.raises(CapacityError, match="need 10 rows; the cache holds 9"):
        oracle.sdpa_with_kv_cache(*given, 7)


@pytest.mark.parametrize(
    ("change", "options", "error"),
    [
        ({}, {"causal": "top_left"}, OptionError),
        ({}, {"causal": True}, OptionError),
        ({}, {"input_pos": -1}, OptionError),
        ({}, {"input_pos": [0, 0, 0]}, ShapeError),
        ({1: (2, 2, 2, 5)}, {}, ShapeError),
        ({1: (2, 3, 4, 5)}, {}, ShapeError),
        ({2: (1, 3, 2, 4)}, {}, ShapeError),
        ({3: (2, 9, 2)}, {}, ShapeError),
        ({0: (3, 4, 5)}, {}, ShapeError),
    ],
)
def test_wrong_arguments_are_refused(rng, change, options, error):
    given = [np.ones(change.get(i, array.shape)) for i, array in enumerate(arrays(rng))]
    options = {"input_pos": 0, **options}
    with pytest.raises(error):
        oracle.sdpa_with_kv_cache(*given, **options)
