"""The quantised formats of KV caches: how many words a row takes, and how codes and scales become words and back.

A row of codes starts on a quad, like every row; the scales of all rows lie behind the codes of all rows of a layer, so
that codes are loaded as whole quads. Codes are stored unsigned: plus 128 in a byte (int8, q8_0), plus 8 in four bits
(q4_0). What pads a row decodes to 0. The rows of neighbouring tokens never share a word.

``int8``
    Per row, asymmetric: ``(code - zero_point) * scale``; a row has a float32 scale and its zero point, a word each.
``q8_0``, ``q4_0``
    Blocks of 32 elements, symmetric: ``code * scale``; the float16 scales of two blocks share a word, and a row owns
    whole words. Byte b of word w of a q4_0 row holds elements 8 w + b (low four bits) and 8 w + 4 + b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .dtypes import AXIS, FLOAT_DTYPES
from .errors import OptionError
from .layout import QUAD_WORDS, row_quads, vec_strides, words_per_vec

QUANTISED = ("int8", "q8_0", "q4_0")
CACHE_DTYPES = (*FLOAT_DTYPES, *QUANTISED)

#: Elements of a block of q8_0 and q4_0.
BLOCK = 32

#: The code of each format in the params word `formats`, in the order of `CACHE_DTYPES`.
FORMAT = {name: code for code, name in enumerate(CACHE_DTYPES)}

#: The smallest and the largest code.
CODE_RANGE = {"int8": (-128, 127), "q8_0": (-127, 127), "q4_0": (-8, 7)}

#: The largest magnitude that a format can hold: a block's scale is a float16. For int8 the range of a row, largest less
#: smallest, must be a float32.
LARGEST = {"int8": float(np.finfo(np.float32).max) / 2, "q8_0": 65504.0 * 127, "q4_0": 65504.0 * 8}

#: What is added to a code where it is stored.
_BIAS = {"int8": 128, "q8_0": 128, "q4_0": 8}


@dataclass(frozen=True)
class QuantisedRows:
    """Rows on the host: ``codes`` int8 ``[..., dim]`` and their scales.

    ``scale`` is float32 ``[...]`` for int8 and float16 ``[..., blocks]`` for the block formats; ``zero_point`` is int8
    ``[...]`` for int8, else None.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes."""
        return self.codes.shape


def is_plain(key_dtype: str, value_dtype: str) -> bool:
    """Whether keys and values are of one float type, so that kernels address them in vecs."""
    return key_dtype == value_dtype and key_dtype in FLOAT_DTYPES


def variant_axes(query_dtype: str, key_dtype: str, value_dtype: str) -> tuple[str, str]:
    """Return the values of the axes query and key of the shader variants that compute these dtypes."""
    if is_plain(key_dtype, value_dtype):
        return AXIS[query_dtype], AXIS[key_dtype]
    return "any", key_dtype if key_dtype == value_dtype else "mixed"


def unit_words(key_dtype: str, value_dtype: str) -> int:
    """Return the words of the unit in which keys and values are addressed: a vec of floats, else a quad."""
    return words_per_vec(key_dtype) if is_plain(key_dtype, value_dtype) else QUAD_WORDS


def num_blocks(dim: int) -> int:
    """Return the blocks of a row of ``dim`` elements; the last one is padded."""
    return -(-dim // BLOCK)


def code_quads(dim: int, dtype: str) -> int:
    """Return the quads of the codes (or elements) of one row."""
    if dtype == "q8_0":
        return 2 * num_blocks(dim)
    if dtype == "q4_0":
        return num_blocks(dim)
    return -(-dim // 16) if dtype == "int8" else row_quads(dim, dtype)


def formats_word(query: str, key: str, value: str, new: str = "float32") -> int:
    """Return the params word `formats` for these dtypes: 8 bits each."""
    return sum(FORMAT[name] << 8 * place for place, name in enumerate((query, key, value, new)))


def scale_words(dim: int, dtype: str) -> int:
    """Return the words of the scales of one row."""
    if dtype == "int8":
        return 2
    return -(-num_blocks(dim) // 2) if dtype in QUANTISED else 0


def code_words(shape: Sequence[int], dtype: str) -> int:
    """Return the words of the codes of ``[..., dim]``: where the scales start."""
    return math.prod(shape[:-1]) * code_quads(shape[-1], dtype) * QUAD_WORDS


def stored_words(shape: Sequence[int], dtype: str) -> int:
    """Return the words of codes and scales of ``[..., dim]``, padded to whole quads."""
    words = code_words(shape, dtype) + math.prod(shape[:-1]) * scale_words(shape[-1], dtype)
    return -(-words // QUAD_WORDS) * QUAD_WORDS


def stored_strides(heads: int, tokens: int, dim: int, dtype: str, unit: int, layout: str) -> tuple[int, int, int]:
    """Return the strides (batch, head, token) of keys or values in units of ``unit`` words, as `unit_words` gives them.

    Quantised rows lie as ``[batch, heads, tokens]`` whatever the layout of the arrays that they came from.
    """
    if unit != QUAD_WORDS or dtype == "float32":  # a quad of float32 is a vec
        return vec_strides(heads, tokens, dim, dtype, layout)
    row = code_quads(dim, dtype)
    return heads * tokens * row, tokens * row, row


def check_range(argument: str, rows: np.ndarray, dtype: str) -> None:
    """Raise OptionError if new rows hold what a quantised format cannot: it would spoil a whole row or block."""
    if dtype not in QUANTISED or not rows.size:
        return
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(rows).max())
    if not largest <= LARGEST[dtype]:
        what = "NaN" if math.isnan(largest) else "infinity" if math.isinf(largest) else f"a magnitude of {largest:.6g}"
        raise OptionError(f"`{argument}` holds {what}; rows of an {dtype} cache must be finite and within "
                          f"+-{LARGEST[dtype]:.6g}.")


def pack_codes(rows: QuantisedRows, dtype: str) -> np.ndarray:
    """Return the words of the codes, uint32 ``[..., words of a row]``."""
    dim = rows.shape[-1]
    words = code_quads(dim, dtype) * QUAD_WORDS
    elements = words * (8 if dtype == "q4_0" else 4)
    stored = np.empty((*rows.shape[:-1], elements), np.uint8)
    stored[..., :dim] = rows.codes.astype(np.int16) + _BIAS[dtype]
    zero = 0 if rows.zero_point is None else rows.zero_point.astype(np.int16)[..., None]
    stored[..., dim:] = zero + _BIAS[dtype]
    if dtype == "q4_0":
        halves = stored.reshape(*rows.shape[:-1], words, 2, 4)
        stored = halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)
    return np.ascontiguousarray(stored).reshape(*rows.shape[:-1], 4 * words).view(np.uint32)


def unpack_codes(words: np.ndarray, dim: int, dtype: str) -> np.ndarray:
    """Return codes int8 ``[..., dim]`` from the words of rows; the inverse of `pack_codes`."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if dtype == "q4_0":
        by_word = stored.reshape(*words.shape, 1, 4)
        stored = np.concatenate([by_word & 15, by_word >> 4], axis=-2).reshape(*words.shape[:-1], 8 * words.shape[-1])
    return (stored[..., :dim].astype(np.int16) - _BIAS[dtype]).astype(np.int8)


def pack_scales(rows: QuantisedRows, dtype: str) -> np.ndarray:
    """Return the words of the scales, uint32 ``[..., words of a row]``."""
    if dtype == "int8":
        assert rows.zero_point is not None
        zero = rows.zero_point.astype(np.int32).view(np.uint32)
        return np.stack([np.ascontiguousarray(rows.scale, np.float32).view(np.uint32), zero], axis=-1)
    blocks = rows.scale.shape[-1]
    halves = np.zeros((*rows.scale.shape[:-1], blocks + blocks % 2), np.float16)
    halves[..., :blocks] = rows.scale
    return halves.view(np.uint32)


def unpack_scales(words: np.ndarray, dim: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (scale, zero_point) of rows from their words; the inverse of `pack_scales`."""
    words = np.ascontiguousarray(words)
    if dtype == "int8":
        return words[..., 0].copy().view(np.float32), words[..., 1].copy().view(np.int32).astype(np.int8)
    return words.view(np.float16)[..., : num_blocks(dim)].copy(), None


def pack_stored(words: np.ndarray, rows: QuantisedRows, dtype: str) -> None:
    """Write codes ``[batch, heads, tokens, dim]`` and scales into ``words`` (`stored_words` of them)."""
    split = code_words(rows.shape, dtype)
    words[:split] = pack_codes(rows, dtype).ravel()
    scales = pack_scales(rows, dtype).ravel()
    words[split : split + scales.size] = scales


def dequantised(rows: QuantisedRows, dtype: str) -> np.ndarray:
    """Return the float32 elements that rows stand for."""
    if dtype == "int8":
        assert rows.zero_point is not None
        codes = rows.codes.astype(np.float32) - rows.zero_point.astype(np.float32)[..., None]
        result: np.ndarray = codes * rows.scale[..., None]
        return result
    scale = np.repeat(rows.scale.astype(np.float32), BLOCK, axis=-1)[..., : rows.shape[-1]]
    return rows.codes.astype(np.float32) * scale
