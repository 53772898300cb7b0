"""Pass 3 by itself: weights times values against `oracle.attn_output`, padding, and every rounding of halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.cases import CASES, REPEATED, Case
from tests.gpu.kernels.harness import (
    BASES,
    DTYPE,
    GUARD,
    Rig,
    Rigs,
    Store,
    as_tiles,
    assert_the_same_bits,
    block,
    draw,
    place_tiles,
    variants_of,
)
from tests.tolerance import assert_close
from vkattn import oracle
from vkattn.dtypes import numpy_dtype
from vkattn.kernels.manifest import Variant
from vkattn.layout import row_vecs

WORDS = {"params": 1 << 10, "probs": (1 << 17) + (1 << 12), "value": 1 << 17, "outputs": 1 << 17}


@pytest.fixture(params=variants_of("attn_output"), ids=lambda variant: variant.name)
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Rig:
    return rigs.of(request.param)


class Inputs:
    """Weights and values of one case; NaN in values without weight and in weights that must not be read."""

    def __init__(self, case: Case, variant: Variant, rng: np.random.Generator) -> None:
        value_dtype, self.out_dtype = DTYPE[variant.axes["value"]], DTYPE[variant.axes["out"]]
        self.case = case
        self.mask = case.draw_mask(rng)
        shape = (case.batch_size, case.num_heads, case.q_len, case.num_keys)
        probs = np.where(case.attended(self.mask), rng.random(shape, np.float32), np.float32(0)) + np.float32(0)
        self.probs: np.ndarray = probs / np.maximum(probs.sum(axis=3, keepdims=True), np.float32(1e-6))
        self.value = draw(rng, (case.batch_size, case.num_kv_heads, case.num_keys, case.value_dim), value_dtype, 1, 1)
        self.store = Store(case, self.value, value_dtype, case.unread_values(self.mask))

    def tiles(self) -> np.ndarray:
        """Return the weights as pass 2 leaves them: 0 in a vec4 with a key that the row sees, else unwritten."""
        seen = as_tiles(self.case, self.case.visible(), False)
        is_written = np.repeat(seen.reshape(*seen.shape[:2], self.case.score_cols // 4, 4).any(axis=3), 4, axis=2)
        return np.where(is_written, as_tiles(self.case, self.probs, np.float32(0)), np.uint32(GUARD).view(np.float32))

    def pieces(self) -> dict[str, Any]:
        case = self.case
        strides = self.store.strides("v") | Store.unwritten(case, self.out_dtype).strides("out")
        params = block(case, strides, self.mask, out_vecs=row_vecs(case.value_dim, self.out_dtype))
        return {"params": params, "probs": place_tiles(case, self.tiles()), "value": self.store.place("value_base"),
                "outputs": []}

    def run(self, rig: Rig) -> np.ndarray:
        """Return the output ``[batch, heads, q_len, value_dim]``, after the checks of `Store.take`."""
        return Store.unwritten(self.case, self.out_dtype).take(rig.run(self.pieces())["outputs"], "out_base")

    def check(self, out: np.ndarray) -> None:
        value = np.where(np.isfinite(self.value.astype(np.float32)), self.value, self.value.dtype.type(0))
        expected = oracle.attn_output(self.probs, self.value)
        assert_close(out, expected, np.zeros(expected.shape[:3]),
                     terms=lambda: oracle.attn_output(self.probs, np.abs(value)))


@pytest.mark.parametrize("name", CASES)
def test_weights_times_values(rig: Rig, rng: np.random.Generator, name: str) -> None:
    inputs = Inputs(CASES[name], rig.variant, rng)
    inputs.check(inputs.run(rig))


def test_values_that_are_not_finite(rig: Rig, rng: np.random.Generator) -> None:
    """Infinity and NaN reach the rows and elements that give them a weight, and change no bit of any other."""
    case = Case(q_len=40, num_keys=100, kv_len=(100, 60), q_offset=(0, 0), window=(None, 9), value_dim=21)
    inputs = Inputs(case, rig.variant, rng)
    clean = inputs.run(rig).astype(np.float32)
    inputs.value[:, :, 20, 3], inputs.value[:, :, 45, 5], inputs.value[:, :, 46, 5] = np.nan, np.inf, -np.inf
    inputs.value[:, :, 30, 20] = -np.inf
    inputs.store = Store(case, inputs.value, inputs.store.dtype)
    dirty = inputs.run(rig).astype(np.float32)
    expected = oracle.attn_output(inputs.probs, inputs.value)
    hit = ~np.isfinite(expected)
    assert hit.any()
    np.testing.assert_array_equal(dirty[hit], expected[hit].astype(np.float32))
    np.testing.assert_array_equal(dirty[~hit], clean[~hit])


def test_sums_beyond_the_range_of_the_output_are_infinite(rig: Rig) -> None:
    case = Case(batch_size=1, num_kv_heads=1, q_len=2, num_keys=40, kv_len=(40,), q_offset=(0,), value_dim=4)
    inputs = Inputs(case, rig.variant, np.random.default_rng(1))
    limit = float(np.finfo(np.float16).max if rig.variant.axes["value"] == "f16" else 3e38)
    inputs.value[...] = np.array([limit, -limit, limit, 1], inputs.value.dtype)
    inputs.value[0, 0, 20:, 2] *= -1
    inputs.probs[...] = np.array([1, 1 / 64], np.float32)[:, None]
    inputs.store = Store(case, inputs.value, inputs.store.dtype)
    out = inputs.run(rig)[0, 0].astype(np.float32)
    if rig.variant.axes["value"] == "f16" and inputs.out_dtype == "float32":
        np.testing.assert_allclose(out[0], [40 * limit, -40 * limit, 0, 40], rtol=1e-6)
    else:
        assert out[0, [0, 1, 3]].tolist() == [np.inf, -np.inf, 40]
    np.testing.assert_allclose(out[1, [0, 1, 3]], [limit * 0.625, -limit * 0.625, 0.625], rtol=1e-2)
    assert abs(out[1, 2]) < limit * 1e-6


#: Significands of 1 .. 2 at, just below and just above every value and every midpoint of a half (or bfloat16).
SIGNIFICANDS = {"float16": 11, "bfloat16": 8, "float32": 5}


def rounding_weights(dtype: str) -> np.ndarray:
    """Return float32 in 1 .. 2 on both sides of every tie, and float32 of random bits."""
    bits = SIGNIFICANDS[dtype]
    steps = (np.arange(2**bits, dtype=np.int64) << (23 - bits))[:, None] + np.array([-1, 0, 1])
    near = (0x3F800000 + steps).astype(np.uint32).view(np.float32).ravel()
    random = np.random.default_rng(5).integers(0x00800000, 0x7F800000, 1000, dtype=np.uint32)
    odd = np.array([np.inf, np.nan, 0.0], np.float32)
    return np.concatenate([near, -near[::7], random.view(np.float32), -random.view(np.float32), odd])


def powers_of_two(dtype: str) -> np.ndarray:
    """Return every power of two that ``dtype`` has (as a normal float32), and zeros up to a whole number of quads."""
    low, high = {"float16": (-24, 15), "bfloat16": (-126, 127), "float32": (-126, 127)}[dtype]
    powers = 2.0 ** np.arange(low, high + 1)
    return np.append(powers, np.zeros(-len(powers) % 8)).astype(numpy_dtype(dtype))


def test_the_output_is_rounded_to_nearest_even(rig: Rig, rigs: Rigs) -> None:
    """One key: the output is weight times value, a power of two, so that only the store rounds."""
    dtypes = DTYPE[rig.variant.axes["value"]], DTYPE[rig.variant.axes["out"]]
    weights, values = rounding_weights(dtypes[1]), powers_of_two(dtypes[0])
    if dtypes[0] == "bfloat16":  # one weight of each tie covers the exponents; all of them at 2^0 and below 2^-126
        weights = weights[:: 1 if dtypes[1] == "bfloat16" else 3]
    case = Case(batch_size=1, num_kv_heads=1, q_len=len(weights), num_keys=1, kv_len=(1,), q_offset=(0,),
                value_dim=len(values), tiles_per_chunk=-(-len(weights) // 32))
    out = Store(case, np.zeros((1, 1, len(weights), len(values)), numpy_dtype(dtypes[1])), dtypes[1])
    value = Store(case, values[None, None, None], dtypes[0])
    tiles = as_tiles(case, weights[None, None, :, None], np.float32(0)).view(np.uint32).ravel()
    big = rigs.make(rig.variant, groups=8, chunks=1, probs=tiles.size + 64, outputs=out.words.size + 256)
    after = big.run({"params": block(case, value.strides("v") | out.strides("out"),
                                     out_vecs=row_vecs(len(values), dtypes[1])),
                     "probs": [(4 * BASES["probs_base"], tiles)], "value": value.place("value_base"), "outputs": []})
    big.close()
    got = out.take(after["outputs"], "out_base")[0, 0]
    with np.errstate(all="ignore"):
        product = weights[:, None].astype(np.float64) * values.astype(np.float64)
        exact = product.astype(np.float32) + np.float32(0)
        expected = np.where(weights[:, None] == 0, np.float32(0), exact).astype(got.dtype)
    kind = f"u{got.itemsize}"
    is_tiny = np.abs(product) < np.finfo(np.float32).tiny  # a device may flush float32 subnormals
    same = (got.view(kind) == expected.view(kind)) | (np.isnan(got) & np.isnan(expected))
    assert same[~is_tiny].all(), [(weights[i], values[j], got[i, j], expected[i, j])
                                  for i, j in np.argwhere(~same & ~is_tiny)[:5]]
    assert (np.abs(got[is_tiny].astype(np.float32)) <= np.finfo(np.float32).tiny).all()


def test_the_bits_do_not_depend_on_the_number_of_workgroups_or_runs(rig: Rig, rigs: Rigs,
                                                                    rng: np.random.Generator) -> None:
    inputs = Inputs(REPEATED, rig.variant, rng)
    inputs.check(inputs.run(rig))
    assert_the_same_bits(rigs, rig, inputs.pieces())
