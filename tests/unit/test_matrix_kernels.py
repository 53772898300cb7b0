"""The families on matrix units: who may use them, and which variant."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tests.matrix_devices import PROBLEM, device, nvidia, passed
from vkattn.caps.model import DeviceInfo, MatrixShape
from vkattn.dispatch import choose
from vkattn.errors import NoKernelError
from vkattn.kernels import coopmat, coopmat2, matrix, split_matrix, verdicts
from vkattn.kernels.manifest import load_manifest
from vkattn.problem import Problem

pytestmark = pytest.mark.usefixtures("no_verdicts")

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
KERNELS = [kernel for kernel in load_manifest().values() if kernel.kernel in matrix.FEATURES
           and kernel.kernel != split_matrix.KERNEL]  # that is one of `split`: tests/unit/test_split_matrix.py


@pytest.mark.parametrize(("changes", "reason"), [
    ({"query_dtype": "float32"}, "query, key and value are float32, float16, float16; they must be float16, or"),
    ({"head_dim": 257}, "head_dim 257; it must be 16 to 256"),
    ({"value_dim": 300}, "value_dim 300; it must be 16 to 256"),
    ({"value_dim": 15}, "value_dim 15; it must be 16 to 256"),
])
def test_what_no_device_computes(changes: dict[str, Any], reason: str) -> None:
    problem = dataclasses.replace(PROBLEM, **changes)
    for family in (coopmat, coopmat2):
        reasons = family.not_supported_reasons(problem, nvidia())
        assert len(reasons) == 1 and reasons[0].startswith(reason)
        assert family.untested(problem, nvidia()) is None


@pytest.mark.parametrize(("info", "reason"), [
    (device(extensions=frozenset()), "needs VK_KHR_cooperative_matrix, which the device does not report"),
    (device(matrix_shapes=(MatrixShape(8, 8, 16, "float16", "float32"),)),
     "needs matrices of 16 x 16 x 16 float16 summed in float32, which the device does not report"),
    (device(max_shared_memory_bytes=16384), "bytes of shared memory, the device has 16384"),
    (device(subgroup_size=16), "no variant is compiled for subgroups of 16 invocations and float16"),
])
def test_what_a_device_lacks(info: DeviceInfo, reason: str) -> None:
    reasons = coopmat.not_supported_reasons(PROBLEM, info)
    assert any(reason in found for found in reasons)
    assert coopmat.untested(PROBLEM, info) is None
    with pytest.raises(NoKernelError, match="coopmat: .*" + re.escape(reason)):
        choose(PROBLEM, info, "coopmat")
    assert choose(PROBLEM, info).NAME == "fused"


def test_the_second_family_needs_its_extension_and_features() -> None:
    assert coopmat2.not_supported_reasons(PROBLEM, device()) == [
        "needs VK_NV_cooperative_matrix2, which the device does not report"]
    (reason,) = coopmat2.not_supported_reasons(PROBLEM, nvidia(matrix_features=frozenset({"reductions"})))
    assert reason == "needs conversions, per_element of VK_NV_cooperative_matrix2, which the device does not report"


def test_a_kernel_is_used_only_after_its_self_test() -> None:
    info = nvidia()
    assert coopmat2.not_supported_reasons(PROBLEM, info) == [
        "attn_coopmat2_f16_d128_l32: not tested on this device yet"]
    assert choose(PROBLEM, info).NAME == "fused"
    passed(info, "attn_coopmat2_f16_d128_l32")
    assert coopmat2.not_supported_reasons(PROBLEM, info) == [] and coopmat2.untested(PROBLEM, info) is None
    assert choose(PROBLEM, info).NAME == "coopmat2"
    assert choose(dataclasses.replace(PROBLEM, head_dim=64, value_dim=64), info).NAME == "fused"  # another kernel


@pytest.mark.parametrize(("rows", "dtype", "expected"), [
    (125, "float16", "split"), (126, "float16", "coopmat2"), (126, "float32", "split"), (256, "float32", "split")])
def test_split_is_preferred_up_to_fewer_rows_where_units_take_the_rest(rows: int, dtype: str, expected: str) -> None:
    """8 KV heads: 1000 rows in all."""
    passed(nvidia(), "attn_coopmat2_f16_d128_l32")
    problem = dataclasses.replace(PROBLEM, num_heads=8, max_q_len=rows, query_dtype=dtype)
    found = choose(problem, nvidia())
    assert expected == found.NAME


def test_a_failed_self_test_is_a_reason_and_another_variant_may_do() -> None:
    info = device()
    quad, shared = coopmat.candidates(PROBLEM, info)
    assert [quad.axes["rows"], shared.axes["rows"]] == ["quad", "shared"]
    assert coopmat.untested(PROBLEM, info) == quad
    verdicts.note(quad, info, "failed its self-test on this device (causal: an error of 4e+04 of the bound)")
    assert coopmat.untested(PROBLEM, info) == shared
    assert coopmat.not_supported_reasons(PROBLEM, info) == [
        f"{quad.name}: failed its self-test on this device (causal: an error of 4e+04 of the bound)",
        f"{shared.name}: not tested on this device yet"]
    passed(info, shared.name)
    assert coopmat.not_supported_reasons(PROBLEM, info) == []
    assert coopmat.variants(PROBLEM, info) == (shared,) and coopmat.untested(PROBLEM, info) is None


def test_the_first_that_passes_needs_no_test_of_the_next() -> None:
    passed(device(), "attn_coopmat_f16_d128_l32_quad")
    assert coopmat.untested(PROBLEM, device()) is None


def test_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    passed(nvidia(), "attn_coopmat2_f16_d128_l32")
    monkeypatch.setenv("VKATTN_TIERS", "base,subgroup")
    assert coopmat2.not_supported_reasons(PROBLEM, nvidia()) == ["VKATTN_TIERS does not name coopmat"]
    assert choose(PROBLEM, nvidia()).NAME == "fused"
    monkeypatch.setenv("VKATTN_TIERS", "coopmat")
    assert choose(PROBLEM, nvidia()).NAME == "coopmat2"


def test_emulated_units_are_used_only_by_name() -> None:
    info = nvidia(device_type="cpu", subgroup_size=8, matrix_shapes=(MatrixShape(8, 8, 8, "float16", "float32"),))
    passed(info, "attn_coopmat_f16_d128_l8_shared", "attn_coopmat2_f16_d128_l8")
    assert choose(PROBLEM, info).NAME == "fused"
    assert choose(PROBLEM, info, "coopmat").NAME == "coopmat"
    assert choose(PROBLEM, info, "coopmat2").NAME == "coopmat2"


def test_every_variant_is_reachable() -> None:
    reached = set()
    for lanes in matrix.LANES.values():
        info = nvidia(subgroup_size=lanes)
        for dtype in matrix.OPERANDS:
            for dim in (1, 64, 65, 128, 129, 256):
                for head_dim, value_dim in ((dim, 1), (1, dim)):
                    problem = Problem(1, 1, 1, 9, 9, head_dim, value_dim, dtype, dtype, dtype)
                    for family in (coopmat, coopmat2):
                        found = family.candidates(problem, info)
                        assert all(matrix.WIDTHS[kernel.axes["width"]] >= dim for kernel in found)
                        reached |= {kernel.name for kernel in found}
    assert reached == {kernel.name for kernel in KERNELS}


def test_python_and_shaders_agree() -> None:
    for file in ("attn_coopmat.comp", "attn_coopmat2.comp"):
        text = (SHADERS / file).read_text()
        compiled = {kernel.axes["width"] for kernel in KERNELS if f"{kernel.kernel}.comp" == file}
        widths = dict(re.findall(r"defined\(WIDTH_(D\d+)\)\n#define WIDTH (\d+)u", text))
        assert {name.lower(): int(width) for name, width in widths.items()} == {
            name: matrix.WIDTHS[name] for name in compiled}
        sizes = re.findall(r"defined\(LANES_(L\d+)\)\n#define LANES (\d+)u\n#define EDGE (\d+)u", text)
        for name, lanes, edge in sizes:
            assert (matrix.LANES[name.lower()], matrix.EDGES[name.lower()]) == (int(lanes), int(edge))
        assert len(sizes) == len({kernel.axes["lanes"] for kernel in KERNELS if f"{kernel.kernel}.comp" == file})


def test_kernels_declare_what_they_use() -> None:
    for kernel in KERNELS:
        assert "CooperativeMatrixKHR" in kernel.capabilities and kernel.compiler.startswith("glslangValidator 1")
        assert ("CooperativeMatrixReductionsNV" in kernel.capabilities) == (kernel.kernel == "attn_coopmat2")
        assert kernel.shared_bytes <= 49152
        lanes = matrix.LANES[kernel.axes["lanes"]]
        assert matrix.block_rows(kernel) == kernel.local_size[0] // lanes * matrix.EDGES[kernel.axes["lanes"]]


def test_work_is_cut_for_slow_devices_only() -> None:
    passed(nvidia(), "attn_coopmat2_f16_d128_l32")
    assert coopmat2.cut(PROBLEM, 8192, 8192, {}, nvidia()).num_chunks == 1
    slow = nvidia(device_type="cpu")
    passed(slow, "attn_coopmat2_f16_d128_l32")
    cut = coopmat2.cut(PROBLEM, 8192, 8192, {}, slow)
    tiles = 8 * -(-8192 * 3 // matrix.block_rows(coopmat2.variants(PROBLEM, slow)[0]))
    assert cut.num_chunks > 1 and cut.num_chunks * cut.words["tiles_per_chunk"] >= tiles
