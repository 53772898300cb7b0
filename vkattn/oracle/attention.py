"""Attention in float64 NumPy: the definition that every kernel is measured against, whole and as its first pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from .problem import Problem, as_bhsd, from_bhsd, kv_head, per_head
from .softmax import softmax, weighted_sum


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    causal: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    sinks: Any = None,
    alibi_slopes: Any = None,
    q_offset: Any = None,
    kv_len: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Any:
    """Scaled dot product attention, in float64.

    ``out_i = sum_j softmax_j(softcap(scale <q_i, k_j>) - slope |p_i - j| + mask_ij) v_j``, with ``p_i = q_offset + i``
    and ``softcap(s) = softcap tanh(s / softcap)``

    Parameters
    ----------
    query : Array, shape ``[batch_size, num_heads, q_len, head_dim]`` (bhsd)
        float32, float16, bfloat16 or float64; converted exactly to float64, as are all arrays. In the layout bshd the
        middle two dimensions of query, key, value and out are exchanged.
    key : Array, shape ``[batch_size, num_kv_heads, kv_len, head_dim]`` (bhsd)
        Query head h reads KV head ``h // (num_heads / num_kv_heads)``.
    value : Array, shape ``[batch_size, num_kv_heads, kv_len, value_dim]`` (bhsd)
        value_dim may differ from head_dim.
    mask : Array that broadcasts to ``[batch_size, num_heads, q_len, kv_len]`` in every layout, or None
        bool: True is attended. float: added to the score, -inf is not attended.
    causal : "top_left", "bottom_right" or None
        Row i attends keys ``j <= p_i``; the name sets the default of ``q_offset``. None is no causal mask.
    scale : float or None
        Multiplies the dot product; None is ``1 / sqrt(head_dim)``.
    softcap : float or None
        Bounds the scaled dot product smoothly; None is no bound.
    window : (left, right), each an int or None
        Keys ``p_i - left <= j <= p_i + right`` are attended: inclusive counts in tokens; None is no limit.
    sinks : Array, shape ``[num_heads]``, or None
        A logit that joins each row's denominator once.
    alibi_slopes : Array, shape ``[num_heads]``, or None
        ALiBi: subtracts slope times the distance between row and key.
    q_offset : int, or integers of shape ``[batch_size]``, or None
        Position of query row 0; None is 0, or ``kv_len - q_len`` for "bottom_right".
    kv_len : int, or integers of shape ``[batch_size]``, or None
        Live keys; keys, values and mask columns at or beyond it are not read. None is all of them.
    layout : "bhsd" or "bshd"
    return_lse : bool
        Whether to return the natural logarithm of each row's denominator too.

    Returns
    -------
    out : float64, shape ``[batch_size, num_heads, q_len, value_dim]`` (bhsd)
    lse : float64, shape ``[batch_size, num_heads, q_len]`` in every layout; only if ``return_lse``

    Raises
    ------
    ShapeError, OptionError, DTypeError
        If the arrays do not fit together or an option has a value that it cannot have; also if ``q_offset`` is needed:
        a window or ALiBi with causal=None and lengths that differ.

    Notes
    -----
    A row that attends nothing gives 0, and its lse is -inf (the sink, if there is one). NaN in what is not attended
    has no effect.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; grouped queries: Ainslie et al. 2023 (arXiv
    2305.13245); ALiBi: Press et al. 2021 (arXiv 2108.12409); the order of the steps: ONNX operator Attention, opset 24.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> query, key, value = np.ones((1, 4, 3, 8)), np.ones((1, 2, 5, 8)), np.ones((1, 2, 5, 6))
    >>> oracle.attention(query, key, value, causal="bottom_right").shape
    (1, 4, 3, 6)
    """
    problem = Problem(
        query, key, mask=mask, causal=causal, scale=scale, softcap=softcap, window=window,
        alibi_slopes=alibi_slopes, q_offset=q_offset, kv_len=kv_len, layout=layout,
    )  # fmt: skip
    v = as_bhsd(value, "value", layout)
    if v.shape[0] != problem.batch_size or v.shape[2] != problem.num_keys:
        raise ShapeError(f"`value` {v.shape} and `key` {problem.key.shape} (b, h, s, d) do not fit together.")
    if v.shape[1] != problem.num_kv_heads:
        raise ShapeError(f"`value` has {v.shape[1]} heads but `key` has {problem.num_kv_heads}.")
    sink = per_head(sinks, "sinks", problem.num_heads)

    out = np.empty((problem.batch_size, problem.num_heads, problem.q_len, v.shape[3]))
    lse = np.empty(out.shape[:3])
    for batch, head in np.ndindex(*lse.shape[:2]):  # one head at a time, because scores are large
        score = problem.scores(batch, head)[None, None]
        prob, row_lse = softmax(score, None if sink is None else sink[[head]], return_lse=True)
        head_value = v[batch, kv_head(head, problem.num_heads, problem.num_kv_heads)]
        out[batch, head] = weighted_sum(prob[0, 0], head_value)
        lse[batch, head] = row_lse[0, 0]
    out = from_bhsd(out, layout)
    return (out, lse) if return_lse else out


def attn_weights(query: Any, key: Any, **options: Any) -> np.ndarray:
    """Masked, scaled scores: the first pass.

    ``s_ij = softcap(scale <q_i, k_j>) - slope |p_i - j| + mask_ij``, and -inf where row i does not attend key j

    Parameters
    ----------
    query, key : Array
        As for `attention`.
    **options
        ``mask, causal, scale, softcap, window, alibi_slopes, q_offset, kv_len, layout`` as for `attention`.

    Returns
    -------
    scores : float64, shape ``[batch_size, num_heads, q_len, kv_len]`` in every layout

    Raises
    ------
    ShapeError, OptionError, DTypeError
        As `attention`.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> oracle.attn_weights(np.ones((1, 2, 2, 4)), np.ones((1, 1, 3, 4)), causal="top_left")[0, 0].tolist()
    [[2.0, -inf, -inf], [2.0, 2.0, -inf]]
    """
    problem = Problem(query, key, **options)
    scores = np.empty((problem.batch_size, problem.num_heads, problem.q_len, problem.num_keys))
    for batch, head in np.ndindex(*scores.shape[:2]):
        scores[batch, head] = problem.scores(batch, head)
    return scores


def magnitude(query: Any, key: Any, **options: Any) -> np.ndarray:
    """Size of the terms in each row's dot products, which bounds what float32 scores can do.

    ``m_i = max_j |scale| sum_d |q_id k_jd|`` over the keys j that row i attends; 0 for a row that attends nothing

    Parameters
    ----------
    query, key : Array
        As for `attention`.
    **options
        As for `attn_weights`.

    Returns
    -------
    m : float64, shape ``[batch_size, num_heads, q_len]`` in every layout

    Notes
    -----
    A float32 dot product has an absolute error of some multiple of ``2^-24 m``, whatever its own value, and an error
    of a score is a relative error of a weight. The tests' tolerance is built on this.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> oracle.magnitude(np.ones((1, 1, 1, 2)), np.array([[[[3.0, -3.0]]]]), scale=0.5).item()
    3.0
    """
    problem = Problem(query, key, **options)
    size = np.empty((problem.batch_size, problem.num_heads, problem.q_len))
    for batch, head in np.ndindex(*size.shape[:2]):
        size[batch, head] = problem.magnitude(batch, head)
    return size
