"""Where the keys and values of all layers of a cache lie: few buffers, each below the device's limit."""

from __future__ import annotations

from contextlib import ExitStack

from ..errors import CapacityError
from ..formats import code_words, scale_words, stored_strides, stored_words, unit_words
from ..runtime.buffer import KOMPUTE_MAX_BYTES, Buffer
from ..runtime.device import Device

#: Names of the params words that say where a layer starts.
LAYER_FIELDS = ("key_offset", "value_offset")


def buffer_until(undo: ExitStack, device: Device, num_words: int, name: str) -> Buffer:
    """Return a host buffer that is freed when ``undo`` is left."""
    buffer = device.buffer(num_words, "host", name)
    undo.callback(buffer.destroy)
    return buffer


class CacheStorage:
    """Key and value buffers of ``num_layers`` layers of shape ``[batch, num_kv_heads, capacity, dim]``.

    Layers lie one after another; when a buffer is full the next one starts. A *group* is the layers of one pair of
    buffers. ``dims`` are head_dim and value_dim. Contents are undefined until rows are written.
    """

    def __init__(self, device: Device, batch: int, num_kv_heads: int, capacity: int, dims: tuple[int, int],
                 dtypes: tuple[str, str], num_layers: int) -> None:
        self.device = device
        self.dims = dims
        self.dtypes = dtypes
        self.unit_words = unit_words(*dtypes)  # what strides and offsets count
        self.rows = batch * num_kv_heads * capacity
        self.layer_words = [stored_words((self.rows, dim), dtype) for dim, dtype in zip(dims, dtypes, strict=True)]
        self.strides = [stored_strides(num_kv_heads, capacity, dim, dtype, self.unit_words, "bhsd")
                        for dim, dtype in zip(dims, dtypes, strict=True)]
        limit = min(device.info.max_storage_buffer_range, KOMPUTE_MAX_BYTES)
        self.layers_per_group = min(num_layers, limit // (4 * max(self.layer_words)))
        if self.layers_per_group == 0:
            raise CapacityError(
                f"one layer of the cache needs {4 * max(self.layer_words)} bytes; the largest storage buffer of "
                f'"{device.info.name}" is {limit} bytes. Hint: lower `capacity` or `batch`.')
        self.groups: list[tuple[Buffer, Buffer]] = []
        made: list[Buffer] = []
        try:
            for start in range(0, num_layers, self.layers_per_group):
                count = min(self.layers_per_group, num_layers - start)
                for name, words in zip(("key", "value"), self.layer_words, strict=True):
                    made.append(device.buffer(count * words, "storage",
                                              f"{name} cache, layers {start}-{start + count - 1}"))
        except CapacityError:
            for buffer in made:
                buffer.destroy()
            raise
        self.groups = list(zip(made[::2], made[1::2], strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size_bytes for pair in self.groups for buffer in pair)

    def place(self, layer: int) -> tuple[int, tuple[int, int]]:
        """Return the group of ``layer``, and the words in the key and the value buffer where it starts."""
        group, index = divmod(layer, self.layers_per_group)
        return group, (index * self.layer_words[0], index * self.layer_words[1])

    def offsets(self, layer: int) -> dict[str, int]:
        """Return the params words (in units of `unit_words` words) that choose ``layer`` within its group."""
        _, starts = self.place(layer)
        return {name: start // self.unit_words for name, start in zip(LAYER_FIELDS, starts, strict=True)}

    def regions(self, which: int) -> list[tuple[int, int]]:
        """Return (words from the layer's start, words) of what a layer's keys (0) or values (1) are made of.

        The codes or elements of all rows come first, then the scales of all rows, if there are any.
        """
        dim, dtype = self.dims[which], self.dtypes[which]
        codes, scales = code_words((self.rows, dim), dtype), self.rows * scale_words(dim, dtype)
        return [(0, codes), (codes, scales)] if scales else [(0, codes)]

    def close(self) -> None:
        """Free the buffers."""
        for pair in self.groups:
            for buffer in pair:
                buffer.destroy()
        self.groups = []
