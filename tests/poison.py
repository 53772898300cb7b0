"""NaN and infinity in everything that must not be read, and odd ways to lay the same array in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkattn.oracle.problem import Problem

#: What an additive mask holds beyond the live length.
MASK_TAIL = np.nan


def poisoned_arrays(
    clean: tuple[np.ndarray, np.ndarray, np.ndarray], options: dict[str, Any], poison: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return copies (bhsd) with ``poison`` in keys, values and queries without effect.

    An additive mask among the ``options`` gets MASK_TAIL beyond the live lengths, in place.
    """
    query, key, value = (array.copy() for array in clean)
    problem = Problem(
        query, key, **{name: given for name, given in options.items() if name not in ("sinks", "layout")}
    )  # fmt: skip
    group_size = problem.num_heads // problem.num_kv_heads
    for batch in range(problem.batch_size):
        attended = np.stack([problem.attended(batch, head) for head in range(problem.num_heads)])
        query[batch][~attended.any(axis=2)] = poison
        by_kv_head = attended.reshape(problem.num_kv_heads, group_size * problem.q_len, problem.num_keys)
        is_dead = ~by_kv_head.any(axis=1)
        key[batch][is_dead] = poison
        value[batch][is_dead] = poison
    mask = options.get("mask")
    if mask is not None and mask.dtype != np.bool_ and mask.shape[-1] == problem.num_keys > 1:
        live = np.broadcast_to(options.get("kv_len", problem.num_keys), problem.batch_size)
        has_batch = mask.ndim == 4 and mask.shape[0] == problem.batch_size
        for entry, length in zip(mask, live, strict=True) if has_batch else [(mask, live.max())]:
            entry[..., length:] = MASK_TAIL
    return query, key, value


def _every_other(array: np.ndarray) -> np.ndarray:
    """Return an equal array whose last stride is two elements, with NaN between."""
    spread = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
    spread[..., ::2] = array
    return spread[..., ::2]


def _window_of_larger(array: np.ndarray) -> np.ndarray:
    """Return an equal array that is the middle of a larger one full of NaN."""
    larger = np.full([length + 2 for length in array.shape], np.nan, array.dtype)
    middle = larger[tuple(slice(1, length + 1) for length in array.shape)]
    middle[...] = array
    return middle


#: Ways to lay the same array in memory.
VIEWS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "heads_and_tokens_exchanged": lambda array: np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "reversed_dim": lambda array: np.ascontiguousarray(array[..., ::-1])[..., ::-1],
    "reversed_tokens": lambda array: np.ascontiguousarray(array[:, :, ::-1])[:, :, ::-1],
    "every_other": _every_other,
    "window_of_larger": _window_of_larger,
}
