"""Decode in one dispatch: the subgroup form of attn_split writes the new rows of a cache before it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.caches import GUARD, poison
from tests.fakes import with_tuning
from tests.graphs import Decoder
from tests.tolerance import assert_matches_oracle
from tests.ways import splits_of
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.dtypes import numpy_dtype
from vkattn.kernels import split, split_cut
from vkattn.runtime.device import Device


@pytest.fixture(params=[None, 1, 3, split_cut.MAX_SPLITS], ids=lambda count: f"splits-{count}")
def own_device(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that takes the subgroup form, with some number of splits, and with 3 the sizes as constants."""
    if request.param == 3:
        chosen = split.constant_sizes
        monkeypatch.setattr(split, "constant_sizes",
                            lambda problem, info: chosen(problem, replace(info, device_type="other")))
    split._shape.cache_clear()
    with splits_of(request.param), Device(device.info.index) as opened:
        opened.info = with_tuning(opened.info, split_subgroups=True)
        yield opened
    split._shape.cache_clear()


def cached_rows(cache: KVCache) -> list[np.ndarray]:
    return list(cache.read())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_dispatch_leaves_the_same_cache_as_two(own_device: Device, rng: np.random.Generator, dtype: str) -> None:
    """And gives what the oracle does, also where the new rows lie in several splits, and when rows are overwritten."""
    made = Decoder(own_device, (6, 2, 32), 70, 8, dtype)
    names = [dispatch.variant.kernel for dispatch in made.graph._longest.dispatches]
    assert "kv_append" not in names
    assert "attn_split_subgroup" in names
    poison(made.cache, GUARD)
    other = KVCache(1, 2, 70, 32, dtype=dtype, device=own_device)
    for start, tokens in ((0, 8), (8, 1), (9, 7), (16, 1), (12, 5), (17, 8), (3, 1)):
        arrays = made.arrays(rng, tokens)
        made.step(arrays, start)
        other.update(arrays["key"], arrays["value"], start)
        for one, two in zip(cached_rows(made.cache), cached_rows(other), strict=True):
            np.testing.assert_array_equal(one, two)
    made.cache.truncate(0)
    arrays = made.arrays(rng, 3)
    before = made.graph.run(arrays, input_pos=0)
    poison(made.cache, GUARD)
    for name, array in made.graph.run(arrays, input_pos=0).items():  # nothing but the new rows is read
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize("own_device", [3], indirect=True)
def test_new_rows_are_read_anew(own_device: Device, rng: np.random.Generator) -> None:
    """Rows of 16 bytes, several in each line of a GPU's cache: what was there before, NaN, reaches no workgroup."""
    cache, builder = KVCache(1, 1, 30, 4, device=own_device), GraphBuilder(own_device)
    query, key, value = (builder.input(name, (1, Dim("tokens", max=5), heads, 4), "float32")
                         for name, heads in (("query", 8), ("key", 1), ("value", 1)))
    builder.output("out", builder.sdpa_with_kv_cache(query, key, value, builder.kv_cache("cache", cache=cache),
                                                     builder.position("at"), algorithm="split"))
    graph, start = builder.build(), 0
    for tokens in (5, 4, 1, 5, 3):
        arrays = {name: rng.standard_normal((1, tokens, heads, 4), np.float32)
                  for name, heads in (("query", 8), ("key", 1), ("value", 1))}
        graph.run(arrays | {name: np.full_like(arrays[name], np.nan) for name in ("key", "value")}, at=start)
        over_nan, again = (graph.run(arrays, at=start)["out"] for _ in range(2))
        assert np.isfinite(again).all()
        np.testing.assert_array_equal(over_nan, again)
        start += tokens


def test_rows_that_no_query_sees_are_written_too(own_device: Device, rng: np.random.Generator) -> None:
    """Positions and a window that leave new rows out: the cache holds them all the same."""
    cache = KVCache(2, 2, 40, 16, value_dim=20, dtype="float16", device=own_device)
    builder = GraphBuilder(own_device)
    count = Dim("count", max=6)
    query = builder.input("query", (2, count, 4, 16), "float32")
    rows = [builder.input(name, (2, count, 2, dim), "float32") for name, dim in (("key", 16), ("value", 20))]
    mask = builder.input("mask", (2, 1, 1, Dim("columns", max=40)), "bool")
    out = builder.sdpa_with_kv_cache(query, *rows, builder.kv_cache("cache", cache=cache), builder.position("at"),
                                     mask=mask, causal="bottom_right", window=(1, None))
    builder.output("out", out)
    graph = builder.build()
    held: list[Any] = [np.zeros((2, 40, 2, dim), np.float16) for dim in (16, 20)]
    for start, tokens in ((np.array([0, 0]), 5), (np.array([5, 2]), 6), (np.array([7, 8]), 1)):
        arrays = {name: (3 * rng.standard_normal((2, tokens, heads, dim))).astype(np.float32)
                  for name, heads, dim in (("query", 4, 16), ("key", 2, 16), ("value", 2, 20))}
        kv_len = start + tokens
        seen = rng.random((2, 1, 1, int(kv_len.max()))) < 0.5
        result = graph.run(arrays | {"mask": seen}, at=start)["out"]
        for b in range(2):
            for have, name in zip(held, ("key", "value"), strict=True):
                have[b, start[b] : kv_len[b]] = arrays[name][b].astype(np.float16)
        longest = int(kv_len.max())
        assert_matches_oracle(result, arrays["query"], held[0][:, :longest], held[1][:, :longest], mask=seen,
                              causal="bottom_right", window=(1, None), kv_len=kv_len, layout="bshd")
        for have, got in zip(held, cache.read(), strict=True):
            for b in range(2):
                np.testing.assert_array_equal(got[b, : kv_len[b]], have[b, : kv_len[b]])


def test_rows_of_another_dtype_take_two_dispatches(own_device: Device, rng: np.random.Generator) -> None:
    """Half queries with float32 rows: the kernel reads new rows in the queries' dtype, so the append stays."""
    cache = KVCache(1, 2, 20, 8, dtype="float16", device=own_device)
    builder = GraphBuilder(own_device)
    query = builder.input("query", (1, 1, 4, 8), "float16")
    rows = [builder.input(name, (1, 1, 2, 8), "float32") for name in ("key", "value")]
    builder.output("out", builder.sdpa_with_kv_cache(query, *rows, builder.kv_cache("cache", cache=cache),
                                                     builder.position("at")))
    graph = builder.build()
    kernels = [dispatch.variant.kernel for dispatch in graph._longest.dispatches]
    assert next(kernel for kernel in kernels if kernel != "copy") == "kv_append"  # some devices copy inputs first
    arrays = {name: rng.standard_normal((1, 1, heads, 8)).astype(numpy_dtype(dtype))
              for name, heads, dtype in (("query", 4, "float16"), ("key", 2, "float32"), ("value", 2, "float32"))}
    out = graph.run(arrays, at=0)["out"]
    assert_matches_oracle(out, arrays["query"], arrays["key"].astype(np.float16), arrays["value"].astype(np.float16),
                          layout="bshd")
