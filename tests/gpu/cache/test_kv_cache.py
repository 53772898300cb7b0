"""`KVCache`: exactly the new rows are written, in the cache's dtype, and everything else stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.caches import (
    GUARD,
    Model,
    assert_holds,
    bits,
    fill_words,
    new_rows,
    poison,
    raw_rows,
    raw_words,
    small_buffers,
)
from vkattn import KVCache
from vkattn.dtypes import FLOAT_DTYPES, numpy_dtype
from vkattn.runtime.device import Device

DIMS = [(1, 17), (5, 1), (17, 5), (64, 64)]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_rows_come_back_as_they_were_written(device: Device, rng: np.random.Generator, head_dim: int, value_dim: int,
                                             dtype: str) -> None:
    cache = KVCache(2, 3, 11, head_dim, value_dim=value_dim, num_layers=2, dtype=dtype, device=device)
    model = Model(cache)
    poison(cache)
    for step, tokens in enumerate((4, 1, 1, 5)):
        for layer in range(2):
            rows = new_rows(rng, cache, tokens, dtype if (step + layer) % 2 else "float32")
            start = int(model.lengths[layer, 0])
            cache.update(*rows, start, layer)
            model.update(*rows, start, layer)
    assert (cache.lengths == 11).all()
    assert_holds(cache, model)


def float32_edges() -> np.ndarray:
    """Return float32 values around every rounding edge of float16 and bfloat16, both signs."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16)[:-1].astype(np.float32)  # finite, not negative
    brains = (np.arange(0x0080, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    edges = []
    for exact in (halves, brains):
        words = exact.view(np.uint32).astype(np.int64)
        middle = (words[:-1] + words[1:]) // 2
        edges += [exact, *((middle + step).astype(np.uint32).view(np.float32) for step in (-1, 0, 1))]
    special = np.array([65519.996, 65520, 65536, 3.4028235e38, np.inf, 0, 2**-25, 2**-24, 1e-38], np.float32)
    positive = np.concatenate([*edges, special])
    positive = positive[(positive == 0) | (positive >= np.finfo(np.float32).tiny)]
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_rows_are_rounded_to_the_nearest_even(device: Device, dtype: str) -> None:
    values = float32_edges()
    values = np.concatenate([values, np.zeros(-len(values) % 192, np.float32)]).reshape(1, -1, 3, 64)
    cache = KVCache(1, 3, values.shape[1], 64, dtype=dtype, device=device)
    cache.update(values, values, 0)
    with np.errstate(over="ignore"):
        expected = values.astype(numpy_dtype(dtype))
    for got in cache.read():
        np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_nan_and_infinity_are_kept(device: Device, dtype: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1.0], np.float32).reshape(1, 1, 1, 5)
    for rows in (special, special.astype(numpy_dtype(dtype))):
        cache = KVCache(1, 1, 2, 5, dtype=dtype, device=device)
        cache.update(rows, rows, 0)
        for got in cache.read():
            assert np.isnan(got[..., 0])
            np.testing.assert_array_equal(bits(got[..., 1:]), bits(special.astype(got.dtype)[..., 1:]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_the_caches_dtype_keep_every_bit(device: Device, dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    every[np.isnan(every.view(numpy_dtype(dtype)).astype(np.float32))] = 0
    if dtype == "bfloat16":
        every[(every & 0x7FFF) < 0x0080] = 0  # a device may flush bfloat16's subnormals, which are float32's too
    rows = every.view(numpy_dtype(dtype)).reshape(1, 256, 4, 64)
    cache = KVCache(1, 4, 256, 64, dtype=dtype, device=device)
    cache.update(rows, rows, 0)
    for got in cache.read():
        np.testing.assert_array_equal(bits(got), bits(rows))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_only_the_new_rows_are_written(device: Device, rng: np.random.Generator, dtype: str) -> None:
    """The cache is full of 7; S = 3 written at P = 2: rows from 5 on are still 7, bit for bit, as is all else."""
    seven = bits(np.full(4 // numpy_dtype(dtype).itemsize, 7, numpy_dtype(dtype)))
    word = int(np.frombuffer(seven.tobytes(), np.uint32)[0])
    cache = KVCache(2, 3, 9, 6, value_dim=5, num_layers=3, dtype=dtype, device=device)
    sevens = [np.full((2, 9, 3, dim), 7, np.float32) for dim in (6, 5)]
    for layer in range(3):
        cache.update(*sevens, 0, layer)
    poison(cache, word)
    rows = new_rows(rng, cache, 3)
    cache.update(*rows, 2, 1)
    assert cache.lengths.tolist() == [[9, 9], [5, 5], [9, 9]]
    for layer in range(3):
        for written, new in zip(raw_rows(cache, layer), rows, strict=True):
            untouched = np.ones(9, bool) if layer != 1 else np.isin(np.arange(9), (2, 3, 4), invert=True)
            assert (written[:, :, untouched] == word).all()
            if layer == 1:
                expected = new.astype(numpy_dtype(dtype)).transpose(0, 2, 1, 3)
                got = np.ascontiguousarray(written[:, :, 2:5]).view(numpy_dtype(dtype))
                np.testing.assert_array_equal(bits(got[..., : new.shape[3]]), bits(expected))
                assert (bits(got[..., new.shape[3] :]) == 0).all(), "a row's padding is written 0"


def test_each_batch_entry_has_its_own_position(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(3, 2, 12, 8, value_dim=3, num_layers=2, dtype="float16", device=device)
    model = Model(cache)
    poison(cache)
    for layer in (1, 0):
        for start, tokens in ((0, 5), ([5, 2, 0], 3), ([8, 1, 3], 1), (np.array([0, 2, 4], np.uint8), 8)):
            rows = new_rows(rng, cache, tokens)
            cache.update(*rows, start, layer)
            model.update(*rows, np.asarray(start, np.int64), layer)
            assert_holds(cache, model)
    assert cache.lengths.tolist() == [[8, 10, 12], [8, 10, 12]]
    assert cache.layer(1).lengths.tolist() == [8, 10, 12]


def test_long_and_short_appends_in_any_order(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(1, 2, 700, 33, dtype="float32", device=device)
    model = Model(cache)
    for start, tokens in ((0, 300), (300, 1), (301, 1), (302, 398), (0, 1), (1, 700 - 1), (5, 2), (7, 256)):
        rows = new_rows(rng, cache, tokens)
        cache.update(*rows, start)
        model.update(*rows, start)
    assert_holds(cache, model)
    assert len(cache.plans) <= 16


def test_rows_of_any_strides(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(2, 3, 8, 6, dtype="float16", device=device)
    key, value = new_rows(rng, cache, 8)
    views = [np.asfortranarray(key), value[:, ::-1, :, ::-1]]
    cache.update(*views, 0)
    got = cache.read()
    for rows, view in zip(got, views, strict=True):
        np.testing.assert_array_equal(rows, view.astype(np.float16))
    got[0][...] = 0  # what read returns is the caller's own
    np.testing.assert_array_equal(cache.read()[0], key.astype(np.float16))


@pytest.mark.parametrize(("max_bytes", "dtype"), [(2000, "float16"), (5000, "float32"), (1 << 27, "float16")])
def test_layers_in_several_groups_of_buffers(device: Device, rng: np.random.Generator, max_bytes: int,
                                             dtype: str) -> None:
    with small_buffers(device, max_bytes) as own:
        cache = KVCache(2, 2, 7, 9, value_dim=4, num_layers=5, dtype=dtype, device=own)
        layer_bytes = 2 * 2 * 7 * (48 if dtype == "float32" else 32)
        assert len(cache.storage.groups) == -(-5 // min(5, max_bytes // layer_bytes))
        assert all(buffer.size_bytes <= max_bytes for pair in cache.storage.groups for buffer in pair)
        model = Model(cache)
        for start, tokens in ((0, 3), ([3, 1], 2)):
            for layer in (4, 0, 2, 1, 3):
                rows = new_rows(rng, cache, tokens)
                cache.update(*rows, start, layer)
                model.update(*rows, start, layer)
        assert_holds(cache, model)
        cache.reorder([1, 1])
        model.reorder([1, 1])
        assert_holds(cache, model)


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0], [0, 0, 0, 0], [2, 2, 0, 0], [0, 3, 3, 1]],
                         ids=str)
def test_reorder(device: Device, rng: np.random.Generator, index: list[int]) -> None:
    cache = KVCache(4, 2, 6, 5, value_dim=7, num_layers=2, dtype="bfloat16", device=device)
    model = Model(cache)
    for layer in range(2):
        for start, tokens in ((0, 2), ([2, 1, 0, 2], 3)):
            rows = new_rows(rng, cache, tokens)
            cache.update(*rows, start, layer)
            model.update(*rows, start, layer)
    for given in (index, np.array(index)):
        cache.reorder(given)
        model.reorder(index)
        assert_holds(cache, model)
    rows = new_rows(rng, cache, 1)
    cache.update(*rows, cache.lengths[1], 1)
    model.update(*rows, model.lengths[1], 1)
    assert_holds(cache, model)


def test_truncate_and_reset_forget_without_moving(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(2, 1, 6, 4, num_layers=2, dtype="float32", device=device)
    model = Model(cache)
    for layer, start in ((0, 0), (1, 0), (1, [3, 1])):
        rows = new_rows(rng, cache, 3)
        cache.update(*rows, start, layer)
        model.update(*rows, start, layer)
    before = raw_words(cache)
    for beyond in (np.uint64(2**63), [10**9, 9]):
        cache.truncate(beyond)
        assert_holds(cache, model)
    for keep in (5, [4, 4], np.int64(4), [2, 3], 9, 0):
        cache.truncate(keep)
        model.lengths = np.minimum(model.lengths, keep)
        assert_holds(cache, model)
    cache.reset()
    assert (cache.lengths == 0).all()
    for got, kept in zip(raw_words(cache), before, strict=True):
        np.testing.assert_array_equal(got, kept)
    assert cache.read(1)[0].shape == (2, 0, 1, 4)


def test_writing_before_the_end_truncates(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(1, 2, 8, 4, dtype="float32", device=device)
    model = Model(cache)
    for start, tokens in ((0, 8), (2, 3)):
        rows = new_rows(rng, cache, tokens)
        cache.update(*rows, start)
        model.update(*rows, start)
    assert cache.lengths.tolist() == [[5]]
    assert_holds(cache, model)


def test_two_caches_do_not_touch_each_other(device: Device, rng: np.random.Generator) -> None:
    caches = [KVCache(1, 2, 9, 8, dtype=dtype, device=device) for dtype in ("float16", "float16", "float32")]
    models = [Model(cache) for cache in caches]
    for start in range(9):
        for cache, model in zip(caches, models, strict=True):
            rows = new_rows(rng, cache, 1)
            cache.update(*rows, start)
            model.update(*rows, start)
    for cache, model in zip(caches, models, strict=True):
        assert_holds(cache, model)


@pytest.mark.parametrize(("dtype", "row_bytes"), [("float32", 48 + 16), ("float16", 32 + 16), ("bfloat16", 32 + 16)])
def test_nbytes_counts_padded_rows(device: Device, dtype: str, row_bytes: int) -> None:
    cache = KVCache(2, 3, 10, 9, value_dim=1, num_layers=4, dtype=dtype, device=device)
    assert cache.nbytes == 2 * 3 * 10 * 4 * row_bytes
    assert repr(cache) == (
        f"<vkattn.KVCache 4 layers, batch 2, 3 heads, capacity 10, head_dim 9, {dtype}>")


def test_a_dropped_cache_gives_its_memory_back_at_once(device: Device, rng: np.random.Generator) -> None:
    with Device(device.info.index) as own:
        def use(cache: Any) -> None:
            for start, tokens in ((0, 1), (1, 9)):
                cache.update(*new_rows(rng, cache, tokens), start)
            cache.read()
            cache.reorder([1, 0])

        use(KVCache(2, 2, 16, 8, device=own))
        allocated = own.allocation_count, own.allocated_bytes  # the device's own boundary tensor
        for _ in range(3):
            use(KVCache(2, 2, 16, 8, device=own))
            assert (own.allocation_count, own.allocated_bytes) == allocated
        cache = KVCache(2, 2, 16, 8, device=own)
        use(cache)
        assert own.allocated_bytes >= allocated[1] + cache.nbytes
        cache.close()
        assert (own.allocation_count, own.allocated_bytes) == allocated


def test_unwritten_memory_is_never_read(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(2, 2, 9, 12, dtype="float16", device=device)
    rows = new_rows(rng, cache, 4)
    results = []
    for word in (0, GUARD):
        cache.reset()
        for buffer in cache.storage.groups[0]:
            fill_words(buffer, word)
        cache.update(*rows, 0)
        cache.truncate([4, 1])
        results.append(cache.read())
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, poisoned)
        assert np.isfinite(clean).all()
