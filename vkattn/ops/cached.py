"""`sdpa_with_kv_cache`: append new keys and values to a cache, then attend over what is live. ExecuTorch's meaning."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache.checks import query_stand_in, rows_dtype
from ..cache.kv_cache import CacheLayer, KVCache
from ..dispatch import check_algorithm
from ..dtypes import FLOAT_DTYPES, as_array, dtype_name, numpy_dtype
from ..errors import CapacityError, OptionError, ShapeError
from ..graph.values import Dim
from ..kernels import split
from ..kernels.tiers import allowed_tiers
from ..layout import split_shape
from ..mask import resolve_causal
from ..validate import attention_call, check_additive, check_mask
from .builder import GraphBuilder
from .graph import Graph


def sdpa_with_kv_cache(
    query: Any,
    key: Any,
    value: Any,
    cache: KVCache | CacheLayer,
    input_pos: Any,
    *,
    mask: Any = None,
    causal: str | None = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Write new keys and values into a cache at ``input_pos``, then attend over its live rows.

    ``cache[b, input_pos_b + s] = new[b, s]``, then `attention` with ``kv_len = input_pos + q_len`` and
    ``q_offset = input_pos``: with the default ``causal``, query row s sees keys ``0 .. input_pos + s``.

    Parameters
    ----------
    query : Array, shape ``[batch, q_len, num_heads, head_dim]`` (bshd), float32 or the cache's dtype
    key : Array, shape ``[batch, q_len, num_kv_heads, head_dim]`` (bshd), float32 or the cache's dtype
        The new rows, as many as there are queries; rounded to the cache's dtype, or quantised, on the device. With a
        quantised cache, queries and rows are float32, float16 or bfloat16.
    value : Array, shape ``[batch, q_len, num_kv_heads, value_dim]`` (bshd), key's dtype
    cache : KVCache of one layer, or ``cache.layer(i)``
    input_pos : int, or integers of shape ``[batch]``
        Where row 0 goes, in tokens: at most the live length. ``input_pos + q_len == capacity`` still fits.
    mask : Array that broadcasts to ``[batch, num_heads, q_len, n]``, or None
        As for `attention`, with n at least the longest live length (or 1); columns beyond that are not read.
    causal : "bottom_right" or None
        None with a mask: the mask alone decides, which is upstream's meaning of a mask.
    scale, softcap, window, sinks, alibi_slopes, return_lse, algorithm
        As for `attention`.
    layout : "bshd" or "bhsd"
        Of query, key, value and the output.

    Returns
    -------
    out : Array, the query's shape with value_dim last, the query's dtype
    lse : Array, float32, shape ``[batch, num_heads, q_len]``; only if ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError
        An argument does not fit; nothing has been written.
    CapacityError
        ``input_pos + q_len`` is beyond the capacity; nothing has been written.
    NoKernelError
        ``algorithm`` cannot compute this; the message says why.

    Notes
    -----
    Plans (one for each power of two of q_len and each set of options) are kept with the cache, at most 16. One plan
    serves every layer and every length.

    Source: ExecuTorch, ``llama::sdpa_with_kv_cache`` in extension/llm/custom_ops/op_sdpa.cpp.

    Example
    -------
    >>> import numpy as np
    >>> cache = KVCache(1, 2, capacity=16, head_dim=8)
    >>> new = np.ones((1, 3, 2, 8), np.float32)
    >>> sdpa_with_kv_cache(np.ones((1, 3, 4, 8), np.float32), new, new, cache, 0).shape
    (1, 3, 4, 8)
    """
    store, layer = _store(cache)
    algorithm = check_algorithm(algorithm)
    new = {"key": as_array(key, "key"), "value": as_array(value, "value")}
    new_dtypes = [dtype_name(array, name, FLOAT_DTYPES) for name, array in new.items()]
    # The queries meet the rows as the cache holds them: stand-ins of its dtype are checked in their place, or of the
    # queries' own where the cache takes any.
    query = as_array(query, "query")
    stands_for = query_stand_in(store, dtype_name(query, "query", FLOAT_DTYPES))
    rounded = [np.broadcast_to(np.zeros((), numpy_dtype(stands_for)), array.shape) for array in new.values()]
    call = attention_call(query, *rounded, scale=scale, softcap=softcap, window=window, sinks=sinks,
                          alibi_slopes=alibi_slopes, q_offset=0, layout=layout, return_lse=return_lse)
    problem, options = call.problem, call.options
    if problem.max_kv_len != problem.max_q_len:
        raise ShapeError(f"`key` has shape {call.key.shape} and `query` {call.query.shape} (layout {layout}): there "
                         "must be as many new keys as queries.")
    if resolve_causal(causal) == "top_left":
        raise OptionError("`causal` is 'top_left'; with a cache it must be 'bottom_right' or None.")
    rows = [(b, s, h, d) for b, h, s, d in (split_shape(array.shape, layout) for array in new.values())]
    rows_dtype(store, rows[0], rows[1], new_dtypes[0], new_dtypes[1])
    with store.device.lock:
        start = store.check_append(input_pos, options.q_len, layer)
        longest = int(start.max()) + options.q_len
        checked = _mask(mask, (problem.batch_size, problem.num_heads, options.q_len), longest, problem.query_dtype)
        check_additive(checked, start + options.q_len, "mask")
        inputs = {"query": call.query} | new
        if checked is not None:
            inputs["mask"] = checked
        group = store.storage.place(layer)[0]
        room = min(1 << max(options.q_len - 1, 0).bit_length(), store.capacity)
        if algorithm == split.NAME:  # which takes so many rows at most: what it can compute is not to be refused
            room = max(options.q_len, min(room, split.MAX_ROWS // problem.group_size))
        described = {name: (array.shape if name == "mask" else split_shape(array.shape, layout)[1], array.dtype.name)
                     for name, array in inputs.items()}
        if checked is not None:
            described["mask"] = (checked.shape[:2] + tuple(size != 1 for size in checked.shape[2:]), checked.dtype.name)
        settings = {
            "causal": causal, "scale": options.scale, "softcap": options.softcap, "window": tuple(window),
            "sinks": _numbers(options.sinks), "alibi_slopes": _numbers(options.alibi_slopes), "layout": layout,
            "return_lse": options.return_lse, "algorithm": algorithm}
        kind = ("sdpa", allowed_tiers(), group, tuple(described.items()), tuple(settings.items()))

        def plan(room: int, columns: int) -> Graph:
            made: Graph = store.plans.get((*kind, room, columns),
                                          lambda: _build(store, group, room, columns, inputs, settings))
            return made

        try:
            graph = plan(room, store.capacity)
        except CapacityError:  # what the call itself needs may fit
            graph = plan(options.q_len, store.capacity if checked is None else longest)
        result = graph.run(inputs, input_pos=start, layer=layer)
    return (result["out"], result["lse"]) if return_lse else result["out"]


def _store(cache: Any) -> tuple[KVCache, int]:
    """Return the cache and the layer, or raise OptionError."""
    if isinstance(cache, CacheLayer):
        store, layer = cache.cache, cache.index
    elif isinstance(cache, KVCache):
        store, layer = cache, 0
        if cache.num_layers > 1:
            raise OptionError(f"`cache` has {cache.num_layers} layers. Hint: pass cache.layer(i).")
    else:
        raise OptionError(f"`cache` is a {type(cache).__name__}; it must be a vkattn.KVCache or one of its layers.")
    store.check()
    return store, layer


def _mask(mask: Any, rows: tuple[int, int, int], longest: int, query_dtype: str) -> np.ndarray | None:
    """Return the mask 4-D, bool or float32, its columns cut to the live ones; or raise if it does not fit."""
    if mask is None:
        return None
    mask = as_array(mask, "mask")
    columns = mask.shape[-1] if mask.ndim else 1
    if columns not in (1, longest) and columns < longest:
        raise ShapeError(f"`mask` has shape {mask.shape}; its last size must be at least {longest}, the longest "
                         "live length, or 1.")
    if columns > longest:
        mask = mask[..., :longest]
    return check_mask(mask, (*rows, longest), query_dtype, "mask")


def _numbers(values: np.ndarray | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values.tolist())


def _build(store: KVCache, group: int, room: int, columns: int, inputs: dict[str, np.ndarray],
           settings: dict[str, Any]) -> Graph:
    """Build the graph for such calls with up to ``room`` rows and ``columns`` of a mask, any layer of ``group``."""
    builder = GraphBuilder(store.device)
    tokens = Dim("q_len", max=room)
    layout = settings["layout"]
    declared = {}
    for name in ("query", "key", "value"):
        batch, heads, _, dim = split_shape(inputs[name].shape, layout)
        shape = (batch, heads, tokens, dim) if layout == "bhsd" else (batch, tokens, heads, dim)
        declared[name] = builder.input(name, shape, inputs[name].dtype.name)
    mask = inputs.get("mask")
    if mask is not None:
        sizes = (*mask.shape[:2], tokens if mask.shape[2] != 1 else 1,
                 Dim("mask_len", max=columns) if mask.shape[3] != 1 else 1)
        declared["mask"] = builder.input("mask", sizes, mask.dtype.name)
    cache = builder.cache_group("cache", store, group)
    result = builder.sdpa_with_kv_cache(
        declared["query"], declared["key"], declared["value"], cache, builder.position("input_pos"),
        layer=builder.position("layer"), mask=declared.get("mask"), **settings)
    out, lse = result if settings["return_lse"] else (result, None)
    builder.output("out", out)
    if lse is not None:
        builder.output("lse", lse)
    return builder.build()
