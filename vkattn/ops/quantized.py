"""`quantized_attention`: int8 query, key and value with scales and zero points. ExecuTorch's custom_quantized_sdpa."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..cache.transfer import check_scales, checked_rows
from ..dtypes import as_array
from ..errors import OptionError, ShapeError
from ..formats import QuantisedRows, dequantised
from ..layout import check_layout, split_shape
from ..mask import MAX_POSITION, as_integer, resolve_causal
from ..runtime.device import Device, resolve_device
from ..validate import attention_call
from .attention import compute


def quantized_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    query_scale: Any,
    query_zero_point: Any,
    key_scale: Any,
    key_zero_point: Any,
    value_scale: Any,
    value_zero_point: Any,
    start_pos: Any = None,
    mask: Any = None,
    causal: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    algorithm: str = "auto",
    device: Device | None = None,
) -> Any:
    """Attention over int8 query, key and value rows, each with a scale and a zero point of its own; float32 output.

    ``x = (code - zero_point) * scale`` for each row of the three, then `attention`. Keys and values stay quantised on
    the device.

    Parameters
    ----------
    query : int8, shape ``[batch_size, q_len, num_heads, head_dim]`` (bshd)
    key : int8, shape ``[batch_size, capacity, num_kv_heads, head_dim]`` (bshd)
    value : int8, shape ``[batch_size, capacity, num_kv_heads, value_dim]`` (bshd)
    query_scale, key_scale, value_scale : float32, the shape of their array without its last size, or 1 in its place
    query_zero_point, key_zero_point, value_zero_point : int8, the shape of their scale
    start_pos : int, integers of shape ``[batch_size]``, or None
        Position of query row 0, in tokens. Without a mask the first ``start_pos + q_len`` keys are live, and the others
        are never read; None is ``capacity - q_len``.
    mask : Array that broadcasts to ``[batch_size, num_heads, q_len, capacity]``, or None
        As for `attention`; all keys are live then.
    causal : "bottom_right" or None
        "bottom_right": query row s attends keys ``0 .. start_pos + s``. None (upstream's default): every live key.
    layout : "bshd" or "bhsd"
        Of query, key, value and the output; "bhsd" is upstream's is_seq_at_dim_2.
    scale, softcap, window, sinks, alibi_slopes, return_lse, algorithm, device
        As for `attention`.

    Returns
    -------
    out : Array, float32, the query's shape with value_dim last
    lse : Array, float32, shape ``[batch_size, num_heads, q_len]``; only if ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError
        An argument does not fit; nothing has been dispatched.
    NoKernelError, CapacityError, DeviceError
        As `attention`.

    Notes
    -----
    The query is dequantised as it is uploaded: it is read once. Weights are not quantised. There is no path of integer
    dot products: their instruction needs a device feature that Kompute cannot enable, and without it an integer
    multiply-add costs as much as a float one.

    Source: ExecuTorch, ``llama::custom_quantized_sdpa`` in extension/llm/custom_ops/op_sdpa.cpp.

    Example
    -------
    >>> from vkattn import oracle
    >>> rows = np.random.default_rng(0).standard_normal((1, 4, 2, 16))
    >>> codes, scale, zero_point = oracle.quantize(rows, "int8")
    >>> quantized_attention(codes, codes, codes, query_scale=scale, query_zero_point=zero_point, key_scale=scale,
    ...                     key_zero_point=zero_point, value_scale=scale, value_zero_point=zero_point).shape
    (1, 4, 2, 16)
    """
    layout = check_layout(layout)
    rows = {name: checked_rows(name, codes, row_scale, zero_point, "int8") for name, codes, row_scale, zero_point in (
        ("query", query, query_scale, query_zero_point), ("key", key, key_scale, key_zero_point),
        ("value", value, value_scale, value_zero_point))}
    for name, given in rows.items():
        if len(given.shape) != 4:
            raise ShapeError(f"`{name}` has shape {given.shape}; it must have 4 dimensions, {' '.join(layout)}.")
    q_len, capacity = (split_shape(rows[name].shape, layout)[2] for name in ("query", "key"))
    if resolve_causal(causal) == "top_left":
        raise OptionError("`causal` is 'top_left'; it must be 'bottom_right' or None: rows stand at `start_pos`.")
    batch_size = split_shape(rows["query"].shape, layout)[0]
    start = _start(start_pos, batch_size, q_len, capacity, mask is not None)
    lengths = np.full(batch_size, capacity) if mask is not None else start + q_len
    stand_ins = [np.broadcast_to(np.float32(0), rows[name].shape) for name in ("key", "value")]
    check_scales("query_scale", rows["query"].scale)
    call = attention_call(
        dequantised(rows["query"], "int8"), *stand_ins, mask=mask, causal=causal, scale=scale, softcap=softcap,
        window=window, sinks=sinks, alibi_slopes=alibi_slopes, q_offset=start,
        kv_len=lengths, layout=layout, return_lse=return_lse,
    )  # fmt: skip
    for name in ("key", "value"):
        by_token = rows[name].scale if layout == "bshd" else rows[name].scale.swapaxes(1, 2)
        for batch, length in enumerate(lengths):
            check_scales(f"{name}_scale", by_token[batch, :length])
    problem = replace(call.problem, key_dtype="int8", value_dtype="int8")
    call = replace(call, problem=problem, key=_by_head(rows["key"], layout), value=_by_head(rows["value"], layout))
    out, lse = compute(call, resolve_device(device), algorithm)
    return (out, lse) if return_lse else out


def _start(start_pos: Any, batch_size: int, q_len: int, capacity: int, has_mask: bool) -> np.ndarray:
    """Return the position of row 0 of each batch entry, int64 ``[batch_size]``, or raise OptionError."""
    wanted = capacity - q_len if start_pos is None else start_pos
    number = as_integer(wanted)
    if number is not None and abs(number) > MAX_POSITION:
        raise OptionError(f"`start_pos` is {start_pos!r}; it must be within +-{MAX_POSITION}.")
    given = as_array(wanted, "start_pos")
    if number is None and (given.dtype.kind not in "iu" or given.shape != (batch_size,)):
        raise OptionError(f"`start_pos` is {start_pos!r}; it must be an integer, or integers of shape ({batch_size},).")
    start = np.empty(batch_size, np.int64)
    start[...] = given
    if not has_mask and ((start < 0) | (start + q_len > capacity)).any():
        raise OptionError(f"`start_pos` is {start_pos!r} with {q_len} queries and {capacity} keys; it must be within "
                          f"0 .. {capacity - q_len}, so that the keys at and before each query are there.")
    return start


def _by_head(rows: QuantisedRows, layout: str) -> QuantisedRows:
    """Return rows as ``[batch, heads, tokens, dim]``."""
    if layout == "bhsd":
        return rows
    assert rows.zero_point is not None
    return QuantisedRows(*(array.swapaxes(1, 2) for array in (rows.codes, rows.scale, rows.zero_point)))
