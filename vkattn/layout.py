"""How rows of elements lie in device buffers: padded to 16 bytes, addressed in vecs of four. Used by every layer.

A *word* is 32 bits, a *quad* four words (16 bytes: 4 float32 or 8 float16 elements) and a *vec* four elements
(one ``vec4`` of a kernel's arithmetic, whatever the dtype). Every row of head_dim elements starts on a quad, and
what pads its last quad is zero in every buffer that holds queries, keys, values or outputs, so that a kernel may
multiply padding by padding. Strides are in vecs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dtypes import ITEM_BYTES, numpy_dtype
from .errors import OptionError

QUAD_BYTES = 16
QUAD_WORDS = 4

#: Axis order of the arrays of one layout; b batch, h heads, s sequence (tokens), d head_dim.
LAYOUTS = ("bhsd", "bshd")


def check_layout(layout: Any) -> str:
    """Return ``layout`` if it is known, else raise OptionError."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise OptionError(f"`layout` is {layout!r}; supported: {', '.join(map(repr, LAYOUTS))}.")
    return str(layout)


def row_quads(dim: int, dtype: str) -> int:
    """Return the quads that one row of ``dim`` elements takes."""
    return -(-dim * ITEM_BYTES[dtype] // QUAD_BYTES)


def padded_dim(dim: int, dtype: str) -> int:
    """Return the elements in the quads of one row of ``dim`` elements."""
    return row_quads(dim, dtype) * QUAD_BYTES // ITEM_BYTES[dtype]


def split_shape(shape: Sequence[int], layout: str) -> tuple[int, int, int, int]:
    """Return (batch, heads, tokens, dim) of a 4-D shape in ``layout``."""
    if layout == "bhsd":
        batch, heads, tokens, dim = shape
    else:
        batch, tokens, heads, dim = shape
    return batch, heads, tokens, dim


def join_shape(batch: int, heads: int, tokens: int, dim: int, layout: str) -> tuple[int, int, int, int]:
    """Return the 4-D shape in ``layout``; the inverse of `split_shape`."""
    return (batch, heads, tokens, dim) if layout == "bhsd" else (batch, tokens, heads, dim)


def row_vecs(dim: int, dtype: str) -> int:
    """Return the vecs (groups of four elements) in the quads of one row of ``dim`` elements."""
    return padded_dim(dim, dtype) // 4


def words_per_vec(dtype: str) -> int:
    """Return the words that a vec (four elements) takes in a buffer."""
    return ITEM_BYTES[dtype]


def vec_strides(heads: int, tokens: int, dim: int, dtype: str, layout: str) -> tuple[int, int, int]:
    """Return the strides (batch, head, token), in vecs, of an array packed by `pack_into`."""
    row = row_vecs(dim, dtype)
    if layout == "bhsd":
        return heads * tokens * row, tokens * row, row
    return tokens * heads * row, row, heads * row


def packed_words(shape: Sequence[int], dtype: str) -> int:
    """Return the 32-bit words that `pack_into` writes for an array of ``shape``."""
    return math.prod(shape[:-1]) * row_quads(shape[-1], dtype) * QUAD_WORDS


def pack_into(words: np.ndarray, array: np.ndarray, dtype: str) -> None:
    """Write ``array`` (any strides) into ``words``, rows padded with zeros to whole quads.

    Parameters
    ----------
    words : uint32, shape ``[packed_words(array.shape, dtype)]``, C-contiguous; overwritten completely.
    array : dtype ``dtype``, shape ``[..., dim]``.
    """
    dim = array.shape[-1]
    padded = padded_dim(dim, dtype)
    rows = words.view(numpy_dtype(dtype)).reshape(*array.shape[:-1], padded)
    rows[..., :dim] = array
    if dim < padded:
        rows[..., dim:] = 0


def unpack(words: np.ndarray, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Return a fresh array of ``shape`` from packed ``words``; the inverse of `pack_into`."""
    rows = words.view(numpy_dtype(dtype)).reshape(*shape[:-1], padded_dim(shape[-1], dtype))
    return np.array(rows[..., : shape[-1]], order="C")
