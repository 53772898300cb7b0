"""A tiny Llama with random weights, for the tests of the example's network and reports."""

from __future__ import annotations

import numpy as np
from smollm2_file import layer_shapes
from smollm2_model import Config, Layer, Weights

MINI = Config(
    num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, model_dim=48, ffn_dim=80, vocab_size=50,
    max_kv_len=40, rope_base=100000.0, norm_eps=1e-5,
)  # fmt: skip
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def mini_weights(rng: np.random.Generator) -> Weights:
    """Random weights for MINI, of a size that keeps activations near 1."""

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    embedding = matrix(MINI.vocab_size, MINI.model_dim)
    layers = tuple(
        Layer(**{name: matrix(*shape) for name, shape in layer_shapes(MINI).items()}) for _ in range(MINI.num_layers)
    )
    return Weights(embedding, layers, 1 + matrix(MINI.model_dim), embedding)
