"""Legal but unkind calls: NaN that must show, NaN that must not, odd arrays, numbers at the ends of their range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.tolerance import assert_matches_oracle
from tests.ways import Way
from vkattn import oracle
from vkattn.dispatch import ALGORITHMS, MATRIX_ALGORITHMS
from vkattn.kernels import fused
from vkattn.kernels.manifest import Variant
from vkattn.problem import Problem
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

TIERS = ["base", "base,subgroup"]
#: Those on matrix units take half precision only: tests/gpu/kernels/test_attn_coopmat.py.
ANY_DTYPE = [name for name in ALGORITHMS if name not in MATRIX_ALGORITHMS]


def arrays(rng: np.random.Generator, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int,
           dtype: Any = np.float32) -> list[np.ndarray]:
    shapes = ((1, heads, q_len, dim), (1, kv_heads, kv_len, dim), (1, kv_heads, kv_len, dim))
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def check(device: Device, inputs: list[Any], **options: Any) -> None:
    out, lse = vkattn.attention(*inputs, return_lse=True, device=device, **options)
    options.pop("algorithm", None)
    assert_matches_oracle(out, *map(np.asarray, inputs), lse=lse, **options)


@pytest.fixture(params=TIERS)
def tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKATTN_TIERS", request.param)


@pytest.mark.usefixtures("tiers")
@pytest.mark.parametrize("algorithm", ANY_DTYPE)
@pytest.mark.parametrize(("kv_len", "bad"), [(40, np.nan), (3000, np.nan), (40, np.inf)])
def test_a_key_that_is_not_finite_shows_in_the_rows_that_attend_it(
    device: Device, rng: np.random.Generator, kv_len: int, bad: float, algorithm: str
) -> None:
    """Zeros, or a finite lse, would hide that something is wrong; merging partial results would lose it."""
    query, key, value = arrays(rng, 4, 2, 5, kv_len, 20)
    options = {"causal": "bottom_right", "algorithm": algorithm, "return_lse": True, "device": device}
    clean, clean_lse = vkattn.attention(query, key, value, **options)
    key[0, 1, kv_len - 3] = bad  # the last 3 rows of heads 2 and 3 attend it
    out, lse = vkattn.attention(query, key, value, **options)
    hit = np.zeros((1, 4, 5), bool)
    hit[:, 2:, 2:] = True
    assert np.isnan(out[hit]).all()
    assert np.isnan(lse[hit]).all()
    np.testing.assert_allclose(out[~hit], clean[~hit], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[~hit], clean_lse[~hit], rtol=1e-5)


@pytest.mark.usefixtures("tiers")
@pytest.mark.parametrize("algorithm", ANY_DTYPE)
@pytest.mark.parametrize(("dim", "dtype"), [(20, np.float32), (20, np.float16)])  # few: subgroup kernels compile slowly
def test_in_bshd_what_follows_a_row_has_no_effect(device: Device, rng: np.random.Generator, dim: int, dtype: Any,
                                                  algorithm: str) -> None:
    """Behind the row of a head lies the next head's, behind the last head's a token that is not live."""
    query, key, value = (array.transpose(0, 2, 1, 3).copy() for array in arrays(rng, 3, 3, 5, 12, dim, dtype))
    key[:, 9:], value[:, 9:] = np.nan, np.inf
    check(device, [query, key, value], layout="bshd", kv_len=9, algorithm=algorithm)
    key[:, 4, 1] = np.nan
    out = vkattn.attention(query, key, value, layout="bshd", kv_len=9, algorithm=algorithm, device=device)
    assert np.isfinite(out[:, :, [0, 2]]).all()
    assert np.isnan(out[:, :, 1]).all()


@pytest.mark.usefixtures("tiers")
@pytest.mark.parametrize("algorithm", ANY_DTYPE)
@pytest.mark.parametrize("softcap", [2.0**-126, 1e-3, 300.0, 1e10, 3e38])
def test_a_softcap_of_any_size(device: Device, rng: np.random.Generator, softcap: float, algorithm: str) -> None:
    """One far above the scores changes nothing: the error of tanh must not be multiplied by it."""
    check(device, arrays(rng, 2, 1, 9, 50, 20), softcap=softcap, scale=2.0, algorithm=algorithm)


def test_the_most_keys_that_fused_accepts_are_right(device: Device, rng: np.random.Generator) -> None:
    """Mesa's llvmpipe ends loops after 65535 iterations: close below each kernel's limit nothing is missing."""
    rows, dim = 130, 128
    shapes = ((1, 1, rows, dim), (1, 1, 1 << 15, dim), (1, 1, 1 << 15, dim))
    problem = attention_call(*(np.broadcast_to(np.float32(0), shape) for shape in shapes)).problem
    limits = {kernel: most_keys(kernel, problem, device) for kernel, reasons in fused.candidates(problem, device.info)
              if not reasons}
    for kernel, limit in limits.items():
        kv_len = limit or 700  # there is no limit elsewhere
        inputs = arrays(rng, 1, 1, rows, kv_len, dim)
        with Way("fused", (kernel.name,)).forced():
            check(device, inputs, mask=rng.random((rows, kv_len)) < 0.8, algorithm="fused")
            if limit:
                with pytest.raises(vkattn.errors.NoKernelError, match="65535"):
                    vkattn.attention(*arrays(rng, 1, 1, rows, limit + 1, dim), algorithm="fused", device=device)
    if "llvmpipe" in device.info.name:
        assert all(limits.values())
        assert limits[fused.variants(replace(problem, max_kv_len=max(limits.values())), device.info)[0]] == max(
            limits.values()), "the choice falls on the kernel that can go through so many keys"


def most_keys(kernel: Variant, problem: Problem, device: Device) -> int | None:
    """Return the keys beyond which a fused kernel is refused, or None if that is more than the problem's."""
    least, most = 1, problem.max_kv_len
    if not fused.loop_reasons(kernel, problem, device.info):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        refused = fused.loop_reasons(kernel, replace(problem, max_kv_len=middle), device.info)
        least, most = (least, middle) if refused else (middle, most)
    return least


@pytest.mark.parametrize("q_offset", [2**29, 2**29 - 60, -(2**29), 20 - 2**29])
@pytest.mark.parametrize("window", [(None, None), (2**40, 2**30), (0, None), (None, 0), (2**29, 2**29), (2**30, 0)])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_positions_at_the_limits(device: Device, rng: np.random.Generator, q_offset: int, window: Any,
                                 causal: str | None) -> None:
    check(device, arrays(rng, 2, 2, 40, 70, 8), q_offset=q_offset, window=window, causal=causal)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_mask_columns_beyond_the_live_keys_may_hold_anything(device: Device, rng: np.random.Generator,
                                                             dtype: Any) -> None:
    inputs = arrays(rng, 2, 2, 5, 70, 8, dtype)
    mask = rng.standard_normal((5, 70)).astype(dtype)
    mask[:, 33:] = np.nan
    check(device, inputs, mask=mask, kv_len=33)


@pytest.mark.parametrize("kind", ["big-endian", "subclass", "not aligned", "memoryview", "broadcast", "field"])
def test_arrays_of_every_kind(device: Device, rng: np.random.Generator, kind: str) -> None:
    inputs: list[Any] = arrays(rng, 2, 2, 5, 40, 8)
    plain = vkattn.attention(*inputs, device=device)
    if kind == "big-endian":
        inputs = [array.astype(">f4") for array in inputs]
    elif kind == "subclass":
        inputs = [array.view(type("Array", (np.ndarray,), {})) for array in inputs]
    elif kind == "not aligned":
        inputs = [np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(array.shape)
                  for array in inputs]
    elif kind == "memoryview":
        inputs = [memoryview(array) for array in inputs]
    elif kind == "broadcast":
        inputs = [np.broadcast_to(array[:, :1], array.shape) for array in inputs]
        plain = vkattn.attention(*map(np.ascontiguousarray, inputs), device=device)
    else:
        records = [np.zeros(array.shape, [("a", "i1"), ("x", "f4")]) for array in inputs]
        for record, array in zip(records, inputs, strict=True):
            record["x"] = array
        inputs = [record["x"] for record in records]
    out = vkattn.attention(*inputs, device=device)
    assert type(out) is np.ndarray
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("lead", [(0,), (0, 2), (2, 0, 3), (3, 0), (0, 3, 2)])
@pytest.mark.parametrize("mask", [None, (3, 5), "full", "ones"])
def test_torch_named_function_with_nothing_to_do(device: Device, lead: tuple[int, ...], mask: Any) -> None:
    query, key = np.zeros((*lead, 2, 3, 8), np.float32), np.zeros((*lead, 2, 5, 8), np.float32)
    if isinstance(mask, str):
        mask = (*lead, 2, 3, 5) if mask == "full" else (1,) * len(lead) + (2, 3, 5)
    given = None if mask is None else np.ones(mask, bool)
    assert vkattn.scaled_dot_product_attention(query, key, key, given, device=device).shape == query.shape


@pytest.mark.parametrize("empty", ["q_len", "kv_len"])
def test_torch_named_function_without_tokens(device: Device, empty: str) -> None:
    q_len, kv_len = (0, 5) if empty == "q_len" else (3, 0)
    query, key = np.ones((2, 3, 2, q_len, 8), np.float32), np.ones((2, 3, 2, kv_len, 8), np.float32)
    mask = np.ones((2, 3, 1, q_len, kv_len), bool)
    out = vkattn.scaled_dot_product_attention(query, key, key, mask, device=device)
    np.testing.assert_array_equal(out, np.zeros_like(query))
    np.testing.assert_array_equal(oracle.scaled_dot_product_attention(query, key, key, mask), out)


def test_values_at_the_ends_of_float32(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 1, 1, 4, 70, 8)
    largest = float(np.finfo(np.float32).max)
    check(device, [query, key, 1e36 * value])
    check(device, [1e-19 * query, 1e19 * key, value], scale=1.0)
    check(device, [query, key, value], sinks=[-largest])
    check(device, [query, key, value], mask=np.full((1, 70), -largest, np.float32))
    out = vkattn.attention(query, key, value, sinks=[largest], device=device)
    np.testing.assert_array_equal(out, np.zeros_like(out))
