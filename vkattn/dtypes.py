"""The element types of vkattn: their names, sizes and NumPy dtypes. Used by every layer.

A dtype is named by a string ("float32", "float16", "bfloat16"), because NumPy has no bfloat16 of its own:
arrays of that type come from ml_dtypes, which is imported by whoever made such an array, never here.
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


def dtype_name(array: Any, argument: str, supported: tuple[str, ...] = FLOAT_DTYPES) -> str:
    """Return the name of ``array``'s dtype, or raise DTypeError naming ``argument``."""
    name = str(np.asarray(array).dtype.name)
    if name not in supported:
        hint = f" Hint: pass {argument}.astype(np.float32)." if name not in FLOAT_DTYPES else ""
        raise DTypeError(f"`{argument}` is {name}; supported: {', '.join(supported)}.{hint}")
    return name


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype called ``name``; "bfloat16" needs ml_dtypes to be importable."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)
