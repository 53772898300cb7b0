"""What the probe says of the real device, against what Kompute says and what Vulkan promises."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from vkattn.caps.model import DeviceInfo
from vkattn.caps.probe import devices, select_device
from vkattn.errors import DeviceError
from vkattn.kernels.manifest import load_manifest
from vkattn.kernels.support import device_reasons
from vkattn.runtime import kompute
from vkattn.runtime.device import Device


@pytest.fixture
def info(expected_device: str | None) -> DeviceInfo:
    chosen = select_device(devices(), None)
    assert expected_device is None or expected_device in chosen.name
    return chosen


def test_the_order_is_komputes() -> None:
    manager = kompute.load().Manager()
    names = [entry["device_name"] for entry in manager.list_devices()]
    manager.destroy()
    assert [info.name for info in devices()] == names
    assert [info.index for info in devices()] == list(range(len(names)))


def test_kompute_reports_the_same_limits(info: DeviceInfo) -> None:
    manager = kompute.load().Manager(info.index)
    said = manager.get_device_properties()
    manager.destroy()
    assert said["device_name"] == info.name
    assert tuple(said["max_work_group_count"]) == info.max_workgroup_count
    assert tuple(said["max_work_group_size"]) == info.max_workgroup_size
    assert said["max_work_group_invocations"] == info.max_workgroup_invocations


def test_limits_are_at_least_what_vulkan_promises(info: DeviceInfo) -> None:
    assert info.api_version >= (1, 1)
    assert info.max_storage_buffer_range >= 1 << 27
    assert info.max_memory_allocation_count >= 4096
    assert info.max_storage_buffers_per_stage >= 4
    assert all(count >= 65535 for count in info.max_workgroup_count)
    assert info.max_workgroup_size >= (128, 128, 64)
    assert info.max_workgroup_invocations >= 128
    assert info.max_shared_memory_bytes >= 16384
    assert info.max_push_constants_bytes >= 128
    assert info.timestamp_period_ns > 0
    assert info.timestamp_valid_bits == 0 or 36 <= info.timestamp_valid_bits <= 64
    assert info.subgroup_size >= 1
    assert "basic" in info.subgroup_operations
    assert info.device_local_bytes > 0
    assert info.driver_name
    assert all(name.startswith("VK_") for name in info.extensions)


def test_every_field_has_its_declared_kind(info: DeviceInfo) -> None:
    for field in fields(info):
        value = getattr(info, field.name)
        plain = str(field.type).split("[")[0]
        assert type(value).__name__ == plain or (plain == "Tuning | None" and value is None), field.name
    assert type(info.heaps[0].size_bytes) is int


def test_the_same_twice() -> None:
    assert devices() == devices()


def test_every_base_variant_runs_here(info: DeviceInfo) -> None:
    """But tall tiles, where there is no room for them: large and small ones are for everybody."""
    for name, variant in load_manifest().items():
        if variant.axes.get("tile") == "tall" and variant.shared_bytes > info.max_shared_memory_bytes:
            assert device_reasons(variant, info) == [
                f"needs {variant.shared_bytes} bytes of shared memory, the device has {info.max_shared_memory_bytes}"]
        elif not variant.capabilities:
            assert device_reasons(variant, info) == [], name


def test_no_driver_is_an_error_with_the_remedy() -> None:
    code = "import vkattn; vkattn.devices()"
    environment = {**os.environ, "VK_ICD_FILENAMES": os.devnull, "VK_DRIVER_FILES": os.devnull}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{DeviceError.__module__}.DeviceError: No Vulkan device was found")
    assert "apt-get install mesa-vulkan-drivers" in last


def test_matrix_units_come_with_their_extensions(device: Device) -> None:
    info = device.info
    assert bool(info.matrix_shapes) == ("VK_KHR_cooperative_matrix" in info.extensions)
    assert bool(info.matrix_features) == ("VK_NV_cooperative_matrix2" in info.extensions)
