"""The symbolic values of a graph: sizes, tensors, positions and caches, before there is any memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import OptionError, PlanError
from ..layout import packed_words
from ..mask import as_integer


@dataclass(frozen=True)
class Dim:
    """A size that may change with every run: its name, and the most it can be (a capacity).

    Example
    -------
    >>> Dim("q_len", max=128)
    Dim(name='q_len', max=128)
    """

    name: str
    max: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise PlanError(f"a Dim is called {self.name!r}; its name must be a Python identifier.")
        if (as_integer(self.max) or 0) < 1:
            raise PlanError(f"Dim {self.name!r} has max {self.max!r}; it must be an integer of at least 1.")

    def __str__(self) -> str:
        return f"{self.name} (at most {self.max})"


Size = int | Dim
Shape = tuple[Size, ...]


def capacity(size: Size) -> int:
    """Return the most that ``size`` can be."""
    return size.max if isinstance(size, Dim) else size


def live(size: Size, dims: Mapping[str, int]) -> int:
    """Return what ``size`` is in a run."""
    return dims[size.name] if isinstance(size, Dim) else size


def capacities(shape: Shape) -> tuple[int, ...]:
    """Return the most that each size of ``shape`` can be."""
    return tuple(capacity(size) for size in shape)


def lives(shape: Shape, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return what each size of ``shape`` is in a run."""
    return tuple(live(size, dims) for size in shape)


def words_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the words of a tensor as it lies in a buffer: rows padded to quads; bool rows hold a bit an element."""
    if dtype == "bool":
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return rows * -(-shape[-1] // 32)
    return packed_words(shape, dtype)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: an input, a constant, or what a node makes. Compared by identity.

    ``kind`` is "tensor", or "scores" or "probs" for a score matrix, which only the three passes can read; ``about``
    then holds what the passes must know. ``producer`` names the node, input or constant.
    """

    owner: Any = field(repr=False)
    producer: str
    shape: Shape
    dtype: str
    kind: str = "tensor"
    about: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        sizes = ", ".join(size.name if isinstance(size, Dim) else str(size) for size in self.shape)
        return f"{self.producer} ({sizes}) {self.dtype}"


@dataclass(frozen=True)
class Position:
    """A whole number, or one for each batch entry, that every run is given by name."""

    owner: Any = field(repr=False, compare=False)
    name: str

    def __str__(self) -> str:
        return repr(self.name)

    def per_batch(self, scalars: Mapping[str, np.ndarray], batch_size: int) -> np.ndarray:
        """Return what a run gave, int64 ``[batch_size]``, or raise OptionError if it is for another batch."""
        values = scalars[self.name]
        if len(values) == batch_size:
            return values
        if len(values) != 1:
            raise OptionError(f"position {self.name!r} has {len(values)} entries; it must be an integer"
                              f"{'' if batch_size == 1 else f', or {batch_size} of them, one per batch entry'}.")
        return np.full(batch_size, values[0])


@dataclass(frozen=True, eq=False)
class CacheValue:
    """A KV cache in a graph, at one point of its history.

    ``layer`` is a number or a `Position` once rows were appended; ``new_len`` and ``position`` are those of the append
    that made this view, or None. ``version`` counts the appends to the layer before it. ``group`` is the pair of
    buffers that the graph is for, where a run chooses the layer and the cache has several.
    """

    owner: Any = field(repr=False)
    name: str
    cache: Any = field(repr=False)
    layer: int | Position | None = None
    position: Position | None = None
    new_len: Size = 0
    version: int = 0
    group: int | None = None

    def __str__(self) -> str:
        return f"cache {self.name!r}" if self.layer is None else f"layer {self.layer} of cache {self.name!r}"
