"""Moving rows of a cache: reading them back, and reordering the batch. Not for every step: each call records anew."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ..formats import QuantisedRows, code_quads, unpack_codes, unpack_scales
from ..graph.hazards import segments
from ..graph.node import Binding, Dispatch
from ..kernels import params
from ..kernels.manifest import variant
from ..layout import QUAD_WORDS, unpack
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from .storage import CacheStorage, buffer_until

if TYPE_CHECKING:
    from .kv_cache import KVCache

GROUPS = 64


def reorder(device: Device, storage: CacheStorage, num_layers: int, batch: int, index: list[int]) -> None:
    """Move the rows of batch entry ``index[b]`` to entry b, for every b at once, in every layer."""
    moved = [entry for entry in range(batch) if index[entry] != entry]
    if not moved:
        return
    scratch = device.buffer(max(storage.layer_words), "storage", "reorder scratch")
    steps: list[Dispatch] = []
    for layer in range(num_layers):
        group, starts = storage.place(layer)
        for which, (buffer, start) in enumerate(zip(storage.groups[group], starts, strict=True)):
            for region, words in storage.regions(which):
                size = words // batch
                for entry in sorted({index[entry] for entry in moved}):
                    at = region + entry * size
                    steps.append(copy_words(buffer, scratch, start + at, at, size))
                for entry in moved:
                    source, target = region + index[entry] * size, start + region + entry * size
                    steps.append(copy_words(scratch, buffer, source, target, size))
    try:
        run_once(device, steps)
    finally:
        scratch.destroy()


def copy_words(source: Buffer, target: Buffer, src: int, dst: int, words: int) -> Dispatch:
    """Return the copy of ``words`` words from word ``src`` of a buffer to word ``dst`` of another."""
    bindings = (Binding(source, (src, src + words)), Binding(source, (src, src + words)),
                Binding(target, (dst, dst + words)))
    return Dispatch(variant("copy"), bindings, params.pushed_count(words, src, dst), GROUPS)


def read_floats(cache: KVCache, layer: int, lengths: np.ndarray, which: int) -> np.ndarray:
    """Return the live keys (0) or values (1) ``[batch, longest, num_kv_heads, dim]`` of a layer of floats."""
    dim, dtype = cache.storage.dims[which], cache.storage.dtypes[which]
    words = _code_words(cache, layer, lengths, which)
    return unpack(words.ravel(), (*words.shape[:3], dim), dtype)


def read_quantised(cache: KVCache, layer: int, lengths: np.ndarray, which: int) -> QuantisedRows:
    """Return codes and scales of the live keys (0) or values (1) of a layer; all 0 beyond an entry's length."""
    dim, dtype = cache.storage.dims[which], cache.storage.dtypes[which]
    words = _code_words(cache, layer, lengths, which)
    scales = _scale_words(cache, layer, which, words.shape[1])
    dead = np.arange(words.shape[1]) >= lengths[:, None]
    scales[dead] = 0
    codes = unpack_codes(words, dim, dtype)
    codes[dead] = 0
    return QuantisedRows(codes, *unpack_scales(scales, dim, dtype))


def _code_words(cache: KVCache, layer: int, lengths: np.ndarray, which: int) -> np.ndarray:
    """Return the words ``[batch, longest, num_kv_heads, words of a row]`` of the live codes or elements."""
    device, storage, longest = cache.device, cache.storage, int(lengths.max(initial=0))
    group, starts = storage.place(layer)
    quads = code_quads(storage.dims[which], storage.dtypes[which])
    shape = (cache.batch, longest, cache.num_kv_heads, quads * QUAD_WORDS)
    words = int(np.prod(shape))
    row_stride = storage.strides[which][2]
    kernel = variant("kv_read")
    with ExitStack() as undo:
        block = buffer_until(undo, device, params.block_words(cache.batch, cache.num_kv_heads), "read params")
        rows = buffer_until(undo, device, words, "read rows")
        params.write_header(block.words, {
            "batch_size": cache.batch, "num_kv_heads": cache.num_kv_heads, "group_size": 1, "max_kv_len": longest,
            "k_stride_batch": storage.strides[which][0] * quads // row_stride,
            "k_stride_head": storage.strides[which][1] * quads // row_stride,
            "k_stride_row": quads, "key_offset": starts[which] // QUAD_WORDS})
        params.write_lengths(block.words, cache.batch, lengths, 0)
        bindings = (Binding(block), Binding(storage.groups[group][which]), Binding(rows))
        run_once(device, [Dispatch(kernel, bindings, dict.fromkeys(kernel.push, 0), GROUPS)])
        return rows.words[:words].copy().reshape(shape)


def _scale_words(cache: KVCache, layer: int, which: int, longest: int) -> np.ndarray:
    """Return the words ``[batch, longest, num_kv_heads, words of a row]`` of the scales, whatever they hold."""
    storage = cache.storage
    group, starts = storage.place(layer)
    start, words = storage.regions(which)[1]
    found = cache.device.buffer(words, "host", "read scales")
    try:
        run_once(cache.device, [copy_words(storage.groups[group][which], found, starts[which] + start, 0, words)])
        by_head = found.words[:words].reshape(cache.batch, cache.num_kv_heads, cache.capacity, -1)
        return by_head[:, :, :longest].transpose(0, 2, 1, 3).copy()
    finally:
        found.destroy()


def write_layer(cache: KVCache, layer: int, which: int, words: np.ndarray) -> None:
    """Write all words of a layer's keys (0) or values (1), as `vkattn.formats.pack_stored` makes them."""
    group, starts = cache.storage.place(layer)
    given = cache.device.buffer(words.size, "host", "load")
    try:
        given.words[: words.size] = words
        run_once(cache.device, [copy_words(given, cache.storage.groups[group][which], 0, starts[which], words.size)])
    finally:
        given.destroy()


def run_once(device: Device, steps: list[Dispatch]) -> None:
    """Run dispatches once."""
    recording = device.recording(segments(steps))
    try:
        recording.run()
    finally:
        recording.close()
