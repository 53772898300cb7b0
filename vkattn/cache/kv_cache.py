"""`KVCache`: the keys and values of all layers of a model, in device memory, with their lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import FLOAT_DTYPES, as_array, dtype_name
from ..errors import CapacityError, ClosedError, OptionError
from ..formats import QUANTISED, check_range, dequantised
from ..layout import packed_words
from ..lru import BoundedPlans
from ..mask import as_integer
from ..runtime.device import PLANS_HEAP_FRACTION, Device, resolve_device
from . import move
from .append import AppendPlan
from .checks import cache_dtype, positive, rows_dtype
from .layer import CacheLayer as CacheLayer
from .storage import CacheStorage
from .transfer import load_layer, raw_layer


class KVCache:
    """Keys and values of every layer, resident on the device; rows are appended and read there, never on the host.

    Parameters
    ----------
    batch, num_kv_heads : int
        Sequences and KV heads.
    capacity : int
        The most tokens a sequence can have; ``input_pos + q_len == capacity`` still fits.
    head_dim : int
        Elements of a key row.
    value_dim : int or None
        Elements of a value row; None is head_dim.
    num_layers : int
        Layers of the model; `layer` gives one of them to attention.
    dtype : "float32", "float16", "bfloat16", "int8", "q8_0" or "q4_0"
        What the cache stores. Rows are rounded to it, or quantised, on the device: "int8" per token and head with a
        scale and a zero point, "q8_0" and "q4_0" in blocks of 32 elements with a scale (`vkattn.oracle.quantize`).
    value_dtype : str or None
        What it stores of values; None is ``dtype``.
    device : vkattn.Device or None
        None is `vkattn.default_device`.

    Raises
    ------
    OptionError, CapacityError
        A size is not positive, or a dtype unknown; one layer does not fit the device's largest buffer.

    Notes
    -----
    Memory that was never written is never read: a new cache needs no clearing.

    Example
    -------
    >>> cache = KVCache(batch=1, num_kv_heads=8, capacity=4096, head_dim=128, num_layers=28)
    >>> cache.nbytes
    469762048
    """

    def __init__(self, batch: int, num_kv_heads: int, capacity: int, head_dim: int, *, value_dim: int | None = None,
                 num_layers: int = 1, dtype: str = "float16", value_dtype: str | None = None,
                 device: Device | None = None) -> None:
        self.batch = positive(batch, "batch")
        self.num_kv_heads = positive(num_kv_heads, "num_kv_heads")
        self.capacity = positive(capacity, "capacity")
        self.head_dim = positive(head_dim, "head_dim")
        self.value_dim = self.head_dim if value_dim is None else positive(value_dim, "value_dim")
        self.num_layers = positive(num_layers, "num_layers")
        self.dtype = cache_dtype(dtype, "dtype")
        self.value_dtype = self.dtype if value_dtype is None else cache_dtype(value_dtype, "value_dtype")
        self.device = resolve_device(device)
        self._lengths = np.zeros((self.num_layers, self.batch), np.int64)
        dims = (self.head_dim, self.value_dim)
        with self.device.lock:
            self.storage = CacheStorage(self.device, self.batch, self.num_kv_heads, self.capacity, dims,
                                        (self.dtype, self.value_dtype), self.num_layers)
        #: Plans that use this cache (appends, attention); they are freed with it.
        self.plans = BoundedPlans(max_bytes=int(self.device.info.device_local_bytes * PLANS_HEAP_FRACTION))
        self._closed = False
        self.device.close_first(self)

    def __repr__(self) -> str:
        return (f"<vkattn.KVCache {self.num_layers} layers, batch {self.batch}, {self.num_kv_heads} heads, capacity "
                f"{self.capacity}, head_dim {self.head_dim}, "
                f"{self.dtype if self.dtype == self.value_dtype else f'{self.dtype} keys, {self.value_dtype} values'}>")

    @property
    def lengths(self) -> np.ndarray:
        """Live tokens, int64 ``[num_layers, batch]``; a copy."""
        return self._lengths.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache in device memory."""
        return self.storage.nbytes

    def check(self) -> None:
        """Raise ClosedError or DeviceError if the cache cannot be used any more."""
        self.device.check()
        if self._closed:
            raise ClosedError("a KVCache was used after close().")

    def layer(self, index: int) -> CacheLayer:
        """Return layer ``index`` of the cache, for `sdpa_with_kv_cache`; negative indices are refused."""
        return CacheLayer(self, self.check_layer(index))

    def check_layer(self, layer: Any) -> int:
        """Return ``layer`` as an int, or raise OptionError if there is no such layer."""
        index = as_integer(layer)
        if index is None or not 0 <= index < self.num_layers:
            raise OptionError(f"`layer` is {layer!r}; this cache has layers 0 .. {self.num_layers - 1}.")
        return index

    def check_append(self, input_pos: Any, tokens: int, layer: int, lengths: np.ndarray | None = None) -> np.ndarray:
        """Return ``input_pos`` as int64 ``[batch]`` if ``tokens`` rows may be written there.

        ``lengths`` are the live lengths of the layer by then; None is those of now.

        Raises
        ------
        OptionError
            Not integers, negative, or beyond the live length: a gap would be left.
        CapacityError
            ``input_pos + tokens`` is beyond the capacity.
        """
        given = as_array(input_pos, "input_pos")
        if given.dtype.kind not in "iu" or given.shape not in ((), (self.batch,)):
            raise OptionError(f"`input_pos` is {input_pos!r}; it must be an integer, or integers of shape "
                              f"({self.batch},), one per batch entry.")
        start = np.empty(self.batch, np.int64)
        start[...] = given
        lengths = self._lengths[layer] if lengths is None else lengths
        places = start.tolist()  # of few numbers Python is quicker than NumPy
        for entry, (place, length) in enumerate(zip(places, lengths.tolist(), strict=True)):
            if not 0 <= place <= length:
                raise OptionError(f"`input_pos` is {place} for batch entry {entry}, but layer {layer} holds {length} "
                                  f"tokens there; it must be within 0 .. {length}, so that no row is left unwritten.")
        last = max(places)
        if last + tokens > self.capacity:
            raise CapacityError(f"append of {tokens} tokens at input_pos {last} needs {last + tokens} rows; this cache "
                                f"holds capacity {self.capacity}. Hint: make a larger cache, or reset() or truncate() "
                                "this one.")
        return start

    def note_append(self, input_pos: np.ndarray, tokens: int, layer: int) -> None:
        """Set the live lengths after rows were written: what lay behind them is forgotten."""
        self._lengths[layer] = input_pos + tokens

    def update(self, key: Any, value: Any, input_pos: Any, layer: int = 0) -> None:
        """Write new rows at ``input_pos``, exactly those rows; the live length becomes ``input_pos + tokens``.

        Parameters
        ----------
        key : Array, shape ``[batch, tokens, num_kv_heads, head_dim]``, float32 or the cache's dtype
            A quantised cache takes float32, float16 and bfloat16.
        value : Array, shape ``[batch, tokens, num_kv_heads, value_dim]``, key's dtype
        input_pos : int, or integers of shape ``[batch]``
            Where row 0 goes, in tokens: at most the live length (no gap). Writing before it truncates.
        layer : int

        Raises
        ------
        ShapeError, DTypeError, OptionError, CapacityError
            Nothing has been written then.
        """
        self.check()
        layer = self.check_layer(layer)
        rows = (as_array(key, "key"), as_array(value, "value"))
        dtype = rows_dtype(self, rows[0].shape, rows[1].shape, dtype_name(rows[0], "key", FLOAT_DTYPES),
                           dtype_name(rows[1], "value", FLOAT_DTYPES))
        check_range("key", rows[0], self.dtype)
        check_range("value", rows[1], self.value_dtype)
        with self.device.lock:
            start = self.check_append(input_pos, rows[0].shape[1], layer)
            group, _ = self.storage.place(layer)
            words = tuple(self._staging_words(array, dtype) for array in rows)
            plan = self.plans.get(("append", group, dtype, words),
                                  lambda: AppendPlan(self, group, dtype, (words[0], words[1])))
            plan.run(self, rows, start, layer)
            self.note_append(start, rows[0].shape[1], layer)

    def _staging_words(self, rows: np.ndarray, dtype: str) -> int:
        """Return the words of a host buffer for ``rows``: a power of two, if the device allows it."""
        words = packed_words(rows.shape, dtype)
        return max(words, min(1 << max(10, (words - 1).bit_length()), self.device.info.max_storage_buffer_range // 4))

    def truncate(self, length: Any) -> None:
        """Forget all tokens at or beyond ``length`` (an int, or integers ``[batch]``), in every layer."""
        self.check()
        keep = as_array(length, "length")
        if keep.dtype.kind not in "iu" or keep.shape not in ((), (self.batch,)) or (keep < 0).any():
            raise OptionError(f"`length` is {length!r}; it must be an integer that is not negative, or one for each "
                              f"of {self.batch} batch entries.")
        keep = np.minimum(keep, self.capacity)  # before it becomes int64: uint64 goes beyond
        np.minimum(self._lengths, keep.astype(np.int64), out=self._lengths)

    def reset(self) -> None:
        """Forget all tokens."""
        self.truncate(0)

    def reorder(self, batch_index: Any) -> None:
        """Let batch entry b go on from what entry ``batch_index[b]`` holds now (beam search), in every layer.

        Parameters
        ----------
        batch_index : integers, shape ``[batch]``, each within 0 .. batch - 1; entries may repeat
        """
        self.check()
        index = as_array(batch_index, "batch_index")
        if index.dtype.kind not in "iu" or index.shape != (self.batch,) or (
                (index < 0) | (index >= self.batch)).any():
            raise OptionError(f"`batch_index` is {batch_index!r}; it must be {self.batch} integers within "
                              f"0 .. {self.batch - 1}.")
        with self.device.lock:
            move.reorder(self.device, self.storage, self.num_layers, self.batch, index.tolist())
            self._lengths = self._lengths[:, index]

    def read(self, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the live keys and values of a layer.

        Returns
        -------
        key : Array, the cache's dtype, or float32 if that is quantised: ``[batch, length, num_kv_heads, head_dim]``
            length is the longest of the batch; rows beyond an entry's own length are 0.
        value : Array, the same of the values, shape ``[batch, length, num_kv_heads, value_dim]``
        """
        self.check()
        layer = self.check_layer(layer)
        with self.device.lock:
            found = [(dequantised(move.read_quantised(self, layer, self._lengths[layer], which), dtype)
                      if dtype in QUANTISED else move.read_floats(self, layer, self._lengths[layer], which))
                     for which, dtype in enumerate(self.storage.dtypes)]
        return found[0], found[1]

    def raw(self, layer: int = 0) -> dict[str, np.ndarray | None]:
        """Return what a layer holds as it is stored, under the names that `load` takes; see there."""
        self.check()
        return raw_layer(self, self.check_layer(layer))

    @classmethod
    def load(cls, key: Any, key_scale: Any = None, key_zero_point: Any = None, *, value: Any, value_scale: Any = None,
             value_zero_point: Any = None, dtype: str = "int8", value_dtype: str | None = None,
             capacity: int | None = None, device: Device | None = None) -> KVCache:
        """Make a cache of one layer from rows that are quantised already (or floats of the cache's dtype).

        All ``tokens`` of every batch entry are live then; `truncate` shortens entries that `raw` has padded.

        Parameters
        ----------
        key : int8 codes, shape ``[batch, tokens, num_kv_heads, head_dim]``; an array of ``dtype`` if that is a float
            q8_0 codes are within -127 .. 127, q4_0 codes within -8 .. 7.
        key_scale : float32 ``[batch, tokens, num_kv_heads]`` for int8, a last size of 1 is allowed
            float16 ``[batch, tokens, num_kv_heads, ceil(head_dim / 32)]`` for q8_0 and q4_0; None for floats.
        key_zero_point : int8, shape of an int8 scale; None for the other formats
        value, value_scale, value_zero_point
            The same of the values.
        dtype, value_dtype : str
            The formats, as for `KVCache`.
        capacity : int or None
            None is ``tokens``.

        Raises
        ------
        ShapeError, DTypeError, OptionError
            Something does not fit, or a scale is not finite.

        Example
        -------
        >>> cache = KVCache(1, 2, capacity=16, head_dim=8, dtype="int8")
        >>> cache.update(np.ones((1, 3, 2, 8), np.float32), np.ones((1, 3, 2, 8), np.float32), 0)
        >>> KVCache.load(**cache.raw(), dtype="int8", capacity=32).lengths.tolist()
        [[3]]
        """
        pairs = ((key, key_scale, key_zero_point), (value, value_scale, value_zero_point))
        return load_layer(cls, pairs, (dtype, dtype if value_dtype is None else value_dtype), capacity, device)

    def close(self) -> None:
        """Free the cache and every plan that uses it."""
        if not self._closed:
            self._closed = True
            with self.device.lock:
                self.plans.clear()
                self.storage.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()
