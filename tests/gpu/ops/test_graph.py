"""One graph, recorded once, for any lengths: upstream's sequences, replay in any order, scores as outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.caches import GUARD, fill_words, poison
from tests.graphs import FORMS, SEQUENCES, Decoder, assert_scores
from tests.tolerance import assert_matches_oracle
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.runtime.device import Device


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_upstream_sequences(device: Device, rng: np.random.Generator, name: str, dtype: str, form: str) -> None:
    """Then the same from position 0 gives the same bits, and so does long -> short -> long."""
    sizes, steps = SEQUENCES[name]
    made = Decoder(device, sizes, sum(steps), max(steps), dtype, form)
    given = [(made.arrays(rng, tokens), start)
             for tokens, start in zip(steps, np.cumsum((0, *steps[:-1])).tolist(), strict=True)]
    first = [made.step(arrays, start) for arrays, start in given]
    assert made.cache.lengths.item() == made.capacity
    for (arrays, start), before in zip(given, first, strict=True):
        again = made.graph.run(arrays, input_pos=start)
        for output, array in before.items():
            np.testing.assert_array_equal(again[output], array, err_msg=output)
    longest = min(max(steps), sum(steps) // 2, 33)
    long, short, other = (made.arrays(rng, tokens) for tokens in (longest, 1, longest - 1))
    whole = made.step(long, 0)
    made.step(short, longest)
    made.step(other, longest + 1)
    made.step(short, 0)
    for output, array in made.step(long, 0).items():
        np.testing.assert_array_equal(array, whole[output], err_msg=output)


def test_large_scores(device: Device, rng: np.random.Generator) -> None:
    made = Decoder(device, (4, 2, 128), 40, 8)
    for start, tokens in ((0, 8), (8, 1), (9, 7)):
        made.step(made.arrays(rng, tokens, size=7.0), start)
        made.step(made.arrays(rng, tokens, size=0.01), start)


@pytest.mark.parametrize("options", [{"softcap": 5.0, "window": (4, None)},
                                     {"scale": -0.1, "alibi_slopes": np.linspace(0, 1, 4)}], ids=list)
def test_options_of_scores(device: Device, rng: np.random.Generator, options: dict[str, Any]) -> None:
    made = Decoder(device, (4, 2, 8), 80, 8, form="passes", options=options)
    for start, tokens in ((0, 8), (8, 8), (16, 1), (10, 3)):
        made.step(made.arrays(rng, tokens), start)


@pytest.mark.parametrize("form", FORMS)
def test_stale_scratch_and_a_poisoned_cache_have_no_effect(device: Device, rng: np.random.Generator, form: str) -> None:
    made = Decoder(device, (6, 2, 20), 90, 70, form=form)
    given = [(made.arrays(rng, tokens), start) for start, tokens in ((0, 70), (70, 1), (40, 3), (43, 33), (0, 1))]
    results = []
    for word in (0, GUARD):
        poison(made.cache, word)
        for buffer in made.graph._buffers:
            if buffer.name.startswith("arena"):
                fill_words(buffer, word)
            elif buffer.name.startswith(("inputs", "outputs")):
                buffer.words[...] = word
        results.append([made.step(arrays, start) for arrays, start in given])
    for clean, poisoned in zip(*results, strict=True):
        for name, array in clean.items():
            np.testing.assert_array_equal(array, poisoned[name], err_msg=name)


def test_only_live_words_of_outputs_are_written(device: Device, rng: np.random.Generator) -> None:
    """A graph for 32 rows, run with 1: no kernel and no copy touches what is not live."""
    for form, rows in (("node", 8), ("passes", 8)):
        made = Decoder(device, (rows, 8, 16), 128, 32, form=form)
        outputs = [buffer for buffer in made.graph._buffers if buffer.name.startswith("outputs")]
        for buffer in outputs:
            buffer.words[...] = GUARD
        made.step(made.arrays(rng, 1), 0)
        written = sum(int((buffer.words != GUARD).sum()) for buffer in outputs)
        tiles = 0 if form == "node" else 2 * 8 * 32 * 64  # scores and weights come in tiles of 32 x 64
        assert written <= rows * 16 + rows * 4 + tiles


def test_three_passes_of_a_large_matrix(device: Device, rng: np.random.Generator) -> None:
    """The whole matrix in one buffer, although a node of the same size would go in chunks of rows."""
    heads, length = (4, 700) if "SwiftShader" in device.info.name else (8, 1500)
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (1, heads, Dim("n", max=2048), 64), "float32") for name in "qkv")
    out = builder.attn_output(builder.softmax(builder.attn_weights(query, key, causal="top_left")), value)
    builder.output("out", out)
    graph = builder.build()
    arrays = {name: rng.standard_normal((1, heads, length, 64), np.float32) for name in "qkv"}
    result = graph.run(arrays)["out"]
    for row in (0, 31, 32, length // 2, length - 1):
        one = arrays["q"][:, :, row : row + 1]
        assert_matches_oracle(result[:, :, row : row + 1], one, arrays["k"], arrays["v"], causal="top_left",
                              q_offset=row)


def test_passes_with_a_mask_that_closes_tiles_and_rows(device: Device, rng: np.random.Generator) -> None:
    builder = GraphBuilder(device)
    q_len, kv_len = Dim("q_len", max=40), Dim("kv_len", max=200)
    query, key, value = (builder.input(name, (1, heads, tokens, 8), "float32") for name, heads, tokens in
                         (("query", 4, q_len), ("key", 2, kv_len), ("value", 2, kv_len)))
    mask = builder.input("mask", (q_len, kv_len), "bool")
    scores = builder.attn_weights(query, key, mask=mask)
    builder.output("scores", scores)
    probs, lse = builder.softmax(scores, return_lse=True)
    for name, made in (("probs", probs), ("lse", lse), ("out", builder.attn_output(probs, value))):
        builder.output(name, made)
    graph = builder.build()
    for rows, columns in ((40, 200), (3, 65), (33, 130)):
        arrays = {name: 3 * rng.standard_normal((1, heads, tokens, 8), np.float32) for name, heads, tokens in
                  (("query", 4, rows), ("key", 2, columns), ("value", 2, columns))}
        arrays["mask"] = rng.random((rows, columns)) < 0.7
        arrays["mask"][:, :64] = False
        arrays["mask"][1] = False
        result = graph.run(arrays)
        assert_matches_oracle(result["out"], *(arrays[name] for name in ("query", "key", "value")), lse=result["lse"],
                              mask=arrays["mask"])
        assert_scores(result["scores"], result["probs"], arrays["query"], arrays["key"], mask=arrays["mask"])
        assert (result["out"][:, :, 1] == 0).all()


def test_sinks_in_the_second_pass(device: Device, rng: np.random.Generator) -> None:
    sinks = np.array([1.0, -3.0])
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (2, 2, 5, 8), "float32") for name in ("query", "key", "value"))
    probs, lse = builder.softmax(builder.attn_weights(query, key), sinks=sinks, return_lse=True)
    builder.output("out", builder.attn_output(probs, value))
    builder.output("lse", lse)
    arrays = {name: rng.standard_normal((2, 2, 5, 8), np.float32) for name in ("query", "key", "value")}
    result = builder.build().run(arrays)
    assert_matches_oracle(result["out"], *arrays.values(), lse=result["lse"], sinks=sinks)


def test_outputs_are_fresh_and_a_value_may_have_two_names(device: Device, rng: np.random.Generator) -> None:
    builder = GraphBuilder(device)
    x = builder.input("x", (1, 2, Dim("n", max=9), 8), "float32")
    first = builder.attention(x, x, x)
    second = builder.attention(first, x, x)
    for name, value in (("first", first), ("again", first), ("second", second), ("twice", second)):
        builder.output(name, value)
    graph = builder.build()
    given = rng.standard_normal((1, 2, 7, 8), np.float32)
    result = graph.run({"x": given})
    kept = {name: array.copy() for name, array in result.items()}
    graph.run({"x": 2 * given[:, :, :3]})
    for name, array in result.items():
        np.testing.assert_array_equal(array, kept[name])
        assert array.flags.owndata and array.flags.writeable
    np.testing.assert_array_equal(result["first"], result["again"])
    np.testing.assert_array_equal(result["second"], result["twice"])
    assert_matches_oracle(result["first"], given, given, given)
    assert_matches_oracle(result["second"], result["first"], given, given)


def test_a_graph_that_only_appends(device: Device, rng: np.random.Generator) -> None:
    cache = KVCache(2, 2, 9, 4, dtype="float16", device=device)
    builder = GraphBuilder(device)
    rows = builder.input("rows", (2, Dim("n", max=4), 2, 4), "float32")
    builder.kv_append(builder.kv_cache("cache", cache=cache), rows, rows, builder.position("at"))
    graph = builder.build()
    for tokens, start in ((4, 0), (1, [4, 2]), (4, [5, 1])):
        assert graph.run({"rows": rng.standard_normal((2, tokens, 2, 4), np.float32)}, at=start) == {}
    assert cache.lengths.tolist() == [[9, 5]]


def test_the_report_adds_up(device: Device) -> None:
    made = Decoder(device, (4, 2, 16), 128, 8)
    report = made.graph.report()
    assert report.scratch_bytes == sum(row.size_bytes for row in report.buffers if row.name.startswith("arena"))
    assert report.caches == {"cache": made.cache.nbytes}
    assert report.device_bytes + report.staging_bytes == made.graph.nbytes
    for arena, start, size, first, last in report.scratch.values():
        row = next(row for row in report.buffers if row.name == arena)
        assert 0 <= start < start + size <= row.size_bytes
        assert 0 <= first <= last < report.num_dispatches
    assert "staging" in str(report)
    assert report.as_dict()["scratch_bytes"] == report.scratch_bytes


@pytest.mark.parametrize("tiers", [("base", "base,subgroup"), ("base,subgroup", "base")])
@pytest.mark.parametrize("algorithm", ["split", "fused"])
def test_a_graph_keeps_to_the_tiers_that_it_was_built_under(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, str], algorithm: str
) -> None:
    """Tiles of the kernels of one tier have other sizes than those of another."""
    monkeypatch.setenv("VKATTN_TIERS", tiers[0])
    tokens = {"split": 10, "fused": 130}[algorithm]
    made = Decoder(device, (6, 2, 16), 2 * tokens, tokens, algorithm=algorithm)
    monkeypatch.setenv("VKATTN_TIERS", tiers[1])
    made.step(made.arrays(rng, tokens), 0)
    made.step(made.arrays(rng, tokens - 1), tokens)
