"""What tests of graphs share: a graph that decodes with one cache, in one node or three passes, and a user's kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.tolerance import assert_matches_oracle
from vkattn import Dim, GraphBuilder, KVCache, oracle
from vkattn.dtypes import numpy_dtype
from vkattn.ops.graph import Graph
from vkattn.runtime.device import Device

#: Heads, KV heads and head_dim of upstream's sequences, and the tokens of each step.
SEQUENCES: dict[str, tuple[tuple[int, int, int], tuple[int, ...]]] = {
    "8-4-4": ((8, 4, 4), (3, 1, 1, 5, 1, 1, 2)),
    "6-2-8": ((6, 2, 8), (3, 1, 1, 5, 1, 1)),
    "24-8-128": ((24, 8, 128), (111, 1, 1, 1, 57, 1, 1)),
    "8-2-64": ((8, 2, 64), (5, 1, 1, 1, 1, 3, 1)),
}
FORMS = ("node", "passes")


@dataclass
class Decoder:
    """A graph of one layer, its own cache, and what the oracle says it holds.

    ``form`` is "node" (sdpa_with_kv_cache) or "passes" (kv_append and the three passes, whose results are outputs).
    """

    device: Device
    sizes: tuple[int, int, int]
    capacity: int
    max_q_len: int
    dtype: str = "float32"
    form: str = "node"
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        heads, kv_heads, head_dim = self.sizes
        self.cache = KVCache(1, kv_heads, self.capacity, head_dim, dtype=self.dtype, device=self.device)
        builder = GraphBuilder(self.device)
        query, key, value = (
            builder.input(name, (1, Dim("q_len", max=self.max_q_len), count, head_dim), self.dtype)
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)))
        cache, position = builder.kv_cache("cache", cache=self.cache), builder.position("input_pos")
        if self.form == "node":
            out, lse = builder.sdpa_with_kv_cache(query, key, value, cache, position, return_lse=True,
                                                  algorithm=self.algorithm, **self.options)
        else:
            view = builder.kv_append(cache, key, value, position)
            scores = builder.attn_weights(query, view, causal="bottom_right", layout="bshd", **self.options)
            builder.output("scores", scores)
            probs, lse = builder.softmax(scores, return_lse=True)
            builder.output("probs", probs)
            out = builder.attn_output(probs, view)
        builder.output("lse", lse)
        builder.output("out", out)
        self.graph: Graph = builder.build()
        shape = (1, self.capacity, kv_heads, head_dim)
        self.rows = [np.full(shape, np.nan, numpy_dtype(self.dtype)) for _ in range(2)]

    def arrays(self, rng: np.random.Generator, tokens: int, size: float = 3.0) -> dict[str, np.ndarray]:
        """Return signed queries, keys and values with scores up to tens."""
        heads, kv_heads, head_dim = self.sizes
        return {name: (size * rng.standard_normal((1, tokens, count, head_dim), np.float32)).astype(
            numpy_dtype(self.dtype)) for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))}

    def step(self, arrays: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
        """Run the graph, compare every output with the oracle, and return the outputs."""
        result = self.graph.run(arrays, input_pos=start)
        stop = start + arrays["query"].shape[1]
        for rows, name in zip(self.rows, ("key", "value"), strict=True):
            rows[:, start:stop] = arrays[name]
        keys, values = (rows[:, :stop] for rows in self.rows)
        options = {"causal": "bottom_right", "layout": "bshd"} | self.options
        assert self.cache.lengths.tolist() == [[stop]]
        assert_matches_oracle(result["out"], arrays["query"], keys, values, lse=result["lse"], **options)
        if self.form == "passes":
            assert_scores(result["scores"], result["probs"], arrays["query"], keys, **options)
        return result


def assert_scores(scores: np.ndarray, probs: np.ndarray, query: np.ndarray, key: np.ndarray, **options: Any) -> None:
    """Assert that scores and weights are the oracle's, as exact as float32 dot products are."""
    expected = oracle.attn_weights(query, key, **options)
    size = oracle.magnitude(query, key, **options)[..., None]
    assert scores.shape == probs.shape == expected.shape
    assert scores.dtype == probs.dtype == np.float32
    closed = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(scores), closed)
    error = np.abs(np.where(closed, 0, scores) - np.where(closed, 0, expected))
    assert (error <= 2.0**-22 * (size + np.abs(np.where(closed, 0, expected)))).all(), error.max()
    weight = oracle.softmax(expected)
    assert (probs[closed] == 0).all()
    assert (np.abs(probs - weight) <= (1e-5 + 2.0**-20 * (1 + size)) * weight + 1e-37).all()


#: The kernel of a user, compiled, so that these tests need no compiler; tests/unit/test_shader_compiler.py compiles it.
SCALE_AND_ADD = Path(__file__).with_name("scale_and_add.spv").read_bytes()


def float_word(number: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(number).view(np.uint32))
