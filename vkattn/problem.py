"""One attention call as values: what picks kernels (`Problem`), and what may change with every run (`Options`)."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass

import numpy as np

from .mask import Window


@dataclass(frozen=True)
class Problem:
    """Sizes and dtypes. ``max_q_len`` and ``max_kv_len`` are capacities, in tokens; live lengths are in `Options`."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    max_q_len: int
    max_kv_len: int
    head_dim: int
    value_dim: int
    query_dtype: str
    key_dtype: str
    value_dtype: str
    layout: str = "bhsd"
    mask: str | None = None  # None, "bool" or "float32"

    @functools.cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def __hash__(self) -> int:
        """Return a hash that is computed once: problems are keys in every run."""
        return self._hash

    @property
    def group_size(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def out_dtype(self) -> str:
        """The output has the query's dtype."""
        return self.query_dtype

    def __str__(self) -> str:
        text = (f"batch_size {self.batch_size}, num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}, "
                f"q_len {self.max_q_len}, kv_len {self.max_kv_len}, head_dim {self.head_dim}, "
                f"value_dim {self.value_dim}, query {self.query_dtype}, key {self.key_dtype}, value {self.value_dtype}")
        return text + (f", mask {self.mask}" if self.mask else "")


@dataclass(frozen=True)
class Options:
    """What the params block carries: lengths, positions and the options of the score.

    ``kv_len`` and ``q_offset`` are int64 ``[batch_size]``; ``causal`` has gone into ``q_offset`` and ``window``.
    ``alibi_slopes`` and ``sinks`` are float32 ``[num_heads]`` or None; ``softcap`` None is off.
    """

    q_len: int
    kv_len: np.ndarray
    q_offset: np.ndarray
    scale: float
    softcap: float | None
    window: Window
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    return_lse: bool
