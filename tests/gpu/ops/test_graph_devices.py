"""The same bits however the graph is realised: far inputs, full boundaries, rows in chunks, sizes from the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.graphs import Decoder
from tests.tolerance import assert_matches_oracle
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import OptionError
from vkattn.runtime.device import Device

STEPS = ((9, 0), (1, 9), (9, 4))


def run_all(device: Device, form: str, algorithm: str) -> list[dict[str, np.ndarray]]:
    """Return what a decoder gives for the same inputs on any device; each step is compared with the oracle."""
    rng = np.random.default_rng(7)
    made = Decoder(device, (6, 2, 24), 20, 9, "float16", form, algorithm=algorithm)
    return [made.step(made.arrays(rng, tokens), start) for tokens, start in STEPS]


def assert_same(first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]]) -> None:
    for one, other in zip(first, second, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("form", ["node", "passes"])
def test_inputs_that_are_far_from_the_shaders(device: Device, form: str) -> None:
    """A discrete device copies live words of inputs into its own memory first; here a software device plays one.

    The bits are the same where the kernels are: those of "auto" differ between kinds of devices.
    """
    with Device(device.info.index) as own:
        own.info = replace(own.info, device_type="discrete" if own.info.is_unified else "integrated")
        far = run_all(own, form, "auto" if form == "node" else "")
    if form == "passes":
        assert_same(run_all(device, form, ""), far)


@pytest.mark.parametrize("device_type", ["integrated", "discrete"])
def test_kernels_read_params_from_the_memory_of_the_device(device: Device, rng: np.random.Generator,
                                                           device_type: str) -> None:
    """A graph and a plan of single calls copy them once in a run, where the memory is not the host's as well."""
    arrays = {name: rng.standard_normal((1, 2, 5, 8), np.float32) for name in ("query", "key", "value")}
    with Device(device.info.index) as own:
        own.info = replace(own.info, device_type=device_type)
        builder = GraphBuilder(own)
        builder.output("out", builder.attention(*(builder.input(name, array.shape, "float32")
                                                  for name, array in arrays.items())))
        graph = builder.build()
        assert_matches_oracle(graph.run(arrays)["out"], *arrays.values())
        assert_matches_oracle(vkattn.attention(*arrays.values(), device=own), *arrays.values())
        (plan,) = own.plans.values()
        for recording in (graph.recording, plan.recording):
            attention = [dispatch for dispatch in recording.dispatches if dispatch.variant.name.startswith("attn_")]
            kinds = {dispatch.bindings[0].buffer.kind for dispatch in attention}
            assert kinds == {"host" if device_type == "integrated" else "storage"}
            copies = 0 if device_type == "integrated" else 4 if recording is graph.recording else 5  # and a mask
            assert recording.num_dispatches == len(attention) + copies


@pytest.mark.parametrize(("form", "algorithm"), [("node", "three_pass"), ("node", "split"), ("passes", "")])
def test_full_boundaries(device: Device, form: str, algorithm: str) -> None:
    with Device(device.info.index, boundary="full" if device.boundary == "coherent" else "coherent") as own:
        assert_same(run_all(device, form, algorithm), run_all(own, form, algorithm))


def test_rows_in_chunks(device: Device, rng: np.random.Generator) -> None:
    """A small score budget: a long run takes many chunks, a short one the recording of a single chunk."""
    results = []
    given = {tokens: {name: np.random.default_rng(tokens).standard_normal((1, heads, tokens, 16), np.float32)
                      for name, heads in (("query", 4), ("key", 2), ("value", 2))} for tokens in (150, 7)}
    for budget in (64 << 20, 70000):
        with Device(device.info.index, score_budget_bytes=budget) as own:
            builder = GraphBuilder(own)
            n = Dim("n", max=150)
            query, key, value = (builder.input(name, (1, heads, n, 16), "float32")
                                 for name, heads in (("query", 4), ("key", 2), ("value", 2)))
            out = builder.attention(query, key, value, causal="top_left", algorithm="three_pass")
            builder.output("out", out)
            builder.output("chained", builder.attention(out, key, value, algorithm="three_pass"))
            graph = builder.build()
            assert (graph.report().num_dispatches > 20) == (budget == 70000)
            kept = 1 if own.info.is_unified else 3  # `out`, and the device's own copies of query, key and value
            assert graph.report().scratch_bytes <= budget + kept * 150 * 4 * 16 * 4 + 4096
            results.append([graph.run(given[tokens]) for tokens in (150, 7, 150)])
    assert_same(*results)
    for result, tokens in zip(results[0], (150, 7, 150), strict=True):
        arrays = [given[tokens][name] for name in ("query", "key", "value")]
        assert_matches_oracle(result["out"], *arrays, causal="top_left")
        assert_matches_oracle(result["chained"], result["out"], *arrays[1:])


def test_kv_len_and_q_offset_from_the_run(device: Device, rng: np.random.Generator) -> None:
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (3, heads, tokens, 8), "float32") for name, heads, tokens in
                         (("query", 4, Dim("q_len", max=6)), ("key", 2, Dim("keys", max=70)),
                          ("value", 2, Dim("keys", max=70))))
    builder.output("out", builder.attention(query, key, value, window=(9, None), causal="top_left",
                                            kv_len=builder.position("kv_len"), q_offset=builder.position("q_offset")))
    graph = builder.build()
    for q_len, keys, kv_len, q_offset in ((6, 70, 33, 20), (1, 40, [40, 0, 7], [39, 3, -5]), (6, 70, [70, 1, 64], 64)):
        arrays = [rng.standard_normal((3, heads, tokens, 8), np.float32) for heads, tokens in
                  ((4, q_len), (2, keys), (2, keys))]
        for array in arrays[1:]:
            array[:, :, int(np.max(kv_len)) :] = np.nan
        out = graph.run(dict(zip(("query", "key", "value"), arrays, strict=True)), kv_len=np.array(kv_len),
                        q_offset=q_offset)["out"]
        assert_matches_oracle(out, *arrays, window=(9, None), causal="top_left", kv_len=kv_len, q_offset=q_offset)
    given = dict(zip(("query", "key", "value"), arrays, strict=True))
    with pytest.raises(OptionError, match=r"kv_len is \[71, 71, 71\]; it must be within 0 .. 70"):
        graph.run(given, kv_len=71, q_offset=0)
    with pytest.raises(OptionError, match="position 'kv_len' has 2 entries; it must be an integer, or 3 of them"):
        graph.run(given, kv_len=[1, 2], q_offset=0)


def test_caches_of_different_batches_in_one_graph(device: Device, rng: np.random.Generator) -> None:
    """One position serves both as an integer; a list is for the cache of that batch only."""
    builder = GraphBuilder(device)
    at, other = builder.position("at"), builder.position("other")
    caches = {batch: KVCache(batch, 1, 8, 4, dtype="float32", device=device) for batch in (1, 3)}
    for batch, cache in caches.items():
        rows = builder.input(f"rows{batch}", (batch, 2, 1, 4), "float32")
        out = builder.sdpa_with_kv_cache(rows, rows, rows, builder.kv_cache(f"cache{batch}", cache=cache),
                                         at if batch == 1 else other)
        builder.output(f"out{batch}", out)
    graph = builder.build()
    kept: dict[int, list[np.ndarray]] = {1: [], 3: []}
    for start in (0, 2, 4):
        given: dict[str, Any] = {f"rows{batch}": rng.standard_normal((batch, 2, 1, 4), np.float32) for batch in caches}
        result = graph.run(given, at=start, other=[start] * 3)
        for batch, rows in kept.items():
            rows.append(given[f"rows{batch}"])
            keys = np.concatenate(rows, axis=1)
            assert_matches_oracle(result[f"out{batch}"], rows[-1], keys, keys, causal="bottom_right", layout="bshd")
    with pytest.raises(OptionError, match="position 'at' has 3 entries"):
        graph.run(given, at=[0, 0, 0], other=0)
    assert caches[1].lengths.tolist() == [[6]]
