"""The kernels on matrix units: each variant against `oracle.attention` where the device has the units, else reasons.

What a device does not report is asserted, not skipped; what it reports must pass the self-test, except that the
variants "quad" may find another order of elements than theirs, and then "shared" is used.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkattn
from tests.gpu.kernels import test_attn_fused as fused_tests
from tests.gpu.kernels.cases import CASES, REPEATED, Case
from tests.gpu.kernels.harness import CHUNKS, DTYPE, Rig, Rigs, assert_the_same_bits, variants_of
from tests.gpu.kernels.test_attn_fused import TILES, WORDS, Inputs
from vkattn import oracle
from vkattn.dispatch import MATRIX_ALGORITHMS, by_name
from vkattn.errors import NoKernelError
from vkattn.kernels import matrix, verdicts
from vkattn.kernels.manifest import Variant
from vkattn.ops.selftest import judge
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

pytestmark = pytest.mark.usefixtures("own_verdicts")

VARIANTS = variants_of("attn_coopmat") + variants_of("attn_coopmat2")
NAMES = [variant.name for variant in VARIANTS]

__all__ = ["WORDS"]  # for the fixture `rigs`


def as_fused(variant: Variant) -> Variant:
    """Return ``variant`` with the axes that the tests of the fused kernels look at."""
    dtype = variant.axes["dtype"]
    return dataclasses.replace(variant, axes=MappingProxyType({"query": dtype, "key": dtype}))


def refused(variant: Variant, device: Device) -> bool:
    """Whether the device does not report what ``variant`` needs; if so, check that it says so and is not used."""
    reasons = matrix.static_reasons(variant, device.info)
    if not reasons:
        return False
    dtype = DTYPE[variant.axes["dtype"]]
    array = np.ones((1, 1, 65, matrix.WIDTHS[variant.axes["width"]]), np.float32).astype(dtype)
    name = variant.kernel.removeprefix("attn_")
    problem = attention_call(array, array, array).problem
    family = by_name(name)
    if variant in family.candidates(problem, device.info):
        said = family.not_supported_reasons(problem, device.info)
        assert any(reason in found for reason in reasons for found in said)
    if all(matrix.static_reasons(other, device.info) for other in family.candidates(problem, device.info)):
        with pytest.raises(NoKernelError, match=f"{name}: (needs|no variant is compiled)"):
            vkattn.attention(array, array, array, algorithm=name, device=device)
    return True


def cases_for(variant: Variant) -> dict[str, Case]:
    """Return the cases whose rows fit the variant, and whose row tiles the rig's chunks hold."""
    width, rows = matrix.WIDTHS[variant.axes["width"]], matrix.block_rows(variant)
    return {name: case for name, case in (CASES | TILES).items()
            if min(case.head_dim, case.value_dim) >= matrix.NARROWEST
            and max(case.head_dim, case.value_dim) <= width
            and -(-case.q_len * case.group_size // rows) * case.batch_size * case.num_kv_heads
            <= CHUNKS * case.tiles_per_chunk}


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_a_variant(device: Device, rigs: Rigs, variant: Variant) -> None:
    """The self-test, every case, large scores, what is not finite, and 200 identical runs."""
    if refused(variant, device):
        return
    verdict = judge(device, variant)
    if variant.axes.get("rows") == "quad" and verdict:
        assert verdict.startswith("failed its self-test on this device (causal: an error of")
        return
    assert verdict == ""
    rig = rigs.of(as_fused(variant))
    wrong = {}
    for name, case in cases_for(variant).items():
        inputs = Inputs(case, rig.variant, np.random.default_rng(7))
        out, lse = inputs.run(rig)
        share = oracle.worst_share(out, inputs.query, inputs.key, inputs.value, lse=lse, coopmat=True, **inputs.options)
        if not share <= 1:
            wrong[name] = share
    assert not wrong
    fused_tests.test_values_that_are_not_finite(rig, rigs, np.random.default_rng(3))
    for bad in (np.nan, np.inf):
        fused_tests.test_a_score_that_is_not_a_number_makes_its_row_nan(rig, np.random.default_rng(3), bad)
    _large_scores(rig)
    assert_the_same_bits(rigs, rig, Inputs(REPEATED, rig.variant, np.random.default_rng(6)).pieces())


def _large_scores(rig: Rig) -> None:
    """Scores of hundreds, both signs: the maximum moves from tile to tile, weights underflow."""
    case = Case(q_len=40, num_keys=270, kv_len=(270, 190), scale=1.0, head_dim=64, value_dim=64, num_kv_heads=1)
    inputs = Inputs(case, rig.variant, np.random.default_rng(5), 8.0)
    inputs.key *= np.linspace(0.1, 1.0, case.num_keys, dtype=np.float32)[:, None].astype(inputs.key.dtype)
    inputs.pack()
    out, lse = inputs.run(rig)
    assert oracle.worst_share(out, inputs.query, inputs.key, inputs.value, lse=lse, coopmat=True, **inputs.options) <= 1


def can(device: Device, name: str, problem: Any) -> bool:
    """Whether ``name`` computes ``problem`` once its self-tests have run."""
    vkattn.ops.selftest.settle(device, problem, name)
    return not by_name(name).not_supported_reasons(problem, device.info)


@pytest.mark.parametrize("name", MATRIX_ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "q_len", "kv_len", "head_dim", "value_dim"), [
    ((6, 2), 67, 131, 1, 7), ((3, 3), 129, 257, 17, 17), ((6, 2), 200, 333, 64, 80), ((3, 1), 65, 127, 128, 64),
    ((3, 1), 63, 97, 129, 256), ((2, 2), 130, 33, 256, 129), ((6, 2), 90, 1001, 80, 128)])
def test_hostile_shapes(device: Device, rng: np.random.Generator, name: str, dtype: Any, heads: tuple[int, int],
                        q_len: int, kv_len: int, head_dim: int, value_dim: int) -> None:
    """Odd sizes off the tiles, causal both ways, windows, masks, and NaN in what nobody attends."""
    query, key, value = ((2 * rng.standard_normal((2, *shape), np.float32)).astype(dtype) for shape in (
        (heads[0], q_len, head_dim), (heads[1], kv_len, head_dim), (heads[1], kv_len, value_dim)))
    live = np.array([kv_len - 1, kv_len // 2])
    mask = rng.random((q_len, kv_len)) < 0.7
    mask[:, 5:7], mask[min(9, q_len - 1)] = False, False
    if not can(device, name, attention_call(query, key, value).problem):
        with pytest.raises(NoKernelError, match=f"{name}: "):
            vkattn.attention(query, key, value, algorithm=name, device=device)
        return
    for options in ({"causal": "bottom_right"}, {"causal": "top_left", "window": (40, None)}, {"mask": mask},
                    {"mask": np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32),
                     "softcap": 8.0, "sinks": np.linspace(-1, 3, heads[0])}):
        dirty_key, dirty_value = key.copy(), value.copy()
        for batch in range(2):
            dirty_key[batch, :, live[batch] :], dirty_value[batch, :, live[batch] :] = np.nan, np.nan
        if "mask" in options:
            dirty_key[:, :, 5], dirty_value[:, :, 6] = np.nan, np.inf
        out, lse = vkattn.attention(query, dirty_key, dirty_value, kv_len=live, return_lse=True, algorithm=name,
                                    device=device, **options)
        share = oracle.worst_share(out, query, key, value, kv_len=live, lse=lse, coopmat=True, **options)
        assert share <= 1, options


@pytest.mark.parametrize("name", MATRIX_ALGORITHMS)
def test_what_it_does_not_compute_is_refused_with_the_reason(device: Device, name: str) -> None:
    single, half = np.ones((1, 1, 9, 16), np.float32), np.ones((1, 1, 9, 257), np.float16)
    with pytest.raises(NoKernelError, match=f"{name}: query, key and value are float32"):
        vkattn.attention(single, single, single, algorithm=name, device=device)
    with pytest.raises(NoKernelError, match=f"{name}: head_dim 257; it must be 16 to 256; value_dim 257"):
        vkattn.attention(half, half, half, algorithm=name, device=device)


@pytest.mark.parametrize("name", MATRIX_ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_the_lowest_finite_mask_is_not_minus_infinity(device: Device, rng: np.random.Generator, name: str,
                                                      dtype: Any) -> None:
    """Rows masked with the lowest float everywhere attend all keys alike, though it has no place in base 2."""
    query, key, value = ((0.1 * rng.standard_normal((1, 1, rows, 8))).astype(dtype) for rows in (3, 70, 70))
    if not can(device, name, attention_call(query, key, value).problem):
        with pytest.raises(NoKernelError, match=f"{name}: "):
            vkattn.attention(query, key, value, algorithm=name, device=device)
        return
    mask = np.full((3, 70), np.finfo(np.float32).min, np.float32)
    mask[0, 4] = 0
    out, lse = vkattn.attention(query, key, value, mask=mask, return_lse=True, algorithm=name, device=device)
    assert oracle.worst_share(out, query, key, value, mask=mask, lse=lse, coopmat=True) <= 1
    assert (out[0, 0, 1:] != 0).all()


@pytest.mark.parametrize("name", MATRIX_ALGORITHMS)
def test_a_graph_takes_it_for_long_runs(device: Device, rng: np.random.Generator, name: str) -> None:
    arrays = [rng.standard_normal((1, heads, 150, 64)).astype(np.float16) for heads in (6, 2, 2)]
    graph = vkattn.GraphBuilder(device)
    tokens = vkattn.Dim("tokens", max=150)
    query = graph.input("query", (1, 6, tokens, 64), "float16")
    key, value = (graph.input(label, (1, 2, 150, 64), "float16") for label in ("key", "value"))
    if not can(device, name, attention_call(*arrays).problem):
        with pytest.raises(NoKernelError, match=f"{name}: "):
            graph.attention(query, key, value, causal="top_left", algorithm=name)
        return
    graph.output("out", graph.attention(query, key, value, causal="top_left", algorithm=name))
    built = graph.build()
    for count in (150, 3, 77):
        query_rows = arrays[0][:, :, :count]
        out = built.run({"query": query_rows, "key": arrays[1], "value": arrays[2]}, tokens=count)["out"]
        assert oracle.worst_share(out, query_rows, *arrays[1:], causal="top_left", coopmat=True) <= 1
    assert any(span.variant.startswith(f"attn_{name}_") for span in built.timings())
    built.close()


def test_tests_of_the_driver_leave_their_verdicts(device: Device, tmp_path: Path) -> None:
    """What `refused` does not stop has a verdict after its family was asked for; nothing else has."""
    array = np.ones((1, 1, 65, 16), np.float16)
    problem = attention_call(array, array, array).problem
    for name in MATRIX_ALGORITHMS:
        family = by_name(name)
        able = can(device, name, problem)
        known = [verdicts.verdict(kernel, device.info) for kernel in family.candidates(problem, device.info)]
        reported = [not matrix.static_reasons(kernel, device.info)
                    for kernel in family.candidates(problem, device.info)]
        assert able == ("" in known)
        assert any(found is not None for found in known) == any(reported)
