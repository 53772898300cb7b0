"""Graphs of several nodes: layers that feed each other, shared caches, constants, masks, a user's own kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.caches import Session, small_buffers
from tests.graphs import SCALE_AND_ADD, float_word
from tests.tolerance import assert_matches_oracle
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import OptionError, PlanError
from vkattn.kernels.split import MAX_ROWS
from vkattn.runtime.device import Device


def layers(device: Device, cache: KVCache, max_q_len: int, heads: int = 4) -> Any:
    """Return a graph of all layers of ``cache``: each attends with the queries that the one before it gave."""
    builder = GraphBuilder(device)
    q_len = Dim("q_len", max=max_q_len)
    query, key, value = (builder.input(name, (1, q_len, count, cache.head_dim), "float32")
                         for name, count in (("query", heads), ("key", cache.num_kv_heads), ("value",
                                                                                             cache.num_kv_heads)))
    view, position = builder.kv_cache("cache", cache=cache), builder.position("input_pos")
    for layer in range(cache.num_layers):
        query = builder.sdpa_with_kv_cache(query, key, value, view, position, layer=layer, name=f"layer{layer}")
        builder.output(f"out{layer}", query)
    return builder.build()


def run_layers(graph: Any, session: Session, tokens: int, start: int) -> dict[str, np.ndarray]:
    """Run such a graph; compare each layer with the oracle, given the device's own result of the layer before."""
    query, key, value = session.arrays(tokens)
    result: dict[str, np.ndarray] = graph.run({"query": query, "key": key, "value": value}, input_pos=start)
    for layer in range(session.cache.num_layers):
        session.model.update(key, value, start, layer)
        session.compare(result[f"out{layer}"], None, query, start, layer)
        query = result[f"out{layer}"]
    return result


def test_the_output_of_a_layer_is_the_query_of_the_next(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(1, 2, 24, 8, num_layers=4, dtype="float16", device=device)
    session = Session(cache, 4, rng)
    graph = layers(device, cache, 9)
    for tokens, start in ((9, 0), (1, 9), (1, 10), (7, 11), (9, 2)):
        run_layers(graph, session, tokens, start)
    appends = sum(dispatch.variant.kernel == "kv_append" for dispatch in graph._longest.dispatches)
    assert appends in (0, 4), "of each layer by itself, or inside its attention"
    assert graph.report().num_segments >= 4 + appends, "each layer reads what its append and the layer before wrote"


def test_prefill_and_decode_graphs_share_a_cache(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(1, 2, 40, 8, num_layers=2, dtype="float32", device=device)
    session = Session(cache, 4, rng)
    prefill, decode = layers(device, cache, 16), layers(device, cache, 1)
    for tokens, start in ((16, 0), (1, 16), (1, 17), (5, 18), (1, 23), (16, 4), (1, 20)):
        run_layers(decode if tokens == 1 else prefill, session, tokens, start)
    session.step(session.arrays(3), 21, 1)
    decode.close()
    run_layers(prefill, session, 2, 10)


def test_attention_output_is_appended_to_the_next_cache(device: Device, rng: np.random.Generator) -> None:
    """What one node made is another's new keys and values, without leaving the device."""
    builder = GraphBuilder(device)
    x = builder.input("x", (2, Dim("n", max=6), 3, 8), "float32")
    caches = [KVCache(2, 3, 12, 8, dtype="float16", device=device) for _ in range(2)]
    at = builder.position("at")
    first = builder.sdpa_with_kv_cache(x, x, x, builder.kv_cache("a", cache=caches[0]), at)
    builder.output("first", first)
    builder.output("second", builder.sdpa_with_kv_cache(x, first, first, builder.kv_cache("b", cache=caches[1]), at))
    graph = builder.build()
    sessions = [Session(cache, 3, rng) for cache in caches]
    for tokens, start in ((6, 0), (1, 6), (3, [7, 2])):
        given = sessions[0].arrays(tokens)[0]
        result = graph.run({"x": given}, at=start)
        for session, rows, name in zip(sessions, (given, result["first"]), ("first", "second"), strict=True):
            session.model.update(rows, rows, start)
            session.compare(result[name], None, given, start)


def test_a_run_chooses_the_layer(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(1, 2, 24, 8, num_layers=3, dtype="float16", device=device)
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (1, Dim("n", max=4), heads, 8), "float32")
                         for name, heads in (("query", 4), ("key", 2), ("value", 2)))
    view = builder.kv_append(builder.kv_cache("cache", cache=cache), key, value, builder.position("at"),
                             layer=builder.position("layer"))
    builder.output("out", builder.attention(query, view, view, causal="bottom_right", layout="bshd"))
    graph = builder.build()
    session = Session(cache, 4, rng)
    for tokens, start in ((4, 0), (1, 4), (2, 5)):
        for layer in (2, 0, 1):
            arrays = session.arrays(tokens)
            out = graph.run(dict(zip(("query", "key", "value"), arrays, strict=True)), at=start, layer=layer)["out"]
            session.model.update(*arrays[1:], start, layer)
            session.compare(out, None, arrays[0], start, layer)
    for wrong, message in ((3, "`layer` is 3"), (-1, "`layer` is -1"), ([0, 1], "position 'layer' has 2 entries")):
        with pytest.raises(OptionError, match=message):
            graph.run(dict(zip(("query", "key", "value"), arrays, strict=True)), at=0, layer=wrong)


def test_layers_of_a_cache_in_several_buffers(device: Device, rng: np.random.Generator) -> None:
    with small_buffers(device, 25000) as own:
        cache = KVCache(1, 2, 100, 12, num_layers=5, dtype="float32", device=own)
        assert len(cache.storage.groups) == 3
        session = Session(cache, 4, rng)
        graph = layers(own, cache, 4)
        for tokens, start in ((4, 0), (1, 4), (4, 5)):
            run_layers(graph, session, tokens, start)


def test_two_appends_to_a_layer_in_one_graph(device: Device, rng: np.random.Generator) -> None:
    """The first one is read before the second; the second starts where the first ended, or truncates it."""
    cache = KVCache(1, 2, 16, 8, dtype="float32", device=device)
    builder = GraphBuilder(device)
    query, rows = (builder.input(name, (1, 3, heads, 8), "float32") for name, heads in (("query", 4), ("rows", 2)))
    view = builder.kv_cache("cache", cache=cache)
    for name in ("first", "second"):
        after = builder.kv_append(view, rows, rows, builder.position(f"{name}_pos"))
        builder.output(name, builder.attention(query, after, after, causal="bottom_right", layout="bshd"))
    graph = builder.build()
    session = Session(cache, 4, rng)
    for starts in ((0, 3), (6, 9), (2, 4), (5, 0)):
        query_rows, key, _ = session.arrays(3)
        result = graph.run({"query": query_rows, "rows": key}, first_pos=starts[0], second_pos=starts[1])
        for name, start in zip(("first", "second"), starts, strict=True):
            session.model.update(key, key, start)
            session.compare(result[name], None, query_rows, start)
        np.testing.assert_array_equal(cache.lengths, session.model.lengths)
    with pytest.raises(OptionError, match="`input_pos` is 4 for batch entry 0, but layer 0 holds 3 tokens"):
        graph.run({"query": query_rows, "rows": key}, first_pos=0, second_pos=4)
    np.testing.assert_array_equal(cache.lengths, session.model.lengths)


def test_two_layers_that_a_run_chooses_must_differ(device: Device) -> None:
    cache = KVCache(1, 1, 8, 4, num_layers=3, dtype="float32", device=device)
    builder = GraphBuilder(device)
    rows = builder.input("rows", (1, 2, 1, 4), "float32")
    view, at = builder.kv_cache("cache", cache=cache), builder.position("at")
    for name in ("a", "b"):
        builder.kv_append(view, rows, rows, at, layer=builder.position(name))
    graph = builder.build()
    given = {"rows": np.ones((1, 2, 1, 4), np.float32)}
    graph.run(given, at=0, a=2, b=0)
    assert cache.lengths.tolist() == [[2], [0], [2]]
    with pytest.raises(PlanError, match="layer 1 of cache 'cache' is chosen by position 'a' too"):
        graph.run(given, at=0, a=1, b=1)
    assert cache.lengths.tolist() == [[2], [0], [2]]


def test_constants(device: Device, rng: np.random.Generator) -> None:
    key, value = (rng.standard_normal((1, 2, 50, dim)).astype(np.float16) for dim in (8, 6))
    mask = rng.random((50,)) < 0.6
    builder = GraphBuilder(device)
    query = builder.input("query", (1, 4, Dim("n", max=9), 8), "float32")
    constants = [builder.constant(name, array) for name, array in (("key", key), ("value", value), ("mask", mask))]
    builder.output("out", builder.attention(query, *constants[:2], mask=constants[2]))
    graph = builder.build()
    kept = [array.copy() for array in (key, value, mask)]
    for array in (key, value, mask):
        array[...] = 0  # the graph has copies
    for tokens in (9, 1, 4):
        given = rng.standard_normal((1, 4, tokens, 8), np.float32)
        assert_matches_oracle(graph.run({"query": given})["out"], given, *kept[:2], mask=kept[2])


@pytest.mark.parametrize(("kind", "sizes"), [
    ("bool", ("n", "columns")), ("float32", (4, "n", "columns")), ("bool", (2, 1, "n", 40)), ("float32", ("n", 1)),
    ("bool", (2, 1, 1, "columns"))], ids=str)
def test_masks_are_inputs(device: Device, rng: np.random.Generator, kind: str, sizes: tuple[Any, ...]) -> None:
    """A mask may have a last size of its own: at least the longest live length, or 1."""
    cache = KVCache(2, 2, 40, 8, dtype="float32", device=device)
    dims = {"n": Dim("n", max=5), "columns": Dim("columns", max=64)}
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (2, dims["n"], heads, 8), "float32")
                         for name, heads in (("query", 4), ("key", 2), ("value", 2)))
    mask = builder.input("mask", [dims.get(size, size) for size in sizes], kind)
    builder.output("out", builder.sdpa_with_kv_cache(query, key, value, builder.kv_cache("cache", cache=cache),
                                                     builder.position("at"), mask=mask))
    graph = builder.build()
    session = Session(cache, 4, rng)
    for tokens, start, columns in ((5, 0, 5), (1, 5, 33), (5, [6, 1], 64), (5, [11, 2], 1), (3, [12, 7], 15)):
        arrays = session.arrays(tokens)
        shape = [{"n": tokens, "columns": columns}.get(size, size) for size in sizes]
        drawn = rng.random(shape) < 0.6
        given = drawn if kind == "bool" else np.where(drawn, rng.standard_normal(shape), -np.inf).astype(np.float32)
        out = graph.run(dict(zip(("query", "key", "value"), arrays, strict=True)) | {"mask": given}, at=start)["out"]
        session.model.update(*arrays[1:], start)
        session.compare(out, None, arrays[0], start, mask=given)


def test_a_kernel_of_ones_own(device: Device, rng: np.random.Generator, tmp_path: Path) -> None:
    """Twice between attention nodes, with other push constants; both share a pipeline."""
    (tmp_path / "kernel.spv").write_bytes(SCALE_AND_ADD)
    n = Dim("n", max=12)
    builder = GraphBuilder(device)
    x, y = (builder.input(name, (1, 2, n, 8), "float32") for name in "xy")
    (z,) = builder.kernel("mix", SCALE_AND_ADD, [x, y], {"z": ((1, 2, n, 8), "float32")},
                          push={"factor": float_word(0.5)}, dims=(2, n))
    attended = builder.attention(z, x, y)
    (out,) = builder.kernel("mix_again", tmp_path / "kernel.spv", [attended, z], {"out": ((1, 2, n, 8), "float32")},
                            push={"factor": float_word(-2.0)}, dims=(2, n), groups=3)
    for name, value in (("z", z), ("attended", attended), ("out", out)):
        builder.output(name, value)
    graph = builder.build()
    for tokens in (12, 1, 7):
        given = {name: rng.standard_normal((1, 2, tokens, 8), np.float32) for name in "xy"}
        result = graph.run(given)
        np.testing.assert_array_equal(result["z"], np.float32(0.5) * given["x"] + given["y"])
        assert_matches_oracle(result["attended"], result["z"], given["x"], given["y"])
        np.testing.assert_allclose(result["out"], -2 * result["attended"] + result["z"], rtol=1e-6, atol=1e-6)


def test_the_algorithms_of_a_node(device: Device) -> None:
    """One for a few rows; for many two, the second for runs of many; the one that was asked for."""
    builder = GraphBuilder(device)
    few, many = (builder.input(name, (1, 2, rows, 8), "float32") for name, rows in (("few", 5), ("many", MAX_ROWS + 1)))
    for name, query, algorithm, expected in (("a", few, "auto", ("split",)), ("b", many, "auto", ("split", "fused")),
                                             ("c", few, "three_pass", ("three_pass",))):
        builder.attention(query, query, query, algorithm=algorithm, name=name)
        assert builder.algorithms_of(name) == expected
    with pytest.raises(PlanError, match="'d' is no attention node"):
        builder.algorithms_of("d")
