"""A hunt for data races: the same call again and again, each variant by itself, gives the same bits.

Four tiles of keys and a few of query rows, so that every buffer in shared memory is filled again while others may still
read it; several heads, so that workgroups run side by side. A few repeats by default; VKATTN_LONG=1 repeats 200 times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np
import pytest

import vkattn
from tests.caches import bits, poison, raw_words
from tests.fakes import fake_device_info
from tests.tolerance import Expected
from tests.ways import Way, splits_of
from vkattn.caps.model import DeviceInfo
from vkattn.dtypes import AXIS, numpy_dtype
from vkattn.formats import QUANTISED
from vkattn.kernels import fused, split, three_pass
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.problem import Problem
from vkattn.runtime.device import Device

IS_LONG = os.environ.get("VKATTN_LONG") == "1"
REPEATS = 200 if IS_LONG else 12
DTYPE = {axis: dtype for dtype, axis in AXIS.items()}
ROOM = {"max_storage_buffers_per_stage": 16, "max_shared_memory_bytes": 48 << 10, "max_workgroup_invocations": 1024,
        "max_workgroup_size": (1024, 1024, 64),
        "subgroup_operations": frozenset({"basic", "vote", "shuffle", "arithmetic", "ballot"})}
DTYPES = [(query, key) for query in AXIS for key in AXIS if query in ("float32", key)]


def problem_of(query_dtype: str, key_dtype: str, *, rows: int, keys: int, dim: int) -> Problem:
    """Return a problem of two KV heads whose three query heads have ``rows`` rows together."""
    return Problem(1, 6, 2, rows // 3, keys, dim, dim, query_dtype, key_dtype, key_dtype)


@cache
def split_problems() -> dict[str, tuple[Problem, str, int]]:
    """Return for each variant of `split` a problem, and the type and subgroup size of a device that would choose it."""
    found: dict[str, tuple[Problem, str, int]] = {}
    for query_dtype, key_dtype in DTYPES:
        for kind, subgroup_size in (("cpu", 1), ("cpu", 8), *(("discrete", size) for size in (4, 8, 16, 32))):
            for dim in (8, 16, 24, 32, 48, 64, 96, 128, 256):
                for rows in (3, 15):
                    problem = problem_of(query_dtype, key_dtype, rows=rows, keys=1024, dim=dim)
                    info = fake_device_info(device_type=kind, subgroup_size=subgroup_size, **ROOM)
                    found.setdefault(split.shape(problem, info).kernel.name, (problem, kind, subgroup_size))
    return found


def way_of(kernel: Variant, info: DeviceInfo) -> tuple[Problem, Way]:
    """Return a problem of four tiles of keys for a variant, and how to have it computed with that variant."""
    if kernel.kernel in ("attn_split", "attn_split_lanes", "attn_split_subgroup"):
        problem, kind, subgroup_size = split_problems()[kernel.name]
        shape = split.shape(problem, replace(info, device_type=kind, subgroup_size=subgroup_size, tuning=None))
        return problem, Way("split", (shape.kernel.name,), shape)
    query_dtype, key_dtype = DTYPE[kernel.axes["query"]], DTYPE[kernel.axes["key"]]
    if kernel.kernel == "attn_weights":
        problem = problem_of(query_dtype, key_dtype, rows=4 * three_pass.BLOCK_ROWS + 1, keys=4 * three_pass.BLOCK_COLS,
                             dim=64)
        return problem, Way("three_pass", tuple(one.name for one in three_pass.variants(problem)))
    dim = 128 if kernel.axes.get("width") == "w128" else 64
    rows = 2 * fused.block_rows(kernel) + 1
    return problem_of(query_dtype, key_dtype, rows=rows, keys=128, dim=dim), Way("fused", (kernel.name,))


def is_quantised(kernel: Variant) -> bool:
    """Whether a variant reads or writes quantised rows: those are in caches only, and go with them."""
    return bool(set(kernel.axes.values()) & {*QUANTISED, "mixed"})


#: The three passes go by the first of them, which has both dtypes; of the others each variant by itself.
KERNELS = [kernel for kernel in load_manifest().values()
           if kernel.kernel.startswith(("attn_fused", "attn_split", "attn_weights")) and not is_quantised(kernel)]
#: Dtypes of the rows that are appended, and of the cache.
CACHES = [*DTYPES, *(("float32", dtype) for dtype in QUANTISED)]


def cannot_run(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why the device cannot run a variant."""
    is_foreign = kernel.kernel == "attn_split_subgroup" and not info.tuned.split_subgroups
    if is_foreign and kernel.axes["query"] != "f16" and not IS_LONG:
        return ["not chosen on a device of this type; tried with float16 only unless VKATTN_LONG=1"]
    family = split if kernel.kernel.startswith("attn_split") else fused
    return family.variant_reasons(kernel, info)


def repeated(run: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """Return what ``run`` gives, after checking that it gives the same bits every time."""
    first = run()
    for repeat in range(1, REPEATS):
        for now, before in zip(run(), first, strict=True):
            changed = int((bits(now) != bits(before)).sum())
            assert not changed, f"repeat {repeat} changed {changed} of {before.size} elements"
    return first


@pytest.mark.once  # on the others tests/gpu/kernels repeat each kernel by itself
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_gives_the_same_bits_every_time(device: Device, rng: np.random.Generator, kernel: Variant) -> None:
    reasons = cannot_run(kernel, device.info)
    if reasons:
        pytest.skip(f"{device.info.name}: {reasons[0]}")
    problem, way = way_of(kernel, device.info)
    assert kernel.name in way.kernels
    query, keys = ((1, 6, problem.max_q_len, problem.head_dim), (1, 2, problem.max_kv_len, problem.head_dim))
    inputs = [(2 * rng.standard_normal(shape, np.float32)).astype(numpy_dtype(dtype)) for shape, dtype in
              ((query, problem.query_dtype), (keys, problem.key_dtype), (keys, problem.value_dtype))]
    expected = Expected(*inputs, causal="bottom_right")
    for splits in (1, 5) if way.algorithm == "split" else (1,):
        with way.forced(), splits_of(splits):
            out, lse = repeated(lambda: list(vkattn.attention(
                *inputs, causal="bottom_right", return_lse=True, algorithm=way.algorithm, device=device)))
        expected.check(out, lse)


def test_every_variant_is_hunted() -> None:
    """Those of the three passes and of the caches go together; matrix units are hunted in test_attn_coopmat.py."""
    info = fake_device_info(**ROOM)
    alone = {kernel.name for kernel in KERNELS}
    together = {name for kernel in KERNELS for name in way_of(kernel, info)[1].kernels}
    caches = {kernel.name for kernel in load_manifest().values()
              if kernel.kernel.startswith("kv_") or is_quantised(kernel)}
    others = {kernel.name for kernel in load_manifest().values()
              if kernel.kernel in ("copy", "fill", "roofline_copy", "roofline_fma", "attn_coopmat", "attn_coopmat2")}
    assert alone | together | caches == set(load_manifest()) - others
    for kernel in KERNELS:
        assert kernel.name in way_of(kernel, info)[1].kernels


@pytest.fixture
def filled(request: pytest.FixtureRequest, device: Device,
           rng: np.random.Generator) -> Iterator[tuple[vkattn.KVCache, list[np.ndarray]]]:
    """A cache with 250 tokens, and the query, key and value (bshd) of one more; the rows may be float32."""
    rows_dtype, cache_dtype = request.param

    def draw(tokens: int, heads: int) -> np.ndarray:
        return rng.standard_normal((2, tokens, heads, 64), np.float32).astype(numpy_dtype(rows_dtype))

    opened = vkattn.KVCache(2, 2, capacity=260, head_dim=64, dtype=cache_dtype, device=device)
    poison(opened)
    opened.update(draw(250, 2), draw(250, 2), 0)
    yield opened, [draw(1, 6), draw(1, 2), draw(1, 2)]
    opened.close()


@pytest.mark.parametrize("filled", CACHES, ids="-".join, indirect=True)
def test_an_append_gives_the_same_bits_every_time(filled: tuple[vkattn.KVCache, list[np.ndarray]]) -> None:
    """The whole memory of the cache, and what is read back."""
    opened, (_, key, value) = filled

    def run() -> list[np.ndarray]:
        opened.update(key, value, 250)
        return [*raw_words(opened), *opened.read()]

    repeated(run)


@pytest.mark.parametrize(("algorithm", "filled"), [
    (algorithm, dtypes) for algorithm in ("split", "fused", "three_pass") for dtypes in CACHES
    if IS_LONG or algorithm == "split" or dtypes in (("float32", "float16"), ("float32", "q8_0"))], indirect=["filled"])
def test_append_and_attend_give_the_same_bits_every_time(device: Device, algorithm: str,
                                                         filled: tuple[vkattn.KVCache, list[np.ndarray]]) -> None:
    """The row that was appended in the same recording is the one with the highest score. Its place changes in turn."""
    opened, (query, key, value) = filled
    key[...] = 3 * query[:, :, ::3]
    builder = vkattn.GraphBuilder(device)
    given = [builder.input(name, array.shape, array.dtype.name) for name, array in
             (("query", query), ("key", key), ("value", value))]
    out = builder.sdpa_with_kv_cache(*given, builder.kv_cache("cache", cache=opened), builder.position("input_pos"),
                                     algorithm=algorithm)
    builder.output("out", out)
    graph = builder.build()
    inputs = {"query": query, "key": key, "value": value}

    def run() -> list[np.ndarray]:
        elsewhere = graph.run(inputs | {"key": -key, "value": -value}, input_pos=249)["out"]
        return [elsewhere, graph.run(inputs, input_pos=250)["out"]]

    results = repeated(run)
    for got, position, sign in zip(results, (249, 250), (-1, 1), strict=True):
        np.testing.assert_array_equal(
            bits(graph.run(inputs | {"key": sign * key, "value": sign * value}, input_pos=position)["out"]), bits(got))
        keys, values = opened.read()
        assert keys.shape[1] == position + 1
        Expected(query, keys.astype(key.dtype), values.astype(value.dtype), layout="bshd").check(got)
    graph.close()


def test_repeats_are_compared(rng: np.random.Generator) -> None:
    """The hunt would see a single bit."""
    good = rng.standard_normal(8, np.float32)
    bad = good.copy()
    bad[3] = np.nextafter(bad[3], np.float32(9))
    results = iter([[good], *[[good]] * (REPEATS - 2), [bad]])
    with pytest.raises(AssertionError, match=f"repeat {REPEATS - 1} changed 1 of 8"):
        repeated(lambda: next(results))
