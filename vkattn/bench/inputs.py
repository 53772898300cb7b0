"""Random inputs of any size at the speed of a copy: pieces of one pool of normal numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..dtypes import numpy_dtype

#: A prime, so that a repetition never falls on the same place of a row.
POOL_ELEMENTS = 4_194_301

#: Where array number n starts in the pool: multiples of a large prime are spread over all of it.
STEP = 1_299_709


class Pool:
    """Arrays of standard normal numbers; the same number gives the same array again.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.default_rng(seed).standard_normal(POOL_ELEMENTS, np.float32)
        self._rounded: dict[str, np.ndarray] = {}

    def array(self, shape: Sequence[int], dtype: str, number: int) -> np.ndarray:
        """Return array ``number`` of this shape and dtype, a fresh copy."""
        if dtype not in self._rounded:
            self._rounded[dtype] = self._numbers.astype(numpy_dtype(dtype))
        start = number * STEP % POOL_ELEMENTS
        pool = self._rounded[dtype]
        made = np.empty(math.prod(shape), pool.dtype)
        filled = 0
        while filled < made.size:
            piece = pool[start : start + made.size - filled]
            made[filled : filled + piece.size] = piece
            filled, start = filled + piece.size, 0
        return made.reshape(shape)
