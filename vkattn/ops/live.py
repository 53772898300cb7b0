"""What is live of a graph's inputs and outputs: views of their words, found once for each combination of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..dtypes import numpy_dtype
from ..graph.values import words_of
from ..layout import padded_dim
from .inputs import write_mask


class View(Protocol):
    """An array in a host buffer."""

    num_words: int

    def write(self, array: np.ndarray) -> None:
        """Write an array of the view's shape and dtype."""

    def read(self) -> np.ndarray:
        """Return a fresh array."""


class Rows:
    """An array of elements whose rows are padded to whole quads; what is written pads with zeros."""

    def __init__(self, words: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
        self.num_words = words_of(shape, dtype)
        padded, dim = padded_dim(shape[-1], dtype), shape[-1]
        rows = words[: self.num_words].view(numpy_dtype(dtype)).reshape(*shape[:-1], padded)
        self._live, self._padding = rows[..., :dim], rows[..., dim:] if dim < padded else None

    def write(self, array: np.ndarray) -> None:
        """Write ``array``, of any strides."""
        self._live[...] = array
        if self._padding is not None:
            self._padding[...] = 0

    def read(self) -> np.ndarray:
        """Return a fresh array."""
        return np.array(self._live, order="C")


class Bits:
    """An array of bool, a bit to an element; rows are whole words."""

    def __init__(self, words: np.ndarray, shape: tuple[int, ...]) -> None:
        self.num_words = words_of(shape, "bool")
        self._words, self._shape = words[: self.num_words], shape

    def write(self, array: np.ndarray) -> None:
        """Write ``array``, of any strides."""
        write_mask(self._words, array.reshape(1, 1, -1, self._shape[-1]))

    def read(self) -> np.ndarray:
        """Return a fresh array."""
        octets = self._words.view(np.uint8).reshape(*self._shape[:-1], -1)
        return np.unpackbits(octets, axis=-1, count=self._shape[-1], bitorder="little").view(np.bool_)


def view(words: np.ndarray, shape: tuple[int, ...], dtype: str) -> View:
    """Return the array of this shape and dtype that starts at the first of ``words``."""
    return Bits(words, shape) if dtype == "bool" else Rows(words, shape, dtype)


@dataclass(frozen=True)
class Live:
    """What one combination of input shapes decides.

    ``outputs`` holds tensors only: how scores lie depends on the positions of a run too. ``counts`` are the words of
    each input, then of each output (0 for scores).
    """

    dims: Mapping[str, int]
    is_short: bool
    inputs: tuple[View, ...]
    outputs: Mapping[str, View]
    counts: np.ndarray
