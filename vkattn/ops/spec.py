"""What one attention node of a graph is, apart from the tensors it reads: the source of its params block.

Nodes that are alike (the layers of a model) have equal specs and share one block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cache.append import cache_fields, new_row_fields
from ..cache.storage import CacheStorage
from ..caps.model import DeviceInfo
from ..errors import OptionError, PlanError
from ..graph.values import CacheValue, Position, Shape, Size, Value, capacity, live, lives
from ..kernels import fields
from ..kernels.three_pass import Chunking, chunking
from ..layout import vec_strides
from ..mask import Window
from ..problem import Problem

Dims = Mapping[str, int]
Scalars = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes, dtypes and options of an attention node, or of one of the three passes.

    ``storage`` is that of a cache, or None; then ``position`` and ``new_len`` are those of the append before it, and
    ``run_layer`` chooses the layer if that is left to the run. ``score_words`` is what the score buffer holds: the
    ``whole`` matrix, or a chunk of its rows at a time. ``algorithms`` computes a node that is not one of the
    passes: one, or one for short runs and one for long ones; ``scratch`` names the words of the buffers they need.
    A run is short with at most ``short_rows`` query rows to a KV head.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    q_len: Size
    kv_len: Size
    head_dim: int
    value_dim: int
    query_dtype: str
    key_dtype: str
    layout: str
    storage: CacheStorage | None = None
    position: Position | None = None
    new_len: Size = 0
    new_dtype: str = "float32"
    new_layout: str = "bshd"
    run_layer: Position | None = None
    mask_shape: Shape | None = None
    mask_dtype: str | None = None
    causal: str | None = None
    q_offset: Position | int | None = None
    live_kv_len: Position | int | None = None
    scale: float = 1.0
    softcap: float | None = None
    window: Window = (None, None)
    alibi_slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None
    return_lse: bool = False
    appends: bool = False
    score_words: int = 0
    whole: bool = False
    algorithms: tuple[str, ...] = ()
    scratch: tuple[tuple[str, int], ...] = ()
    short_rows: int = 1
    value_dtype: str | None = None  # None is the key's

    @property
    def stored_value_dtype(self) -> str:
        """The dtype of the values."""
        return self.value_dtype or self.key_dtype

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem at capacity."""
        return Problem(self.batch_size, self.num_heads, self.num_kv_heads, capacity(self.q_len), capacity(self.kv_len),
                       self.head_dim, self.value_dim, self.query_dtype, self.key_dtype, self.stored_value_dtype,
                       self.layout, {None: None, "bool": "bool"}.get(self.mask_dtype, "float32"))

    @property
    def flags(self) -> int:
        """The params word ``flags``."""
        return fields.flags(self.mask_dtype, has_alibi=self.alibi_slopes is not None,
                            has_sinks=self.sinks is not None, return_lse=self.return_lse, appends=self.appends)

    def header(self, dims: Dims) -> dict[str, int | float]:
        """Return the header words that depend on ``dims`` alone."""
        q_len = live(self.q_len, dims)
        values = fields.sizes(self.problem, q_len, self.new_dtype)
        values |= fields.score(self.scale, self.softcap, self.window) | {"flags": self.flags}
        values |= self._strides("q", self.num_heads, q_len, self.head_dim, self.query_dtype)
        values |= self._strides("out", self.num_heads, q_len, self.value_dim, self.query_dtype)
        if self.storage is None:
            keys = live(self.kv_len, dims)
            values |= self._strides("k", self.num_kv_heads, keys, self.head_dim, self.key_dtype)
            values |= self._strides("v", self.num_kv_heads, keys, self.value_dim, self.key_dtype)
        else:
            values |= cache_fields(self.storage)
            values |= new_row_fields(self.num_kv_heads, live(self.new_len, dims), self.storage.dims, self.new_dtype,
                                     self.new_layout)
        return values | self._mask_strides(dims)

    def _strides(self, name: str, heads: int, tokens: int, dim: int, dtype: str) -> dict[str, int]:
        return fields.strides(name, vec_strides(heads, tokens, dim, dtype, self.layout))

    def _mask_strides(self, dims: Dims) -> dict[str, int]:
        if self.mask_shape is None:
            return {}
        sizes = lives(self.mask_shape, dims)
        sizes = (1,) * (4 - len(sizes)) + sizes
        row = -(-sizes[3] // 32) * 32 if self.mask_dtype == "bool" else -(-sizes[3] // 4) * 4
        strides = (sizes[1] * sizes[2] * row, sizes[2] * row, row, 1)
        return fields.strides("mask", [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)])

    def lengths(self, dims: Dims, scalars: Scalars) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (kv_len, q_offset, input_pos) of this run, int64 ``[batch_size]`` each."""
        start = self._scalar(self.position or 0, scalars)
        q_len = live(self.q_len, dims)
        if self.storage is not None:
            kv_len = start + live(self.new_len, dims)
        elif self.live_kv_len is None:
            kv_len = np.full(self.batch_size, live(self.kv_len, dims), np.int64)
        else:
            kv_len = self._scalar(self.live_kv_len, scalars)
            if kv_len.min() < 0 or kv_len.max() > live(self.kv_len, dims):
                raise OptionError(f"kv_len is {kv_len.tolist()}; it must be within 0 .. {live(self.kv_len, dims)}, "
                                  "the tokens of the key.")
        if self.q_offset is not None:
            q_offset = self._scalar(self.q_offset, scalars)
        elif self.causal == "bottom_right":
            q_offset = kv_len - q_len
        else:
            q_offset = np.zeros(self.batch_size, np.int64)
        return kv_len, q_offset, start

    def _scalar(self, value: Position | int, scalars: Scalars) -> np.ndarray:
        if isinstance(value, Position):
            return value.per_batch(scalars, self.batch_size)
        return np.full(self.batch_size, value, np.int64)

    def problem_of(self, algorithm: str) -> Problem:
        """Return the problem at the capacity that ``algorithm`` serves: short runs only, if there is another."""
        if len(self.algorithms) < 2 or algorithm != self.algorithms[0]:
            return self.problem
        return self._short_problem

    @functools.cached_property
    def _short_problem(self) -> Problem:
        return short_problem(self.problem, self.short_rows)

    def cut(self, q_len: int, max_kv_len: int, info: DeviceInfo) -> Chunking:
        """Return how the rows of a run are cut into chunks: one of them if the score buffer holds all rows anyway."""
        cut = chunking(self.problem, q_len, max_kv_len, self.score_words, info)
        return replace(cut, tiles_per_chunk=max(cut.row_tiles, 1)) if self.whole else cut


def short_problem(problem: Problem, rows: int) -> Problem:
    """Return ``problem`` with at most ``rows`` query rows to a KV head: what the split kernels take."""
    return replace(problem, max_q_len=max(1, min(problem.max_q_len, rows // problem.group_size)))


#: What a user calls the kinds of symbolic values.
KIND_NAMES = {Value: "a tensor", CacheValue: "a KV cache", Position: "a position"}


def check_value(value: Any, owner: Any, argument: str, node: str, kind: type = Value) -> None:
    """Raise PlanError unless ``value`` is one of this kind and belongs to the builder ``owner``."""
    if not isinstance(value, kind) or value.owner is not owner:  # type: ignore[attr-defined]
        raise PlanError(f"{node}: `{argument}` is {value!r:.80}; it must be {KIND_NAMES[kind]} of this GraphBuilder.")
