"""One attention call as the oracle sees it: checked float64 arrays, options resolved, the scores of one head.

Used by the functions of this package only. The kernels' path shares nothing with it but `mask`, `layout` and `dtypes`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dtypes import FLOAT_DTYPES, as_array, dtype_name
from ..errors import OptionError, ShapeError
from ..layout import check_layout
from ..mask import positions, resolve_causal, resolve_kv_len, resolve_q_offset, resolve_window, visible


def as_bhsd(array: Any, argument: str, layout: str) -> np.ndarray:
    """Return a 4-D array in ``layout`` as float64 ``[batch, heads, tokens, dim]``; every dtype converts exactly."""
    dtype_name(array, argument, (*FLOAT_DTYPES, "float64"))
    exact = as_array(array, argument).astype(np.float64)
    if exact.ndim != 4:
        raise ShapeError(f"`{argument}` has shape {exact.shape}; it must have 4 dimensions ({layout}).")
    return exact if layout == "bhsd" else exact.transpose(0, 2, 1, 3)


def from_bhsd(array: np.ndarray, layout: str) -> np.ndarray:
    """Return ``[batch, heads, tokens, dim]`` in ``layout``; the inverse of `as_bhsd`."""
    return array if layout == "bhsd" else np.ascontiguousarray(array.transpose(0, 2, 1, 3))


def kv_head(head: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the KV head that query head ``head`` reads: consecutive query heads share one."""
    group_size = num_heads // num_kv_heads
    return head // group_size


def check_heads(num_heads: int, num_kv_heads: int, argument: str) -> None:
    """Raise ShapeError unless the query heads divide evenly among the KV heads."""
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(f"`{argument}` has {num_kv_heads} heads; the {num_heads} query heads must be a multiple.")


def per_head(values: Any, argument: str, num_heads: int) -> np.ndarray | None:
    """Return one number for each query head as float64 ``[num_heads]``, or None."""
    if values is None:
        return None
    given = as_array(values, argument).astype(np.float64)
    if given.shape != (num_heads,):
        raise ShapeError(f"`{argument}` has shape {given.shape}; it must be ({num_heads},), one per query head.")
    if np.isnan(given).any() or np.isposinf(given).any():
        raise OptionError(f"`{argument}` holds NaN or infinity.")
    return given


class Problem:
    """Queries, keys and the options that decide the scores; `scores` is the definition of a score."""

    def __init__(
        self,
        query: Any,
        key: Any,
        *,
        mask: Any = None,
        causal: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: Any = (None, None),
        alibi_slopes: Any = None,
        q_offset: Any = None,
        kv_len: Any = None,
        layout: Any = "bhsd",
    ) -> None:
        self.layout = check_layout(layout)
        self.query = as_bhsd(query, "query", self.layout)
        self.key = as_bhsd(key, "key", self.layout)
        self.batch_size, self.num_heads, self.q_len, self.head_dim = self.query.shape
        self.num_kv_heads, self.num_keys = self.key.shape[1:3]
        if self.key.shape[0] != self.batch_size or self.key.shape[3] != self.head_dim or self.head_dim == 0:
            raise ShapeError(f"`query` {self.query.shape} and `key` {self.key.shape} (b, h, s, d) do not fit together.")
        check_heads(self.num_heads, self.num_kv_heads, "key")

        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else float(scale)
        self.softcap = None if softcap is None else float(softcap)
        if not math.isfinite(self.scale):
            raise OptionError(f"`scale` is {scale!r}; it must be finite.")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise OptionError(f"`softcap` is {softcap!r}; it must be finite and positive. Hint: None is no softcap.")
        self.alibi_slopes = per_head(alibi_slopes, "alibi_slopes", self.num_heads)

        causal = resolve_causal(causal)
        window = resolve_window(window)
        kv_len = resolve_kv_len(kv_len, self.batch_size, self.num_keys)
        uses_position = window != (None, None) or alibi_slopes is not None
        q_offset = resolve_q_offset(
            q_offset, causal=causal, q_len=self.q_len, kv_len=kv_len, uses_position=uses_position
        )
        self.positions = positions(self.q_len, q_offset)
        self.visible = visible(
            self.q_len, self.num_keys, q_offset=q_offset, kv_len=kv_len, causal=causal, window=window
        )
        self.mask = None if mask is None else self._broadcast_mask(as_array(mask, "mask"))

    def _broadcast_mask(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask, rank 0 to 4, as a view of shape ``[batch, num_heads, q_len, num_keys]``."""
        if mask.dtype != np.bool_:
            dtype_name(mask, "mask", (*FLOAT_DTYPES, "float64"))
        full = (self.batch_size, self.num_heads, self.q_len, self.num_keys)
        try:
            return np.broadcast_to(mask, full)
        except ValueError as error:
            raise ShapeError(f"`mask` has shape {mask.shape}; it must broadcast to {full}.") from error

    def attended(self, batch: int, head: int) -> np.ndarray:
        """Return which keys each row attends, bool ``[q_len, num_keys]``: visible, and not masked by False or -inf."""
        seen: np.ndarray = self.visible[batch]
        if self.mask is not None:
            mask = self.mask[batch, head]
            seen = seen & (mask if mask.dtype == np.bool_ else ~np.isneginf(mask.astype(np.float64)))
        return seen

    def scores(self, batch: int, head: int) -> np.ndarray:
        """Return the scores of one head, ``[q_len, num_keys]``: -inf where a row does not attend.

        The order is fixed: scale, softcap, then ALiBi and mask. What is not attended is not selected, so NaN there
        (in keys, values or mask) stays there.
        """
        q = self.query[batch, head]
        k = self.key[batch, kv_head(head, self.num_heads, self.num_kv_heads)]
        with np.errstate(invalid="ignore"):  # infinities in keys that no row attends
            score = self.scale * (q @ k.T)
            if self.softcap is not None:
                score = self.softcap * np.tanh(score / self.softcap)
            if self.alibi_slopes is not None:
                distance = np.abs(self.positions[batch][:, None] - np.arange(self.num_keys))
                score = score - self.alibi_slopes[head] * distance
            if self.mask is not None and self.mask.dtype != np.bool_:
                score = score + self.mask[batch, head].astype(np.float64)
        return np.where(self.attended(batch, head), score, -np.inf)

    def magnitude(self, batch: int, head: int) -> np.ndarray:
        """Return, for each row ``[q_len]``, the largest ``|scale| * sum_d |q_d k_jd|`` over the keys it attends."""
        q = np.abs(self.query[batch, head])
        k = np.abs(self.key[batch, kv_head(head, self.num_heads, self.num_kv_heads)])
        with np.errstate(invalid="ignore"):
            size = abs(self.scale) * (q @ k.T)
        largest: np.ndarray = np.where(self.attended(batch, head), size, 0).max(axis=-1, initial=0.0)
        return largest
