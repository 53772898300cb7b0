"""The public calls: `attention`, and `scaled_dot_product_attention` with torch's meaning."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dispatch import choose
from ..dtypes import as_array, numpy_dtype
from ..errors import OptionError, ShapeError
from ..runtime.device import Device, resolve_device
from ..validate import Call, attention_call, finite_option, flag_option
from .plan import AttentionPlan, plan_key
from .selftest import settle


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
    algorithm: str = "auto",
    device: Device | None = None,
) -> Any:
    """Scaled dot product attention on a Vulkan device.

    ``out_i = sum_j softmax_j(softcap(scale <q_i, k_j>) - slope |p_i - j| + mask_ij) v_j``, with ``p_i = q_offset + i``
    and ``softcap(s) = softcap tanh(s / softcap)``.

    Parameters
    ----------
    query : Array, shape ``[batch_size, num_heads, q_len, head_dim]`` (bhsd), float32, float16 or bfloat16
        Any strides; bfloat16 arrays are those of ml_dtypes. Any head_dim from 1.
    key : Array, shape ``[batch_size, num_kv_heads, kv_len, head_dim]`` (bhsd)
        The query's dtype, or any of the three if the query is float32. num_heads must be a multiple of num_kv_heads;
        query head h reads KV head ``h // (num_heads // num_kv_heads)``.
    value : Array, shape ``[batch_size, num_kv_heads, kv_len, value_dim]`` (bhsd), key's dtype
        value_dim may differ from head_dim.
    mask : Array that broadcasts to ``[batch_size, num_heads, q_len, kv_len]`` in every layout, or None
        bool: True is attended. float32, or the query's dtype: added to the score; -inf is not attended, NaN and plus
        infinity are refused where a key is live. Together with ``causal`` both apply.
    causal : "top_left", "bottom_right" or None
        Row i attends keys ``j <= p_i``. "top_left" (torch's is_causal) puts row 0 at key 0; "bottom_right" (decoding)
        puts the last row at the last live key. None is no causal mask.
    scale : float or None
        Multiplies the dot product; None is ``1 / sqrt(head_dim)``.
    softcap : float or None
        Bounds the scaled dot product smoothly to ``(-softcap, softcap)``; None is no bound.
    window : (left, right), each an int or None
        Keys ``p_i - left <= j <= p_i + right`` are attended: counts in tokens, both ends included; None is no limit.
    sinks : Array, shape ``[num_heads]``, or None
        A logit for each query head that joins the denominator once.
    alibi_slopes : Array, shape ``[num_heads]``, or None
        ALiBi: subtracts slope times the distance between row and key.
    q_offset : int, or integers of shape ``[batch_size]``, or None
        Position of query row 0, in tokens; None is 0, or ``kv_len - q_len`` (it may be negative) for "bottom_right".
        A window or ALiBi with causal=None and ``q_len != kv_len`` needs it.
    kv_len : int, or integers of shape ``[batch_size]``, or None
        Live keys; keys, values and mask columns at or beyond it are never read. None is all of them.
    layout : "bhsd" or "bshd"
        Axis order of query, key, value and the output: b batch, h heads, s tokens, d head_dim.
    return_lse : bool
        Whether to return the log-sum-exp of each row too.
    algorithm : "auto", "split", "coopmat2", "coopmat", "fused" or "three_pass"
        Which kernels compute it; a name raises NoKernelError where it cannot.
    device : vkattn.Device or None
        None is `vkattn.default_device`.

    Returns
    -------
    out : Array, the query's shape with value_dim for head_dim, the query's dtype
    lse : Array, float32, shape ``[batch_size, num_heads, q_len]`` in every layout; only if ``return_lse``
        Natural logarithm of the row's denominator, sink included.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        An argument does not fit; nothing has been dispatched.
    CapacityError
        The problem is too large for a limit of the device.
    NoKernelError
        No kernel supports it on this device; the message lists the reasons.
    DeviceError
        No usable device, or it was lost.

    Notes
    -----
    A row that attends nothing gives 0, and its lse is -inf (the sink, if there is one). NaN in keys or values that are
    not attended has no effect. Scores and sums are float32, and a row is divided by its denominator last: values so
    large that their sum leaves float32 (3.4e38) come out as infinity or NaN. Plans (buffers, pipelines, a recording)
    are kept for later calls of similar size, at most 16 to a device.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; grouped queries: Ainslie et al. 2023 (arXiv
    2305.13245); ALiBi: Press et al. 2021 (arXiv 2108.12409); the order of the steps: ONNX operator Attention, opset 24.

    Example
    -------
    >>> import numpy as np
    >>> query, key = np.ones((1, 4, 3, 8), np.float32), np.ones((1, 2, 5, 8), np.float32)
    >>> attention(query, key, key, causal="bottom_right").shape
    (1, 4, 3, 8)
    """
    call = attention_call(
        query, key, value, mask=mask, causal=causal, scale=scale, softcap=softcap, window=window, sinks=sinks,
        alibi_slopes=alibi_slopes, q_offset=q_offset, kv_len=kv_len, layout=layout, return_lse=return_lse,
    )  # fmt: skip
    device = resolve_device(device)
    out, lse = compute(call, device, algorithm)
    return (out, lse) if return_lse else out


def compute(call: Call, device: Device, algorithm: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Run a checked call by this algorithm; what has no row or no key needs no dispatch. Return the output and lse."""
    problem, options = call.problem, call.options
    settle(device, problem, algorithm)
    module = choose(problem, device.info, algorithm)
    rows = (problem.batch_size, problem.num_heads, options.q_len)
    if 0 in rows or options.kv_len.max(initial=0) == 0:
        out = np.zeros((*call.query.shape[:3], problem.value_dim), numpy_dtype(problem.out_dtype))
        lse = np.full(rows, -np.inf, np.float32)
        if options.sinks is not None:
            lse[...] = options.sinks[:, None]
        return out, lse if options.return_lse else None
    key, cut = plan_key(call, device, module)
    with device.lock:
        plan: AttentionPlan = device.plans.get(key, lambda: AttentionPlan(device, key), key.nbytes)
        return plan.run(call, cut)


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
    device: Device | None = None,
) -> np.ndarray:
    """``torch.nn.functional.scaled_dot_product_attention``, on NumPy arrays.

    Parameters
    ----------
    query : Array, shape ``[..., num_heads, q_len, head_dim]``, float32, float16 or bfloat16
        At least two dimensions; leading ones broadcast among query, key and value.
    key : Array, shape ``[..., num_kv_heads, kv_len, head_dim]``, the query's dtype
    value : Array, shape ``[..., num_kv_heads, kv_len, value_dim]``, the query's dtype
    attn_mask : Array that broadcasts to ``[..., num_heads, q_len, kv_len]``, or None
        bool: True is attended. float32, or the query's dtype: added to the score. Not together with ``is_causal``.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Row i attends keys 0 .. i (top-left alignment, whatever the lengths).
    scale : float or None
        Multiplies the dot product; None is ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Let each KV head serve ``num_heads / num_kv_heads`` consecutive query heads. Without it head counts broadcast.
    device : vkattn.Device or None
        None is `vkattn.default_device`.

    Returns
    -------
    out : Array, shape ``[..., num_heads, q_len, value_dim]``, the query's dtype

    Raises
    ------
    ShapeError, DTypeError, OptionError, CapacityError, NoKernelError, DeviceError
        As `attention`; OptionError if ``dropout_p`` is not 0 or a mask comes with ``is_causal``.

    Notes
    -----
    A fully masked row gives 0, as in torch from 2.5 on. Unlike torch, NaN in masked keys and values has no effect.

    Source: PyTorch documentation of the function of this name.

    Example
    -------
    >>> import numpy as np
    >>> x = np.ones((2, 4, 6, 16), np.float32)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (2, 4, 6, 16)
    """
    is_causal, enable_gqa = flag_option(is_causal, "is_causal"), flag_option(enable_gqa, "enable_gqa")
    if finite_option(dropout_p, "dropout_p", "0: this library is for inference") != 0.0:
        raise OptionError(f"`dropout_p` is {dropout_p!r}; it must be 0: this library is for inference.")
    if attn_mask is not None and is_causal:
        raise OptionError("`attn_mask` and `is_causal` are both set; use one. Hint: vkattn.attention takes both.")
    arrays = [as_array(query, "query"), as_array(key, "key"), as_array(value, "value")]
    shapes = ", ".join(f"`{name}` {array.shape}" for name, array in
                       zip(("query", "key", "value"), arrays, strict=True))
    if any(array.ndim < 2 for array in arrays):
        raise ShapeError(f"{shapes}: each must have at least two dimensions, (..., tokens, head_dim).")
    if enable_gqa and any(array.ndim < 3 for array in arrays):
        raise ShapeError(f"{shapes}: `enable_gqa` needs at least three dimensions, (..., heads, tokens, head_dim).")
    shared = 3 if enable_gqa else 2
    try:
        lead = np.broadcast_shapes(*(array.shape[:-shared] for array in arrays))
    except (ValueError, RuntimeError) as error:  # RuntimeError: more than 32 dimensions
        raise ShapeError(f"{shapes}: the leading dimensions do not broadcast.{_gqa_hint(arrays)}") from error
    full = [np.broadcast_to(array, lead + array.shape[-shared:]) for array in arrays]
    heads = full[0].shape[-3] if len(full[0].shape) > 2 else 1
    batch = lead if enable_gqa else lead[:-1]
    flat = [array.reshape(int(np.prod(batch, dtype=np.int64)), -1 if array.size else array.shape[-3], *array.shape[-2:])
            if array.ndim > 2 else array.reshape(1, 1, *array.shape) for array in full]
    mask = None if attn_mask is None else _lead_mask(as_array(attn_mask, "attn_mask"), batch, heads, full)
    call = attention_call(*flat, mask=mask, mask_name="attn_mask", causal="top_left" if is_causal else None,
                          scale=scale)
    device = resolve_device(device)
    out, _ = compute(call, device, "auto")
    return out.reshape(*full[0].shape[:-1], full[2].shape[-1])


def _gqa_hint(arrays: list[np.ndarray]) -> str:
    """Return a hint at `enable_gqa` if the shapes fit with it."""
    if min(array.ndim for array in arrays) < 3 or len({array.shape[:-3] for array in arrays}) > 1:
        return ""
    heads, kv_heads, value_heads = (array.shape[-3] for array in arrays)
    if not 1 < kv_heads == value_heads < heads or heads % kv_heads:
        return ""
    return f" Hint: enable_gqa=True lets each KV head serve {heads // kv_heads} query heads."


def _lead_mask(mask: np.ndarray, batch: tuple[int, ...], heads: int, full: list[np.ndarray]) -> np.ndarray:
    """Return a mask of any rank as one of rank 4 at most, the leading dimensions flattened as those of the query."""
    if mask.ndim <= 4 and len(batch) <= 1:
        return mask
    rank = len(batch) + 3
    target = (*batch, heads, full[0].shape[-2], full[1].shape[-2])
    padded = mask.reshape((1,) * (rank - mask.ndim) + mask.shape) if mask.ndim <= rank else mask
    if padded.ndim != rank or any(size not in (1, limit) for size, limit in zip(padded.shape, target, strict=True)):
        raise ShapeError(f"`attn_mask` has shape {mask.shape}; it must broadcast to {target}.")
    spread = np.broadcast_to(padded, (*batch, *padded.shape[-3:]))
    return spread.reshape(int(np.prod(batch, dtype=np.int64)), *padded.shape[-3:])
