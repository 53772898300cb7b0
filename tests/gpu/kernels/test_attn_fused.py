"""The fused kernels by themselves: each variant against `oracle.attention`, what it reads, exactly what it writes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.cases import CASES, REPEATED, Case
from tests.gpu.kernels.harness import (
    DTYPE,
    Rig,
    Rigs,
    Store,
    assert_the_same_bits,
    block,
    draw,
    place_mask,
    take_lse,
    variants_of,
)
from vkattn import oracle
from vkattn.kernels import fused
from vkattn.kernels.manifest import Variant
from vkattn.layout import row_vecs
from vkattn.runtime import pipeline

WORDS = {"params": 1 << 10, "query": 1 << 17, "key": 1 << 17, "value": 1 << 17, "mask_data": 1 << 18,
         "outputs": 1 << 17, "lse": 1 << 12}

#: Cases around the edges of this kernel's own tiles, beside those of the three passes.
TILES = {
    **{f"q_len {n}": Case(batch_size=1, num_kv_heads=1, q_len=n, num_keys=n, kv_len=(n,), q_offset=(0,),
                          window=(None, 0), head_dim=8, value_dim=64) for n in (63, 64, 65, 127, 128, 129)},
    **{f"{n} keys": Case(batch_size=1, num_keys=n, kv_len=(n,), q_offset=(0,), q_len=3)
       for n in (15, 16, 17, 95, 96, 97, 1023, 1024, 1025, 1040)},
    **{f"head_dim {n}": Case(q_len=3, head_dim=n, value_dim=n) for n in (1, 15, 16, 32, 36, 63, 64, 65, 96, 256)},
    **{f"value_dim {n}": Case(q_len=3, value_dim=n) for n in (1, 63, 64, 65, 124, 127, 128, 129, 192, 260)},
    "rows of two tiles see different keys": Case(group_size=3, q_len=70, num_keys=260, kv_len=(260, 200),
                                                 q_offset=(190, 130), window=(40, 0), num_kv_heads=1),
    "bottom right with few keys": Case(q_len=90, q_offset=(-20, -57), window=(None, 0)),
    "a mask that closes whole tiles": Case(mask="bool", q_len=70, num_keys=300, kv_len=(300, 260), num_kv_heads=1,
                                           mask_shape=(True, False, False, True)),
    "a float mask over many tiles": Case(mask="float", q_len=66, num_keys=300, kv_len=(300, 260), num_kv_heads=1,
                                         q_offset=(234, 194), window=(None, 0)),
}  # fmt: skip


VARIANTS = variants_of("attn_fused") + variants_of("attn_fused_subgroup")


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def rig(request: pytest.FixtureRequest, rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> Rig:
    info = rigs.device.info
    reasons = fused.variant_reasons(request.param, info)
    if info.device_type == "cpu" and request.param.axes.get("tile") == "tall":
        # lavapipe and SwiftShader report 32 KiB of shared memory, and have what a shader declares.
        assert len(reasons) == 1 and "bytes of shared memory" in reasons[0]
        reasons = []
        monkeypatch.setattr(pipeline, "device_reasons", lambda variant, info: [])
    if reasons and info.subgroup_size < fused.SUBGROUP_LANES and "subgroup" in request.param.name:
        pytest.skip(f"{info.name}: {reasons[0]}")
    assert not reasons
    return rigs.of(request.param)


class Inputs:
    """Random inputs of one case, NaN in everything that must not be read, and what the oracle says."""

    def __init__(self, case: Case, variant: Variant, rng: np.random.Generator, size: float = 2.0) -> None:
        self.q_dtype, self.k_dtype = DTYPE[variant.axes["query"]], DTYPE[variant.axes["key"]]
        self.case = case
        keys = (case.batch_size, case.num_kv_heads, case.num_keys)
        self.query = draw(rng, (case.batch_size, case.num_heads, case.q_len, case.head_dim), self.q_dtype, size)
        self.key = draw(rng, (*keys, case.head_dim), self.k_dtype, size)
        self.value = draw(rng, (*keys, case.value_dim), self.k_dtype, size, 1.0)
        self.mask = case.draw_mask(rng)
        self.slopes = rng.uniform(-0.1, 1, case.num_heads).astype(np.float32) if case.alibi else None
        self.sinks = (8 * rng.standard_normal(case.num_heads)).astype(np.float32) if case.sinks else None
        self.pack()

    def pack(self) -> None:
        """Put the arrays into their stores, with GUARD in keys that no row sees and values without any weight."""
        case = self.case
        self.stores = {"query": Store(case, self.query, self.q_dtype),
                       "key": Store(case, self.key, self.k_dtype, case.unread_keys()[:, None]),
                       "value": Store(case, self.value, self.k_dtype, case.unread_values(self.mask))}

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": np.float32(self.case.scale), "softcap": self.case.softcap, "alibi_slopes": self.slopes,
                "mask": self.mask, "sinks": self.sinks} | self.case.places

    def pieces(self) -> dict[str, Any]:
        case, stores = self.case, self.stores
        strides = stores["query"].strides("q") | stores["key"].strides("k") | stores["value"].strides("v")
        params = block(case, strides | Store.unwritten(case, self.q_dtype).strides("out"), self.mask, self.slopes,
                       self.sinks, row_vecs(case.value_dim, self.q_dtype))
        return {"params": params, "mask_data": place_mask(self.mask), "outputs": [], "lse": []} | {
            name: store.place(f"{name}_base") for name, store in stores.items()}

    def run(self, rig: Rig) -> tuple[np.ndarray, np.ndarray | None]:
        """Return out ``[batch, heads, q_len, value_dim]`` and lse, after checking that nothing else was written."""
        after = rig.run(self.pieces())
        out = Store.unwritten(self.case, self.q_dtype).take(after["outputs"], "out_base")
        return out, take_lse(self.case, after["lse"])

    def check(self, results: tuple[np.ndarray, np.ndarray | None]) -> None:
        out, lse = results
        share = oracle.worst_share(out, self.query, self.key, self.value, lse=lse, **self.options)
        assert share <= 1, f"the worst row is off by {share} of its bound"


def dtypes(variant: Variant) -> tuple[str, str]:
    return variant.axes["query"], variant.axes["key"]


def names_for(variant: Variant) -> list[str]:
    """Return the cases of a variant: all for float32, some for float16, a few for other dtypes.

    Dtypes differ in how elements are loaded and stored only, so the edges of tiles need not be tried with each.
    VKATTN_LONG=1 runs everything.
    """
    if os.environ.get("VKATTN_LONG") == "1" or dtypes(variant) == ("f32", "f32"):
        return [*CASES, *TILES]
    some = ["one key", "many rows", "window", "bool mask", "float mask", "sinks", "nothing live in one batch"]
    return ["plain", "group 3", "everything", *(some if dtypes(variant) == ("f16", "f16") else ())]


@pytest.mark.parametrize(("rig", "name"), [
    pytest.param(variant, name, id=f"{variant.name}-{name}") for variant in VARIANTS for name in names_for(variant)
], indirect=["rig"])
def test_out_and_lse(rig: Rig, rng: np.random.Generator, name: str) -> None:
    inputs = Inputs((CASES | TILES)[name], rig.variant, rng)
    inputs.check(inputs.run(rig))


def test_large_scores(rig: Rig, rng: np.random.Generator) -> None:
    """Scores of hundreds, both signs: the maximum moves from tile to tile, weights underflow."""
    case = Case(q_len=40, num_keys=270, kv_len=(270, 190), scale=1.0, head_dim=64, value_dim=64, num_kv_heads=1)
    inputs = Inputs(case, rig.variant, rng, 8.0)
    inputs.key *= np.linspace(0.1, 1.0, case.num_keys, dtype=np.float32)[:, None].astype(inputs.key.dtype)
    inputs.pack()
    inputs.check(inputs.run(rig))


def test_values_that_are_not_finite(rig: Rig, rigs: Rigs, rng: np.random.Generator) -> None:
    """Infinity and NaN reach the rows and elements that give them a weight, and change no bit of any other.

    Sums with compensation and without.
    """
    case = Case(q_len=90, num_keys=150, kv_len=(150, 100), window=(None, 9), value_dim=21, scale=0.05)
    inputs = Inputs(case, rig.variant, rng)
    of_both = [rig, rigs.make(rig.variant, spec=(1,))] if rig.variant.spec else [rig]
    cleans = [inputs.run(one) for one in of_both]
    inputs.value[:, :, 20, 3], inputs.value[:, :, 45, 5], inputs.value[:, :, 97, 5] = np.nan, np.inf, -np.inf
    inputs.value[:, :, 90, 20] = -np.inf
    inputs.pack()
    expected = oracle.attention(inputs.query, inputs.key, inputs.value, **inputs.options)
    hit = ~np.isfinite(expected)
    assert hit.any() and not hit.all()
    for one, clean in zip(of_both, cleans, strict=True):
        dirty = inputs.run(one)
        np.testing.assert_array_equal(dirty[0][hit].astype(np.float32), expected[hit].astype(np.float32))
        np.testing.assert_array_equal(dirty[0][~hit], clean[0][~hit])
        np.testing.assert_array_equal(dirty[1], clean[1])
    for one in of_both[1:]:
        one.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_a_number_makes_its_row_nan(rig: Rig, rng: np.random.Generator, bad: float) -> None:
    case = Case(q_len=70, num_keys=200, kv_len=(200, 130), q_offset=(100, 20), window=(None, 0), value_dim=16)
    inputs = Inputs(case, rig.variant, rng)
    clean_out, clean_lse = inputs.run(rig)
    inputs.query[0, 1, 66, 2] = bad  # the row
    inputs.key[1, 0, 60] = np.nan  # and a key that rows 40 and later of the other batch see
    inputs.pack()
    out, lse = inputs.run(rig)
    assert clean_lse is not None and lse is not None
    hit = np.zeros(lse.shape, bool)
    hit[0, 1, 66] = hit[1, 0, 40:] = True
    assert np.isnan(lse[hit]).all() and np.isnan(out[hit].astype(np.float32)).all()
    np.testing.assert_array_equal(lse[~hit], clean_lse[~hit])
    np.testing.assert_array_equal(out[~hit], clean_out[~hit])


@pytest.mark.once
@pytest.mark.parametrize("rig", [one for one in VARIANTS if dtypes(one) in {("f32", "f32"), ("f16", "f16")}],
                         indirect=True, ids=lambda variant: variant.name)
@pytest.mark.parametrize("num_keys", [fused.PLAIN_KEYS, 70000])
def test_many_equal_weights(rig: Rig, rigs: Rigs, num_keys: int) -> None:
    """As many keys as are added up without compensation, and more: of weight 1 and with equal values, so that rounding
    errors do not cancel.
    """
    spec = (int(num_keys > fused.PLAIN_KEYS),) if rig.variant.spec else ()
    case = Case(batch_size=1, num_kv_heads=1, q_len=2, num_keys=num_keys, kv_len=(num_keys,), q_offset=(0,), head_dim=4,
                value_dim=4, tiles_per_chunk=1)
    wide = rigs.make(rig.variant, chunks=1, spec=spec, key=1 << 20, value=1 << 20)
    inputs = Inputs(case, rig.variant, np.random.default_rng(3))
    inputs.query[...] = 0
    inputs.value[...] = np.array([0.1, 0.3, -0.7, 1 / 3], np.float32).astype(inputs.value.dtype)
    inputs.pack()
    results = inputs.run(wide)
    wide.close()
    inputs.check(results)


def test_the_bits_do_not_depend_on_the_number_of_workgroups_or_runs(rig: Rig, rigs: Rigs,
                                                                    rng: np.random.Generator) -> None:
    inputs = Inputs(REPEATED, rig.variant, rng)
    inputs.check(inputs.run(rig))
    assert_the_same_bits(rigs, rig, inputs.pieces())
