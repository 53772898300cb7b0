"""The Llama network in plain NumPy (float32), attention apart: that is a callable. Used by smollm2.py.

Weights keep the names and the [out, in] shapes of the GGUF file, so a linear layer is ``x @ weight.T``. Shapes below
use S for the new tokens of a step, P for those already in the cache, D for head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: ``attend(layer, query, key, value, position) -> out``: arrays [1, heads, S, D], of the new tokens alone, which stand
#: at position P on. It keeps keys and values, and attends causally over all P + S that the layer was given so far.
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Config:
    """The numbers that define one Llama network."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    ffn_dim: int
    vocab_size: int
    max_kv_len: int
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class Layer:
    """The weights of one layer: tensors ``blk.<layer>.<field>.weight`` of the file."""

    attn_norm: np.ndarray
    attn_q: np.ndarray
    attn_k: np.ndarray
    attn_v: np.ndarray
    attn_output: np.ndarray
    ffn_norm: np.ndarray
    ffn_gate: np.ndarray
    ffn_up: np.ndarray
    ffn_down: np.ndarray


@dataclass(frozen=True)
class Weights:
    """All weights; ``output`` is ``token_embd`` itself where the network ties the two, as SmolLM2 does."""

    token_embd: np.ndarray
    layers: tuple[Layer, ...]
    output_norm: np.ndarray
    output: np.ndarray


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, the mean over the last axis."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))


def silu(x: np.ndarray) -> np.ndarray:
    """Return ``x * sigmoid(x)``; written with tanh, which cannot overflow as exp can."""
    return x * np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))


def rope(x: np.ndarray, first_position: int, base: float) -> np.ndarray:
    """Rotate each pair (x[2i], x[2i + 1]) of [..., tokens, D] by the angle ``position * base ** (-2i / D)``.

    The pairs are interleaved because GGUF files of the Llama family hold the rows of attn_q and attn_k in that order.
    (Hugging Face files pair i with i + D/2. The dot product of a query and a key is the same in either order.)
    """
    tokens, head_dim = x.shape[-2:]
    rates = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = (first_position + np.arange(tokens))[:, None] * rates
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


class Decoder:
    """One conversation: the network, and how many tokens it has seen; ``attend`` keeps their keys and values.

    Parameters
    ----------
    attend : see `Attend`; called once per layer in each step, layer 0 first.
    capacity : the most tokens that it can keep.
    """

    def __init__(self, config: Config, weights: Weights, attend: Attend, capacity: int) -> None:
        if capacity > config.max_kv_len:
            raise ValueError(f"`capacity` is {capacity} tokens; the model was made for at most {config.max_kv_len}.")
        self.config = config
        self.weights = weights
        self.attend = attend
        self.capacity = capacity
        self.kv_len = 0

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        """Take S more tokens; return the logits [vocab_size] of the token that would come next."""
        if not tokens or self.kv_len + len(tokens) > self.capacity:
            raise ValueError(
                f"step got {len(tokens)} tokens at kv_len {self.kv_len}; it takes 1 to {self.capacity - self.kv_len}."
            )
        eps = self.config.norm_eps
        x = self.weights.token_embd[list(tokens)]  # [S, model_dim]
        for number, layer in enumerate(self.weights.layers):
            x = x + self._attention(number, layer, rms_norm(x, layer.attn_norm, eps))
            h = rms_norm(x, layer.ffn_norm, eps)
            x = x + (silu(h @ layer.ffn_gate.T) * (h @ layer.ffn_up.T)) @ layer.ffn_down.T
        self.kv_len += len(tokens)
        return self.weights.output @ rms_norm(x[-1], self.weights.output_norm, eps)

    def _attention(self, number: int, layer: Layer, x: np.ndarray) -> np.ndarray:
        """Attend from the tokens of x [S, model_dim] to themselves and all before, and project: [S, model_dim]."""
        config, first = self.config, self.kv_len
        query = rope(split_heads(x @ layer.attn_q.T, config.num_heads), first, config.rope_base)
        key = rope(split_heads(x @ layer.attn_k.T, config.num_kv_heads), first, config.rope_base)
        value = split_heads(x @ layer.attn_v.T, config.num_kv_heads)
        out = self.attend(number, query, key, value, first)  # [1, num_heads, S, D]
        return out[0].transpose(1, 0, 2).reshape(len(x), -1) @ layer.attn_output.T


def split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Split x [S, num_heads * D] into [1, num_heads, S, D]."""
    return x.reshape(1, len(x), num_heads, -1).transpose(0, 2, 1, 3)
