"""The second and third pass, and merging: softmax of scores, weights times values, two partial results into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import as_array
from ..errors import ShapeError
from ..layout import check_layout
from .problem import as_bhsd, check_heads, from_bhsd, kv_head, per_head


def softmax(scores: Any, sinks: Any = None, *, return_lse: bool = False) -> Any:
    """Softmax over the last axis, with the row maximum subtracted; a row of -inf gives zeros, not NaN.

    ``prob_j = exp(s_j) / (sum_j exp(s_j) + exp(sink))``, ``lse = ln(sum_j exp(s_j) + exp(sink))``

    Parameters
    ----------
    scores : Array, shape ``[batch_size, num_heads, q_len, kv_len]``
        Scores; -inf is a key that the row does not attend.
    sinks : Array, shape ``[num_heads]``, or None
        A logit of each head that joins the denominator once and has no value; None or -inf is no sink.
    return_lse : bool
        Whether to return the natural logarithm of the denominator too.

    Returns
    -------
    probs : float64, shape of ``scores``
    lse : float64, shape ``[batch_size, num_heads, q_len]``; only if ``return_lse``

    Raises
    ------
    ShapeError
        If ``scores`` is not 4-D, or ``sinks`` is not one number for each head.

    Notes
    -----
    A row with nothing to attend has zero probabilities. Its lse is -inf without a sink, and the sink with one.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), section 2, for the maximum subtracted; the gpt-oss model
    card (arXiv 2508.10925) for the sinks.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> oracle.softmax(np.zeros((1, 1, 2, 4))).shape
    (1, 1, 2, 4)
    """
    score = as_array(scores, "scores").astype(np.float64)
    if score.ndim != 4:
        raise ShapeError(f"`scores` has shape {score.shape}; it must have 4 dimensions.")
    sink = per_head(sinks, "sinks", score.shape[1])
    sink = np.full(score.shape[1], -np.inf) if sink is None else sink
    sink = np.broadcast_to(sink[None, :, None, None], (*score.shape[:3], 1))

    row_max = np.maximum(score.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    shift = np.where(np.isneginf(row_max), 0, row_max)
    weight = np.exp(score - shift)
    row_sum = weight.sum(axis=-1, keepdims=True) + np.exp(sink - shift)
    row_sum_or_1 = np.where(row_sum == 0, 1, row_sum)
    probs = weight / row_sum_or_1
    lse = np.where(row_sum == 0, -np.inf, shift + np.log(row_sum_or_1))
    return (probs, lse[..., 0]) if return_lse else probs


def attn_output(probs: Any, value: Any, *, layout: str = "bhsd") -> np.ndarray:
    """Weights times values: the third pass.

    ``out_i = sum_j prob_ij v_j``, over the keys whose weight is not zero

    Parameters
    ----------
    probs : Array, shape ``[batch_size, num_heads, q_len, kv_len]`` in every layout
        What `softmax` returns.
    value : Array, shape ``[batch_size, num_kv_heads, kv_len, value_dim]`` (bhsd) or the middle two exchanged (bshd)
        A value row with weight 0 is not read, so NaN there does not matter.
    layout : str
        "bhsd" or "bshd", of ``value`` and of the result.

    Returns
    -------
    out : float64, shape ``[batch_size, num_heads, q_len, value_dim]`` (bhsd) or with the middle two exchanged (bshd)

    Raises
    ------
    ShapeError, OptionError
        If the shapes do not fit together, or the layout is not known.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> oracle.attn_output(np.ones((1, 4, 2, 3)) / 3, np.ones((1, 2, 3, 8))).shape
    (1, 4, 2, 8)
    """
    prob = as_array(probs, "probs").astype(np.float64)
    v = as_bhsd(value, "value", check_layout(layout))
    if prob.ndim != 4 or v.shape[0] != prob.shape[0] or v.shape[2] != prob.shape[3]:
        raise ShapeError(f"`probs` {prob.shape} and `value` {v.shape} (b, h, s, d) do not fit together.")
    batch_size, num_heads, q_len, _ = prob.shape
    check_heads(num_heads, v.shape[1], "value")
    out = np.empty((batch_size, num_heads, q_len, v.shape[3]))
    for batch, head in np.ndindex(batch_size, num_heads):
        out[batch, head] = weighted_sum(prob[batch, head], v[batch, kv_head(head, num_heads, v.shape[1])])
    return from_bhsd(out, layout)


def weighted_sum(prob: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return ``prob [q_len, kv_len]`` times ``value [kv_len, value_dim]``, value rows of weight 0 unread."""
    is_read = prob != 0
    read_by_any = np.where(is_read.any(axis=0)[:, None], value, 0)
    if np.isfinite(read_by_any).all():
        return prob @ read_by_any
    # A value that is not finite is read by some rows and not by others: select row by row, since 0 * NaN is NaN.
    with np.errstate(invalid="ignore"):
        return np.stack([row[row != 0] @ value[row != 0] for row in prob])


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bhsd"
) -> tuple[np.ndarray, np.ndarray]:
    """Merge two partial results over disjoint sets of keys into the result over their union.

    ``lse = ln(e^lse_a + e^lse_b)``, ``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``

    Parameters
    ----------
    out_a, out_b : Array, shape ``[batch_size, num_heads, q_len, value_dim]`` (bhsd) or with the middle two exchanged
        Partial outputs.
    lse_a, lse_b : Array, shape ``[batch_size, num_heads, q_len]`` in every layout
        Their natural log-sum-exp; -inf for a part with nothing, whose output is then not read.
    layout : str
        "bhsd" or "bshd".

    Returns
    -------
    out : float64, shape of ``out_a``
    lse : float64, shape of ``lse_a``

    Notes
    -----
    Merge parts without sinks; a sink is then one more part, with an output of zeros and ``lse`` the sink.

    Source: Ye et al., FlashInfer (arXiv 2501.01005), "attention states".

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> part = np.ones((1, 2, 3, 8)), np.zeros((1, 2, 3))
    >>> out, lse = oracle.merge_states(*part, *part)
    >>> out.shape, lse.shape
    ((1, 2, 3, 8), (1, 2, 3))
    """
    parts = [as_bhsd(out, "out", check_layout(layout)) for out in (out_a, out_b)]
    lses = [as_array(lse, "lse").astype(np.float64) for lse in (lse_a, lse_b)]
    if parts[0].shape != parts[1].shape or any(lse.shape != parts[0].shape[:3] for lse in lses):
        shapes = ", ".join(str(array.shape) for array in (*parts, *lses))
        raise ShapeError(f"outputs (b, h, s, d) and lses (b, h, s) have shapes {shapes}; they do not fit together.")
    lse = np.logaddexp(lses[0], lses[1])
    total = np.where(np.isneginf(lse), 0, lse)
    out = np.zeros(parts[0].shape)
    for part, part_lse in zip(parts, lses, strict=True):
        weight = np.exp(part_lse - total)[..., None]
        out += np.where(weight == 0, 0, weight * np.where(weight == 0, 0, part))
    return from_bhsd(out, layout), lse
