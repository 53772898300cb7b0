"""Appending to a KV cache and attending over what is live, in float64: ExecuTorch's sdpa_with_kv_cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import as_array
from ..errors import CapacityError, OptionError, ShapeError
from ..layout import check_layout
from ..mask import resolve_kv_len
from .attention import attention


def sdpa_with_kv_cache(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    input_pos: Any,
    *,
    mask: Any = None,
    causal: str | None = "bottom_right",
    layout: str = "bshd",
    return_lse: bool = False,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Write new keys and values into caches at ``input_pos``, then attend over the live rows.

    ``cache[b, input_pos_b + s] = new[b, s]``, then `attention` with ``kv_len = input_pos + q_len`` and
    ``q_offset = input_pos``: with the default ``causal``, query row s attends keys ``0 .. input_pos + s``

    Parameters
    ----------
    query : Array, shape ``[batch_size, q_len, num_heads, head_dim]`` (bshd) or with the middle two exchanged (bhsd)
    key, value : Array, shape ``[batch_size, q_len, num_kv_heads, head_dim or value_dim]`` (bshd)
        The new rows, as many as there are queries; converted to the caches' dtype as they are written.
    key_cache, value_cache : Array, shape ``[batch_size, capacity, num_kv_heads, head_dim or value_dim]`` (bshd)
        The caches before; not modified. Rows at or beyond the live length are not read.
    input_pos : int, or integers of shape ``[batch_size]``
        Where the new rows are written, in tokens: the number of rows that are live before.
    mask : Array that broadcasts to ``[batch_size, num_heads, q_len, n]``, or None
        As for `attention`, with n at least the longest live length; columns beyond it are not read.
    causal : "bottom_right", "top_left" or None
        With None and a mask, the mask alone decides, which is upstream's meaning of a mask. "top_left" is refused: the
        rows stand at ``input_pos``.
    layout : "bshd" or "bhsd"
    return_lse : bool
        As for `attention`.
    **options
        ``scale, softcap, window, sinks, alibi_slopes`` as for `attention`.

    Returns
    -------
    out : float64, shape of ``query`` with value_dim last
    lse : float64, shape ``[batch_size, num_heads, q_len]`` in every layout; only if ``return_lse``
    key_cache, value_cache : arrays of the caches' shapes and dtypes
        The caches after: new arrays.

    Raises
    ------
    ShapeError, OptionError, CapacityError
        As `attention`; CapacityError if ``input_pos + q_len`` is more than the capacity.

    Notes
    -----
    Upstream lets a mask reach every row of the cache, written or not; here only live rows exist.

    Source: ExecuTorch, ``llama::sdpa_with_kv_cache`` in extension/llm/custom_ops/op_sdpa.cpp.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> cache = np.zeros((1, 16, 2, 8), np.float32)
    >>> new = np.ones((1, 3, 2, 8), np.float32)
    >>> out, key_cache, value_cache = oracle.sdpa_with_kv_cache(np.ones((1, 3, 4, 8)), new, new, cache, cache, 5)
    >>> out.shape, key_cache[0, :, 0, 0].tolist()
    ((1, 3, 4, 8), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """
    if causal == "top_left":
        raise OptionError("`causal` is 'top_left'; with a cache it must be 'bottom_right' or None.")
    token_axis = 2 if check_layout(layout) == "bhsd" else 1
    key_cache, value_cache = as_array(key_cache, "key_cache").copy(), as_array(value_cache, "value_cache").copy()
    key, value = as_array(key, "key"), as_array(value, "value")
    _check_rows(query, key, key_cache, "key", token_axis)
    _check_rows(query, value, value_cache, "value", token_axis)
    batch_size, q_len = key.shape[0], key.shape[token_axis]
    capacity = min(key_cache.shape[token_axis], value_cache.shape[token_axis])
    start = resolve_kv_len(input_pos, batch_size, capacity)
    live = start + q_len
    longest = int(live.max(initial=0))
    if longest > capacity:
        raise CapacityError(f"{q_len} rows at input_pos {input_pos} need {longest} rows; the cache holds {capacity}.")

    for cache, new in ((key_cache, key), (value_cache, value)):
        by_token, new_by_token = np.moveaxis(cache, token_axis, 1), np.moveaxis(new, token_axis, 1)
        for batch in range(batch_size):
            by_token[batch, start[batch] : live[batch]] = new_by_token[batch]

    if mask is not None:
        mask = as_array(mask, "mask")
        if mask.ndim == 0 or mask.shape[-1] < longest:
            raise ShapeError(f"`mask` has shape {mask.shape}; its last dimension must be at least {longest}.")
        mask = mask[..., :longest]
    rows = (slice(None),) * token_axis + (slice(longest),)
    result = attention(
        query, key_cache[rows], value_cache[rows], mask=mask, causal=causal, q_offset=start, kv_len=live,
        layout=layout, return_lse=return_lse, **options,
    )  # fmt: skip
    return (*(result if return_lse else (result,)), key_cache, value_cache)


def _check_rows(query: Any, new: Any, cache: np.ndarray, argument: str, token_axis: int) -> None:
    """Raise ShapeError unless ``new`` differs from ``cache`` in its number of tokens only, which is the queries'."""
    given, expected = list(np.shape(new)), list(cache.shape)
    if len(given) == len(expected) == np.ndim(query) == 4:
        expected[token_axis] = np.shape(query)[token_axis]
    if given != expected or len(given) != 4:
        raise ShapeError(f"`{argument}` has shape {tuple(given)} but its cache {cache.shape} needs {tuple(expected)}.")
