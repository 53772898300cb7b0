"""Asks the Vulkan driver for its matrix units: the shapes that it multiplies, and what it can do with a matrix besides.

PyPI's binding ``vulkan`` is older than VK_NV_cooperative_matrix2, so the structures are declared here.
"""

from __future__ import annotations

import importlib
from typing import Any

from .model import MatrixShape

KHR, NV2 = "VK_KHR_cooperative_matrix", "VK_NV_cooperative_matrix2"

#: The features of VkPhysicalDeviceCooperativeMatrix2FeaturesNV, in the order of its members.
NV2_FEATURES = ("workgroup_scope", "flexible_dimensions", "reductions", "conversions", "per_element",
                "tensor_addressing", "block_loads")

#: VkComponentTypeKHR.
_TYPES = {0: "float16", 1: "float32", 1000141000: "bfloat16"}
_SCOPE_SUBGROUP = 3

#: VkStructureType.
_COOPERATIVE_MATRIX_PROPERTIES, _COOPERATIVE_MATRIX_2_FEATURES, _FEATURES_2 = 1000506001, 1000593000, 1000059000

#: VkCooperativeMatrixPropertiesKHR, VkPhysicalDeviceCooperativeMatrix2FeaturesNV and VkPhysicalDeviceFeatures2 (whose
#: 55 features are not looked at).
_DECLARATIONS = """
typedef struct { uint32_t type; void* next; uint32_t m, n, k, a, b, c, result, saturating, scope; } Shape;
typedef struct { uint32_t type; void* next; uint32_t features[7]; } Matrix2;
typedef struct { uint32_t type; void* next; uint32_t features[55]; } Features;
typedef int32_t (*GetShapes)(void* device, uint32_t* count, Shape* shapes);
typedef void (*GetFeatures)(void* device, Features* features);
"""


def _interface() -> Any:
    """Return a foreign-function interface that knows the structures; cffi comes with ``vulkan``."""
    interface = importlib.import_module("cffi").FFI()
    interface.cdef(_DECLARATIONS)
    return interface


def _function(vk: Any, ffi: Any, instance: Any, name: str, kind: str) -> Any:
    """Return a function of the driver as ``kind``, or None where the loader does not know it."""
    address = int(vk.ffi.cast("uintptr_t", vk.lib.vkGetInstanceProcAddr(instance, name.encode())))
    return ffi.cast(kind, address) if address else None


def matrix_shapes(vk: Any, instance: Any, handle: Any, extensions: frozenset[str]) -> tuple[MatrixShape, ...]:
    """Return the shapes at subgroup scope with one type for both operands and one for both sums; () without any."""
    if KHR not in extensions:
        return ()
    ffi = _interface()
    ask = _function(vk, ffi, instance, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", "GetShapes")
    if ask is None:
        return ()
    device = ffi.cast("void*", int(vk.ffi.cast("uintptr_t", handle)))
    count = ffi.new("uint32_t*")
    if ask(device, count, ffi.NULL) or not count[0]:
        return ()
    found = ffi.new("Shape[]", count[0])
    for shape in found:
        shape.type = _COOPERATIVE_MATRIX_PROPERTIES
    if ask(device, count, found) < 0:
        return ()
    return tuple(
        MatrixShape(shape.m, shape.n, shape.k, _TYPES.get(shape.a, "other"), _TYPES.get(shape.result, "other"))
        for shape in found[0 : count[0]]
        if shape.scope == _SCOPE_SUBGROUP and shape.a == shape.b and shape.c == shape.result and not shape.saturating)


def matrix_features(vk: Any, instance: Any, handle: Any, extensions: frozenset[str]) -> frozenset[str]:
    """Return the names of `NV2_FEATURES` that the device reports."""
    if NV2 not in extensions:
        return frozenset()
    ffi = _interface()
    ask = _function(vk, ffi, instance, "vkGetPhysicalDeviceFeatures2", "GetFeatures")
    if ask is None:
        return frozenset()
    matrix = ffi.new("Matrix2*", {"type": _COOPERATIVE_MATRIX_2_FEATURES})
    features = ffi.new("Features*", {"type": _FEATURES_2, "next": matrix})
    ask(ffi.cast("void*", int(vk.ffi.cast("uintptr_t", handle))), features)
    return frozenset(name for name, has in zip(NV2_FEATURES, matrix.features, strict=True) if has)
