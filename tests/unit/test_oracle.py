"""The oracle against hand-worked values, against plain loops, and against itself."""

from __future__ import annotations

import doctest
import importlib
import math

import ml_dtypes
import numpy as np
import pytest

from vkattn import oracle
from vkattn.errors import DTypeError, OptionError, ShapeError

LN2 = math.log(2)
LN3 = math.log(3)


def row_of(values):
    """Return one batch entry of one head, ``[1, 1, tokens, dim]``."""
    return np.array(values, np.float64)[None, None]


# Two queries, three keys, worked by hand: with scale 1 the scores are multiples of ln 2 and ln 3, so that the weights
# are fractions. Row 0 scores (0, ln 2, ln 3): weights 1/6, 2/6, 3/6. Row 1 scores (ln 2, 0, 0): weights 2/4, 1/4, 1/4.
QUERY = row_of([[1, 0], [0, 1]])
KEY = row_of([[0, LN2], [LN2, 0], [LN3, 0]])
VALUE = row_of([[6, 0], [0, 12], [-6, 24]])


def test_hand_worked_2x3():
    out, lse = oracle.attention(QUERY, KEY, VALUE, scale=1, return_lse=True)
    np.testing.assert_allclose(out[0, 0], [[1 - 3, 4 + 12], [3 - 1.5, 3 + 6]], rtol=1e-14)
    np.testing.assert_allclose(lse[0, 0], [math.log(6), math.log(4)], rtol=1e-14)


@pytest.mark.parametrize(
    ("options", "expected", "sums"),
    [
        # top_left: row 0 sees key 0; row 1 sees keys 0 and 1, weights 2/3 and 1/3
        ({"causal": "top_left"}, [[6, 0], [4, 4]], [1, 3]),
        # bottom_right: row 0 sees keys 0 and 1, weights 1/3 and 2/3; row 1 sees all
        ({"causal": "bottom_right"}, [[2, 8], [1.5, 9]], [3, 4]),
        ({"causal": "bottom_right", "window": (0, None)}, [[0, 12], [-6, 24]], [2, 1]),
        ({"causal": "top_left", "q_offset": -1}, [[0, 0], [6, 0]], [0, 2]),
        ({"window": (0, 0), "q_offset": 0}, [[6, 0], [0, 12]], [1, 1]),
        ({"window": (None, 0), "q_offset": 1}, [[2, 8], [1.5, 9]], [3, 4]),
        ({"kv_len": 2}, [[2, 8], [4, 4]], [3, 3]),
        ({"kv_len": 0}, [[0, 0], [0, 0]], [0, 0]),
        ({"mask": [[True, False, True], [False, False, False]]}, [[-3, 18], [0, 0]], [4, 0]),
        ({"mask": [True, True, False]}, [[2, 8], [4, 4]], [3, 3]),
        # a float mask of ln 2 on key 1 doubles its weight: (1, 4, 3)/8 and (2, 2, 1)/5
        ({"mask": [0.0, LN2, 0.0]}, [[-1.5, 15], [1.2, 9.6]], [8, 5]),
        ({"mask": [0.0, LN2, -np.inf]}, [[1.2, 9.6], [3, 6]], [5, 4]),
        # a sink of ln 2 adds 2 to the denominator: /8 and /6
        ({"sinks": [LN2]}, [[-1.5, 12], [1, 6]], [8, 6]),
        ({"sinks": [-np.inf]}, [[-2, 16], [1.5, 9]], [6, 4]),
        ({"sinks": [LN2], "kv_len": 0}, [[0, 0], [0, 0]], [2, 2]),
        # ALiBi of slope ln 2 halves a weight per step of distance; rows stand at 0 and 1: (1, 1, 3/4) and (1, 1, 1/2)
        (
            {"alibi_slopes": [LN2], "q_offset": 0},
            [[1.5 / 2.75, 30 / 2.75], [3 / 2.5, 24 / 2.5]],
            [2.75, 2.5],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_hand_worked_options(options, expected, sums):
    options = {k: np.array(v) if isinstance(v, list) else v for k, v in options.items()}
    out, lse = oracle.attention(QUERY, KEY, VALUE, scale=1, return_lse=True, **options)
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-14)
    np.testing.assert_allclose(np.exp(lse[0, 0]), sums, rtol=1e-14)
    assert np.array_equal(np.isneginf(lse[0, 0]), np.array(sums) == 0)


def test_softcap_comes_before_the_mask():
    """Softcap after the mask would turn -inf into -cap, and the value of a masked key would leak."""
    value = VALUE.copy()
    value[0, 0, 2] = 1e6
    out = oracle.attention(QUERY, KEY, value, scale=1, softcap=0.5, mask=np.array([0, 0, -np.inf]))
    score = 0.5 * math.tanh(LN2 / 0.5)
    weight = math.exp(score) / (1 + math.exp(score))
    expected = [[6 * (1 - weight), 12 * weight], [6 * weight, 12 * (1 - weight)]]
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-14)


def test_softcap_comes_after_scale():
    score = oracle.attn_weights(QUERY, KEY, scale=3, softcap=2)[0, 0]
    np.testing.assert_allclose(score[0], 2 * np.tanh(np.array([0, 3 * LN2, 3 * LN3]) / 2), rtol=1e-14)


def test_default_scale_is_one_over_root_head_dim():
    np.testing.assert_allclose(oracle.attn_weights(QUERY, KEY)[0, 0, 0], np.array([0, LN2, LN3]) / math.sqrt(2))


def test_consecutive_query_heads_share_a_kv_head():
    """4 heads over 2 KV heads whose value is their number give 0 0 1 1, not 0 1 0 1."""
    value = np.arange(2.0)[None, :, None, None] * np.ones((1, 2, 3, 1))
    out = oracle.attention(np.ones((1, 4, 1, 2)), np.ones((1, 2, 3, 2)), value)
    assert out.ravel().tolist() == [0, 0, 1, 1]


def test_nine_heads_over_three_read_their_own_keys():
    query = np.ones((1, 9, 1, 1))
    key = np.zeros((1, 3, 3, 1))
    key[0, [0, 1, 2], [0, 1, 2], 0] = 1000  # KV head h picks key h
    value = np.broadcast_to(np.arange(3.0)[None, None, :, None], (1, 3, 3, 1))
    assert oracle.attention(query, key, value).ravel().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("score", [150.0, -200.0, 1e5])
def test_large_equal_scores_average_the_values(score):
    query = row_of([[score, 0.0]])
    out, lse = oracle.attention(query, row_of([[1, 3], [1, -3]]), row_of([[1], [2]]), scale=1, return_lse=True)
    assert out.item() == 1.5
    assert lse.item() == pytest.approx(score + LN2, rel=1e-15)


def test_no_keys_and_no_queries():
    out, lse = oracle.attention(np.ones((2, 2, 3, 4)), np.ones((2, 1, 0, 4)), np.ones((2, 1, 0, 5)), return_lse=True)
    assert out.shape == (2, 2, 3, 5)
    assert not out.any()
    assert np.isneginf(lse).all()
    assert oracle.attention(np.ones((1, 2, 0, 4)), np.ones((1, 1, 3, 4)), np.ones((1, 1, 3, 5))).shape == (1, 2, 0, 5)
    assert oracle.attention(np.ones((0, 2, 1, 4)), np.ones((0, 1, 3, 4)), np.ones((0, 1, 3, 5))).shape == (0, 2, 1, 5)


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


ONES = np.ones((1, 2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((ONES[0], ONES, ONES), {}, ShapeError, "4 dimensions"),
        ((ONES, ONES[..., :3], ONES), {}, ShapeError, "do not fit"),
        ((ONES, np.ones((2, 2, 3, 4)), ONES), {}, ShapeError, "do not fit"),
        ((ONES[..., :0], ONES[..., :0], ONES), {}, ShapeError, "do not fit"),
        ((ONES, ONES, np.ones((1, 2, 4, 4))), {}, ShapeError, "`value`"),
        ((ONES, ONES, np.ones((1, 1, 3, 4))), {}, ShapeError, "`value` has 1 heads"),
        ((np.ones((1, 3, 3, 4)), ONES, ONES), {}, ShapeError, "multiple"),
        ((ONES.astype(int), ONES, ONES), {}, DTypeError, "`query`"),
        ((ONES, ONES, ONES), {"mask": np.ones((3, 3), int)}, DTypeError, "`mask`"),
        ((ONES, ONES, ONES), {"mask": np.ones((2, 3, 3, 3))}, ShapeError, "broadcast"),
        ((ONES, ONES, ONES), {"mask": np.ones((1, 1, 1, 3, 3))}, ShapeError, "broadcast"),
        ((ONES, ONES, ONES), {"layout": "sbhd"}, OptionError, "`layout`"),
        ((ONES, ONES, ONES), {"scale": math.nan}, OptionError, "`scale`"),
        ((ONES, ONES, ONES), {"softcap": 0.0}, OptionError, "None is no softcap"),
        ((ONES, ONES, ONES), {"softcap": math.inf}, OptionError, "`softcap`"),
        ((ONES, ONES, ONES), {"sinks": [1.0]}, ShapeError, "`sinks`"),
        ((ONES, ONES, ONES), {"sinks": [1.0, math.nan]}, OptionError, "`sinks`"),
        ((ONES, ONES, ONES), {"alibi_slopes": [1.0]}, ShapeError, "`alibi_slopes`"),
        ((ONES, ONES, ONES), {"causal": True}, OptionError, "bottom_right"),
        ((ONES, ONES, ONES), {"kv_len": 4}, OptionError, "`kv_len`"),
        ((ONES, ONES, ONES), {"kv_len": 2, "window": (1, 1)}, OptionError, "`q_offset` is needed"),
        ((ONES, ONES, ONES), {"kv_len": 2, "alibi_slopes": [1.0, 1.0]}, OptionError, "`q_offset` is needed"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error, words):
    with pytest.raises(error, match=words):
        oracle.attention(*arguments, **options)


@pytest.mark.parametrize("module", ["attention", "softmax", "sdpa", "cache", "tolerance"])
def test_examples_in_docstrings(module):
    failed, run = doctest.testmod(importlib.import_module(f"vkattn.oracle.{module}"))
    assert run > 0
    assert failed == 0
