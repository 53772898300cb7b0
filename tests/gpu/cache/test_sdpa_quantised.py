"""Attention over quantised caches: within the usual bounds of the oracle over what the cache stands for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.caches import Session, assert_holds
from tests.emulated import forced
from tests.fakes import with_tuning
from tests.ways import splits_of
from vkattn import GraphBuilder, KVCache
from vkattn.formats import QUANTISED
from vkattn.runtime.device import Device

PAIRS = [*((name, name) for name in QUANTISED), ("int8", "float16")]
MORE_PAIRS = [pytest.param(pair, marks=pytest.mark.slow) for pair in (("float32", "q4_0"), ("q8_0", "bfloat16"))]

#: Upstream's shapes: (query heads, KV heads, head_dim, capacity, (tokens of each step)), and a layout.
UPSTREAM = [((8, 4, 17, 5, (3, 1, 1)), "bshd"), ((8, 4, 17, 5, (3, 1, 1)), "bhsd"), ((8, 8, 17, 5, (1,) * 4), "bhsd"),
            ((8, 4, 16, 5, (1, 1)), "bshd"), ((32, 8, 128, 2048, (130, 1)), "bshd"),
            ((8, 1, 128, 2048, (24, 1)), "bhsd"), ((32, 16, 128, 2048, (33, 1)), "bhsd")]


def made_session(device: Device, rng: np.random.Generator, pair: tuple[str, str], *, heads: tuple[int, int] = (6, 2),
                 dims: tuple[int, int] = (20, 33), batch: int = 2, capacity: int = 70, size: float = 2.0,
                 **sizes: Any) -> Session:
    cache = KVCache(batch, heads[1], capacity, dims[0], value_dim=dims[1], dtype=pair[0], value_dtype=pair[1],
                    device=device, **sizes)
    return Session(cache, heads[0], rng, size)


@pytest.mark.parametrize(("shape", "layout"), UPSTREAM, ids=str)
def test_upstreams_shapes(device: Device, rng: np.random.Generator, shape: tuple[Any, ...], layout: str) -> None:
    """Keys and values go to +-15; unwritten rows hold NaN in their scales, and are never read.

    Queries to +-15 as well give scores in the hundreds, where one rounding of a score is 1e-5 of its weight: those keep
    the row-wise bound of the oracle, and queries of ordinary size an absolute 1e-4 too.
    """
    heads, kv_heads, head_dim, capacity, steps = shape
    made = made_session(device, rng, ("int8", "int8"), heads=(heads, kv_heads), dims=(head_dim, head_dim), batch=1,
                        capacity=capacity, size=5.0)
    start = 0
    for tokens in steps:
        arrays = [np.clip(array, -15, 15) for array in made.arrays(tokens)]
        made.step(arrays, start, layout=layout)
        arrays[0] = arrays[0] / np.float32(5)
        out = made.step(arrays, start, layout=layout)
        start += tokens
        keys, values = (array[0, :, :start] for array in made.model.arrays)
        expected = vkattn.oracle.attention(arrays[0], keys, values, layout="bshd", causal="bottom_right")
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
    assert_holds(made.cache, made.model)


@pytest.mark.parametrize("pair", [*PAIRS, *MORE_PAIRS], ids=str)
def test_prompts_and_steps_with_every_option(device: Device, rng: np.random.Generator, pair: tuple[str, str]) -> None:
    """Prompts take `fused`, steps `split`: window, softcap, sinks, ALiBi and a mask; a position for each entry."""
    made = made_session(device, rng, pair, num_layers=2)
    every: dict[str, Any] = {"window": (25, None), "softcap": 7.0, "sinks": np.arange(6.0) - 2, "scale": 0.2,
                             "alibi_slopes": np.linspace(0, 0.5, 6).astype(np.float32)}
    for start, tokens in ((0, 32), ([20, 7], 31), ([51, 38], 1), ([52, 39], 18), ([30, 5], 1)):
        made.step(made.arrays(tokens), start, 1, mask=rng.random((2, 1, 1, 70)) < 0.7, **every)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_any_dtype(device: Device, rng: np.random.Generator, dtype: str) -> None:
    made = made_session(device, rng, ("q8_0", "q8_0"), capacity=40)
    for start, tokens in ((0, 25), (25, 8), (33, 7)):  # 25 rows of 3 query heads go another way than 8
        made.step(made.arrays(tokens, dtype), start)


@pytest.mark.parametrize(("algorithm", "pair"), [
    *(("three_pass", (name, name)) for name in QUANTISED),
    *((algorithm, ("q4_0", "int8")) for algorithm in ("split", "fused", "three_pass"))], ids=str)
def test_every_algorithm_reads_every_format(device: Device, rng: np.random.Generator, algorithm: str,
                                            pair: tuple[str, str]) -> None:
    made = made_session(device, rng, pair, dims=(70, 20), capacity=50)
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (2, 2, heads, dim), "float32")
                         for name, heads, dim in (("q", 6, 70), ("k", 2, 70), ("v", 2, 20)))
    out, lse = builder.sdpa_with_kv_cache(
        query, key, value, builder.kv_cache("cache", cache=made.cache), builder.position("at"), window=(30, None),
        algorithm=algorithm, return_lse=True)
    builder.output("out", out)
    builder.output("lse", lse)
    graph = builder.build()
    for start in range(0, 50, 2):
        arrays = made.arrays(2)
        result = graph.run(dict(zip("qkv", arrays, strict=True)), at=start)
        made.model.update(arrays[1], arrays[2], start)
        if start in (0, 2, 30, 48):
            made.compare(result["out"], result["lse"], arrays[0], start, window=(30, None))


@pytest.mark.parametrize("dtype", ["int8", "q4_0", pytest.param("q8_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", ["shuffles", pytest.param("matrix units", marks=pytest.mark.once)])
def test_what_a_gpu_decodes_with(device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
                                 dtype: str, by: str) -> None:
    """Several splits, empty ones too, and a mask that closes rows with NaN for scales; matrix units are emulated."""
    monkeypatch.setenv("VKATTN_TIERS", "base,subgroup")  # not the units of the device itself, where it has some
    with forced(f"{dtype}_d64") if by == "matrix units" else nullcontext(), splits_of(5):
        _decode(device, rng, monkeypatch, dtype, "emulated" if by == "matrix units" else "attn_split_quant_subgroup_")


def _decode(device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str, kernel: str) -> None:
    monkeypatch.setattr(device, "info", with_tuning(device.info, split_subgroups=True))
    wide = min(8 * device.info.subgroup_size, 60 if kernel == "emulated" else 100)
    made = made_session(device, rng, (dtype, dtype), dims=(wide, min(wide, 50)), heads=(10, 2), capacity=150)
    builder = GraphBuilder(device)
    cache = made.cache
    query, key, value = (builder.input(name, (2, 1, heads, dim), "float32") for name, heads, dim in (
        ("q", 10, cache.head_dim), ("k", 2, cache.head_dim), ("v", 2, cache.value_dim)))
    mask = builder.input("mask", (2, 1, 1, vkattn.Dim("keys", max=150)), "bool")
    options: dict[str, Any] = {"softcap": 20.0, "sinks": np.linspace(-2, 5, 10)}
    out, lse = builder.sdpa_with_kv_cache(query, key, value, builder.kv_cache("cache", cache=cache),
                                          builder.position("at"), mask=mask, return_lse=True, algorithm="split",
                                          **options)
    builder.output("out", out)
    builder.output("lse", lse)
    graph = builder.build()
    kernels = {step.variant.name for step in graph._latest.dispatches}
    assert any(name.startswith(kernel) and dtype in name for name in kernels)
    rows = made.arrays(140)
    cache.update(*rows[1:], 0)
    made.model.update(*rows[1:], 0)
    for start in (np.array([140, 3]), np.array([141, 0]), np.array([64, 1])):
        arrays = made.arrays(1)
        keys = int(start.max()) + 1
        allowed = rng.random((2, 1, 1, keys)) < 0.7
        allowed[..., 7] = False
        poison_row(cache, 7)
        result = graph.run(dict(zip("qkv", arrays, strict=True)) | {"mask": allowed}, at=start)
        made.model.update(arrays[1], arrays[2], start)
        made.compare(result["out"], result["lse"], arrays[0], start, mask=allowed, **options)


def poison_row(cache: KVCache, token: int) -> None:
    """Make the scales of one token's rows NaN, in every head."""
    words = {"int8": 0x7FC00000}.get(cache.dtype, 0x7E007E00)
    for which, buffer in enumerate(cache.storage.groups[0]):
        start, count = cache.storage.regions(which)[1]
        row = count // cache.storage.rows
        for head in range(cache.batch * cache.num_kv_heads):
            at = start + (head * cache.capacity + token) * row
            fill_range(buffer, at, 1 if cache.dtype == "int8" else row, words)


def fill_range(buffer: Any, offset: int, count: int, word: int) -> None:
    from vkattn.graph.node import Binding, Dispatch
    from vkattn.kernels.manifest import variant

    push = {"offset": offset, "count": count, "value": word}
    recording = buffer.device.recording([[Dispatch(variant("fill"), (Binding(buffer),), push, 1)]])
    recording.run()
    recording.close()


def test_the_same_bits_with_clean_and_poisoned_memory(device: Device, rng: np.random.Generator) -> None:
    made = made_session(device, rng, ("q4_0", "int8"))
    steps = [(made.arrays(tokens), start) for start, tokens in ((0, 30), (30, 1), (3, 17), (0, 1))]
    made.assert_memory_has_no_effect(steps)


def test_three_passes_apart_over_mixed_formats(device: Device, rng: np.random.Generator) -> None:
    made = made_session(device, rng, ("q8_0", "int8"), batch=1, capacity=40)
    builder = GraphBuilder(device)
    query, key, value = (builder.input(name, (1, 3, heads, dim), "float16")
                         for name, heads, dim in (("q", 6, 20), ("k", 2, 20), ("v", 2, 33)))
    view = builder.kv_append(builder.kv_cache("cache", cache=made.cache), key, value, builder.position("at"))
    scores = builder.attn_weights(query, view, causal="bottom_right", layout="bshd")
    builder.output("out", builder.attn_output(builder.softmax(scores), view))
    graph = builder.build()
    for start in (0, 3, 6):
        arrays = made.arrays(3, "float16")
        out = graph.run(dict(zip("qkv", arrays, strict=True)), at=start)["out"]
        made.model.update(arrays[1], arrays[2], start)
        made.compare(out, None, arrays[0], start)


def test_nothing_is_allocated_for_a_step(device: Device, rng: np.random.Generator) -> None:
    """A quantised cache is read where it lies: a plan's scratch is that of a float16 cache's plan."""
    sizes = []
    for dtype in ("float16", "int8", "q4_0"):
        with Device(device.info.index) as own:
            made = made_session(own, rng, (dtype, dtype), batch=1, capacity=64)
            made.step(made.arrays(1), 0)
            before = own.allocation_count, own.allocated_bytes
            for start in (1, 2, 3):
                made.step(made.arrays(1), start)
            assert (own.allocation_count, own.allocated_bytes) == before
            sizes.append(before[0])
    assert len(set(sizes)) == 1
