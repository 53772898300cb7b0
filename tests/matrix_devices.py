"""Devices with matrix units that are not there, a problem for them, and self-tests that passed on them."""

from __future__ import annotations

from typing import Any

from tests.fakes import fake_device_info
from vkattn.caps.model import DeviceInfo, MatrixShape
from vkattn.kernels import verdicts
from vkattn.kernels.manifest import load_manifest
from vkattn.problem import Problem

PROBLEM = Problem(1, 24, 8, 2048, 2048, 128, 128, "float16", "float16", "float16")
KHR = frozenset({"VK_KHR_cooperative_matrix", "VK_KHR_shader_float16_int8", "VK_KHR_vulkan_memory_model",
                 "VK_KHR_shader_bfloat16"})
SHAPES = tuple(MatrixShape(16, 16, 16, operand, "float32") for operand in ("float16", "bfloat16"))
NV2 = frozenset({"reductions", "conversions", "per_element", "workgroup_scope"})


def device(**changes: Any) -> DeviceInfo:
    """Return a device with matrix units of VK_KHR_cooperative_matrix."""
    return fake_device_info(**({
        "extensions": KHR, "matrix_shapes": SHAPES, "max_shared_memory_bytes": 49152, "max_workgroup_invocations": 1024,
        "max_workgroup_size": (1024, 1024, 64), "max_storage_buffers_per_stage": 16,
        "subgroup_operations": frozenset({"basic", "vote", "shuffle", "arithmetic", "ballot", "shuffle_relative"}),
    } | changes))


def nvidia(**changes: Any) -> DeviceInfo:
    """Return one that has VK_NV_cooperative_matrix2 too."""
    return device(**({"extensions": KHR | {"VK_NV_cooperative_matrix2"}, "matrix_features": NV2} | changes))


def passed(info: DeviceInfo, *names: str) -> None:
    """Note that the self-tests of these variants passed on ``info``."""
    for name in names:
        verdicts.note(load_manifest()[name], info, "")
