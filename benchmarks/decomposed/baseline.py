"""Decode attention built from general operators, as nodes of a graph: the baseline that one fused kernel replaces.

Slice the caches, repeat keys and values over heads, transpose, matmul, scale and mask, softmax, matmul, transpose: each
its own dispatch, each tensor in memory. The kernels are plain but not slow on purpose: accesses are contiguous, all
invocations work, and each dispatch fills the device where its tensor is large enough.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from vkattn import GraphBuilder
from vkattn.graph.values import Shape, Size, Value

SPIRV = Path(__file__).resolve().parent / "spirv"

#: float16 elements of a quad of 16 bytes, in which the kernels move rows.
QUAD_ELEMENTS = 8


def decomposed_attention(builder: GraphBuilder, query: Value, key_cache: Value, value_cache: Value, tokens: Size, *,
                         name: str, groups: int = 64) -> Value:
    """Declare the dispatches of one layer; return the output, with the shape of ``query``.

    Parameters
    ----------
    query : float16 ``[batch, q_len, num_heads, head_dim]``; head_dim a multiple of 8
    key_cache, value_cache : float16 ``[batch, capacity, num_kv_heads, head_dim]``
    tokens : the live length, an int or a Dim
    name : prefix of the names of its nodes
    groups : workgroups of each dispatch
    """
    batch, q_len, num_heads, head_dim = query.shape
    capacity, num_kv_heads = key_cache.shape[1:3]
    if not all(isinstance(size, int) for size in (batch, num_heads, head_dim, capacity, num_kv_heads)):
        raise ValueError(f"`query` is {query} and `key_cache` {key_cache}; only q_len may be a Dim.")
    if head_dim % QUAD_ELEMENTS or query.dtype != "float16":
        raise ValueError(f"`query` is {query}; it must be float16 with a head_dim that is a multiple of 8.")
    head_quads, heads = head_dim // QUAD_ELEMENTS, batch * num_heads

    def node(kernel: str, what: str, reads: list[Value], shape: Shape, dtype: str, dims: list[Size],
             **push: int) -> Value:
        (made,) = builder.kernel(f"{name}_{what}", SPIRV / f"decomposed_{kernel}.spv", reads, {what: (shape, dtype)},
                                 dims=dims, push=push, groups=groups)
        return made

    def swap(what: str, given: Value, outer: Size, inner: Size) -> Value:
        return node("swap", what, [given], (batch, inner, outer, head_dim), "float16", [outer, inner],
                    batch_size=batch, row_quads=head_quads)

    def rows(which: str, cache: Value) -> Value:
        live = node("slice", f"slice_{which}", [cache], (batch, tokens, num_kv_heads, head_dim), "float16", [tokens],
                    batch_size=batch, capacity=capacity, token_quads=num_kv_heads * head_quads)
        repeated = node("repeat", f"repeat_{which}", [live], (batch, tokens, num_heads, head_dim), "float16", [tokens],
                        batch_size=batch, num_heads=num_heads, group_size=num_heads // num_kv_heads,
                        head_quads=head_quads)
        return swap(f"transpose_{which}", repeated, tokens, num_heads)

    queries, keys, values = swap("transpose_query", query, q_len, num_heads), rows("key", key_cache), rows(
        "value", value_cache)
    matrix = (batch, num_heads, q_len, tokens)
    sizes: list[Size] = [q_len, tokens]
    scores = node("scores", "matmul_scores", [queries, keys], matrix, "float32", sizes, heads=heads,
                  head_quads=head_quads)
    scale = int(np.float32(1 / math.sqrt(head_dim)).view(np.uint32))
    masked = node("mask", "scale_mask", [scores], matrix, "float32", sizes, heads=heads, scale=scale)
    weights = node("softmax", "softmax", [masked], matrix, "float32", sizes, heads=heads)
    out = node("output", "matmul_output", [weights, values], (batch, num_heads, q_len, head_dim), "float16", sizes,
               heads=heads, head_quads=head_quads)
    return swap("transpose_out", out, num_heads, q_len)
