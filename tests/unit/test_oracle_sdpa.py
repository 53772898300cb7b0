"""The oracle of the torch-named function: shapes, broadcasting and refusals, without torch."""

from __future__ import annotations

import numpy as np
import pytest

from vkattn import oracle
from vkattn.errors import OptionError, ShapeError


def test_is_attention_with_the_leading_dimensions_as_batch(rng):
    query, key, value = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(2, 4, 6, 7))
    expected = oracle.attention(query, key, value)
    np.testing.assert_allclose(oracle.scaled_dot_product_attention(query, key, value), expected, rtol=1e-13)
    flat = oracle.scaled_dot_product_attention(query[1, 2], key[1, 2], value[1, 2])
    np.testing.assert_allclose(flat, expected[1, 2], rtol=1e-13)
    deep = oracle.scaled_dot_product_attention(*(a.reshape(2, 2, 2, *a.shape[2:]) for a in (query, key, value)))
    np.testing.assert_allclose(deep.reshape(expected.shape), expected, rtol=1e-13)


def test_causal_is_top_left(rng):
    query, key, value = rng.normal(size=(1, 2, 3, 5)), rng.normal(size=(1, 2, 6, 5)), rng.normal(size=(1, 2, 6, 7))
    out = oracle.scaled_dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(out, oracle.attention(query, key, value, causal="top_left"), rtol=1e-13)
    np.testing.assert_allclose(out[0, :, 0], value[0, :, 0], rtol=1e-13)


def test_gqa_repeats_consecutive_heads(rng):
    query, key, value = rng.normal(size=(2, 6, 3, 5)), rng.normal(size=(2, 2, 4, 5)), rng.normal(size=(2, 2, 4, 7))
    out = oracle.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    np.testing.assert_allclose(out, oracle.attention(query, key, value), rtol=1e-13)
    with pytest.raises(ShapeError, match="broadcast"):
        oracle.scaled_dot_product_attention(query, key, value)


def test_leading_dimensions_broadcast(rng):
    query, key, value = rng.normal(size=(4, 3, 5)), rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(2, 1, 6, 7))
    out = oracle.scaled_dot_product_attention(query, key, value)
    assert out.shape == (2, 4, 3, 7)
    np.testing.assert_allclose(
        out[1, 3], oracle.scaled_dot_product_attention(query[3], key[1, 3], value[1, 0]), rtol=1e-13
    )


@pytest.mark.parametrize("shape", [(), (6,), (1, 6), (3, 1), (3, 6), (4, 3, 6), (4, 1, 1), (2, 1, 3, 6), (2, 4, 3, 6)])
@pytest.mark.parametrize("kind", [bool, float])
def test_masks_of_every_rank(rng, shape, kind):
    query, key, value = rng.normal(size=(2, 4, 3, 5)), rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(2, 4, 6, 7))
    mask = rng.random(shape) < 0.5 if kind is bool else np.asarray(rng.normal(size=shape))
    mask = np.asarray(mask)
    out = oracle.scaled_dot_product_attention(query, key, value, mask)
    full = np.broadcast_to(mask, (2, 4, 3, 6))
    bias = np.where(full, 0, -np.inf) if kind is bool else full
    score = query @ key.swapaxes(-1, -2) / np.sqrt(5) + bias
    weight = np.exp(score)
    total = weight.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(out, weight / np.where(total == 0, 1, total) @ value, rtol=1e-12, atol=1e-14)


ONES = np.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((ONES, ONES, ONES), {"dropout_p": 0.1}, OptionError),
        ((ONES, ONES, ONES, np.ones((3, 3))), {"is_causal": True}, OptionError),
        ((ONES[0, 0], ONES, ONES), {}, ShapeError),
        ((ONES, np.ones((3, 3, 4)), ONES), {}, ShapeError),
        ((ONES, np.ones((2, 3, 5)), ONES), {}, ShapeError),
        ((ONES, np.ones((2, 5, 4)), ONES), {}, ShapeError),
        ((ONES, ONES, ONES, np.ones((3, 4))), {}, ShapeError),
        ((ONES, ONES, ONES, np.ones((4, 2, 3, 3))), {}, ShapeError),
        ((ONES, np.ones((3, 3, 4)), np.ones((3, 3, 4))), {"enable_gqa": True}, ShapeError),
        ((ONES[0], ONES[0], ONES[0]), {"enable_gqa": True}, ShapeError),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error):
    with pytest.raises(error):
        oracle.scaled_dot_product_attention(*arguments, **options)
