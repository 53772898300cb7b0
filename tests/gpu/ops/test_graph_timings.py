"""`Graph.timings` on the device: which dispatches, under which names, and that it changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import vkattn
from vkattn.errors import ClosedError
from vkattn.ops.timings import Timings


def test_timings_name_nodes_and_change_nothing(device: vkattn.Device, rng: np.random.Generator) -> None:
    """Two layers, the first one's output an output too: it is copied, because the second reads it."""
    cache = vkattn.KVCache(1, 2, 40, 16, num_layers=2, dtype="float16", device=device)
    builder = vkattn.GraphBuilder(device)
    q_len = vkattn.Dim("q_len", max=4)
    query, key, value = (builder.input(name, (1, q_len, heads, 16), "float32")
                         for name, heads in (("query", 6), ("key", 2), ("value", 2)))
    view, position = builder.kv_cache("cache", cache=cache), builder.position("position")
    first = builder.sdpa_with_kv_cache(query, key, value, view, position, layer=0, name="first")
    builder.output("first_out", first)
    builder.output("out", builder.sdpa_with_kv_cache(first, key, value, view, position, layer=1, name="second"))
    graph = builder.build()
    given = {name: rng.standard_normal((1, 3, heads, 16), np.float32)
             for name, heads in (("query", 6), ("key", 2), ("value", 2))}
    before = graph.run(given, position=0)
    rows = [cache.read(layer) for layer in range(2)]
    timings = graph.timings()
    assert isinstance(timings, Timings)
    assert len(timings) == graph.report().num_dispatches
    assert {span.node for span in timings} >= {"first", "second", "output first_out"}
    for node in ("first", "second"):
        kernels = [span.variant for span in timings if span.node == node]
        if kernels[0].startswith("attn_split_subgroup"):  # where it is preferred it appends too
            assert len(kernels) == 1
        else:
            assert kernels[0] == "kv_append_f32_f16"
            assert len(kernels) > 1
            assert all(name.startswith("attn_") for name in kernels[1:])
    assert [span.variant for span in timings if span.node == "output first_out"] == ["copy"]
    assert all(0 < span.nanoseconds < 60e9 for span in timings)
    assert json.loads(json.dumps(timings.as_dict()))["total_ns"] == timings.total_ns

    assert cache.lengths.tolist() == [[3], [3]]
    for layer, (keys, values) in enumerate(rows):
        again = cache.read(layer)
        np.testing.assert_array_equal(again[0], keys)
        np.testing.assert_array_equal(again[1], values)
    after = graph.run(given, position=0)
    for name in ("first_out", "out"):
        np.testing.assert_array_equal(after[name], before[name])
    cache.close()
    with pytest.raises(ClosedError, match="KVCache"):
        graph.timings()
    graph.close()
    with pytest.raises(ClosedError, match="graph"):
        graph.timings()
