"""The network of examples/smollm2.py, in pieces and whole, against other ways to write the same; the oracle attends."""

from __future__ import annotations

import numpy as np
import pytest
from smollm2_attention import OracleAttention
from smollm2_model import Decoder, Weights, rms_norm, rope, silu, split_heads

from tests.examples.mini import MINI, PROMPT

# --- the pieces of the network ---------------------------------------------------------------------------------------


def test_rms_norm_by_hand() -> None:
    x = np.array([[3.0, -4.0]], np.float32)  # mean square 12.5
    weight = np.array([1.0, 2.0], np.float32)
    got = rms_norm(x, weight, 0.5)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[3 / np.sqrt(13), -8 / np.sqrt(13)]], rtol=1e-6)


def test_silu_is_right_and_does_not_overflow() -> None:
    x = np.array([-200.0, -2.0, 0.0, 1.0, 200.0], np.float32)
    expected = [0.0, -2 / (1 + np.exp(2.0)), 0.0, 1 / (1 + np.exp(-1.0)), 200.0]
    np.testing.assert_allclose(silu(x), expected, rtol=1e-6, atol=1e-6)


def test_split_heads_gives_each_head_its_columns() -> None:
    x = np.arange(2 * 6).reshape(2, 6)  # 2 tokens, 3 heads of 2
    assert split_heads(x, 3).shape == (1, 3, 2, 2)
    assert split_heads(x, 3)[0, 1].tolist() == [[2, 3], [8, 9]]


def test_rope_by_hand() -> None:
    x = np.array([[1.0, 0.0, 0.0, 1.0]] * 2, np.float32)
    got = rope(x, first_position=4, base=16.0)  # rates 1 and 16 ** -0.5 = 1/4; positions 4 and 5
    expected = [
        [np.cos(4), np.sin(4), -np.sin(1), np.cos(1)],
        [np.cos(5), np.sin(5), -np.sin(1.25), np.cos(1.25)],
    ]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def rope_of_halves(x: np.ndarray, first_position: int, base: float) -> np.ndarray:
    """The other convention: element i is paired with i + head_dim / 2."""
    tokens, head_dim = x.shape[-2:]
    angles = np.outer(first_position + np.arange(tokens), base ** (-np.arange(head_dim // 2) / (head_dim // 2)))
    cos, sin = np.cos(np.tile(angles, 2)), np.sin(np.tile(angles, 2))
    rotated = np.concatenate([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], axis=-1)
    return (x * cos + rotated * sin).astype(np.float32)


def test_interleaved_pairs_are_the_un_permuted_halves(rng: np.random.Generator) -> None:
    """The file's rows with interleaved pairs, and the rows put back with half pairs, give the same scores."""
    head_dim, num_heads = 8, 3
    x = rng.standard_normal((5, 20), dtype=np.float32)
    q_rows, k_rows = (rng.standard_normal((num_heads * head_dim, 20), dtype=np.float32) for _ in range(2))

    def un_permuted(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(num_heads, head_dim // 2, 2, 20).swapaxes(1, 2).reshape(rows.shape)

    query, key = (rope(split_heads(x @ rows.T, num_heads), 7, 1e5) for rows in (q_rows, k_rows))
    halves = [rope_of_halves(split_heads(x @ un_permuted(rows).T, num_heads), 7, 1e5) for rows in (q_rows, k_rows)]
    np.testing.assert_allclose(query[..., 0::2], halves[0][..., : head_dim // 2], atol=1e-5)
    np.testing.assert_allclose(query @ key.swapaxes(2, 3), halves[0] @ halves[1].swapaxes(2, 3), rtol=1e-4, atol=1e-4)


def test_rope_scores_depend_on_distance_alone(rng: np.random.Generator) -> None:
    query, key = rng.standard_normal((2, 1, 64))
    scores = [(rope(query, p + 3, 1e5) @ rope(key, p, 1e5).T).item() for p in (0, 1, 500)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[1] * 10, [9, 1], [4, 3, 3]], ids=str)
def test_steps_with_the_cache_equal_one_step(weights: Weights, steps: list[int]) -> None:
    whole = Decoder(MINI, weights, OracleAttention(MINI, len(PROMPT)), len(PROMPT))
    expected = whole.step(PROMPT)
    cached = Decoder(MINI, weights, OracleAttention(MINI, MINI.max_kv_len), MINI.max_kv_len)
    first = 0
    for count in steps:
        got = cached.step(PROMPT[first : first + count])
        first += count
    assert cached.kv_len == whole.kv_len == len(PROMPT)
    assert got.shape == (MINI.vocab_size,)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_network_equals_a_plain_float64_forward(weights: Weights) -> None:
    """No cache, no GQA by index, half-pair rotation on rows put back in order: another road to the same logits."""

    def un_permuted(rows: np.ndarray, heads: int) -> np.ndarray:
        return rows.reshape(heads, MINI.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + MINI.norm_eps) * weight

    group_size = MINI.num_heads // MINI.num_kv_heads
    x = weights.token_embd[PROMPT].astype(np.float64)
    hidden = np.triu(np.ones((len(PROMPT), len(PROMPT)), bool), 1)
    for layer in weights.layers:
        h = norm(x, layer.attn_norm)
        heads = []
        for head in range(MINI.num_heads):
            rows = slice(head * MINI.head_dim, (head + 1) * MINI.head_dim)
            kv_rows = slice(head // group_size * MINI.head_dim, (head // group_size + 1) * MINI.head_dim)
            q = rope_of_halves(h @ un_permuted(layer.attn_q, MINI.num_heads)[rows].T, 0, MINI.rope_base)
            k = rope_of_halves(h @ un_permuted(layer.attn_k, MINI.num_kv_heads)[kv_rows].T, 0, MINI.rope_base)
            score = np.where(hidden, -np.inf, q.astype(np.float64) @ k.T / np.sqrt(MINI.head_dim))
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            heads.append(weight / weight.sum(axis=1, keepdims=True) @ (h @ layer.attn_v[kv_rows].T))
        x = x + np.concatenate(heads, axis=1) @ layer.attn_output.T
        h = norm(x, layer.ffn_norm)
        gate = h @ layer.ffn_gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.ffn_up.T)) @ layer.ffn_down.T
    expected = weights.output @ norm(x[-1], weights.output_norm)
    got = Decoder(MINI, weights, OracleAttention(MINI, len(PROMPT)), len(PROMPT)).step(PROMPT)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_decoder_refuses_what_does_not_fit(weights: Weights) -> None:
    with pytest.raises(ValueError, match="`capacity` is 41 tokens"):
        Decoder(MINI, weights, OracleAttention(MINI, 41), 41)
    decoder = Decoder(MINI, weights, OracleAttention(MINI, 4), 4)
    with pytest.raises(ValueError, match="it takes 1 to 4"):
        decoder.step([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="got 0 tokens"):
        decoder.step([])
    assert decoder.kv_len == 0
