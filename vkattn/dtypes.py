"""The element types of vkattn: their names, sizes and NumPy dtypes. Used by every layer.

A dtype is named by a string ("float32", "float16", "bfloat16"), because NumPy has no bfloat16 of its own:
arrays of that type come from ml_dtypes, which is imported only where such an array is to be made.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .errors import DTypeError

FLOAT_DTYPES = ("float32", "float16", "bfloat16")

#: Bytes of one element.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: The name of a dtype in the axes of shader variants.
AXIS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def as_array(value: Any, argument: str) -> np.ndarray:
    """Return ``value`` as a plain array without copying, or raise DTypeError."""
    if isinstance(value, np.ma.MaskedArray):
        raise DTypeError(f"`{argument}` is a numpy.ma.MaskedArray, whose mask would be lost. Hint: pass a plain array, "
                         "such as value.filled(0), and what is not to be attended as a mask of attention.")
    try:
        return np.asarray(value)
    except Exception as error:  # whatever a foreign array's conversion raises
        raise DTypeError(f"`{argument}` of type {type(value).__name__} cannot become a NumPy array: {error}. "
                         "Hint: move it to the CPU and convert it first.") from error


def dtype_name(array: Any, argument: str, supported: tuple[str, ...] = FLOAT_DTYPES) -> str:
    """Return the name of ``array``'s dtype, or raise DTypeError naming ``argument``."""
    name = str(as_array(array, argument).dtype.name)
    if name not in supported:
        hint = f" Hint: pass {argument}.astype(np.float32)." if name not in FLOAT_DTYPES else ""
        raise DTypeError(f"`{argument}` is {name}; supported: {', '.join(supported)}.{hint}")
    return name


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype called ``name``; DTypeError for "bfloat16" where ml_dtypes cannot be imported."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise DTypeError("NumPy has no bfloat16 of its own; arrays of it need the package ml_dtypes. "
                             "Hint: pip install ml_dtypes") from error
        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)
