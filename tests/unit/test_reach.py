"""What a device uses of the compiled variants, and that the cases of `vkattn check` reach all of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import fake_device_info
from vkattn import check
from vkattn.caps.model import DeviceInfo, MatrixShape
from vkattn.check_results import Result, as_text, failed
from vkattn.kernels import matrix, verdicts
from vkattn.kernels.manifest import load_manifest, variant
from vkattn.reach import chosen, unable, why_not_run

pytestmark = pytest.mark.usefixtures("no_verdicts")

OPERATIONS = frozenset({"basic", "vote", "shuffle", "arithmetic", "ballot", "shuffle_relative"})
MATRICES = {
    "extensions": frozenset({"VK_KHR_cooperative_matrix", "VK_KHR_shader_float16_int8", "VK_KHR_vulkan_memory_model",
                             "VK_KHR_shader_bfloat16", "VK_NV_cooperative_matrix2"}),
    "matrix_features": frozenset({"reductions", "conversions", "per_element", "workgroup_scope"}),
    "matrix_shapes": tuple(MatrixShape(edge, edge, edge, operand, "float32") for operand in matrix.OPERANDS
                           for edge in sorted(set(matrix.EDGES.values()))),
}
#: What most GPUs have, and the software devices.
ROOM = {"max_workgroup_invocations": 1024, "max_workgroup_size": (1024, 1024, 64), "max_shared_memory_bytes": 49152,
        "max_storage_buffers_per_stage": 32, "subgroup_operations": OPERATIONS}
DEVICES: dict[str, dict[str, Any]] = {
    "no subgroup operations": {"max_storage_buffers_per_stage": 16},
    **{f"{kind}, subgroups of {size}": ROOM | {"device_type": kind, "subgroup_size": size}
       for kind in ("discrete", "integrated", "cpu") for size in (4, 8, 32)},
    **{f"matrix units, subgroups of {size}": ROOM | MATRICES | {"subgroup_size": size} for size in (8, 32, 64)},
    "matrix units on a CPU": ROOM | MATRICES | {"device_type": "cpu", "subgroup_size": 8},
    "little shared memory": ROOM | {"max_shared_memory_bytes": 16384},
}


def reached(monkeypatch: pytest.MonkeyPatch, info: DeviceInfo) -> set[str]:
    """Return the variants of attention that the cases of `vkattn check` would run on a device that is not there."""
    for name in ("_attend", "_attend_stored"):
        monkeypatch.setattr(check, name, lambda *arguments: lambda: 0.0)
    monkeypatch.setattr(check, "settle", lambda *arguments: None)
    results = {name: Result() for name in load_manifest()}
    device: Any = SimpleNamespace(info=info)
    check.check_attention(device, results)
    check.check_quantised(device, results)
    return {name for name, result in results.items() if result.cases}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "failed"])
def test_the_cases_reach_every_variant_that_a_device_uses(monkeypatch: pytest.MonkeyPatch, name: str,
                                                          is_passed: bool) -> None:
    info = fake_device_info(**DEVICES[name])
    if not is_passed and not info.matrix_shapes:
        return
    for kernel in load_manifest().values():
        if kernel.kernel in matrix.FEATURES and not matrix.static_reasons(kernel, info):
            verdicts.note(kernel, info, "" if is_passed else "failed its self-test on this device (wrong)")
    assert chosen(info) == reached(monkeypatch, info)


def why(name: str, info: DeviceInfo) -> str:
    return why_not_run(variant(name), info, chosen(info))


def test_why_a_variant_is_not_run() -> None:
    gpu, cpu = fake_device_info(**ROOM), fake_device_info(**ROOM | MATRICES | {"device_type": "cpu",
                                                                               "subgroup_size": 8})
    quad = variant("attn_coopmat_f16_d64_l32_quad")
    assert why("fill", gpu) == why("attn_softmax", gpu) == ""
    assert why("roofline_fma", gpu).startswith("no attention")
    assert why("attn_fused_subgroup_f32_f32", gpu) == "never used here: other variants do its work"
    assert why("attn_fused_subgroup_f32_f32", fake_device_info(**ROOM | {"subgroup_size": 4})) == (
        "cannot run here: needs subgroups of 8 invocations, the device has 4")
    assert why(quad.name, gpu) == (
        "cannot run here: needs VK_KHR_cooperative_matrix, which the device does not report")
    assert why("attn_coopmat_f16_d64_l8_shared", cpu) == "used here only if asked for by name"
    failing = fake_device_info(**ROOM | MATRICES)
    verdicts.note(quad, failing, "failed its self-test on this device (wrong)")
    assert why(quad.name, failing) == "cannot run here: failed its self-test on this device (wrong)"


def test_lanes_of_split_are_those_of_a_subgroup() -> None:
    narrow = fake_device_info(**ROOM | {"subgroup_size": 8})
    assert unable(variant("attn_split_subgroup_f16_f16_r4_l8_q1"), narrow) == []
    for name in ("attn_split_subgroup_f16_f16_r4_l16_q1", "attn_split_quant_subgroup_int8_l16"):
        assert unable(variant(name), narrow) == ["needs subgroups of 16 invocations, the device has 8"]
    assert unable(variant("attn_split_lanes_f16_f16"), narrow) == []
    assert unable(variant("attn_split_lanes_f16_f16"), replace(narrow, subgroup_size=4)) == [
        "needs subgroups of 8 invocations, the device has 4"]


def test_the_report_has_a_line_for_each_reason() -> None:
    results = {"fill": Result(0.25, 3), "copy": Result(2.0, 1, "3 words: error is 2 times the bound"),
               "attn_softmax": Result(problem="MISSED"), "roofline_fma": Result(not_run="no attention"),
               "roofline_copy": Result(not_run="no attention")}
    assert [name for name, result in results.items() if failed(result)] == ["copy", "attn_softmax"]
    assert as_text(results).splitlines() == [
        "  FAILED attn_softmax  MISSED",
        "  FAILED copy          3 words: error is 2 times the bound",
        "  ok     fill          worst error 0.25 of the bound, 3 cases",
        "  -      2 not run (1 of roofline_copy, 1 of roofline_fma): no attention",
        "1 passed, 2 failed, 2 not run"]
