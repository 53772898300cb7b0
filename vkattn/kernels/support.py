"""Why a device cannot run a compiled variant, in sentences. Used by the kernels, the pipelines and ``vkattn info``."""

from __future__ import annotations

import math

from ..caps.model import DeviceInfo
from .manifest import Variant

#: SPIR-V capability -> the subgroup operation that a device must report; these need no feature to be enabled.
SUBGROUP = {
    "GroupNonUniform": "basic",
    "GroupNonUniformVote": "vote",
    "GroupNonUniformArithmetic": "arithmetic",
    "GroupNonUniformBallot": "ballot",
    "GroupNonUniformShuffle": "shuffle",
    "GroupNonUniformShuffleRelative": "shuffle_relative",
    "GroupNonUniformClustered": "clustered",
    "GroupNonUniformQuad": "quad",
}

#: SPIR-V capability -> the extension that a device must report. Kompute enables the feature of none of them, so a
#: kernel that uses cooperative matrices is trusted only after a numeric self-test on the device (docs/kernels.md).
COOPERATIVE = {
    "CooperativeMatrixKHR": "VK_KHR_cooperative_matrix",
    "CooperativeMatrixReductionsNV": "VK_NV_cooperative_matrix2",
    "CooperativeMatrixConversionsNV": "VK_NV_cooperative_matrix2",
    "CooperativeMatrixPerElementOperationsNV": "VK_NV_cooperative_matrix2",
    "CooperativeMatrixTensorAddressingNV": "VK_NV_cooperative_matrix2",
    "CooperativeMatrixBlockLoadsNV": "VK_NV_cooperative_matrix2",
    "TensorAddressingNV": "VK_NV_cooperative_matrix2",
    "BFloat16TypeKHR": "VK_KHR_shader_bfloat16",
    "BFloat16CooperativeMatrixKHR": "VK_KHR_shader_bfloat16",
    "Float16": "VK_KHR_shader_float16_int8",
    "StorageBuffer16BitAccess": "VK_KHR_16bit_storage",
    "UniformAndStorageBuffer16BitAccess": "VK_KHR_16bit_storage",
    "VulkanMemoryModel": "VK_KHR_vulkan_memory_model",
    "VulkanMemoryModelDeviceScope": "VK_KHR_vulkan_memory_model",
}

PUSH_WORD_BYTES = 4


def device_reasons(variant: Variant, info: DeviceInfo) -> list[str]:
    """Return why ``info`` cannot run ``variant`` with its default spec constants; an empty list means that it can."""
    reasons = []
    if info.api_version < (1, 1):
        reasons.append(f"needs Vulkan 1.1, the device has {'.'.join(map(str, info.api_version))}")
    for axis, size, limit in zip("xyz", variant.local_size, info.max_workgroup_size, strict=True):
        if size > limit:
            reasons.append(f"needs a workgroup of {size} in {axis}, the device allows {limit}")
    invocations = math.prod(variant.local_size)
    push_bytes = len(variant.push) * PUSH_WORD_BYTES
    for need, limit, what in (
        (invocations, info.max_workgroup_invocations, "invocations in a workgroup"),
        (variant.shared_bytes, info.max_shared_memory_bytes, "bytes of shared memory"),
        (len(variant.bindings), info.max_storage_buffers_per_stage, "storage buffers"),
        (push_bytes, info.max_push_constants_bytes, "bytes of push constants"),
    ):
        if need > limit:
            reasons.append(f"needs {need} {what}, the device has {limit}")
    return reasons + _capability_reasons(variant.capabilities, info)


def _capability_reasons(capabilities: frozenset[str], info: DeviceInfo) -> list[str]:
    """Return why the device, opened by Kompute, does not have what a variant uses beyond SPIR-V's Shader."""
    reasons = []
    missing_extensions = set()
    is_cooperative = "CooperativeMatrixKHR" in capabilities
    for capability in sorted(capabilities):
        if capability in SUBGROUP:
            if SUBGROUP[capability] not in info.subgroup_operations:
                reasons.append(f"needs subgroup {SUBGROUP[capability]} operations, the device reports none in compute")
        elif is_cooperative and capability in COOPERATIVE:
            if COOPERATIVE[capability] not in info.extensions:
                missing_extensions.add(COOPERATIVE[capability])
        else:
            reasons.append(f"uses {capability}, whose feature Kompute cannot enable")
    return reasons + [f"needs {name}, which the device does not report" for name in sorted(missing_extensions)]
