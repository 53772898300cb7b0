"""The oracle against values worked out by hand, what it refuses, and its examples."""

from __future__ import annotations

import doctest
import importlib
import math

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
