"""What a graph refuses around its nodes: names, outputs, the build, and every run, which then changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.caches import raw_words
from tests.graphs import SCALE_AND_ADD
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import CapacityError, ClosedError, DTypeError, NoKernelError, OptionError, PlanError, ShapeError
from vkattn.ops.graph import Graph
from vkattn.runtime.device import Device

N = Dim("n", max=6)
X = np.ones((1, 2, 3, 4), np.float32)


def start(device: Device) -> tuple[GraphBuilder, Any, Any]:
    """Return a builder with an input and a node that reads it."""
    builder = GraphBuilder(device)
    x = builder.input("x", (1, 2, N, 4), "float32")
    return builder, x, builder.attention(x, x, x, name="node")


NAMES: dict[str, tuple[Callable[[GraphBuilder, Any], Any], type[Exception], str]] = {
    "input": (lambda b, x: b.input("x", (1,), "float32"), PlanError, "an input is called 'x', and so is"),
    "node": (lambda b, x: b.input("node", (1,), "float32"), PlanError, "an input is called 'node'"),
    "constant": (lambda b, x: b.constant("x", X), PlanError, "a constant is called 'x'"),
    "cache": (lambda b, x: b.kv_cache("x", batch=1), PlanError, "a cache is called 'x'"),
    "position": (lambda b, x: b.position("x"), PlanError, "a position is called 'x'"),
    "identifier": (lambda b, x: b.input("x y", (1,), "float32"), PlanError, "its name must be a Python identifier"),
    "not a string": (lambda b, x: b.position(3), PlanError, "a position is called 3"),
    "position like a Dim": (lambda b, x: b.position("n"), PlanError, "a position is called 'n', and so is a Dim"),
    "Dim like a position": (lambda b, x: [b.position("p"), b.input("y", (Dim("p", max=3),), "float32")], PlanError,
                            "input 'y': a Dim is called 'p', and so is a position"),
    "two Dims": (lambda b, x: b.input("y", (Dim("n", max=7),), "float32"), PlanError,
                 "input 'y': there are two Dims called 'n', with max 6 and 7"),
    "dtype": (lambda b, x: b.input("y", (1,), "float64"), DTypeError, "input 'y' is 'float64'; supported: float32"),
    "no size": (lambda b, x: b.input("y", (), "float32"), ShapeError, r"input 'y' has shape \(\)"),
    "zero size": (lambda b, x: b.input("y", (2, 0), "float32"), ShapeError, "each size must be a positive int or"),
    "size": (lambda b, x: b.input("y", (2, 1.5), "float32"), ShapeError, "each size must be a positive int or a Dim"),
    "constant dtype": (lambda b, x: b.constant("y", np.ones(3)), DTypeError, "`y` is float64; supported"),
    "constant shape": (lambda b, x: b.constant("y", np.float32(1)), ShapeError, r"constant 'y' has shape \(\)"),
    "no sizes": (lambda b, x: b.kv_cache("c"), PlanError, "cache 'c': give either `cache` or the sizes of a new one"),
    "no cache": (lambda b, x: b.kv_cache("c", cache=X), PlanError, "cache 'c' is a ndarray; it must be"),
    "sizes": (lambda b, x: b.kv_cache("c", batch=0, num_kv_heads=1, capacity=1, head_dim=1), OptionError,
              "`batch` is 0"),
    "output of an input": (lambda b, x: b.output("out", x), PlanError, "output 'out': x .* is not made by a node"),
    "output of an array": (lambda b, x: b.output("out", X), PlanError, "output 'out': `value` is array"),
}


@pytest.mark.parametrize(("declare", "kind", "message"), NAMES.values(), ids=NAMES.keys())
def test_a_wrong_declaration(device: Device, declare: Callable[[GraphBuilder, Any], Any], kind: type[Exception],
                             message: str) -> None:
    builder, x, node = start(device)
    with pytest.raises(kind, match=message):
        declare(builder, x)
    builder.input("y", (1,), "bool")  # the name of what was refused is free
    builder.output("out", node)
    with pytest.raises(PlanError, match="there are two outputs called 'out'"):
        builder.output("out", node)


def test_outputs_of_caches_and_replaced_scores(device: Device) -> None:
    builder, x, _ = start(device)
    with pytest.raises(PlanError, match=r"output 'c': `value` is CacheValue.*; it must be a tensor"):
        builder.output("c", builder.kv_cache("cache", batch=1, num_kv_heads=2, capacity=4, head_dim=4))
    scores = builder.attn_weights(x, x, name="scores")
    builder.softmax(scores, name="weights")
    with pytest.raises(PlanError, match=r"output 's': scores .* is replaced by its softmax in weights. Hint"):
        builder.output("s", scores)


def test_builds_that_are_refused(device: Device) -> None:
    builder, _, node = start(device)
    with pytest.raises(PlanError, match="the graph has no output and appends to no cache"):
        builder.build()
    builder.output("out", node)
    builder.input("lost", (1,), "float32")
    builder.constant("forgotten", X)
    with pytest.raises(PlanError, match=r"nothing uses the inputs \['lost', 'forgotten'\]. Hint"):
        builder.build()


def test_a_built_graph_cannot_be_added_to(device: Device) -> None:
    builder, x, node = start(device)
    builder.output("out", node)
    graph = builder.build()
    for declare in (lambda: builder.build(), lambda: builder.input("y", (1,), "float32"), lambda: builder.position("p"),
                    lambda: builder.constant("y", X), lambda: builder.kv_cache("c", batch=1),
                    lambda: builder.attention(x, x, x), lambda: builder.output("again", node)):
        with pytest.raises(PlanError, match=r"the graph is built; nothing can be added|build\(\) was called twice"):
            declare()
    assert graph.run({"x": X})["out"].shape == X.shape


def test_caches_that_do_not_belong(device: Device) -> None:
    builder = GraphBuilder(device)
    cache = KVCache(1, 1, 4, 4, device=device)
    builder.kv_cache("cache", cache=cache)
    with pytest.raises(PlanError, match=r"cache 'again' is the same KVCache as another of this graph. Hint"):
        builder.kv_cache("again", cache=cache)
    with pytest.raises(PlanError, match="give either"):
        builder.kv_cache("both", cache=cache, batch=1)
    closed = KVCache(1, 1, 4, 4, device=device)
    closed.close()
    with pytest.raises(ClosedError, match="a KVCache was used after close"):
        builder.kv_cache("closed", cache=closed)
    with Device(device.info.index) as own, pytest.raises(PlanError, match=r"'far' lies on .* but the graph is for"):
        builder.kv_cache("far", cache=KVCache(1, 1, 4, 4, device=own))


def test_stale_views(device: Device) -> None:
    builder = GraphBuilder(device)
    rows = builder.input("rows", (1, 2, 1, 4), "float32")
    cache = builder.kv_cache("cache", batch=1, num_kv_heads=1, capacity=4, head_dim=4, num_layers=2, dtype="float32")
    first = builder.kv_append(cache, rows, rows, builder.position("p"), name="first")
    other = builder.kv_append(cache, rows, rows, builder.position("o"), layer=1, name="other")
    probs = builder.softmax(builder.attn_weights(rows, first, layout="bshd"))
    with pytest.raises(PlanError, match="must be read from the same append"):
        builder.attn_output(probs, other)
    with pytest.raises(PlanError, match="must be read from the same append"):
        builder.attn_output(probs, rows)
    builder.kv_append(first, rows, rows, builder.position("q"), name="second")
    for read in (lambda: builder.attention(rows, first, first, layout="bshd"),
                 lambda: builder.attn_output(probs, first)):
        with pytest.raises(PlanError, match=r"layer 0 of cache 'cache' was appended to by second since; .* Hint"):
            read()


def test_what_the_device_cannot_do_is_refused_at_the_build_and_leaves_nothing(device: Device) -> None:
    with Device(device.info.index) as own:
        own.info = replace(own.info, max_storage_buffer_range=1 << 20)
        builder, x, _ = start(own)
        n = Dim("many", max=2000)
        long = builder.input("long", (1, 2, n, 4), "float32")
        builder.output("out", builder.attn_weights(long, long, name="scores"))
        builder.output("node", builder.attention(x, x, x))
        with pytest.raises(CapacityError, match=r"^scores .* needs 33030144 bytes; .* is 1048576 bytes. Hint"):
            builder.build()
        assert own.allocation_count == 0
        builder, x, _ = start(own)
        made = builder.kernel("big", SCALE_AND_ADD, [x, x], {"y": ((4,), "float32")},
                              push={f"word{i}": 0 for i in range(own.info.max_push_constants_bytes // 4)})
        builder.output("out", made[0])
        with pytest.raises(NoKernelError, match=r"big cannot run on .*bytes of push constants"):
            builder.build()
        assert own.allocation_count <= 2  # the boundary tensor and its staging


@pytest.fixture(scope="module")
def graph(device: Device) -> Graph:
    """A graph with a cache of capacity 8 that holds 3 tokens, and a size that no input has."""
    builder = GraphBuilder(device)
    query, key = (builder.input(name, (1, N, heads, 4), "float32") for name, heads in (("query", 4), ("key", 2)))
    mask = builder.input("mask", (Dim("columns", max=9),), "bool")
    cache = KVCache(1, 2, 8, 4, dtype="float32", device=device)
    view = builder.kv_cache("cache", cache=cache)
    builder.output("out", builder.sdpa_with_kv_cache(query, key, key, view, builder.position("at"), mask=mask))
    graph = builder.build()
    graph.run(given(3, 3), at=0)
    return graph


def given(tokens: int, columns: int, **changes: Any) -> dict[str, Any]:
    return {"query": np.ones((1, tokens, 4, 4), np.float32), "key": np.ones((1, tokens, 2, 4), np.float32),
            "mask": np.ones(columns, bool)} | changes


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "missing input": ({"query": X}, {"at": 0}, PlanError, r"inputs missing: \['key', 'mask'\]; .* not declared: \[\]"),
    "unknown input": (given(1, 4, value=X), {"at": 3}, PlanError, r"that were not declared: \['value'\]"),
    "missing position": (given(1, 4), {}, PlanError, r"position 'at' is missing. Hint: run\(inputs, at=\.\.\.\)"),
    "unknown position": (given(1, 4), {"at": 3, "pos": 3}, PlanError, "'pos' is neither a position nor a Dim"),
    "unknown array": (given(1, 4), {"at": 3, "pos": X}, PlanError, "'pos' is neither a position nor a Dim"),
    "float size": (given(2, 5), {"at": 3, "n": 2.7}, PlanError, "'n' is 2.7; the size of a Dim must be an integer"),
    "float position": (given(1, 4), {"at": 3.0}, OptionError, "position 'at' is 3.0; it must be an integer"),
    "positions": (given(1, 4), {"at": [3, 3]}, OptionError, "position 'at' has 2 entries; it must be an integer"),
    "far position": (given(1, 4), {"at": 2**30}, OptionError, "position 'at' is 1073741824; it must be within"),
    "gap": (given(1, 5), {"at": 4}, OptionError, "`input_pos` is 4 for batch entry 0, but layer 0 holds 3"),
    "negative": (given(1, 5), {"at": -1}, OptionError, "`input_pos` is -1"),
    "capacity": (given(6, 9), {"at": 3}, CapacityError, "append of 6 tokens at input_pos 3 needs 9 rows"),
    "length above its capacity": (given(7, 9), {"at": 0}, CapacityError,
                                  "input 'query' has n 7; the graph was built for at most 6. .* Hint"),
    "other Dim above its capacity": (given(1, 10), {"at": 0}, CapacityError, "input 'mask' has columns 10"),
    "nothing": (given(0, 4), {"at": 3}, ShapeError, "every size must be at least 1"),
    "two lengths": (given(2, 5, key=np.ones((1, 1, 2, 4), np.float32)), {"at": 3}, PlanError,
                    "input 'key' has shape .* which makes n 1; it is 2 elsewhere in this run"),
    "a Dim by name": (given(2, 5), {"at": 3, "n": 1}, PlanError, "which makes n 2; it is 1 elsewhere"),
    "rank": (given(1, 4, query=np.ones((1, 4, 4), np.float32)), {"at": 3}, ShapeError,
             r"input 'query' has shape \(1, 4, 4\); it was declared as \(1, n \(at most 6\), 4, 4\)"),
    "fixed size": (given(1, 4, query=np.ones((1, 1, 2, 4), np.float32)), {"at": 3}, ShapeError,
                   r"input 'query' has shape \(1, 1, 2, 4\)"),
    "dtype": (given(1, 4, query=np.ones((1, 1, 4, 4))), {"at": 3}, DTypeError,
              "input 'query' is float64; it was declared as float32"),
    "short mask": (given(2, 4), {"at": 3}, ShapeError, "a mask has 4 columns; it needs at least 5"),
}


@pytest.mark.parametrize(("inputs", "scalars", "kind", "message"), RUNS.values(), ids=RUNS.keys())
def test_a_refused_run_changes_nothing(graph: Graph, inputs: dict[str, Any], scalars: dict[str, Any],
                                       kind: type[Exception], message: str) -> None:
    cache = graph._plan.caches["cache"]
    before = raw_words(cache)
    with pytest.raises(kind, match=message):
        graph.run(inputs, **scalars)
    assert cache.lengths.tolist() == [[3]]
    for got, kept in zip(raw_words(cache), before, strict=True):
        np.testing.assert_array_equal(got, kept)
    graph.run(given(3, 1), at=0, n=3)  # a size may be given by name as well


def test_closed_graphs_caches_and_devices(device: Device) -> None:
    with Device(device.info.index) as own:
        builder, x, node = start(own)
        cache = KVCache(1, 2, 8, 4, dtype="float32", device=own)
        builder.kv_append(builder.kv_cache("cache", cache=cache), x, x, builder.position("at"), layout="bhsd")
        builder.output("out", node)
        first = builder.build()
        first.run({"x": X}, at=0)
        cache.close()
        with pytest.raises(ClosedError, match="a KVCache was used after close"):
            first.run({"x": X}, at=0)
        first.close()
        first.close()
        for use in (lambda: first.run({"x": X}, at=0), lambda: first.report(), lambda: first.timings()):
            with pytest.raises(ClosedError, match="a graph was used after close"):
                use()
        assert own.allocation_count <= 2  # the boundary tensor and its staging
        builder, _, node = start(own)
        builder.output("out", node)
        second = builder.build()
    with pytest.raises(ClosedError, match=r"used after close\(\)"):
        second.run({"x": X})
    with pytest.raises(ClosedError, match=r"the device .* was used after close"):
        GraphBuilder(own)
    with pytest.raises(OptionError, match=r"`device` is 0; it must be a vkattn\.Device"):
        GraphBuilder(0)


def test_a_graph_that_owns_its_cache_frees_it(device: Device) -> None:
    with Device(device.info.index) as own:
        for _ in range(2):
            builder = GraphBuilder(own)
            rows = builder.input("rows", (1, N, 2, 4), "float32")
            cache = builder.kv_cache("cache", batch=1, num_kv_heads=2, capacity=8, head_dim=4, dtype="float32")
            builder.output("out", builder.sdpa_with_kv_cache(rows, rows, rows, cache, builder.position("at")))
            graph = builder.build()
            assert graph.run({"rows": np.ones((1, 2, 2, 4), np.float32)}, at=0)["out"].shape == (1, 2, 2, 4)
            graph.close()
            assert own.allocation_count <= 2
