"""From a user's arrays and options to a checked call; every mistake is found here, before anything is dispatched."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import FLOAT_DTYPES, as_array, dtype_name
from .errors import DTypeError, OptionError, ShapeError
from .formats import QuantisedRows
from .layout import check_layout, split_shape
from .mask import Window, resolve_causal, resolve_kv_len, resolve_q_offset, resolve_window
from .problem import Options, Problem

#: The range of float32's normal numbers: a device may flush smaller ones to 0.
FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Call:
    """A checked attention call. Arrays are 4-D in ``problem.layout``; ``mask`` is 4-D, its sizes full or 1.

    Quantised rows are bhsd whatever the layout is.
    """

    problem: Problem
    options: Options
    query: np.ndarray
    key: np.ndarray | QuantisedRows
    value: np.ndarray | QuantisedRows
    mask: np.ndarray | None


def finite_option(value: Any, argument: str, what: str = "a finite number") -> float:
    """Return an option as a finite float, 0 or in float32's normal range, or raise OptionError."""
    try:
        is_number = not isinstance(value, (str, bytes, bool, np.bool_)) and np.ndim(value) == 0
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"`{argument}` is {value!r}; it must be {what}.") from error
    if not math.isfinite(number):
        raise OptionError(f"`{argument}` is {value!r}; it must be {what}.")
    if number and not FLOAT32_TINY <= abs(number) <= FLOAT32_MAX:
        raise OptionError(f"`{argument}` is {value!r}; it must be {what}, of a magnitude within "
                          f"{FLOAT32_TINY:.3g} .. {FLOAT32_MAX:.3g}, float32's range.")
    return number


def flag_option(value: Any, argument: str) -> bool:
    """Return True or False, or raise OptionError."""
    try:
        number = int(value) if isinstance(value, np.bool_) else operator.index(value)
    except TypeError:
        number = -1
    if number not in (0, 1):
        raise OptionError(f"`{argument}` is {value!r}; it must be True or False.")
    return bool(number)


def per_head_option(values: Any, argument: str, num_heads: int) -> np.ndarray | None:
    """Return one finite float32 for each query head, or None."""
    if values is None:
        return None
    given = as_array(values, argument)
    if given.shape != (num_heads,):
        raise ShapeError(f"`{argument}` has shape {given.shape}; it must be ({num_heads},), one per query head.")
    if given.dtype.kind not in "iuf" and given.dtype.name not in FLOAT_DTYPES:
        raise DTypeError(f"`{argument}` is {given.dtype.name}; it must hold numbers.")
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = given.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise OptionError(f"`{argument}` holds a value that is not finite in float32.")
    return numbers


def check_mixture(query: str, key: str, value: str) -> None:
    """Raise DTypeError unless query, key and value dtypes go together."""
    if key != value:
        raise DTypeError(f"`key` is {key} but `value` is {value}; they must have the same dtype.")
    if query not in ("float32", key):
        hint = "pass query.astype(np.float32)" if key != "float32" else f"pass key and value as {query}"
        raise DTypeError(f"`query` is {query} but `key` is {key}; supported: equal dtypes, or a float32 query. "
                         f"Hint: {hint}.")


def check_mask(mask: Any, full: tuple[int, int, int, int], query_dtype: str, argument: str) -> np.ndarray | None:
    """Return ``mask`` 4-D, each size full or 1, bool or float32; None if there is none. See `check_additive` too.

    Raises
    ------
    DTypeError : neither bool, float32 nor the query's dtype.
    ShapeError : it does not broadcast to ``full`` = (batch_size, num_heads, q_len, kv_len).
    """
    if mask is None:
        return None
    given = as_array(mask, argument)
    if given.dtype != np.bool_:
        name = str(given.dtype.name)
        if name not in {"float32", query_dtype}:
            raise DTypeError(f"`{argument}` is {name}; supported: bool, float32"
                             f"{'' if query_dtype == 'float32' else f' and {query_dtype}'}.")
    sizes = zip(given.shape[::-1], full[::-1], strict=False)
    if given.ndim > 4 or any(size not in (1, limit) for size, limit in sizes):
        raise ShapeError(f"`{argument}` has shape {given.shape}; it must broadcast to {full}, "
                         "(batch_size, num_heads, q_len, kv_len).")
    given = given.reshape((1,) * (4 - given.ndim) + given.shape)
    given = given[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in given.strides)]  # np.broadcast_to
    if given.dtype != np.bool_:
        with np.errstate(invalid="ignore"):
            given = given.astype(np.float32, copy=False)
    return given


def check_additive(mask: np.ndarray | None, kv_len: np.ndarray, argument: str) -> None:
    """Raise OptionError if a float mask, 4-D or less, holds NaN or plus infinity in a column of a live key."""
    if mask is None or mask.dtype == np.bool_:
        return
    full = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    lengths = kv_len if full.shape[0] == len(kv_len) else [kv_len.max(initial=0)]
    live = (entry[..., :length] if full.shape[3] > 1 else entry
            for entry, length in zip(full, lengths, strict=False))
    if not all(bool(columns.max(initial=-np.inf) < np.inf) for columns in live):
        raise OptionError(f"`{argument}` holds NaN or plus infinity; a mask closes a key with -inf.")


def attention_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    mask_name: str = "mask",
    causal: Any = None,
    scale: Any = None,
    softcap: Any = None,
    window: Any = (None, None),
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_offset: Any = None,
    kv_len: Any = None,
    layout: Any = "bhsd",
    return_lse: bool = False,
) -> Call:
    """Check every argument of `vkattn.attention`; see there for shapes and meaning.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        Naming the argument, what it is, and what is allowed.
    """
    layout = check_layout(layout)
    arrays = {"query": as_array(query, "query"), "key": as_array(key, "key"), "value": as_array(value, "value")}
    dtypes = {name: dtype_name(array, name, FLOAT_DTYPES) for name, array in arrays.items()}
    for name, array in arrays.items():
        if array.ndim != 4:
            raise ShapeError(f"`{name}` has shape {array.shape}; it must have 4 dimensions, {' '.join(layout)}.")
    check_mixture(dtypes["query"], dtypes["key"], dtypes["value"])
    problem = _problem(arrays, dtypes, layout)
    full = (problem.batch_size, problem.num_heads, problem.max_q_len, problem.max_kv_len)
    lengths = resolve_kv_len(kv_len, problem.batch_size, problem.max_kv_len)
    checked_mask = check_mask(mask, full, dtypes["query"], mask_name)
    check_additive(checked_mask, lengths, mask_name)
    if checked_mask is not None:
        kind = "bool" if checked_mask.dtype == np.bool_ else "float32"
        problem = Problem(**{**problem.__dict__, "mask": kind})

    causal = resolve_causal(causal)
    window = resolve_window(window)
    uses_position = window != (None, None) or alibi_slopes is not None
    offsets = resolve_q_offset(q_offset, causal=causal, q_len=problem.max_q_len, kv_len=lengths,
                               uses_position=uses_position)
    if softcap is not None and finite_option(softcap, "softcap", "a positive finite number, or None") <= 0:
        raise OptionError(f"`softcap` is {softcap!r}; it must be positive. Hint: None is no softcap.")
    options = Options(
        q_len=problem.max_q_len,
        kv_len=lengths,
        q_offset=offsets,
        scale=1 / math.sqrt(problem.head_dim) if scale is None else finite_option(scale, "scale"),
        softcap=None if softcap is None else float(softcap),
        window=causal_window(causal, window),
        alibi_slopes=per_head_option(alibi_slopes, "alibi_slopes", problem.num_heads),
        sinks=per_head_option(sinks, "sinks", problem.num_heads),
        return_lse=flag_option(return_lse, "return_lse"),
    )
    return Call(problem, options, arrays["query"], arrays["key"], arrays["value"], checked_mask)


def causal_window(causal: str | None, window: Window) -> Window:
    """Return ``window`` with the causal mask in it: a row sees nothing to the right of its position."""
    return window if causal is None else (window[0], 0)


def _problem(arrays: dict[str, np.ndarray], dtypes: dict[str, str], layout: str) -> Problem:
    """Return the sizes of three 4-D arrays, or raise ShapeError where they do not fit together."""
    batch, heads, q_len, head_dim = split_shape(arrays["query"].shape, layout)
    key_batch, kv_heads, kv_len, key_dim = split_shape(arrays["key"].shape, layout)
    value_batch, value_heads, value_len, value_dim = split_shape(arrays["value"].shape, layout)
    shapes = {name: array.shape for name, array in arrays.items()}
    for name, given in (("key", key_batch), ("value", value_batch)):
        if given != batch:
            raise ShapeError(f"`{name}` has shape {shapes[name]} but `query` has batch_size {batch} "
                             f"(shape {shapes['query']}, layout {layout}); they must be equal.")
    if key_dim != head_dim or head_dim == 0:
        raise ShapeError(f"`key` has shape {shapes['key']} but `query` has head_dim {head_dim}; "
                         "they must be equal and at least 1.")
    if value_dim == 0:
        raise ShapeError(f"`value` has shape {shapes['value']}; its last size, value_dim, must be at least 1.")
    if (value_heads, value_len) != (kv_heads, kv_len):
        raise ShapeError(f"`value` has shape {shapes['value']} but `key` has {kv_heads} heads and {kv_len} tokens "
                         f"(shape {shapes['key']}, layout {layout}); they must be equal.")
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"`key` has shape {shapes['key']} but `query` has num_heads {heads} (layout {layout}); "
                         f"num_heads must be a multiple of num_kv_heads ({kv_heads}).")
    return Problem(batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim,
                   dtypes["query"], dtypes["key"], dtypes["value"], layout)


