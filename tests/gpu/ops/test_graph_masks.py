"""Float masks of graphs: NaN and plus infinity are refused as in a call, where some row could meet them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.graphs import SCALE_AND_ADD, float_word
from tests.tolerance import assert_matches_oracle
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import OptionError
from vkattn.runtime.device import Device

MESSAGE = "`mask` holds NaN or plus infinity; a mask closes a key with -inf"
BAD = [np.nan, np.inf]


def declare(device: Device, mask_shape: tuple[Any, ...] | np.ndarray, *, layers: int = 1) -> GraphBuilder:
    """Return a builder with an attention node for each layer, over keys and a mask that they share."""
    builder = GraphBuilder(device)
    query, key = (builder.input(name, (2, 2, tokens, 4), "float32") for name, tokens in (("query", 3), ("key", 7)))
    mask = (builder.constant("mask", mask_shape) if isinstance(mask_shape, np.ndarray) else
            builder.input("mask", mask_shape, "float32"))
    kv_len = builder.position("kv_len")
    for layer in range(layers):
        builder.output(f"out_{layer}", builder.attention(query, key, key, mask=mask, kv_len=kv_len))
    return builder


def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.standard_normal((2, 2, tokens, 4), np.float32) for name, tokens in (("query", 3), ("key", 7))}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", [(7,), (2, 1, 3, 7), (2, 2, 3, 1)])
def test_a_mask_is_refused_where_a_call_refuses_it(device: Device, rng: np.random.Generator, shape: tuple[int, ...],
                                                   bad: float) -> None:
    """In a column that is live in its batch entry; elsewhere it has no effect. A call and a graph agree."""
    inputs = arrays(rng)
    graph = declare(device, shape, layers=2).build()
    for column in {0, shape[-1] - 1, min(4, shape[-1] - 1)}:
        for entry in range(shape[0] if len(shape) == 4 else 1):
            mask = rng.standard_normal(shape).astype(np.float32)
            mask[(entry, ..., column) if len(shape) == 4 else column] = bad
            for kv_len in (np.array([4, 6]), np.array([6, 4]), np.array([7, 7])):
                call = {"mask": mask, "kv_len": kv_len, "device": device}
                lengths = kv_len if len(shape) == 4 else kv_len.max(keepdims=True)
                if shape[-1] == 1 or column < lengths[entry]:
                    with pytest.raises(OptionError, match=MESSAGE):
                        vkattn.attention(inputs["query"], inputs["key"], inputs["key"], **call)
                    with pytest.raises(OptionError, match=MESSAGE):
                        graph.run(inputs | {"mask": mask}, kv_len=kv_len)
                else:
                    result = graph.run(inputs | {"mask": mask}, kv_len=kv_len)
                    for out in result.values():
                        assert_matches_oracle(out, inputs["query"], inputs["key"], inputs["key"], mask=mask,
                                              kv_len=kv_len)


@pytest.mark.parametrize("bad", BAD)
def test_a_constant_mask_is_refused_in_runs_that_reach_the_column(device: Device, rng: np.random.Generator,
                                                                  bad: float) -> None:
    mask, inputs = rng.standard_normal((3, 7)).astype(np.float32), arrays(rng)
    mask[1, 5] = bad
    graph = declare(device, mask).build()
    out = graph.run(inputs, kv_len=5)["out_0"]
    assert_matches_oracle(out, inputs["query"], inputs["key"], inputs["key"], mask=mask, kv_len=5)
    with pytest.raises(OptionError, match=MESSAGE):
        graph.run(inputs, kv_len=[5, 6])


@pytest.mark.parametrize("bad", BAD)
def test_over_a_cache_nothing_is_written(device: Device, rng: np.random.Generator, bad: float) -> None:
    """By a graph and by a call; each batch entry has a length of its own."""
    cache = KVCache(2, 1, 8, 4, dtype="float32", device=device)
    builder = GraphBuilder(device)
    query, key = (builder.input(name, (2, 1, heads, 4), "float32") for name, heads in (("query", 2), ("key", 1)))
    mask = builder.input("mask", (2, 1, 1, Dim("columns", max=8)), "float32")
    builder.output("out", builder.sdpa_with_kv_cache(query, key, key, builder.kv_cache("cache", cache=cache),
                                                     builder.position("at"), mask=mask))
    graph = builder.build()
    given = [rng.standard_normal((2, 1, heads, 4), np.float32) for heads in (2, 1)]
    rows = rng.standard_normal((2, 5, 1, 4), np.float32)
    cache.update(rows, rows, 0)
    cache.truncate([5, 2])
    before = cache.read()[0].copy()
    wrong = np.zeros((2, 1, 1, 6), np.float32)
    wrong[1, ..., 2] = bad  # the new row of entry 1
    named = dict(zip(("query", "key"), given, strict=True))
    for run in (lambda mask: graph.run(named | {"mask": mask}, at=[5, 2])["out"],
                lambda mask: vkattn.sdpa_with_kv_cache(given[0], given[1], given[1], cache, [5, 2], mask=mask)):
        with pytest.raises(OptionError, match=MESSAGE):
            run(wrong)
        assert cache.lengths.tolist() == [[5, 2]]
        np.testing.assert_array_equal(cache.read()[0], before)
        right = np.zeros_like(wrong)
        right[1, ..., 3:] = bad  # live for entry 0 only
        out = run(right)
        keys = cache.read()[0]
        assert_matches_oracle(out, given[0], keys, keys, mask=np.zeros_like(wrong), q_offset=[5, 2], kv_len=[6, 3],
                              causal="bottom_right", layout="bshd")
        cache.truncate([5, 2])


def test_a_mask_that_a_kernel_makes_is_not_looked_at(device: Device, rng: np.random.Generator) -> None:
    """Rows that attend its NaN are NaN, and no others."""
    builder = GraphBuilder(device)
    query, key = (builder.input(name, (1, 1, tokens, 4), "float32") for name, tokens in (("query", 3), ("key", 8)))
    x, y = (builder.input(name, (3, 8), "float32") for name in "xy")
    (mask,) = builder.kernel("mix", SCALE_AND_ADD, [x, y], {"mask": ((3, 8), "float32")},
                             push={"factor": float_word(2.0)}, dims=(1, 3))
    builder.output("out", builder.attention(query, key, key, mask=mask))
    inputs = {name: rng.standard_normal((1, 1, tokens, 4), np.float32) for name, tokens in (("query", 3), ("key", 8))}
    terms = {name: rng.standard_normal((3, 8), np.float32) for name in "xy"}
    terms["y"][1, 4] = np.nan
    out = builder.build().run(inputs | terms)["out"]
    assert np.isnan(out[:, :, 1]).all()
    seen = [0, 2]
    assert_matches_oracle(out[:, :, seen], inputs["query"][:, :, seen], inputs["key"], inputs["key"],
                          mask=(2 * terms["x"] + terms["y"])[seen])
