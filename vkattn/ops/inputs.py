"""Writing one call's arrays and options into host-visible words, live words only."""

from __future__ import annotations

import numpy as np

from ..formats import QuantisedRows, formats_word, pack_stored, stored_strides, stored_words, unit_words
from ..kernels import params
from ..kernels.passes import Cut
from ..layout import pack_into, packed_words, row_vecs, vec_strides
from ..problem import Options, Problem
from ..validate import Call


def mask_words(mask: np.ndarray | None) -> int:
    """Return the words that `write_mask` writes."""
    if mask is None:
        return 0
    if mask.dtype == np.bool_:
        return mask[..., 0].size * -(-mask.shape[3] // 32) if mask.size else 0
    return mask.size


def write_mask(words: np.ndarray, mask: np.ndarray) -> None:
    """Write a 4-D mask: bool as one bit per element, rows padded to words; float32 as it is."""
    if mask.dtype == np.bool_:
        row_words = -(-mask.shape[3] // 32)
        packed = np.packbits(mask, axis=-1, bitorder="little")
        rows = words.view(np.uint8).reshape(*mask.shape[:3], 4 * row_words)
        rows[..., : packed.shape[3]] = packed
        rows[..., packed.shape[3] :] = 0
    else:
        words.view(np.float32).reshape(mask.shape)[...] = mask


def mask_strides(mask: np.ndarray | None) -> tuple[int, int, int, int]:
    """Return the strides (batch, head, row, column) in elements; 0 where the mask is broadcast."""
    if mask is None:
        return 0, 0, 0, 0
    batch, heads, rows, cols = mask.shape
    row = -(-cols // 32) * 32 if mask.dtype == np.bool_ else cols
    sizes = (heads * rows * row, rows * row, row, 1)
    strides = [0 if size == 1 else stride for size, stride in zip((batch, heads, rows, cols), sizes, strict=True)]
    return strides[0], strides[1], strides[2], strides[3]


def array_words(array: np.ndarray | QuantisedRows, dtype: str) -> int:
    """Return the words that `write_array` writes."""
    if isinstance(array, QuantisedRows):
        return stored_words(array.shape, dtype)
    return packed_words(array.shape, dtype)


def write_array(words: np.ndarray, array: np.ndarray | QuantisedRows, dtype: str) -> None:
    """Write a query, key or value: rows padded to quads; quantised rows as codes, then scales."""
    if isinstance(array, QuantisedRows):
        pack_stored(words, array, dtype)
    else:
        pack_into(words, array, dtype)


def header(call: Call, cut: Cut, words: dict[str, int]) -> dict[str, int | float]:
    """Return the params header of ``call``; ``words`` holds the live words of query, key, value and mask."""
    problem, options = call.problem, call.options
    values: dict[str, int | float] = {
        "batch_size": problem.batch_size,
        "num_kv_heads": problem.num_kv_heads,
        "group_size": problem.group_size,
        "q_len": options.q_len,
        "max_kv_len": int(options.kv_len.max(initial=0)),
        "head_vecs": -(-problem.head_dim // 4),
        "value_vecs": -(-problem.value_dim // 4),
        "out_vecs": row_vecs(problem.value_dim, problem.out_dtype),
        "flags": flags(problem, options),
        "formats": formats_word(problem.query_dtype, problem.key_dtype, problem.value_dtype),
        "scale": options.scale,
        "softcap": options.softcap or 0.0,
        "window_left": params.WINDOW_OFF if options.window[0] is None else options.window[0],
        "window_right": params.WINDOW_OFF if options.window[1] is None else options.window[1],
        "key_offset": 0,
        "value_offset": 0,
        "q_words": words["query"],
        "k_words": words["key"],
        "v_words": words["value"],
        "mask_words": words["mask"],
    }
    values |= cut.words
    queries, keys = (problem.num_heads, options.q_len), (problem.num_kv_heads, problem.max_kv_len)
    unit, layout = unit_words(problem.key_dtype, problem.value_dtype), problem.layout
    for name, strides in (
        ("q", vec_strides(*queries, problem.head_dim, problem.query_dtype, layout)),
        ("k", stored_strides(*keys, problem.head_dim, problem.key_dtype, unit, layout)),
        ("v", stored_strides(*keys, problem.value_dim, problem.value_dtype, unit, layout)),
        ("out", vec_strides(*queries, problem.value_dim, problem.out_dtype, layout)),
    ):
        values |= {f"{name}_stride_{axis}": s for axis, s in zip(("batch", "head", "row"), strides, strict=True)}
    axes = ("batch", "head", "row", "col")
    values |= {f"mask_stride_{axis}": s for axis, s in zip(axes, mask_strides(call.mask), strict=True)}
    return values


def flags(problem: Problem, options: Options) -> int:
    """Return the bits of the params word ``flags``."""
    bits = {None: 0, "bool": params.FLAG_MASK_BITS, "float32": params.FLAG_MASK_FLOAT}[problem.mask]
    bits |= params.FLAG_ALIBI if options.alibi_slopes is not None else 0
    bits |= params.FLAG_SINKS if options.sinks is not None else 0
    return bits | (params.FLAG_LSE if options.return_lse else 0)
