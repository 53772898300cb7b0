"""Writing one call's arrays and options into host-visible words, live words only."""

from __future__ import annotations

import numpy as np

from ..formats import QuantisedRows, pack_stored, stored_strides, stored_words, unit_words
from ..kernels import fields
from ..kernels.passes import Cut
from ..layout import pack_into, packed_words, vec_strides
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
    values = fields.sizes(problem, options.q_len) | fields.score(options.scale, options.softcap, options.window)
    values |= {
        "max_kv_len": int(options.kv_len.max(initial=0)),
        "flags": fields.flags(problem.mask, has_alibi=options.alibi_slopes is not None,
                              has_sinks=options.sinks is not None, return_lse=options.return_lse),
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
        ("mask", mask_strides(call.mask)),
    ):
        values |= fields.strides(name, strides)
    return values
