"""Between NumPy arrays and the words of a graph's inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import as_array, numpy_dtype
from ..errors import CapacityError, DTypeError, PlanError, ShapeError
from ..graph.values import Dim, Shape, Value, lives
from ..kernels.three_pass import BLOCK_COLS, BLOCK_ROWS
from ..mask import visible


def bind_shape(name: str, shape: Shape, given: tuple[int, ...], dims: dict[str, int]) -> None:
    """Match an input's shape with the declared one and note what each Dim is; ShapeError, PlanError, CapacityError."""
    if len(given) != len(shape):
        raise ShapeError(f"input {name!r} has shape {given}; it was declared as ({', '.join(map(str, shape))}).")
    for size, actual in zip(shape, given, strict=True):
        if isinstance(size, Dim):
            if dims.setdefault(size.name, actual) != actual:
                raise PlanError(f"input {name!r} has shape {given}, which makes {size.name} {actual}; "
                                f"it is {dims[size.name]} elsewhere in this run.")
            if actual > size.max:
                raise CapacityError(f"input {name!r} has {size.name} {actual}; the graph was built for at most "
                                    f"{size.max}. Lengths may shrink between runs; capacities are fixed. "
                                    "Hint: build a second graph.")
            if actual < 1:
                raise ShapeError(f"input {name!r} has shape {given}; every size must be at least 1.")
        elif size != actual:
            raise ShapeError(f"input {name!r} has shape {given}; it was declared as ({', '.join(map(str, shape))}).")


def as_input(name: str, value: Value, given: Any) -> np.ndarray:
    """Return an input as an array of the declared dtype, or raise DTypeError; nothing is converted."""
    array = given if type(given) is np.ndarray else as_array(given, name)
    if array.dtype != numpy_dtype(value.dtype) and array.dtype.name != value.dtype:  # names are slow
        raise DTypeError(f"input {name!r} is {array.dtype.name}; it was declared as {value.dtype}. "
                         "Hint: nothing is converted in a run; do it before.")
    return array


def _score_tiles(value: Value, dims: Mapping[str, int], longest: int) -> tuple[int, int, int, int]:
    """Return the shape (batch, KV heads, rows, columns) in which the passes hold the live scores."""
    spec = value.about
    batch, heads, q_len, _ = lives(value.shape, dims)
    rows = q_len * (heads // spec.num_kv_heads)
    return batch, spec.num_kv_heads, -(-rows // BLOCK_ROWS) * BLOCK_ROWS, -(-longest // BLOCK_COLS) * BLOCK_COLS


def read_scores(words: np.ndarray, value: Value, dims: Mapping[str, int],
                scalars: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return scores or weights ``[batch, num_heads, q_len, kv_len]`` from the tiles that the passes use.

    Rows of the query heads of one KV head are interleaved; what no row sees by position was never written.
    """
    spec = value.about
    batch, heads, q_len, _ = lives(value.shape, dims)
    kv_len, q_offset, _ = spec.lengths(dims, scalars)
    longest = int(kv_len.max())
    group = heads // spec.num_kv_heads
    shape = _score_tiles(value, dims, longest)
    tiles = words[: math.prod(shape)].view(np.float32).reshape(shape)[:, :, : q_len * group, :longest]
    matrix = tiles.reshape(batch, spec.num_kv_heads, q_len, group, longest).swapaxes(2, 3)
    seen = visible(q_len, longest, q_offset=q_offset, kv_len=kv_len, window=spec.window)[:, None]
    empty = -np.inf if value.kind == "scores" else 0.0
    return np.where(seen, matrix.reshape(batch, heads, q_len, longest), np.float32(empty))


def score_words(value: Value, dims: Mapping[str, int], scalars: Mapping[str, np.ndarray]) -> int:
    """Return the live words of scores or weights in a run."""
    return math.prod(_score_tiles(value, dims, int(value.about.lengths(dims, scalars)[0].max())))
