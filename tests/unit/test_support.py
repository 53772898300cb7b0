"""The reasons why a device cannot run a variant, one limit at a time."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from tests.fakes import fake_device_info
from vkattn.kernels.manifest import Binding, Variant, load_manifest
from vkattn.kernels.support import SUBGROUP, device_reasons

COOPMAT = frozenset({"CooperativeMatrixKHR", "Float16", "VulkanMemoryModel"})


def variant(**overrides: Any) -> Variant:
    """Return a variant that needs all that the fake device has."""
    fields: dict[str, Any] = {
        "name": "fake",
        "kernel": "fake",
        "axes": MappingProxyType({}),
        "bindings": tuple(Binding(f"b{i}", "read", False) for i in range(8)),
        "push": tuple(f"p{i}" for i in range(32)),
        "spec": (),
        "capabilities": frozenset({"GroupNonUniform", "GroupNonUniformVote"}),
        "local_size": (128, 1, 1),
        "shared_bytes": 16384,
        "file": "fake.spv",
        "sha256": "",
        "compiler": "",
    }
    return Variant(**{**fields, **overrides})


def test_what_just_fits_is_supported() -> None:
    assert device_reasons(variant(), fake_device_info()) == []
    assert device_reasons(variant(local_size=(2, 1, 64)), fake_device_info()) == []


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ({"api_version": (1, 0, 3)}, "needs Vulkan 1.1, the device has 1.0.3"),
        ({"max_workgroup_size": (64, 128, 64)}, "needs a workgroup of 128 in x, the device allows 64"),
        ({"max_workgroup_invocations": 64}, "needs 128 invocations in a workgroup, the device has 64"),
        ({"max_shared_memory_bytes": 16383}, "needs 16384 bytes of shared memory, the device has 16383"),
        ({"max_storage_buffers_per_stage": 4}, "needs 8 storage buffers, the device has 4"),
        ({"max_push_constants_bytes": 124}, "needs 128 bytes of push constants, the device has 124"),
        ({"subgroup_operations": {"basic"}}, "needs subgroup vote operations, the device reports none in compute"),
    ],
)
def test_each_limit(device: dict[str, Any], reason: str) -> None:
    assert device_reasons(variant(), fake_device_info(**device)) == [reason]


def test_all_reasons_are_given() -> None:
    info = fake_device_info(subgroup_operations=frozenset(), max_shared_memory_bytes=0)
    assert len(device_reasons(variant(local_size=(1, 1, 65)), info)) == 4


def test_local_sizes_are_compared_axis_by_axis() -> None:
    reasons = device_reasons(variant(local_size=(1, 1, 65)), fake_device_info())
    assert reasons == ["needs a workgroup of 65 in z, the device allows 64"]


@pytest.mark.parametrize("capability", SUBGROUP)
def test_subgroup_operations(capability: str) -> None:
    only = variant(capabilities=frozenset({capability}))
    assert device_reasons(only, fake_device_info(subgroup_operations=frozenset({SUBGROUP[capability]}))) == []
    assert len(device_reasons(only, fake_device_info(subgroup_operations=frozenset()))) == 1


@pytest.mark.parametrize("capability", ["Float16", "StorageBuffer16BitAccess", "Int8", "Int64", "Capability99"])
def test_a_feature_is_refused_even_if_the_extension_is_reported(capability: str) -> None:
    """SwiftShader reports 16-bit storage and computes wrong values, because Kompute does not enable it."""
    info = fake_device_info(extensions=frozenset({"VK_KHR_16bit_storage", "VK_KHR_shader_float16_int8"}))
    reasons = device_reasons(variant(capabilities=frozenset({capability})), info)
    assert reasons == [f"uses {capability}, whose feature Kompute cannot enable"]


def test_cooperative_matrices_need_their_extensions() -> None:
    cooperative = variant(capabilities=COOPMAT)
    assert device_reasons(cooperative, fake_device_info()) == [
        "needs VK_KHR_cooperative_matrix, which the device does not report",
        "needs VK_KHR_shader_float16_int8, which the device does not report",
        "needs VK_KHR_vulkan_memory_model, which the device does not report",
    ]
    names = {"VK_KHR_cooperative_matrix", "VK_KHR_shader_float16_int8", "VK_KHR_vulkan_memory_model"}
    assert device_reasons(cooperative, fake_device_info(extensions=frozenset(names))) == []


def test_base_variants_run_on_what_vulkan_promises() -> None:
    """Every variant without capabilities of its own fits the least device, unless it is a larger tile of one that does.

    The number of buffers is left aside: Vulkan promises 4, and every device known has more.
    """
    info = fake_device_info(subgroup_operations=frozenset(), extensions=frozenset(), max_storage_buffers_per_stage=16)
    for name, committed in load_manifest().items():
        if not committed.capabilities and committed.axes.get("tile") not in ("large", "tall"):
            assert device_reasons(committed, info) == [], name
