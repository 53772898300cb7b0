"""Which keys a query row sees: positions, causal alignments, windows, live lengths. Used by `validate` and `oracle`.

Query row ``i`` stands at position ``p_i = q_offset + i``, and everything about its place follows from ``p_i`` and
nothing else. It sees key ``j`` if all of these hold:

* ``j < kv_len``, the live keys of its batch entry;
* with a causal mask, ``j <= p_i``;
* with a window, ``p_i - left <= j <= p_i + right``: inclusive counts, 0 is the row itself, None is no limit.

The two causal alignments differ only in the ``q_offset`` that they imply: 0 for ``top_left``, ``kv_len - q_len`` for
``bottom_right``. With more keys than queries and with more queries than keys (a line per query, ``#`` is seen)::

    q_len 2, kv_len 5                    q_len 5, kv_len 2
    top_left       bottom_right          top_left       bottom_right
    # . . . .      # # # # .             # .            . .
    # # . . .      # # # # #             # #            . .
                                         # #            . .
                                         # #            # .
                                         # #            # #

Prefill with an empty cache is both; decoding (few new queries, at the end of many keys) is ``bottom_right``; torch's
``is_causal`` is ``top_left``. The functions are pure: values in, NumPy arrays or an error out.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .dtypes import as_array
from .errors import DTypeError, OptionError, ShapeError

#: The names of the causal alignments.
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")

#: Offsets and lengths are at most this, so that ``p_i``, and ``p_i`` with a window's bounds, fit 32 bits in shaders.
MAX_POSITION = 2**29

#: A window's bound beyond this limits nothing (two positions are never further apart), so larger ones become this.
MAX_WINDOW = 2**30

Window = tuple[int | None, int | None]


def resolve_causal(causal: Any) -> str | None:
    """Return the alignment ``causal`` ("top_left", "bottom_right" or None), or raise OptionError."""
    if causal is None or (isinstance(causal, str) and causal in CAUSAL_ALIGNMENTS):
        return causal
    allowed = "allowed: 'top_left', 'bottom_right', None"
    if causal is False:
        raise OptionError(f"`causal` is False; {allowed}. Hint: None is no causal mask.")
    raise OptionError(
        f"`causal` is {causal!r}; {allowed}. Hint: causal='top_left' lets query i see keys 0 .. i (torch's is_causal); "
        "causal='bottom_right' lets it see keys 0 .. kv_len - q_len + i (decoding at the end of a cache)."
    )


def resolve_window(window: Any) -> Window:
    """Return ``window`` as (left, right), each a count of keys beside the row's own or None, or raise OptionError."""
    is_row = isinstance(window, (tuple, list)) or (isinstance(window, np.ndarray) and window.ndim == 1)
    if not is_row or len(window) != 2:
        raise OptionError(f"`window` is {window!r}; it must be a pair (left, right). Hint: (None, None) is no window.")
    left, right = (_window_bound(bound, window) for bound in window)
    return left, right


def _window_bound(bound: Any, window: Any) -> int | None:
    """Return one bound of a window, at most MAX_WINDOW."""
    if bound is None:
        return None
    count = as_integer(bound)
    if count is None or count < 0:
        raise OptionError(
            f"`window` is {window!r}; each bound must be None (no limit) or an integer that is not negative. "
            "Hint: the bounds are inclusive, so 0 is the row's own key only; W keys ending at the row are (W - 1, 0)."
        )
    return min(count, MAX_WINDOW)


def resolve_kv_len(kv_len: Any, batch_size: int, num_keys: int) -> np.ndarray:
    """Return the live keys of each batch entry, int64 ``[batch_size]``; None is all ``num_keys`` of the key tensor."""
    if kv_len is None:
        return np.full(batch_size, num_keys, np.int64)
    lengths = _per_batch(kv_len, "kv_len", batch_size)
    if lengths.size and (lengths.min() < 0 or lengths.max() > num_keys):
        raise OptionError(f"`kv_len` is {_brief(lengths)}; it must be within 0 .. {num_keys}, the tokens of `key`.")
    return lengths


def default_q_offset(causal: str | None, q_len: int, kv_len: np.ndarray, uses_position: bool) -> np.ndarray:
    """Return the q_offset of each batch entry when none is given, or raise OptionError if there is no natural one.

    Parameters
    ----------
    causal : str or None
        "top_left" (0), "bottom_right" (``kv_len - q_len``, may be negative) or None.
    q_len : int
        Query rows, in tokens.
    kv_len : int64, shape ``[batch_size]``
        Live keys of each batch entry, in tokens.
    uses_position : bool
        Whether a window or ALiBi is given. With causal=None these have no natural alignment when the lengths differ;
        without them the offset means nothing and is 0.

    Returns
    -------
    int64, shape ``[batch_size]``
    """
    if causal == "bottom_right":
        return kv_len - q_len
    if causal is None and uses_position and np.any(kv_len != q_len):
        raise OptionError(
            f"`q_offset` is needed: with a window or ALiBi, causal=None, q_len {q_len} and kv_len {_brief(kv_len)} the "
            "place of the query rows is not known. Hint: q_offset=0 puts query 0 beside key 0; "
            "q_offset=kv_len - q_len puts the last query beside the last key."
        )
    return np.zeros_like(kv_len)


def resolve_q_offset(
    q_offset: Any, *, causal: str | None, q_len: int, kv_len: np.ndarray, uses_position: bool
) -> np.ndarray:
    """Return the position of query row 0 in each batch entry, int64 ``[batch_size]``; None is `default_q_offset`."""
    if q_offset is None:
        return default_q_offset(causal, q_len, kv_len, uses_position)
    return _per_batch(q_offset, "q_offset", len(kv_len))


def positions(q_len: int, q_offset: np.ndarray) -> np.ndarray:
    """Return ``p_i = q_offset + i``, int64 ``[batch_size, q_len]``."""
    return np.asarray(q_offset, np.int64)[:, None] + np.arange(q_len)


def visible(
    q_len: int,
    num_keys: int,
    *,
    q_offset: np.ndarray,
    kv_len: np.ndarray,
    causal: str | None = None,
    window: Window = (None, None),
) -> np.ndarray:
    """Return which keys each query row sees, as the whole matrix: bool ``[batch_size, q_len, num_keys]``.

    ``q_offset`` and ``kv_len`` are int64 ``[batch_size]``. What ``causal`` is called does not matter any more here:
    its alignment has gone into ``q_offset``.
    """
    row = positions(q_len, q_offset)[:, :, None]
    key = np.arange(num_keys)[None, None, :]
    seen = np.broadcast_to(key < np.asarray(kv_len)[:, None, None], (len(kv_len), q_len, num_keys)).copy()
    left, right = window
    if causal is not None:
        seen &= key <= row
    if left is not None:
        seen &= key >= row - left
    if right is not None:
        seen &= key <= row + right
    return seen


def as_integer(value: Any) -> int | None:
    """Return ``value`` as an int, or None if it is not an integer (a bool is not)."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _per_batch(value: Any, argument: str, batch_size: int) -> np.ndarray:
    """Return an int, or integers of shape ``[batch_size]``, as int64 ``[batch_size]``."""
    try:
        given = as_array(value, argument)
    except DTypeError as error:
        raise OptionError(f"`{argument}` is {value!r}; it must be an integer, or integers of shape ({batch_size},)."
                          ) from error
    if given.dtype.kind not in "iu" and given.size:
        raise OptionError(f"`{argument}` is {value!r}; it must be an integer, or integers of shape ({batch_size},).")
    if given.shape not in ((), (batch_size,)):
        raise ShapeError(f"`{argument}` has shape {given.shape}; it must be () or ({batch_size},), one per batch.")
    if given.size and (int(given.min()) < -MAX_POSITION or int(given.max()) > MAX_POSITION):
        raise OptionError(f"`{argument}` is {value!r}; it must be within {-MAX_POSITION} .. {MAX_POSITION}.")
    return np.broadcast_to(given.astype(np.int64), (batch_size,)).copy()


def _brief(values: np.ndarray) -> str:
    """Return per-batch integers as a short text for a message."""
    few = ", ".join(map(str, values[:8].tolist()))
    return f"[{few}, ...]" if len(values) > 8 else f"[{few}]"
