"""Quantised caches: the codes are the oracle's, exactly the new rows are written, and every way in and out agrees."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.caches import GUARD, Model, assert_holds, bits, new_rows, poison, raw_words, small_buffers
from vkattn import GraphBuilder, KVCache, oracle
from vkattn.cache import kv_cache as kv_cache_module
from vkattn.dtypes import numpy_dtype
from vkattn.errors import CapacityError, DTypeError, OptionError, ShapeError
from vkattn.formats import QUANTISED
from vkattn.runtime.device import Device

#: (key, value) formats of a cache.
PAIRS = [*((name, name) for name in QUANTISED), ("int8", "float16"), ("bfloat16", "q4_0"), ("q4_0", "q8_0")]


def assert_raw_is(raw: dict[str, np.ndarray | None], name: str, rows: np.ndarray, dtype: str) -> None:
    """Assert that codes, scales and zero points are the oracle's, bit for bit (NaN too)."""
    for part, expected in zip((name, f"{name}_scale", f"{name}_zero_point"), oracle.quantize(rows, dtype), strict=True):
        got = raw[part]
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(got, expected)


def hard_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows of all magnitudes: signed, constant, zero, with one huge value, with ties between two codes."""
    rows = 10.0 ** rng.uniform(-5, 4, (*shape[:-1], 1)) * rng.standard_normal(shape)
    flat = rows.reshape(-1, shape[-1])
    flat[0] = 0
    flat[1], flat[2] = 3.7, -0.25
    flat[3, shape[-1] // 2] = 4e5
    flat[4] = np.round(flat[4] / np.abs(flat[4]).max() * 254) / 2
    flat[5] = np.abs(flat[5])
    flat[6] = -np.abs(flat[6]) - 1
    flat[7] *= 1e-30
    return rows.astype(np.float32)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_rows_below_float32s_normal_range(device: Device, rng: np.random.Generator, dtype: str) -> None:
    """A device may read them as 0, of either sign: the scale is 0 without a sign, or int8's smallest."""
    cache = KVCache(1, 1, 40, 65, dtype=dtype, device=device)
    rows = (1e-39 * rng.standard_normal((1, 40, 1, 65))).astype(np.float32)
    rows[:, 20:] *= np.float32(1e-5)
    assert (rows > 0).any() and (rows < 0).any()
    cache.update(rows, -rows, 0)
    raw = cache.raw()
    for name, given in (("key", rows), ("value", -rows)):
        for part, expected in zip((name, f"{name}_scale", f"{name}_zero_point"), oracle.quantize(given, dtype),
                                  strict=True):
            if expected is not None:
                np.testing.assert_array_equal(bits(np.asarray(raw[part])), bits(expected))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("rows_dtype", ["float32", "float16", "bfloat16"])
def test_the_codes_are_the_oracles(device: Device, rng: np.random.Generator, dtype: str, rows_dtype: str) -> None:
    for head_dim, value_dim in ((17, 1), (128, 300), (64, 33)):
        cache = KVCache(2, 2, 40, head_dim, value_dim=value_dim, dtype=dtype, device=device)
        poison(cache)
        rows = []
        for dim in (head_dim, value_dim):
            given = hard_rows(rng, (2, 40, 2, dim))
            if rows_dtype == "float16":
                given = np.clip(given, -6e4, 6e4)
            rows.append(given.astype(numpy_dtype(rows_dtype)))
        cache.update(*rows, 0)
        raw = cache.raw()
        for name, array in zip(("key", "value"), rows, strict=True):
            assert_raw_is(raw, name, array, dtype)
        cache.close()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_constant_and_zero_rows_are_exact_to_the_format(device: Device, dtype: str) -> None:
    cache = KVCache(1, 1, 3, 40, dtype=dtype, device=device)
    rows = np.zeros((1, 3, 1, 40), np.float32)
    rows[0, 1], rows[0, 2] = 12.5, -12.5
    cache.update(rows, rows, 0)
    key, value = cache.read()
    assert (key[0, 0] == 0).all()
    assert (value[0, 0] == 0).all()
    # one rounding of the scale: to float32, or to float16
    np.testing.assert_allclose(key, rows, rtol=2.0**-22 if dtype == "int8" else 2.0**-11)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_two_updates_are_one_bit_for_bit(device: Device, rng: np.random.Generator, dtype: str) -> None:
    words = []
    key, value = (rng.standard_normal((2, 7, 3, dim)).astype(np.float32) for dim in (17, 70))
    for cuts in ((0, 7), (0, 3, 4, 7)):
        cache = KVCache(2, 3, 9, 17, value_dim=70, dtype=dtype, device=device)
        poison(cache)
        for start, stop in itertools.pairwise(cuts):
            cache.update(key[:, start:stop], value[:, start:stop], start)
        words.append(raw_words(cache))
        cache.close()
    for once, twice in zip(*words, strict=True):
        np.testing.assert_array_equal(once, twice)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_only_the_new_rows_are_written(device: Device, rng: np.random.Generator, pair: tuple[str, str]) -> None:
    """Rows are written in the middle of a layer of guards: each has its own words, and no other word changes."""
    cache = KVCache(2, 3, 8, 33, value_dim=20, num_layers=2, dtype=pair[0], value_dtype=pair[1], device=device)
    cache.note_append(np.array([2, 5]), 1, 1)
    poison(cache)
    cache.update(*new_rows(rng, cache, 2), [2, 5], 1)
    for which, buffer in enumerate(cache.storage.groups[0]):
        written = raw_words(cache)[which] != GUARD
        expected = np.zeros(buffer.num_words, bool)
        for start, words in cache.storage.regions(which):
            at = cache.storage.place(1)[1][which] + start
            rows = expected[at : at + words].reshape(2, 3, 8, -1)
            rows[0, :, 2:4] = rows[1, :, 5:7] = True
        np.testing.assert_array_equal(written & ~expected, False)
        missing = expected & ~written  # a word may happen to be the guard's; a row of them may not
        assert missing.sum() <= 2


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_appends_truncations_reorders_and_reads(device: Device, rng: np.random.Generator,
                                                pair: tuple[str, str]) -> None:
    cache = KVCache(3, 2, 12, 17, value_dim=40, num_layers=2, dtype=pair[0], value_dtype=pair[1], device=device)
    model = Model(cache)
    poison(cache)
    for layer in (1, 0):
        for start, tokens in ((0, 5), ([5, 2, 0], 3), (np.array([0, 2, 3]), 9)):
            rows = new_rows(rng, cache, tokens, "float16" if layer else "float32", 15)
            cache.update(*rows, start, layer)
            model.update(*rows, start, layer)
        assert_holds(cache, model)
    cache.reorder([2, 2, 0])
    model.reorder([2, 2, 0])
    cache.truncate([12, 6, 1])
    model.lengths = np.minimum(model.lengths, [12, 6, 1])
    assert_holds(cache, model)


def test_layers_in_several_pairs_of_buffers(device: Device, rng: np.random.Generator) -> None:
    with small_buffers(device, 4096) as own:
        cache = KVCache(1, 2, 12, 17, num_layers=5, dtype="int8", device=own)
        model = Model(cache)
        assert len(cache.storage.groups) > 1
        for layer in range(5):
            rows = new_rows(rng, cache, 12)
            cache.update(*rows, 0, layer)
            model.update(*rows, 0, layer)
        assert_holds(cache, model)


@pytest.mark.parametrize(("dtype", "row_bytes"), [("int8", 136), ("q8_0", 136), ("q4_0", 72)])
def test_bytes_of_a_row(device: Device, dtype: str, row_bytes: int) -> None:
    cache = KVCache(2, 8, 256, 128, num_layers=3, dtype=dtype, device=device)
    assert cache.nbytes == 2 * 3 * 2 * 8 * 256 * row_bytes
    assert cache.nbytes == sum(buffer.size_bytes for pair in cache.storage.groups for buffer in pair)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_comes_out_raw_goes_in_again(device: Device, rng: np.random.Generator, pair: tuple[str, str]) -> None:
    cache = KVCache(2, 3, 9, 33, value_dim=70, dtype=pair[0], value_dtype=pair[1], device=device)
    cache.update(*new_rows(rng, cache, 7), 0)
    again = KVCache.load(**cache.raw(), dtype=pair[0], value_dtype=pair[1], capacity=20, device=device)  # type: ignore[arg-type]
    assert again.capacity == 20
    assert again.lengths.tolist() == [[7, 7]]
    for got, expected in zip(again.read(), cache.read(), strict=True):
        np.testing.assert_array_equal(bits(got), bits(expected))
    for name, expected in cache.raw().items():
        np.testing.assert_array_equal(again.layer(0).raw()[name], expected)


CODES = np.zeros((1, 2, 3, 40), np.int8)
SCALE, ZERO = np.ones((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int8)
BLOCKS = np.ones((1, 2, 3, 2), np.float16)

NOT_LOADED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("int8", {"key": CODES.astype(np.int16)}, DTypeError, "`key` is int16; the codes of int8 rows are int8"),
    ("int8", {"key": CODES[0]}, ShapeError, r"`key` has shape \(2, 3, 40\)"),
    ("int8", {"value": CODES[:, :1]}, ShapeError, r"`value` \(1, 1, 3, 40\)"),
    ("int8", {"key_scale": SCALE[..., :2]}, ShapeError, r"`key_scale` has shape \(1, 2, 2\); it must be \(1, 2, 3\)"),
    ("int8", {"key_scale": SCALE.astype(np.float64)}, DTypeError, "`key_scale` is float64; it must be float32"),
    ("int8", {"value_zero_point": None}, DTypeError, "`value_zero_point` is None; it must be int8"),
    ("int8", {"value_scale": SCALE * np.float32(np.nan)}, OptionError, "`value_scale` holds NaN or infinity"),
    ("int8", {"capacity": 1}, CapacityError, "`key` has 2 tokens but `capacity` is 1"),
    ("q4_0", {"key_scale": BLOCKS, "key_zero_point": None, "key": CODES + np.int8(8)}, OptionError,
     "q4_0 codes are within -8 .. 7"),
    ("q8_0", {"key_scale": BLOCKS}, OptionError, "`key_zero_point` must be None: q8_0 is symmetric"),
    ("float16", {}, DTypeError, "`key` is int8; the codes of float16 rows are float16"),
]


@pytest.mark.parametrize(("dtype", "changes", "error", "message"), NOT_LOADED)
def test_what_load_refuses(device: Device, dtype: str, changes: dict[str, Any], error: type[Exception],
                           message: str) -> None:
    given = {name: part for which in ("key", "value") for name, part in
             ((which, CODES), (f"{which}_scale", SCALE), (f"{which}_zero_point", ZERO))}
    before = device.allocation_count
    with pytest.raises(error, match=message):
        KVCache.load(**(given | changes), dtype=dtype, device=device)  # type: ignore[arg-type]
    assert device.allocation_count == before


@pytest.mark.parametrize(("dtype", "bad"), [("int8", np.nan), ("int8", np.inf), ("int8", -3e38), ("q8_0", np.nan),
                                            ("q8_0", 8.4e6), ("q4_0", -np.inf), ("q4_0", 6e5)])
def test_what_a_format_cannot_hold_is_refused_on_the_host(device: Device, rng: np.random.Generator, dtype: str,
                                                          bad: float) -> None:
    cache = KVCache(1, 2, 6, 20, dtype=dtype, device=device)
    cache.update(*new_rows(rng, cache, 2), 0)
    before = raw_words(cache)
    builder = GraphBuilder(device)
    key, value = (builder.input(name, (1, 1, 2, 20), "float32") for name in ("k", "v"))
    view = builder.kv_append(builder.kv_cache("cache", cache=cache), key, value, builder.position("at"))
    builder.output("out", builder.attention(key, view, view, layout="bshd"))
    graph = builder.build()
    good, spoilt = np.ones((1, 1, 2, 20), np.float32), np.ones((1, 1, 2, 20), np.float32)
    spoilt[0, 0, 1, 7] = bad
    for call, name in ((lambda: cache.update(spoilt, good, 2), "key"), (lambda: cache.update(good, spoilt, 2), "value"),
                       (lambda: graph.run({"k": good, "v": spoilt}, at=2), "v")):
        with pytest.raises(OptionError, match=rf"`{name}` holds .*; rows of an {dtype} cache must be finite"):
            call()
    assert cache.lengths.tolist() == [[2]]
    for now, then in zip(raw_words(cache), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(("dtype", "bad"), [("int8", np.nan), ("q8_0", 8.4e6), ("q4_0", -np.inf)])
def test_constants_that_a_format_cannot_hold_are_refused_when_they_are_appended(device: Device, dtype: str,
                                                                                bad: float) -> None:
    cache = KVCache(1, 2, 6, 20, dtype="float16" if bad == 8.4e6 else dtype, value_dtype=dtype, device=device)
    good, spoilt = np.ones((1, 1, 2, 20), np.float32), np.ones((1, 1, 2, 20), np.float32)
    spoilt[0, 0, 1, 7] = bad
    builder = GraphBuilder(device)
    query, fine, wrong = (builder.constant(name, array) for name, array in
                          (("query", good), ("fine", good), ("wrong", spoilt)))
    tokens, at = builder.kv_cache("cache", cache=cache), builder.position("at")
    refusal = rf"node: `value` holds .*; rows of an {dtype} cache must be finite"
    with pytest.raises(OptionError, match=refusal):
        builder.kv_append(tokens, fine, wrong, at, name="node")
    with pytest.raises(OptionError, match=refusal):
        builder.sdpa_with_kv_cache(query, fine, wrong, tokens, at, name="node")
    assert cache.lengths.tolist() == [[0]]


def test_an_input_of_a_refused_append_may_hold_anything(device: Device) -> None:
    """What was refused is not appended, so its rows need not fit the format."""
    cache = KVCache(1, 1, 4, 8, dtype="int8", device=device)
    builder = GraphBuilder(device)
    rows = np.ones((1, 1, 1, 8), np.float32)
    given, wrong = builder.input("given", rows.shape, "float32"), builder.constant("wrong", rows * np.float32(np.nan))
    with pytest.raises(OptionError, match="`value` holds NaN"):
        builder.kv_append(builder.kv_cache("cache", cache=cache), given, wrong, builder.position("at"))
    builder.output("out", builder.attention(given, given, wrong))
    out = builder.build().run({"given": rows * np.float32(3e38)}, at=0)["out"]
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_not_finite_on_the_device_spoils_its_row_or_block_alone(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Rows that a graph computes are not looked at: the scale becomes NaN, so that nothing reads as a number."""
    monkeypatch.setattr(kv_cache_module, "check_range", lambda *arguments: None)
    cache = KVCache(1, 2, 4, 70, dtype=dtype, device=device)
    rows = rng.standard_normal((1, 4, 2, 70)).astype(np.float32)
    rows[0, 1, 0, 3], rows[0, 2, 1, 40], rows[0, 3, 0, 69] = np.nan, np.inf, -np.inf
    cache.update(rows, rows, 0)
    with np.errstate(invalid="ignore"):
        assert_raw_is(cache.raw(), "key", rows, dtype)
        key, _ = cache.read()
    assert np.isnan(key[0, 1, 0, 3])
    assert np.isnan(key).any(axis=-1).sum() == 3
