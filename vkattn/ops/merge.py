"""Merging the results of attention over two disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import as_array, dtype_name
from ..errors import DTypeError, ShapeError
from ..layout import check_layout


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bhsd"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention over two sets of keys from that over each.

    ``lse = ln(e^lse_a + e^lse_b)``, ``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``; on the host, in float32.

    Parameters
    ----------
    out_a, out_b : Array, shape ``[batch_size, num_heads, q_len, value_dim]`` (bhsd), of one dtype
        What `attention` returned for the same queries over different keys.
    lse_a, lse_b : Array, float32, shape ``[batch_size, num_heads, q_len]`` in every layout
        What it returned with ``return_lse``.
    layout : "bhsd" or "bshd"
        Of the outputs.

    Returns
    -------
    out : Array, the shape and dtype of ``out_a``
    lse : Array, float32, shape ``[batch_size, num_heads, q_len]``

    Raises
    ------
    ShapeError, DTypeError, OptionError
        The shapes do not fit together, a dtype is not supported, the layout is unknown.

    Notes
    -----
    A row that attends nothing in either set gives 0 and -inf; one whose lse is NaN in either gives NaN and NaN. What is
    in a row of no weight, as where its lse is -inf, has no effect. Sinks belong to one of the two calls only.

    Source: Ye et al. 2024, Cascade Inference; Dao et al. 2023, Flash-Decoding.

    Example
    -------
    >>> import numpy as np
    >>> one, lse = np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 2, 3), np.float32)
    >>> out, total = merge_states(one, lse, 3 * one, lse)
    >>> float(out[0, 0, 0, 0]), round(float(total[0, 0, 0]), 4)
    (2.0, 0.6931)
    """
    layout = check_layout(layout)
    first, second = as_array(out_a, "out_a"), as_array(out_b, "out_b")
    lses = [_lse(lse, name) for lse, name in ((lse_a, "lse_a"), (lse_b, "lse_b"))]
    dtype_name(first, "out_a")
    if second.dtype != first.dtype:
        raise DTypeError(f"`out_a` is {first.dtype.name} but `out_b` is {second.dtype.name}; they must have the same "
                         "dtype.")
    rows = first.shape[:3] if layout == "bhsd" else (first.shape[0], *first.shape[2:0:-1])
    if first.ndim != 4 or second.shape != first.shape or any(lse.shape != rows for lse in lses):
        raise ShapeError(f"`out_a` {first.shape}, `out_b` {second.shape}, `lse_a` {lses[0].shape} and `lse_b` "
                         f"{lses[1].shape} do not fit together (layout {layout}).")
    top: np.ndarray = np.maximum(*lses)
    top = np.where(np.isneginf(top), np.float32(0), top)
    with np.errstate(over="ignore"):  # two lse may be as far apart as float32 reaches
        weights = [np.exp(lse - top) for lse in lses]
    total = weights[0] + weights[1]  # NaN where an lse is
    shares = [np.divide(weight, total, out=np.zeros_like(total), where=total != 0) for weight in weights]
    if layout == "bshd":
        shares = [share.swapaxes(1, 2) for share in shares]
    out = _weighed(shares[0], first) + _weighed(shares[1], second)
    with np.errstate(divide="ignore"):
        lse = np.where(total != 0, top + np.log(total), -np.inf).astype(np.float32)
    return out.astype(first.dtype), lse


def _weighed(share: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the share of each row, in float32; a share of 0 is 0 of anything."""
    product: np.ndarray = np.zeros(rows.shape, np.float32)
    np.multiply(share[..., None], rows.astype(np.float32), out=product, where=share[..., None] != 0)
    return product


def _lse(lse: Any, argument: str) -> np.ndarray:
    """Return a log-sum-exp as float32, or raise DTypeError if it holds no numbers."""
    given = as_array(lse, argument)
    if given.dtype.kind not in "iuf":
        raise DTypeError(f"`{argument}` is {given.dtype.name}; it must be float32.")
    with np.errstate(over="ignore"):
        return given.astype(np.float32)
