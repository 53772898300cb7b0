"""What tests of `vkattn.attention` share: drawn inputs, and a comparison with the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import vkattn
from tests.tolerance import assert_matches_oracle
from vkattn.dispatch import ALGORITHMS, MATRIX_ALGORITHMS
from vkattn.runtime.device import Device

#: Those on matrix units take half precision only: tests/gpu/kernels/test_attn_coopmat.py.
ANY_DTYPE = [name for name in ALGORITHMS if name not in MATRIX_ALGORITHMS]


def arrays(rng: np.random.Generator, batch: int, heads: tuple[int, int], q_len: int, kv_len: int, head_dim: int,
           value_dim: int | None = None, dtype: Any = np.float32, size: float = 2.0) -> list[np.ndarray]:
    """Return query, key and value, signed, with scores up to tens."""
    shapes = ((batch, heads[0], q_len, head_dim), (batch, heads[1], kv_len, head_dim),
              (batch, heads[1], kv_len, value_dim or head_dim))
    return [(size * rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def check(device: Device, inputs: list[np.ndarray], **options: Any) -> np.ndarray:
    """Compute with lse, compare both with the oracle, return the output."""
    out, lse = vkattn.attention(*inputs, return_lse=True, device=device, **options)
    options.pop("algorithm", None)
    assert_matches_oracle(out, *inputs, lse=lse, **options)
    return out
