"""Stand-ins for devices, for tests that need none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vkattn.caps.model import DeviceInfo, Heap


def fake_device_info(**overrides: Any) -> DeviceInfo:
    """Return a device that has what Vulkan 1.1 promises and little more; ``overrides`` are fields of `DeviceInfo`."""
    fields: dict[str, Any] = {
        "index": 0,
        "name": "Fake GPU",
        "device_type": "discrete",
        "vendor_id": 0x1234,
        "device_id": 0x5678,
        "driver_name": "fake driver",
        "driver_info": "1.0",
        "driver_version": 1,
        "api_version": (1, 1, 0),
        "max_storage_buffer_range": 1 << 27,
        "max_memory_allocation_count": 4096,
        "max_storage_buffers_per_stage": 8,
        "max_workgroup_count": (65535, 65535, 65535),
        "max_workgroup_size": (128, 128, 64),
        "max_workgroup_invocations": 128,
        "max_shared_memory_bytes": 16384,
        "max_push_constants_bytes": 128,
        "timestamp_period_ns": 1.0,
        "timestamp_valid_bits": 64,
        "subgroup_size": 32,
        "subgroup_operations": frozenset({"basic", "vote"}),
        "heaps": (Heap(1 << 33, True), Heap(1 << 34, False)),
        "extensions": frozenset(),
        "matrix_shapes": (),
        "matrix_features": frozenset(),
    }
    unknown = set(overrides) - set(fields)
    if unknown:
        raise TypeError(f"DeviceInfo has no field {', '.join(sorted(unknown))}")
    return DeviceInfo(**{**fields, **overrides})


def with_tuning(info: DeviceInfo, **changes: Any) -> DeviceInfo:
    """Return ``info`` with some of its tuning numbers changed."""
    return replace(info, tuning=replace(info.tuned, **changes))
