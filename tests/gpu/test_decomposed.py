"""The decomposed baseline of benchmarks/: it is attention, for any live length within the capacity, run after run."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.decomposed.baseline import decomposed_attention
from vkattn import Dim, GraphBuilder, oracle
from vkattn.runtime.device import Device

pytestmark = pytest.mark.once

CAPACITY = 140


@pytest.mark.parametrize(
    "batch, heads, kv_heads, head_dim, q_len", [(1, 6, 2, 64, 1), (2, 3, 3, 8, 1), (2, 8, 2, 40, 3)])
def test_it_is_attention_at_every_length(
    device: Device, rng: np.random.Generator, batch: int, heads: int, kv_heads: int, head_dim: int, q_len: int
) -> None:
    """Long, short, long; what lies behind the live length is NaN, and the scores are large and signed."""
    query = (4 * rng.standard_normal((batch, q_len, heads, head_dim))).astype(np.float16)
    key, value = ((4 * rng.standard_normal((batch, CAPACITY, kv_heads, head_dim))).astype(np.float16) for _ in "kv")
    for longest in (CAPACITY, 133):
        key[:, longest:], value[:, longest:] = np.nan, np.nan
        builder = GraphBuilder(device)
        out = decomposed_attention(builder, builder.input("query", query.shape, "float16"),
                                   builder.constant("key", key), builder.constant("value", value),
                                   Dim("tokens", max=CAPACITY), name="layer", groups=7)
        builder.output("out", out)
        graph = builder.build()
        for length in (longest, 3, 32, longest):
            found = graph.run({"query": query}, tokens=length)["out"]
            share = oracle.worst_share(found, query, key[:, :length], value[:, :length], layout="bshd",
                                       causal="bottom_right")
            assert share <= 1, (length, share)
        assert len(graph.timings()) == 12
        graph.close()


def test_what_it_cannot_do_is_refused(device: Device) -> None:
    builder = GraphBuilder(device)
    query = builder.input("query", (1, 1, 2, 12), "float16")
    cache = builder.input("cache", (1, 9, 2, 12), "float16")
    with pytest.raises(ValueError, match="multiple of 8"):
        decomposed_attention(builder, query, cache, cache, 4, name="layer")
