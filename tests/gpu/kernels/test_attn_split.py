"""The split kernels: without and with subgroup shuffles, any number of splits, counters ready for the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.fakes import with_tuning
from tests.tolerance import assert_matches_oracle
from tests.ways import splits_of
from vkattn.kernels import split_cut
from vkattn.ops import plan
from vkattn.runtime.device import Device

#: (batch, query heads, KV heads, q_len, kv_len, head_dim, value_dim)
SIZES = [(1, 3, 1, 1, 70, 8, 8), (2, 6, 2, 2, 333, 64, 64), (1, 8, 1, 8, 257, 128, 36), (1, 5, 5, 1, 1, 1, 1),
         (1, 14, 2, 3, 513, 80, 129), (3, 4, 4, 1, 31, 256, 256)]


@pytest.fixture(scope="module", params=["plain", "subgroup", "lanes"])
def own_device(request: pytest.FixtureRequest, device: Device) -> Iterator[Device]:
    """A device whose split kernels are those without subgroup shuffles, for GPUs, or for CPUs (where rows fit).

    Its plans are roomy, so that each kernel is compiled once for all tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_WORDS", 1 << 19)
        if request.param == "plain":
            patch.setenv("VKATTN_TIERS", "base")
        with Device(device.info.index) as opened:
            opened.info = with_tuning(opened.info, split_subgroups=request.param == "subgroup", split_lanes=True)
            yield opened


def draw(rng: np.random.Generator, size: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim = size
    keys = (batch, kv_heads, kv_len)
    shapes = ((batch, heads, q_len, head_dim), (*keys, head_dim), (*keys, value_dim))
    return [(2 * rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_the_oracle(own_device: Device, rng: np.random.Generator, size: tuple[int, ...]) -> None:
    inputs = draw(rng, size)
    for count in (None, 1, 2, 7, split_cut.MAX_SPLITS):
        for options in ({}, {"causal": "bottom_right", "sinks": np.linspace(-2, 9, size[1])}):
            with splits_of(count):
                out, lse = vkattn.attention(*inputs, algorithm="split", return_lse=True, device=own_device, **options)
            assert_matches_oracle(out, *inputs, lse=lse, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(own_device: Device, rng: np.random.Generator, dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    inputs = draw(rng, (1, 6, 2, 1, 300, 40, 24), kind)
    out, lse = vkattn.attention(*inputs, algorithm="split", return_lse=True, device=own_device)
    assert_matches_oracle(out, *inputs, lse=lse)


def test_masks_and_windows_and_empty_splits(own_device: Device, rng: np.random.Generator) -> None:
    """Batch entries of very different lengths: most splits of the shorter ones are empty."""
    inputs = draw(rng, (3, 4, 2, 2, 700, 16, 20))
    mask = rng.random((3, 1, 2, 700)) < 0.5
    mask[1] = False
    options: dict[str, Any] = {"kv_len": [700, 90, 3], "causal": "bottom_right", "mask": mask, "window": (400, None),
                               "softcap": 9.0, "alibi_slopes": np.array([0.5, 0.1, 0, 0.01], np.float32)}
    with splits_of(16):
        out, lse = vkattn.attention(*inputs, algorithm="split", return_lse=True, device=own_device, **options)
    assert_matches_oracle(out, *inputs, lse=lse, **options)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_must_not_be_read_has_no_effect(own_device: Device, rng: np.random.Generator, poison: float) -> None:
    query, key, value = draw(rng, (2, 6, 2, 3, 400, 20, 24))
    kv_len = np.array([400 - 7, 129])
    mask = rng.random((2, 1, 3, 400)) < 0.7
    mask[..., 40:48] = False
    options = {"mask": mask, "kv_len": kv_len, "causal": "bottom_right"}
    clean = vkattn.attention(query, key, value, algorithm="split", device=own_device, **options)
    assert_matches_oracle(clean, query, key, value, **options)
    for batch, live in enumerate(kv_len):
        for array in (key, value):
            array[batch, :, live:] = poison
            array[batch, :, 40:48] = poison
    np.testing.assert_array_equal(vkattn.attention(query, key, value, algorithm="split", device=own_device, **options),
                                  clean)


def test_counters_are_ready_for_the_next_run_and_bits_do_not_change(own_device: Device,
                                                                    rng: np.random.Generator) -> None:
    inputs = draw(rng, (1, 4, 2, 1, 288, 32, 32))
    with splits_of(9):
        first = vkattn.attention(*inputs, algorithm="split", device=own_device)
        assert_matches_oracle(first, *inputs)
        for _ in range(200):
            np.testing.assert_array_equal(vkattn.attention(*inputs, algorithm="split", device=own_device), first)


def test_many_equal_weights(own_device: Device) -> None:
    keys = 70000
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.ones((1, 1, keys, 4), np.float32)
    value = np.full((1, 1, keys, 4), 0.1, np.float32)
    out, lse = vkattn.attention(query, key, value, algorithm="split", return_lse=True, device=own_device)
    assert_matches_oracle(out, query, key, value, lse=lse)


@pytest.mark.once
def test_in_subgroups_of_sixteen(device: Device) -> None:
    """No software device has them by itself, so its other tests leave out the kernels that most GPUs take."""
    if "llvmpipe" not in device.info.name:
        pytest.skip(f"{device.info.name}: only llvmpipe can be told how wide its subgroups are")
    done = subprocess.run([sys.executable, "-m", "tests.wide"], env=os.environ | {"LP_NATIVE_VECTOR_WIDTH": "512"},
                          capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "16"), done.stderr
