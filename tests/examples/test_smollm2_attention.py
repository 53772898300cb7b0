"""Attention of the example: the oracle's over a rounded cache, the check, and the device's graphs on a tiny network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import smollm2
import smollm2_file
from smollm2_attention import (
    CACHE_DTYPES,
    QUANTISED,
    CheckedAttention,
    GraphAttention,
    OracleAttention,
    cache_differences,
)
from smollm2_file import ModelFileError
from smollm2_model import Decoder, Weights

import vkattn
from tests.examples.mini import MINI, PROMPT


def step(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random query, key and value of new tokens, for MINI."""
    heads = (MINI.num_heads, MINI.num_kv_heads, MINI.num_kv_heads)
    query, key, value = (rng.standard_normal((1, count, tokens, MINI.head_dim), dtype=np.float32) for count in heads)
    return query, key, value


# --- without a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_oracle_attends_to_all_it_was_given_rounded(rng: np.random.Generator, dtype: str) -> None:
    oracle = OracleAttention(MINI, 9, dtype)
    first, second, other = step(rng, 4), step(rng, 2), step(rng, 3)
    oracle(1, *first, 0)
    oracle(0, *other, 0)
    out = oracle(1, *second, 4)
    keys, values = (np.concatenate(pair, axis=2) for pair in zip(first[1:], second[1:], strict=True))
    if dtype in QUANTISED:
        keys, values = (vkattn.oracle.dequantize(*vkattn.oracle.quantize(rows, dtype)) for rows in (keys, values))
    keys, values = keys.astype(oracle.keys.dtype), values.astype(oracle.keys.dtype)
    expected = vkattn.oracle.attention(second[0], keys, values, causal="bottom_right")
    assert oracle.keys.dtype.name == ("float64" if dtype in QUANTISED else dtype)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_check_is_on_the_rounded_rows(rng: np.random.Generator) -> None:
    """Attention over rows that were not rounded is right for a float32 cache and too far off for a float16 one."""
    given = step(rng, 6)
    shares = {}
    for dtype in CACHE_DTYPES:
        attend = CheckedAttention(OracleAttention(MINI, 6), OracleAttention(MINI, 6, dtype))
        attend(0, *given, 0)
        shares[dtype] = attend.error_shares[0]
    assert shares["float32"] < 0.1
    assert shares["float16"] > 5
    assert shares["bfloat16"] > 40


def test_without_held_nothing_is_compared(rng: np.random.Generator) -> None:
    attend = CheckedAttention(OracleAttention(MINI, 6))
    attend(0, *step(rng, 6), 0)
    assert (len(attend.seconds), attend.errors, attend.error_shares) == (1, [], [])


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_row_of_the_cache_that_differs_is_found(rng: np.random.Generator, dtype: str) -> None:
    held = OracleAttention(MINI, 6, dtype)
    for layer in range(2):
        held(layer, *step(rng, 5), 0)
    kept = [(held.keys[layer, :, :, :5].swapaxes(1, 2).copy(), held.values[layer, :, :, :5].swapaxes(1, 2).copy())
            for layer in range(2)]
    if dtype in QUANTISED:  # which reads as float32
        kept = [(key.astype(np.float32), value.astype(np.float32)) for key, value in kept]
    cache: Any = SimpleNamespace(num_layers=2, read=lambda layer: kept[layer])
    assert cache_differences(cache, held, 5) == []
    assert cache_differences(cache, held, 4) == [0, 1]
    kept[1][1][0, 4, 1, 7] = np.nextafter(np.float32(kept[1][1][0, 4, 1, 7]) * np.float32(1.01), np.float32(9))
    assert cache_differences(cache, held, 5) == [1]


def test_bfloat16_without_ml_dtypes_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(smollm2_file.importlib, "import_module", without)
    with pytest.raises(ModelFileError, match="Hint: pip install ml_dtypes"):
        OracleAttention(MINI, 4, "bfloat16")
    OracleAttention(MINI, 4, "float16")


# --- on the device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("steps", [[10, 1, 1, 1], [1, 1, 4, 3, 1, 2]], ids=str)
def test_graphs_share_one_cache(device: vkattn.Device, weights: Weights, dtype: str, steps: list[int]) -> None:
    """Every step of every layer within its bound, the cache exact, and the logits those of the oracle's attention.

    Not with a quantised cache: what differs in the last bit may choose another code.
    """
    attention, held = GraphAttention(MINI, 13, max(steps), dtype, device), OracleAttention(MINI, 13, dtype)
    attend = CheckedAttention(attention, held)
    decoder = Decoder(MINI, weights, attend, 13)
    expected = Decoder(MINI, weights, OracleAttention(MINI, 13, dtype), 13)
    tokens = [*PROMPT, 1, 2, 3]
    for count in steps:
        now, tokens = tokens[:count], tokens[count:]
        logits = decoder.step(now)
        if dtype not in QUANTISED:
            np.testing.assert_allclose(logits, expected.step(now), rtol=1e-4, atol=1e-5)
    assert len(attend.error_shares) == MINI.num_layers * len(steps)
    assert max(attend.error_shares) <= 1
    assert attention.cache.lengths.tolist() == [[sum(steps)]] * MINI.num_layers
    assert cache_differences(attention.cache, held, sum(steps)) == []
    attention.close()


@pytest.mark.gpu
def test_nothing_is_recorded_or_allocated_after_the_start(
    device: vkattn.Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second conversation from position 0, shorter and then longer, gives the same bits again."""
    attention = GraphAttention(MINI, 30, len(PROMPT), "float16", device)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was made after the start")

    monkeypatch.setattr(device, "recording", refuse)
    monkeypatch.setattr(device, "buffer", refuse)
    answers = [smollm2.generate(Decoder(MINI, weights, attention, 30), PROMPT[:length], 9, end_token=-1)
               for length in (10, 3, 10)]
    assert answers[0].tokens == answers[2].tokens
    for first, again in zip(answers[0].logits, answers[2].logits, strict=True):
        np.testing.assert_array_equal(first, again)
    monkeypatch.undo()
    timings = attention.latest.timings()
    assert attention.latest is attention.decode
    assert timings[0].variant == "kv_append_f32_f16"
    attention.close()


@pytest.mark.once
@pytest.mark.gpu
def test_bytes_per_token(device: vkattn.Device) -> None:
    sizes = {}
    for dtype in CACHE_DTYPES:
        attention = GraphAttention(MINI, 16, 4, dtype, device)
        sizes[dtype] = attention.cache.nbytes / 16
        attention.close()
    elements = MINI.num_layers * 2 * MINI.num_kv_heads * MINI.head_dim
    assert {name: sizes[name] for name in ("float32", "float16", "bfloat16")} == {
        "float32": 4 * elements, "float16": 2 * elements, "bfloat16": 2 * elements}
    rows = elements // MINI.head_dim  # of 8 elements: codes are padded to 16 or 32, scales take 8 bytes or a word
    assert {name: sizes[name] for name in QUANTISED} == {"int8": 24 * rows, "q8_0": 36 * rows, "q4_0": 20 * rows}
