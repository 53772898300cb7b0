"""What a cache takes: sizes, dtypes, new rows and the queries over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import DTypeError, OptionError, ShapeError
from ..formats import CACHE_DTYPES, is_plain
from ..mask import MAX_POSITION, as_integer
from ..validate import check_mixture

if TYPE_CHECKING:
    from .kv_cache import KVCache


def positive(value: Any, argument: str) -> int:
    """Return ``value`` as an int of at least 1, and of what positions can count, or raise OptionError."""
    number = as_integer(value)
    if number is None or not 1 <= number <= MAX_POSITION:
        raise OptionError(f"`{argument}` is {value!r}; it must be an integer of at least 1 (and at most "
                          f"{MAX_POSITION}).")
    return number


def cache_dtype(dtype: Any, argument: str) -> str:
    """Return ``dtype`` if a cache can store it, else raise OptionError."""
    if not isinstance(dtype, str) or dtype not in CACHE_DTYPES:
        raise OptionError(f"`{argument}` is {dtype!r}; supported: {', '.join(map(repr, CACHE_DTYPES))}.")
    return str(dtype)


def rows_dtype(cache: KVCache, key: tuple[int, ...], value: tuple[int, ...], key_dtype: str, value_dtype: str) -> str:
    """Return the dtype of new rows (bshd shapes), or raise ShapeError or DTypeError."""
    for name, given, dim in (("key", key, cache.head_dim), ("value", value, cache.value_dim)):
        tokens = given[1] if len(given) == 4 else 0
        if given != (cache.batch, max(tokens, 1), cache.num_kv_heads, dim):
            raise ShapeError(f"`{name}` has shape {given}; this cache takes (batch {cache.batch}, tokens, "
                             f"num_kv_heads {cache.num_kv_heads}, dim {dim}), at least one token.")
    if key[1] != value[1]:
        raise ShapeError(f"`key` has {key[1]} tokens but `value` has {value[1]}.")
    if key_dtype != value_dtype:
        raise DTypeError(f"`key` is {key_dtype} but `value` is {value_dtype}; they must have the same dtype.")
    if is_plain(cache.dtype, cache.value_dtype) and key_dtype not in ("float32", cache.dtype):
        raise DTypeError(f"`key` is {key_dtype}; this {cache.dtype} cache takes float32"
                         f"{'' if cache.dtype == 'float32' else f' or {cache.dtype}'} rows. "
                         "Hint: pass key.astype(np.float32), and value too.")
    return key_dtype


def query_stand_in(cache: KVCache, query_dtype: str) -> str:
    """Return a float dtype that stands for the cache's beside such queries, or raise DTypeError."""
    if not is_plain(cache.dtype, cache.value_dtype):
        return query_dtype
    check_mixture(query_dtype, cache.dtype, cache.dtype)
    return cache.dtype
