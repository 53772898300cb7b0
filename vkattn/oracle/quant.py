"""Quantising rows and back, in NumPy: the definition of the formats of quantised caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import FLOAT_DTYPES, as_array
from ..errors import DTypeError, OptionError, ShapeError

#: Elements of a block of q8_0 and q4_0, and the largest float16, at which a block's scale stays.
BLOCK = 32
LARGEST_SCALE = np.float32(65504)


def quantize(rows: Any, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Quantise rows over their last dimension, in float32 arithmetic rounded to nearest even.

    ``int8``, a row: ``scale = max((hi - lo) / 255, 2^-23)`` with ``lo = min(0, row)``, ``hi = max(0, row)``; the zero
    point is that of the two candidates ``-128 - lo / scale`` and ``127 - hi / scale`` whose end of the range is off
    less, rounded; ``code = clamp(round(x / scale + zero_point), -128, 127)``.
    ``q8_0``, a block of 32: ``scale = float16(max |x| / 127)``, ``code = clamp(round(x / scale), -127, 127)``.
    ``q4_0``, a block of 32: ``scale = float16(m / -8)`` where m is the first element of the largest magnitude, with its
    sign, so that m has the code -8; ``code = clamp(round(x / scale), -8, 7)``.

    Parameters
    ----------
    rows : Array, shape ``[..., dim]``; converted to float32
    dtype : "int8", "q8_0" or "q4_0"

    Returns
    -------
    codes : int8, shape ``[..., dim]``
    scale : float32 ``[...]`` for int8, float16 ``[..., ceil(dim / 32)]`` else
    zero_point : int8 ``[...]`` for int8, else None

    Raises
    ------
    OptionError, ShapeError, DTypeError
        An unknown format; a single number; no numbers.

    Notes
    -----
    A row (int8) or block with an element that is not finite gets the scale NaN, codes and zero point 0. A scale beyond
    float16's range stays at 65504, and codes at the ends of their range.

    Source: ExecuTorch's quantised KV cache, ``choose_qparams_per_token_asymmetric`` and ``quantize_per_token`` (int8);
    the block formats of GGML.

    Example
    -------
    >>> codes, scale, zero_point = quantize(np.array([[-1.0, 0.0, 1.5]]), "int8")
    >>> codes.tolist(), zero_point.tolist()
    ([[-128, -26, 127]], [-26])
    """
    if not isinstance(dtype, str) or dtype not in ("int8", "q8_0", "q4_0"):
        raise OptionError(f"`dtype` is {dtype!r}; supported: 'int8', 'q8_0', 'q4_0'.")
    array = as_array(rows, "rows")
    if array.ndim == 0:
        raise ShapeError("`rows` is a single number; it must have at least one dimension.")
    if array.dtype.kind not in "biuf" and array.dtype.name not in FLOAT_DTYPES:
        raise DTypeError(f"`rows` is {array.dtype.name}; it must hold numbers.")
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        given = array.astype(np.float32)
    if dtype == "int8":
        return _quantize_row(given)
    dim = given.shape[-1]
    blocks = np.zeros((*given.shape[:-1], -(-dim // BLOCK), BLOCK), np.float32)
    blocks.reshape(*given.shape[:-1], -1)[..., :dim] = given
    broken = ~np.isfinite(blocks).all(axis=-1)
    blocks[broken] = 0
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    exact = np.abs(largest) / np.float32(127) if dtype == "q8_0" else largest / np.float32(-8)
    scale = np.clip(exact, -LARGEST_SCALE, LARGEST_SCALE).astype(np.float16) + np.float16(0)  # no -0
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[..., None]
    low, high = (-127, 127) if dtype == "q8_0" else (-8, 7)
    codes = np.where(scale[..., None] == 0, 0, np.clip(np.rint(blocks / divisor), low, high))
    scale[broken] = np.nan
    return codes.astype(np.int8).reshape(*given.shape[:-1], -1)[..., :dim], scale, None


def _quantize_row(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    broken = ~np.isfinite(rows).all(axis=-1)
    rows = np.where(broken[..., None], np.float32(0), rows)
    low, high = (pick(rows, axis=-1, initial=0) for pick in (np.min, np.max))
    scale = np.maximum((high - low) / np.float32(255), np.float32(2.0**-23))
    from_low, from_high = low / scale, high / scale
    use_low = (np.float32(-128) + from_low) + (np.float32(127) + from_high) > 0
    zero_point = np.rint(np.clip(np.where(use_low, -128 - from_low, 127 - from_high), -128, 127))
    codes = np.clip(np.rint(rows / scale[..., None] + zero_point[..., None]), -128, 127)
    return (np.where(broken[..., None], 0, codes).astype(np.int8),
            np.where(broken, np.float32(np.nan), scale), np.where(broken, 0, zero_point).astype(np.int8))


def dequantize(codes: Any, scale: Any, zero_point: Any = None) -> np.ndarray:
    """Return the float64 rows that codes stand for: ``(code - zero_point) * scale``, or ``code * scale`` in blocks.

    Parameters
    ----------
    codes : int8, shape ``[..., dim]``
    scale : shape ``[...]``, or ``[..., ceil(dim / 32)]`` for the block formats
    zero_point : int8 ``[...]``; None for the block formats

    Example
    -------
    >>> dequantize(np.array([[-128, -26, 127]], np.int8), np.array([0.01]), np.array([-26], np.int8)).tolist()
    [[-1.02, 0.0, 1.53]]
    """
    numbers, factor = (as_array(array, name).astype(np.float64) for array, name in ((codes, "codes"), (scale, "scale")))
    if zero_point is not None:
        return (numbers - as_array(zero_point, "zero_point").astype(np.float64)[..., None]) * factor[..., None]
    return numbers * np.repeat(factor, BLOCK, axis=-1)[..., : numbers.shape[-1]]
