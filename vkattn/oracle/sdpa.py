"""torch.nn.functional.scaled_dot_product_attention's meaning in float64: any rank, broadcasting, top-left causal."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import as_array
from ..errors import OptionError, ShapeError
from .attention import attention


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> np.ndarray:
    """Scaled dot product attention as torch defines it, in float64.

    ``out = softmax(scale query key^T + attn_mask) value``, over the last two dimensions

    Parameters
    ----------
    query : Array, shape ``[..., num_heads, q_len, head_dim]``
        At least 2-D. The leading dimensions of query, key and value broadcast.
    key : Array, shape ``[..., num_kv_heads, kv_len, head_dim]``
    value : Array, shape ``[..., num_kv_heads, kv_len, value_dim]``
    attn_mask : Array that broadcasts to ``[..., q_len, kv_len]``, or None
        bool: True is attended. float: added to the scaled dot product.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Row i attends keys 0 .. i ("top_left"). Not together with ``attn_mask``.
    scale : float or None
        None is ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Whether num_kv_heads may be a divisor of num_heads: consecutive query heads then share a KV head.

    Returns
    -------
    out : float64, shape ``[..., q_len, value_dim]``

    Raises
    ------
    ShapeError, OptionError
        If the shapes do not fit together, dropout is asked for, or ``attn_mask`` and ``is_causal`` are both given.

    Notes
    -----
    A row that attends nothing gives 0.

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention, torch 2.13.

    Example
    -------
    >>> import numpy as np
    >>> from vkattn import oracle
    >>> oracle.scaled_dot_product_attention(np.ones((5, 3, 8)), np.ones((5, 4, 8)), np.ones((5, 4, 6))).shape
    (5, 3, 6)
    """
    if dropout_p != 0:
        raise OptionError(f"`dropout_p` is {dropout_p!r}; it must be 0.")
    if attn_mask is not None and is_causal:
        raise OptionError("`attn_mask` and `is_causal` are both given; they exclude each other.")
    q, k, v = (as_array(array, name) for array, name in ((query, "query"), (key, "key"), (value, "value")))
    mask = None if attn_mask is None else as_array(attn_mask, "attn_mask")
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ShapeError(f"`query` {q.shape}, `key` {k.shape} and `value` {v.shape} must have at least 2 dimensions.")
    if enable_gqa:
        k, v = (_repeat_heads(array, q) for array in (k, v))
    try:
        leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (_one_head(array, leading) for array in (q, k, v))
        mask = None if mask is None else _one_head(mask, leading, q.shape[2], k.shape[2])
    except ValueError as error:
        raise ShapeError(f"the shapes do not broadcast: {error}") from error
    out: np.ndarray = attention(q, k, v, mask=mask, causal="top_left" if is_causal else None, scale=scale)
    return out.reshape(*leading, *out.shape[-2:])


def _repeat_heads(array: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return ``[..., num_heads, kv_len, dim]``, each KV head repeated for the query heads that share it."""
    if min(array.ndim, query.ndim) < 3 or array.shape[-3] == 0 or query.shape[-3] % array.shape[-3]:
        raise ShapeError(f"enable_gqa: the heads of {query.shape} are no multiple of those of {array.shape}.")
    return np.repeat(array, query.shape[-3] // array.shape[-3], axis=-3)


def _one_head(array: np.ndarray, leading: tuple[int, ...], *last: int) -> np.ndarray:
    """Return ``[product of leading, 1, ., .]``: the leading dimensions broadcast and laid out as a batch."""
    last = last or array.shape[-2:]
    full = np.broadcast_to(array, (*leading, *last))
    return full.reshape(int(np.prod(leading, dtype=np.int64)), 1, *last)
