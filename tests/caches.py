"""What tests of caches share: new rows, a NumPy model of a cache, the raw words on the device, and small buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np

from tests.tolerance import assert_matches_oracle
from vkattn import KVCache, oracle, sdpa_with_kv_cache
from vkattn.dtypes import ITEM_BYTES, numpy_dtype
from vkattn.formats import QUANTISED
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import variant
from vkattn.layout import padded_dim
from vkattn.runtime.buffer import Buffer
from vkattn.runtime.device import Device

#: NaN as float32, and NaN twice as float16 and as bfloat16.
GUARD = 0x7FC17FCD
COUNT_IS_PUSHED = 0xFFFFFFFF


def new_rows(rng: np.random.Generator, cache: KVCache, tokens: int, dtype: str = "float32",
             size: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values (bshd) for ``tokens`` new rows, signed."""
    rows = [(size * rng.standard_normal((cache.batch, tokens, cache.num_kv_heads, dim), np.float32)).astype(
        numpy_dtype(dtype)) for dim in (cache.head_dim, cache.value_dim)]
    return rows[0], rows[1]


def stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return what a cache of this dtype holds of rows: rounded, or quantised and back by the oracle (float64)."""
    if dtype in QUANTISED:
        return oracle.dequantize(*oracle.quantize(rows, dtype))
    return rows.astype(numpy_dtype(dtype))


class Model:
    """What a cache holds, in NumPy: NaN where nothing was written."""

    def __init__(self, cache: KVCache) -> None:
        self._dtypes = (cache.dtype, cache.value_dtype)
        self.arrays = [np.full((cache.num_layers, cache.batch, cache.capacity, cache.num_kv_heads, dim), np.nan,
                               np.float64 if dtype in QUANTISED else numpy_dtype(dtype))
                       for dim, dtype in zip((cache.head_dim, cache.value_dim), self._dtypes, strict=True)]
        self.lengths = np.zeros((cache.num_layers, cache.batch), np.int64)

    def update(self, key: np.ndarray, value: np.ndarray, input_pos: Any, layer: int = 0) -> None:
        """Write rows (bshd)."""
        for batch, start in enumerate(np.broadcast_to(input_pos, key.shape[:1])):
            for array, rows, dtype in zip(self.arrays, (key, value), self._dtypes, strict=True):
                array[layer, batch, start : start + rows.shape[1]] = stored(rows[batch], dtype)
            self.lengths[layer, batch] = start + key.shape[1]

    def reorder(self, index: Any) -> None:
        """Let batch entry b hold what ``index[b]`` holds."""
        self.arrays = [array[:, index] for array in self.arrays]
        self.lengths = self.lengths[:, index]


def assert_holds(cache: KVCache, model: Model) -> None:
    """Assert that every layer reads as the model does, bit for bit; rows beyond an entry's length are 0."""
    np.testing.assert_array_equal(cache.lengths, model.lengths)
    for layer in range(cache.num_layers):
        lengths = model.lengths[layer]
        dead = np.arange(lengths.max()) >= lengths[:, None]
        for got, array in zip(cache.read(layer), model.arrays, strict=True):
            expected = array[layer, :, : lengths.max()].copy()
            expected[dead] = 0
            if expected.dtype == np.float64:
                expected = expected.astype(np.float32)
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(bits(got), bits(expected))


def bits(array: np.ndarray) -> np.ndarray:
    """Return the elements as unsigned integers, so that NaN and -0 compare too."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def read_words(buffer: Buffer) -> np.ndarray:
    """Return a copy of all words of a buffer in device memory."""
    with_host = buffer.device.buffer(buffer.num_words, "host", "read words")
    bindings = (Binding(buffer), Binding(buffer), Binding(with_host))
    push = {"count_index": COUNT_IS_PUSHED, "count": buffer.num_words, "src_offset": 0, "dst_offset": 0}
    recording = buffer.device.recording([[Dispatch(variant("copy"), bindings, push, 16)]])
    recording.run()
    words = with_host.words.copy()
    recording.close()
    with_host.destroy()
    return words


def fill_words(buffer: Buffer, word: int = GUARD) -> None:
    """Write ``word`` into all words of a buffer in device memory."""
    push = {"offset": 0, "count": buffer.num_words, "value": word}
    recording = buffer.device.recording([[Dispatch(variant("fill"), (Binding(buffer),), push, 16)]])
    recording.run()
    recording.close()


def poison(cache: KVCache, word: int = GUARD) -> None:
    """Write ``word`` into everything that a cache holds: NaN in every dtype, unless told otherwise."""
    for pair in cache.storage.groups:
        for buffer in pair:
            fill_words(buffer, word)


def raw_words(cache: KVCache) -> list[np.ndarray]:
    """Return all words of all buffers of a cache."""
    return [read_words(buffer) for pair in cache.storage.groups for buffer in pair]


def raw_rows(cache: KVCache, layer: int = 0) -> list[np.ndarray]:
    """Return all keys and all values of a layer, written or not, as words ``[batch, heads, capacity, row words]``."""
    group, starts = cache.storage.place(layer)
    rows = []
    for buffer, start, dim in zip(cache.storage.groups[group], starts, (cache.head_dim, cache.value_dim), strict=True):
        row_words = padded_dim(dim, cache.dtype) * ITEM_BYTES[cache.dtype] // 4
        shape = (cache.batch, cache.num_kv_heads, cache.capacity, row_words)
        rows.append(read_words(buffer)[start : start + int(np.prod(shape))].reshape(shape))
    return rows


@contextmanager
def small_buffers(device: Device, max_bytes: int) -> Iterator[Device]:
    """Open another device, whose storage buffers may only be this large, so that caches lie in several of them."""
    with Device(device.info.index) as own:
        own.info = replace(own.info, max_storage_buffer_range=max_bytes)
        yield own


class Session:
    """A cache and its model: every step appends and attends on the device, and is compared with the oracle."""

    def __init__(self, cache: KVCache, num_heads: int, rng: np.random.Generator, size: float = 2.0) -> None:
        self.cache, self.model = cache, Model(cache)
        self.num_heads, self._rng, self._size = num_heads, rng, size
        poison(cache)

    def arrays(self, tokens: int, dtype: str = "float32", new_dtype: str | None = None) -> list[np.ndarray]:
        """Return queries, new keys and new values (bshd)."""
        shape = (self.cache.batch, tokens, self.num_heads, self.cache.head_dim)
        query = (self._size * self._rng.standard_normal(shape, np.float32)).astype(numpy_dtype(dtype))
        return [query, *new_rows(self._rng, self.cache, tokens, new_dtype or dtype, self._size)]

    def step(self, arrays: list[np.ndarray], input_pos: Any, layer: int = 0, *, layout: str = "bshd",
             **options: Any) -> np.ndarray:
        """Append and attend; compare output and lse with the oracle; return the output (bshd)."""
        query, key, value = arrays
        given = arrays if layout == "bshd" else [array.transpose(0, 2, 1, 3) for array in arrays]
        cache = self.cache if self.cache.num_layers == 1 else self.cache.layer(layer)
        out, lse = sdpa_with_kv_cache(*given, cache, input_pos, layout=layout, return_lse=True, **options)
        assert out.flags.owndata
        self.model.update(key, value, input_pos, layer)
        np.testing.assert_array_equal(self.cache.lengths, self.model.lengths)
        out = out if layout == "bshd" else np.ascontiguousarray(out.transpose(0, 2, 1, 3))
        self.compare(out, lse, query, input_pos, layer, **options)
        return out

    def assert_memory_has_no_effect(self, steps: list[tuple[list[np.ndarray], Any]]) -> None:
        """Run the steps over clean and over poisoned memory, the cache's and the plans' scratch: the same bits."""
        results = []
        for word in (0, GUARD):
            poison(self.cache, word)
            for plan in self.cache.plans.values():
                for buffer in plan._buffers:
                    if buffer.name.startswith("arena"):
                        fill_words(buffer, word)
            results.append([self.step(arrays, start) for arrays, start in steps])
            self.cache.reset()
            self.model.lengths[...] = 0
        for clean, poisoned in zip(*results, strict=True):
            np.testing.assert_array_equal(clean, poisoned)

    def compare(self, out: np.ndarray, lse: np.ndarray | None, query: np.ndarray, input_pos: Any, layer: int = 0,
                **options: Any) -> None:
        """Compare what came out (bshd) with the oracle's attention over the model's live rows."""
        live = self.model.lengths[layer]
        longest = int(live.max())
        options = {"causal": "bottom_right"} | options
        mask = options.get("mask")
        if mask is not None and np.ndim(mask) and np.shape(mask)[-1] > longest:
            options["mask"] = mask[..., :longest]
        start = np.broadcast_to(input_pos, (self.cache.batch,))
        keys, values = (array[layer, :, :longest] for array in self.model.arrays)
        assert_matches_oracle(out, query, keys, values, lse=lse, q_offset=start, kv_len=live, layout="bshd", **options)
