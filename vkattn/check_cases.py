"""What ``vkattn check`` computes: shapes with options, and which dtypes go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .dtypes import FLOAT_DTYPES, numpy_dtype
from .errors import DTypeError
from .reach import QUANTISED_PAIRS


def shapes(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Yield (label, (batch, heads, kv heads, q_len, kv_len, head_dim, value_dim), options) of each case."""
    yield "prefill", (1, 9, 3, 67, 67, 64, 64), {"causal": "top_left"}
    yield "decode", (2, 8, 2, 1, 333, 128, 128), {"causal": "bottom_right", "kv_len": [333, 64]}
    yield "odd sizes", (2, 6, 2, 5, 71, 17, 33), {"causal": "bottom_right", "window": (40, None)}
    mask = rng.random((2, 1, 40, 129)) < 0.6
    mask[:, :, 7] = False
    yield "bool mask", (2, 4, 4, 40, 129, 24, 8), {"mask": mask}
    added = np.where(rng.random((4, 33, 65)) < 0.2, -np.inf, rng.standard_normal((4, 33, 65))).astype(np.float32)
    for head_dim in (8, 16, 32, 64, 72, 128, 256):  # decode: each length of a key row, few and many rows to a KV head
        for heads in (3, 8):
            yield f"decode, head_dim {head_dim}", (1, heads, 1, 1, 70, head_dim, head_dim), {"causal": "bottom_right"}
    yield "float mask, softcap, ALiBi, sinks", (1, 4, 1, 33, 65, 129, 3), {
        "mask": added, "softcap": 12.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "q_offset": 32,
        "sinks": [1.0, -2.0, 0.0, 4.0]}


def quantised_shapes(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Yield those of `shapes` that quantised rows are tried with: fewer lengths of a key row."""
    for label, sizes, options in shapes(rng):
        if not label.startswith("decode, head_dim") or sizes[5] in (32, 128, 256):
            yield label, sizes, options


def dtype_mixtures() -> list[tuple[str, str]]:
    """Return each supported (query, key and value) pair of dtypes; bfloat16 only where ml_dtypes is installed."""
    try:
        numpy_dtype("bfloat16")
        known: tuple[str, ...] = FLOAT_DTYPES
    except DTypeError:
        known = tuple(name for name in FLOAT_DTYPES if name != "bfloat16")
    return [(query, key) for query in known for key in known if query in ("float32", key)]


def num_steps() -> int:
    """Return how often `check_device` says what it checks."""
    rng = np.random.default_rng(0)
    return (3 + len(list(shapes(rng))) * len(dtype_mixtures())
            + len(list(quantised_shapes(rng))) * len(QUANTISED_PAIRS))
