"""`split` over quantised rows on matrix units: its self-test where there are units, and everywhere in emulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests import emulated
from vkattn import oracle
from vkattn.formats import QuantisedRows
from vkattn.kernels import matrix, split, split_matrix, verdicts
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.ops import selftest_split
from vkattn.ops.attention import compute
from vkattn.ops.selftest import judge, settle
from vkattn.problem import Problem
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

pytestmark = pytest.mark.usefixtures("own_verdicts")

VARIANTS = [kernel for kernel in load_manifest().values() if kernel.kernel == split_matrix.KERNEL]


def decode(kernel: Variant) -> Problem:
    width, key = matrix.WIDTHS[kernel.axes["width"]], kernel.axes["key"]
    return Problem(1, 6, 2, 1, 300, width, width, "float32", key, key)


@pytest.mark.parametrize("kernel", VARIANTS, ids=[kernel.name for kernel in VARIANTS])
def test_a_variant_passes_its_self_test_or_the_device_lacks_something(device: Device, kernel: Variant) -> None:
    settle(device, decode(kernel), "split")
    chosen = split.shape(decode(kernel), device.info).kernel
    if matrix.static_reasons(kernel, device.info):
        assert chosen.kernel != split_matrix.KERNEL
        assert verdicts.verdict(kernel, device.info) is None
        return
    assert judge(device, kernel) == ""
    assert chosen == kernel


@pytest.mark.once
@pytest.mark.parametrize("name", emulated.NAMES)
def test_the_self_test_in_emulation(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(split, "MATRIX_THREADS", emulated.LANES)
    with emulated.forced(name):
        assert selftest_split.judge(device, emulated.emulated(name), np.random.default_rng(3)) == ""


def stored(rows: np.ndarray, dtype: str) -> tuple[QuantisedRows, np.ndarray]:
    parts = oracle.quantize(rows, dtype)
    return QuantisedRows(*parts), oracle.dequantize(*parts)


@pytest.mark.once
@pytest.mark.parametrize("name", emulated.NAMES)
@pytest.mark.parametrize("case", ["scales", "few keys", "large queries", "a row of zeros", "NaN"])
def test_hostile_rows_in_emulation(device: Device, rng: np.random.Generator, name: str, case: str) -> None:
    """Scales over many powers of ten, one to 17 keys, queries near the ends of float32, and what is no number."""
    key = name.rsplit("_", 1)[0]
    dim = matrix.WIDTHS[name.rsplit("_", 1)[1]]
    for keys in (1, 3, 15, 16, 17) if case == "few keys" else (90,):
        query, keys_in, values_in = (rng.standard_normal((1, heads, rows, dim)).astype(np.float32)
                                     for heads, rows in ((3, 1), (1, keys), (1, keys)))
        options: dict[str, Any] = {}
        if case == "scales":  # a key of little weight may have the largest values by far
            values_in *= 10.0 ** rng.uniform(-3, 3, (1, 1, keys, 1)).astype(np.float32)
            keys_in *= np.float32(3)
        if case == "large queries":
            query *= np.array([1e30, 1e-30, 1], np.float32)[:, None, None]
            options["scale"] = 1e-30
        if case == "a row of zeros":
            values_in[:, :, 5], keys_in[:, :, 6], query[:, 1] = 0, 0, 0
        stored_keys, exact_keys = stored(keys_in, key)
        stored_values, exact_values = stored(values_in, key)
        if case == "NaN":
            stored_keys.scale[:, :, 11] = np.nan
        call = attention_call(query, exact_keys.astype(np.float32), exact_values.astype(np.float32), return_lse=True,
                              **options)
        call = replace(call, problem=replace(call.problem, key_dtype=key, value_dtype=key), key=stored_keys,
                       value=stored_values)
        with emulated.forced(name):
            assert split.variants(call.problem, device.info)[0].name == f"emulated {name}"
            out, lse = compute(call, device, "split")
        if case == "NaN":
            assert np.isnan(out).all() and np.isnan(lse).all()
        else:
            assert oracle.worst_share(out, query, exact_keys, exact_values, lse=lse, **options) <= 1, keys


@pytest.mark.once
@pytest.mark.parametrize("name", emulated.NAMES)
@pytest.mark.parametrize("lead", [20.0, 30.0, 40.0])
def test_what_a_row_of_zeros_outweighs_is_lost_only_where_it_is_nothing(device: Device, name: str, lead: float) -> None:
    """The limit of decision 10: all weight is on zeros, so the output is e^-lead of a value; what is lost is far less.

    Up to e^-26 the tolerance is the ordinary one; below that the error is nothing beside the values.
    """
    key, dim = name.rsplit("_", 1)[0], matrix.WIDTHS[name.rsplit("_", 1)[1]]
    query, keys, values = (np.zeros((1, 1, rows, dim), np.float32) for rows in (1, 2, 2))
    query[...], keys[:, :, 0], values[:, :, 1] = 1, lead / dim, np.linspace(-1, 2, dim)
    (stored_keys, exact_keys), (stored_values, exact_values) = stored(keys, key), stored(values, key)
    call = attention_call(query, keys, values, return_lse=True, scale=1.0)
    call = replace(call, problem=replace(call.problem, key_dtype=key, value_dtype=key), key=stored_keys,
                   value=stored_values)
    with emulated.forced(name):
        out, lse = compute(call, device, "split")
    expected = oracle.attention(query, exact_keys, exact_values, scale=1.0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2.0**-45)
    if lead < 26:
        assert oracle.worst_share(out, query, exact_keys, exact_values, lse=lse, scale=1.0) <= 1
