"""A recorded append of host rows to one group of a cache's layers: the plan behind `KVCache.update`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ..dtypes import AXIS
from ..formats import formats_word, is_plain
from ..graph.node import Binding, Dispatch
from ..kernels import fields, params
from ..kernels.manifest import Variant, variant
from ..layout import pack_into, packed_words, vec_strides
from .storage import buffer_until

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .storage import CacheStorage

#: Workgroups of an append by itself at most, and the invocations of each.
GROUPS = 64
INVOCATIONS = 64


def new_row_fields(heads: int, tokens: int, dims: tuple[int, int], dtype: str, layout: str) -> dict[str, int]:
    """Return the params words that describe new rows ``[batch, tokens, heads, dim]`` as `pack_into` writes them."""
    words: dict[str, int] = {}
    for name, dim in zip("kv", dims, strict=True):
        words |= fields.strides(f"new_{name}", vec_strides(heads, tokens, dim, dtype, layout))
    return words


def cache_fields(storage: CacheStorage) -> dict[str, int]:
    """Return the params words that describe the rows of a cache."""
    words = {"head_vecs": -(-storage.dims[0] // 4), "value_vecs": -(-storage.dims[1] // 4)}
    for name, strides in zip("kv", storage.strides, strict=True):
        words |= fields.strides(name, strides)
    return words


def append_kernel(new_dtype: str, dtypes: tuple[str, str]) -> Variant:
    """Return the kernel that writes rows of ``new_dtype`` into a cache whose keys and values have these dtypes."""
    if is_plain(*dtypes):
        return variant(f"kv_append_{AXIS[new_dtype]}_{AXIS[dtypes[0]]}")
    return variant("kv_append_quantised")


def append_groups(rows: int, dims: tuple[int, int], dtypes: tuple[str, str]) -> int:
    """Return the workgroups that have work when ``rows`` rows of keys, and as many of values, are appended.

    A vec is an invocation's, or a row a workgroup's where it is quantised.
    """
    vecs = sum(-(-dim // 4) for dim in dims)
    return max(1, -(-rows * vecs // INVOCATIONS) if is_plain(*dtypes) else 2 * rows)


class AppendPlan:
    """Host buffers for ``new_words`` of rows, and the recording that appends them to a layer of ``group``.

    The cache keeps the plan, so the plan does not keep the cache.
    """

    def __init__(self, cache: KVCache, group: int, dtype: str, new_words: tuple[int, int]) -> None:
        device, (key, value) = cache.device, cache.storage.groups[group]
        self._dtype = dtype
        words = (params.block_words(cache.batch, cache.num_kv_heads), *new_words)
        with ExitStack() as undo:
            self._params, *self._rows = (buffer_until(undo, device, count, name) for count, name in zip(
                words, ("append params", "new key rows", "new value rows"), strict=True))
            bindings = tuple(map(Binding, (self._params, *self._rows, key, value)))
            kernel, storage = append_kernel(dtype, cache.storage.dtypes), cache.storage
            rows = new_words[0] // packed_words((1, 1, 1, storage.dims[0]), dtype)
            groups = min(GROUPS, append_groups(rows, storage.dims, storage.dtypes))
            self._recording = device.recording([[Dispatch(kernel, bindings, dict.fromkeys(kernel.push, 0), groups)]])
            undo.pop_all()  # they are the plan's now

    @property
    def nbytes(self) -> int:
        """Bytes allocated for this plan."""
        return sum(buffer.allocated_bytes for buffer in (self._params, *self._rows))

    def run(self, cache: KVCache, rows: tuple[np.ndarray, np.ndarray], input_pos: np.ndarray, layer: int) -> None:
        """Write ``rows`` (bshd) at ``input_pos`` of ``layer``; everything has been checked."""
        block = self._params.words
        for buffer, array in zip(self._rows, rows, strict=True):
            pack_into(buffer.words[: packed_words(array.shape, self._dtype)], array, self._dtype)
        tokens = rows[0].shape[1]
        header: dict[str, int | float] = {
            "batch_size": cache.batch, "num_kv_heads": cache.num_kv_heads, "group_size": 1, "q_len": tokens}
        header |= cache_fields(cache.storage) | cache.storage.offsets(layer)
        header["formats"] = formats_word("float32", *cache.storage.dtypes, self._dtype)
        header |= new_row_fields(cache.num_kv_heads, tokens, (cache.head_dim, cache.value_dim), self._dtype, "bshd")
        params.write_header(block, header)
        params.write_lengths(block, cache.batch, 0, 0, input_pos)
        self._recording.run()

    def close(self) -> None:
        """Free pipelines and buffers."""
        self._recording.close()
        for buffer in (self._params, *self._rows):
            buffer.destroy()
