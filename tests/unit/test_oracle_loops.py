"""The oracle against plain loops and against itself: its passes, poison that no row attends, dtypes, merging."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from vkattn import oracle


def plain_loops(query, key, value, *, causal, scale, softcap, left, right, slopes, sinks, q_offset, kv_len, mask):
    """Return attention (out, lse) in bhsd, one number at a time, in pure Python."""
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[3]
    out = np.zeros((batch_size, num_heads, q_len, value_dim))
    lse = np.full((batch_size, num_heads, q_len), -np.inf)
    for b, h, i in np.ndindex(batch_size, num_heads, q_len):
        g = 0
        while (g + 1) * (num_heads // num_kv_heads) <= h:
            g += 1
        position = q_offset[b] + i
        total = 0.0 if sinks is None else math.exp(sinks[h])
        row = [0.0] * value_dim
        for j in range(kv_len[b]):
            if causal and j > position:
                continue
            if left is not None and position - j > left:
                continue
            if right is not None and j - position > right:
                continue
            dot = 0.0
            for d in range(head_dim):
                dot += float(query[b, h, i, d]) * float(key[b, g, j, d])
            score = dot * scale
            if softcap:
                score = softcap * math.tanh(score / softcap)
            if slopes is not None:
                score -= slopes[h] * abs(position - j)
            if mask is not None:
                seen = mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1), i, j]
                if mask.dtype == bool:
                    if not seen:
                        continue
                elif seen == -math.inf:
                    continue
                else:
                    score += float(seen)
            weight = math.exp(score)
            total += weight
            for d in range(value_dim):
                row[d] += weight * float(value[b, g, j, d])
        if total > 0:
            out[b, h, i] = [x / total for x in row]
            lse[b, h, i] = math.log(total)
    return out, lse


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", range(24))
def test_against_plain_loops(rng, case, layout):
    batch_size, num_kv_heads, group_size = 2, 1 + case % 2, 1 + case % 3
    num_heads = num_kv_heads * group_size
    q_len, num_keys, head_dim, value_dim = [(4, 6, 3, 3), (5, 2, 1, 4), (1, 7, 7, 2), (6, 6, 2, 5)][case % 4]
    query = rng.normal(size=(batch_size, num_heads, q_len, head_dim))
    key = rng.normal(size=(batch_size, num_kv_heads, num_keys, head_dim))
    value = rng.normal(size=(batch_size, num_kv_heads, num_keys, value_dim))
    kv_len = np.array([num_keys, num_keys - 1])
    causal = [None, "top_left", "bottom_right"][case % 3]
    given_offset = rng.integers(-2, 5, batch_size) if case % 5 == 0 else None
    window = [(None, None), (1, None), (None, 2), (2, 0), (0, 1)][case % 5]
    slopes = rng.uniform(0, 1, num_heads) if case % 4 == 1 else None
    if given_offset is None and causal is None and (window != (None, None) or slopes is not None):
        given_offset = np.array([1, -1])
    offset = given_offset
    if offset is None:
        offset = kv_len - q_len if causal == "bottom_right" else np.zeros(batch_size, int)
    mask = None
    if case % 3 == 1:
        mask = rng.random((2, 1, q_len, num_keys)) < 0.7
    elif case % 3 == 2:
        mask = np.where(rng.random((1, num_heads, q_len, num_keys)) < 0.3, -np.inf, rng.normal(size=num_keys))
    sinks = rng.normal(size=num_heads) if case % 2 else None
    softcap = 1.5 if case % 7 == 3 else None
    scale = 0.7
    expected, expected_lse = plain_loops(
        query, key, value, causal=causal, scale=scale, softcap=softcap, left=window[0], right=window[1], slopes=slopes,
        sinks=sinks, q_offset=offset, kv_len=kv_len, mask=mask,
    )  # fmt: skip

    if layout == "bshd":
        query, key, value, expected = (a.transpose(0, 2, 1, 3) for a in (query, key, value, expected))
    out, lse = oracle.attention(
        query, key, value, mask=mask, causal=causal, scale=scale, softcap=softcap, window=window, sinks=sinks,
        alibi_slopes=slopes, q_offset=given_offset, kv_len=kv_len, layout=layout, return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_passes_compose(rng, layout):
    query, key, value = rng.normal(size=(2, 6, 6, 5)), rng.normal(size=(2, 2, 6, 5)), rng.normal(size=(2, 2, 6, 3))
    if layout == "bshd":
        query, key, value = (a.transpose(0, 2, 1, 3) for a in (query, key, value))
    options = {"causal": "bottom_right", "softcap": 3.0, "mask": rng.random((6, 6)) < 0.8, "layout": layout}
    sinks = rng.normal(size=6)
    probs, lse = oracle.softmax(oracle.attn_weights(query, key, **options), sinks, return_lse=True)
    out = oracle.attn_output(probs, value, layout=layout)
    expected, expected_lse = oracle.attention(query, key, value, sinks=sinks, return_lse=True, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


POISON = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("poison", POISON)
def test_rows_beyond_kv_len_are_not_read(rng, poison):
    query, key, value = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 2, 8, 5)), rng.normal(size=(2, 2, 8, 4))
    mask = rng.normal(size=(2, 1, 3, 8))
    kv_len = np.array([3, 8])
    clean = oracle.attention(query, key, value, mask=mask, kv_len=kv_len, return_lse=True)
    for array in (key, value):
        array[0, :, 3:] = poison
    mask[0, :, :, 3:] = poison
    dirty = oracle.attention(query, key, value, mask=mask, kv_len=kv_len, return_lse=True)
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(before, after)
    assert np.isfinite(oracle.magnitude(query, key, mask=mask, kv_len=kv_len)).all()


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("kind", [bool, float])
def test_what_one_row_does_not_attend_does_not_reach_it(rng, poison, kind):
    """Key 2 is poisoned: row 1, which attends it, is not finite; row 0, which does not, is as without it."""
    query, key, value = rng.normal(size=(1, 1, 2, 5)), rng.normal(size=(1, 1, 4, 5)), rng.normal(size=(1, 1, 4, 4))
    mask = np.array([[True, True, False, True], [True, True, True, True]])
    mask = mask if kind is bool else np.where(mask, 0.5, -np.inf)
    clean = oracle.attention(query, key, value, mask=mask)
    value[0, 0, 2] = poison
    out = oracle.attention(query, key, value, mask=mask)
    np.testing.assert_allclose(out[0, 0, 0], clean[0, 0, 0], rtol=1e-13)
    assert not np.isfinite(out[0, 0, 1]).any()
    key[0, 0, 2] = np.nan
    out = oracle.attention(query, key, value, mask=mask)
    np.testing.assert_allclose(out[0, 0, 0], clean[0, 0, 0], rtol=1e-13)
    assert not np.isfinite(out[0, 0, 1]).any()


def test_a_query_of_nan_stays_in_its_row(rng):
    query, key, value = rng.normal(size=(1, 2, 3, 5)), rng.normal(size=(1, 1, 4, 5)), rng.normal(size=(1, 1, 4, 4))
    clean = oracle.attention(query, key, value)
    query[0, 0, 1] = np.nan
    out = oracle.attention(query, key, value)
    assert np.isnan(out[0, 0, 1]).all()
    out[0, 0, 1] = clean[0, 0, 1]
    np.testing.assert_array_equal(out, clean)
    assert not oracle.attention(query, key, value, kv_len=0).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
def test_small_dtypes_convert_exactly(rng, dtype):
    arrays = [rng.normal(size=(1, 2, 3, 4)).astype(dtype) for _ in range(3)]
    mask = rng.normal(size=(3, 3)).astype(dtype)
    out = oracle.attention(*arrays, mask=mask)
    assert out.dtype == np.float64
    exact = oracle.attention(*(a.astype(np.float64) for a in arrays), mask=mask.astype(np.float64))
    np.testing.assert_array_equal(out, exact)


def test_float16_dot_product_beyond_its_range():
    query = np.full((1, 1, 1, 64), 40, np.float16)  # the dot product is 102400
    value = np.array([1, 2], np.float16)[None, None, :, None]
    out = oracle.attention(query, np.full((1, 1, 2, 64), 40, np.float16), value)
    assert out.item() == 1.5


def test_magnitude_is_over_attended_keys_only(rng):
    query, key = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 2, 6, 5))
    kv_len = np.array([6, 4])
    mask = rng.random((3, 6)) < 0.6
    mask[1] = False
    size = oracle.magnitude(query, key, scale=-0.5, kv_len=kv_len, mask=mask, causal="top_left", softcap=1.0)
    for b, h, i in np.ndindex(*size.shape):
        terms = [
            0.5 * sum(abs(query[b, h, i, d] * key[b, h // 2, j, d]) for d in range(5))
            for j in range(min(kv_len[b], i + 1))
            if mask[i, j]
        ]
        assert size[b, h, i] == pytest.approx(max(terms, default=0), rel=1e-14)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge_states_is_attention_over_the_union(rng, layout):
    query, key, value = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 2, 9, 5)), rng.normal(size=(2, 2, 9, 4))
    mask = rng.random((2, 1, 3, 9)) < 0.5
    mask[0, :, 0] = False  # nothing in either part
    mask[1, :, 1, :4] = False  # nothing in the first
    token_axis = 2
    if layout == "bshd":
        query, key, value = (a.transpose(0, 2, 1, 3) for a in (query, key, value))
        token_axis = 1
    parts = [
        oracle.attention(
            query, key.take(part, token_axis), value.take(part, token_axis), mask=mask[..., part], layout=layout,
            return_lse=True,
        )
        for part in (np.arange(4), np.arange(4, 9))
    ]  # fmt: skip
    first, first_lse = parts[0]
    has_nothing = np.isneginf(first_lse)
    assert has_nothing.any()
    first[has_nothing if layout == "bhsd" else has_nothing.transpose(0, 2, 1)] = np.nan  # must not be read
    out, lse = oracle.merge_states(*parts[0], *parts[1], layout=layout)
    expected, expected_lse = oracle.attention(query, key, value, mask=mask, layout=layout, return_lse=True)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)

    sinks = rng.normal(size=4)
    sunk, sunk_lse = oracle.merge_states(
        out, lse, np.zeros_like(out), np.broadcast_to(sinks[None, :, None], lse.shape), layout=layout
    )
    expected, expected_lse = oracle.attention(query, key, value, mask=mask, sinks=sinks, layout=layout, return_lse=True)
    np.testing.assert_allclose(sunk, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(sunk_lse, expected_lse, rtol=1e-13)
