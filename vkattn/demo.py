"""`vkattn demo`: one small attention on a device, compared with the oracle, printed so that it can be read.

Proves an installation in a second. The demo with a real language model is examples/smollm2.py (scripts/demo).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from . import oracle
from .ops.attention import attention
from .runtime.device import Device

SHAPE_Q = (1, 4, 6, 8)  # batch, query heads, tokens, head_dim
SHAPE_KV = (1, 2, 9, 8)  # two query heads share each KV head; 9 keys, so row 0 stands at position 3


def _inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return query, key, value: random numbers that are the same each time."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal(shape, dtype=np.float32) for shape in (SHAPE_Q, SHAPE_KV, SHAPE_KV))
    return query, key, value


def _row(name: str, values: np.ndarray) -> str:
    return f"  {name:<8}" + " ".join(f"{value:8.5f}" for value in values)


def main(args: argparse.Namespace) -> int:
    """Run the demo on ``args.device``; 0 if every row is within its bound of the oracle, else 1."""
    query, key, value = _inputs()
    with Device(args.device) as device:
        print(f"Device    {device.info.name} ({device.info.device_type})")
        print(f"Inputs    query {SHAPE_Q}, key and value {SHAPE_KV}, float32; causal, the last row at the last key")
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            out = attention(query, key, value, causal="bottom_right", device=device)
            seconds.append(time.perf_counter() - started)

    expected = oracle.attention(query, key, value, causal="bottom_right")
    weights = oracle.softmax(oracle.attn_weights(query, key, causal="bottom_right"))
    print("\nWho attends whom (head 0, weights of each query row over the 9 keys, in percent; . is masked)")
    for token, row in enumerate(weights[0, 0]):
        print(f"  row {token}  " + "".join(f"{100 * weight:5.0f}" if weight else "    ." for weight in row))
    print("\nThe last row of head 0")
    print(_row("vkattn", out[0, 0, -1]))
    print(_row("oracle", expected[0, 0, -1]))

    error = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    share = oracle.worst_share(out, query, key, value, causal="bottom_right")
    verdict = "good" if share <= 1 else "WRONG"
    print(f"\nError     {error.max():.1e} of a row's length, {share:.3f} of what is allowed: {verdict}")
    print(f"Time      first call (makes the plan) {seconds[0] * 1e3:.0f} ms, second call {seconds[1] * 1e3:.2f} ms")
    return 0 if share <= 1 else 1
