"""Bringing a cache in and out as it is stored: codes, scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import as_array, numpy_dtype
from ..errors import CapacityError, DTypeError, OptionError, ShapeError
from ..formats import CODE_RANGE, QUANTISED, QuantisedRows, num_blocks, pack_stored
from ..layout import pack_into
from ..runtime.device import Device
from . import move
from .checks import positive

if TYPE_CHECKING:
    from .kv_cache import KVCache

#: A code of int8 is up to 255 from its zero point.
MOST_INT8_SCALE = float(np.finfo(np.float32).max) / 255


def raw_layer(cache: KVCache, layer: int) -> dict[str, np.ndarray | None]:
    """Return codes (or floats), scales and zero points of a layer's live rows, by the names of `KVCache.load`."""
    result: dict[str, np.ndarray | None] = {}
    lengths = cache.lengths[layer]
    with cache.device.lock:
        for which, (name, dtype) in enumerate(zip(("key", "value"), cache.storage.dtypes, strict=True)):
            if dtype in QUANTISED:
                rows = move.read_quantised(cache, layer, lengths, which)
            else:
                rows = QuantisedRows(move.read_floats(cache, layer, lengths, which), None)  # type: ignore[arg-type]
            result |= {name: rows.codes, f"{name}_scale": rows.scale, f"{name}_zero_point": rows.zero_point}
    return result


def load_layer(kind: type[KVCache], pairs: tuple[tuple[Any, Any, Any], ...], dtypes: tuple[str, str],
               capacity: int | None, device: Device | None) -> KVCache:
    """Make a cache of one layer from (codes, scale, zero point) of keys and of values; see `KVCache.load`."""
    keys, values = (as_array(codes, name) for name, (codes, _, _) in zip(("key", "value"), pairs, strict=True))
    if keys.ndim != 4 or values.ndim != 4 or values.shape[:3] != keys.shape[:3] or 0 in keys.shape[1:2]:
        raise ShapeError(f"`key` has shape {keys.shape} and `value` {values.shape}; they must be (batch, tokens, "
                         "num_kv_heads, dim), equal but for dim, at least one token.")
    batch, tokens, heads, head_dim = keys.shape
    if capacity is not None and tokens > positive(capacity, "capacity"):
        raise CapacityError(f"`key` has {tokens} tokens but `capacity` is {capacity}. Hint: None is enough.")
    cache = kind(batch, heads, tokens if capacity is None else capacity, head_dim, value_dim=values.shape[3],
                 dtype=dtypes[0], value_dtype=dtypes[1], device=device)
    try:
        parts = [checked_rows(name, *pair, dtype) for name, pair, dtype in zip(("key", "value"), pairs, dtypes,
                                                                             strict=True)]
        for name, rows in zip(("key", "value"), parts, strict=True):
            if rows.scale is not None:
                check_scales(f"{name}_scale", rows.scale)
        with cache.device.lock:
            for which, (rows, dtype) in enumerate(zip(parts, dtypes, strict=True)):
                move.write_layer(cache, 0, which, _image(cache, rows, which, dtype))
            cache.note_append(np.zeros(batch, np.int64), tokens, 0)
    except BaseException:
        cache.close()
        raise
    return cache


def _image(cache: KVCache, rows: QuantisedRows, which: int, dtype: str) -> np.ndarray:
    """Return all words of a layer whose first rows are ``rows`` (bshd)."""

    def spread(array: np.ndarray) -> np.ndarray:
        full = np.zeros((cache.batch, cache.num_kv_heads, cache.capacity, *array.shape[3:]), array.dtype)
        full[:, :, : array.shape[1]] = np.moveaxis(array, 1, 2)
        return full

    words = np.zeros(cache.storage.layer_words[which], np.uint32)
    if dtype in QUANTISED:
        zero = None if rows.zero_point is None else spread(rows.zero_point)
        pack_stored(words, QuantisedRows(spread(rows.codes), spread(rows.scale), zero), dtype)
    else:
        pack_into(words, spread(rows.codes), dtype)
    return words


def checked_rows(name: str, codes: Any, scale: Any, zero_point: Any, dtype: str) -> QuantisedRows:
    """Return rows of format ``dtype`` from a user's arrays, ``[.., .., .., dim]``, or raise where they do not fit."""
    given = as_array(codes, name)
    wanted = "int8" if dtype in QUANTISED else dtype
    if given.dtype.name != wanted:
        raise DTypeError(f"`{name}` is {given.dtype.name}; the codes of {dtype} rows are {wanted}.")
    if dtype not in QUANTISED:
        if scale is not None or zero_point is not None:
            raise OptionError(f"`{name}_scale` and `{name}_zero_point` must be None for {dtype} rows.")
        return QuantisedRows(given.astype(numpy_dtype(dtype), copy=False), None)  # type: ignore[arg-type]
    low, high = CODE_RANGE[dtype]
    if given.size and (given.min() < low or given.max() > high):
        raise OptionError(f"`{name}` holds codes within {given.min()} .. {given.max()}; {dtype} codes are within "
                          f"{low} .. {high}.")
    lead = given.shape[:-1]
    is_row = dtype == "int8"
    shape = lead if is_row else (*lead, num_blocks(given.shape[-1]))
    scales = _numbers(f"{name}_scale", scale, "float32" if is_row else "float16", shape, is_row)
    if not is_row:
        if zero_point is not None:
            raise OptionError(f"`{name}_zero_point` must be None: {dtype} is symmetric.")
        return QuantisedRows(given, scales)
    return QuantisedRows(given, scales, _numbers(f"{name}_zero_point", zero_point, "int8", shape, is_row))


def check_scales(argument: str, scales: np.ndarray) -> None:
    """Raise OptionError unless all scales are finite, and what codes stand for with them too."""
    if not np.isfinite(scales).all():
        raise OptionError(f"`{argument}` holds NaN or infinity in a row that is live.")
    beyond = scales[np.abs(scales) > MOST_INT8_SCALE] if scales.dtype == np.float32 else scales[:0]
    if beyond.size:
        raise OptionError(f"`{argument}` holds {beyond.flat[0]:.6g} in a row that is live; 255 times a scale must be "
                          "within float32.")


def _numbers(argument: str, values: Any, dtype: str, shape: tuple[int, ...], may_end_in_one: bool) -> np.ndarray:
    """Return an array of this dtype and shape, or raise; a last size of 1 may be there, as upstream has it."""
    given = as_array(values, argument)
    if given.dtype.name != dtype:
        raise DTypeError(f"`{argument}` is {'None' if values is None else given.dtype.name}; it must be {dtype}.")
    if given.shape != shape and not (may_end_in_one and given.shape == (*shape, 1)):
        raise ShapeError(f"`{argument}` has shape {given.shape}; it must be {shape}.")
    return given.reshape(shape)
