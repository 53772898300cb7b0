"""Moving rows of a cache: reading them back, and reordering the batch. Not for every step: each call records anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..graph.hazards import segments
from ..graph.node import Binding, Dispatch
from ..kernels import params
from ..kernels.manifest import variant
from ..kernels.params import COUNT_IS_PUSHED
from ..layout import QUAD_WORDS, packed_words, row_quads, unpack
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from .storage import CacheStorage

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
        for buffer, start, words in zip(storage.groups[group], starts, storage.layer_words, strict=True):
            entry_words = words // batch
            sources = sorted({index[entry] for entry in moved})
            for entry in sources:
                at = entry * entry_words
                steps.append(_copy(buffer, scratch, start + at, at, entry_words))
            for entry in moved:
                steps.append(_copy(scratch, buffer, index[entry] * entry_words, start + entry * entry_words,
                                   entry_words))
    recording = device.recording(segments(steps))
    try:
        recording.run()
    finally:
        recording.close()
        scratch.destroy()


def _copy(source: Buffer, target: Buffer, src: int, dst: int, words: int) -> Dispatch:
    bindings = (Binding(source, (src, src + words)), Binding(source, (src, src + words)),
                Binding(target, (dst, dst + words)))
    push = {"count_index": COUNT_IS_PUSHED, "count": words, "src_offset": src, "dst_offset": dst}
    return Dispatch(variant("copy"), bindings, push, GROUPS)


def read(cache: KVCache, layer: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the live keys and values ``[batch, longest, num_kv_heads, dim]`` of a layer."""
    device, storage, longest = cache.device, cache.storage, int(lengths.max(initial=0))
    group, starts = storage.place(layer)
    results = []
    for which, dim in enumerate((cache.head_dim, cache.value_dim)):
        shape = (cache.batch, longest, cache.num_kv_heads, dim)
        words = packed_words(shape, cache.dtype)
        block = device.buffer(params.block_words(cache.batch, cache.num_kv_heads), "host", "read params")
        rows = device.buffer(words, "host", "read rows")
        quads = row_quads(dim, cache.dtype)
        row_stride = storage.strides[which][2]
        params.write_header(block.words, {
            "batch_size": cache.batch, "num_kv_heads": cache.num_kv_heads, "group_size": 1, "max_kv_len": longest,
            "k_stride_batch": storage.strides[which][0] * quads // row_stride,
            "k_stride_head": storage.strides[which][1] * quads // row_stride,
            "k_stride_row": quads, "key_offset": starts[which] // QUAD_WORDS})
        params.write_lengths(block.words, cache.batch, lengths, 0)
        kernel = variant("kv_read")
        bindings = (Binding(block), Binding(storage.groups[group][which]), Binding(rows))
        recording = device.recording([[Dispatch(kernel, bindings, dict.fromkeys(kernel.push, 0), GROUPS)]])
        try:
            recording.run()
            results.append(unpack(rows.words[:words], shape, cache.dtype))
        finally:
            recording.close()
            block.destroy()
            rows.destroy()
    return results[0], results[1]
