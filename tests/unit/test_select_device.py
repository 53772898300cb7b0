"""Which device a selection means, and what is said where it means none; no driver is asked."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from tests.fakes import fake_device_info
from vkattn.caps import probe
from vkattn.caps.probe import select_device
from vkattn.errors import DeviceError, OptionError

KINDS = ["cpu", "other", "integrated", "discrete", "discrete", "virtual"]
NAMES = ["llvmpipe (LLVM 15.0.6)", "Odd one", "Intel Iris", "NVIDIA H200", "nvidia h200", "Virtio 3060"]
DEVICES = [fake_device_info(index=i, device_type=kind, name=NAMES[i]) for i, kind in enumerate(KINDS)]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VKATTN_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["cpu", "discrete"], 1),
        (["integrated", "discrete", "discrete"], 1),
        (["cpu", "other", "virtual", "integrated"], 3),
        (["cpu", "other", "virtual"], 2),
        (["cpu", "other"], 1),
        (["cpu", "cpu"], 0),
    ],
)
def test_the_best_is_taken(kinds: list[str], expected: int) -> None:
    infos = [fake_device_info(index=i, device_type=kind) for i, kind in enumerate(kinds)]
    assert select_device(infos).index == expected
    assert select_device(infos[::-1]).index == expected


def test_a_device_of_vulkan_1_0_is_taken_last() -> None:
    infos = [fake_device_info(api_version=(1, 0, 99)), fake_device_info(index=1, device_type="cpu")]
    assert select_device(infos).index == 1


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (0, 0),
        (np.int64(4), 4),
        ("2", 2),
        (" 5 ", 5),
        ("llvm", 0),
        ("IRIS", 2),
        ("odd ONE", 1),
        ("3060", 5),  # digits that are no index are part of a name
    ],
)
def test_index_and_name(select: Any, expected: int) -> None:
    assert select_device(DEVICES, select).index == expected


def test_a_whole_name_wins_over_parts() -> None:
    infos = [fake_device_info(index=0, name="GPU 2"), fake_device_info(index=1, name="GPU")]
    assert select_device(infos, "gpu").index == 1


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (6, "`select` is 6, but there is no device of that index. Devices: 0: llvmpipe"),
        (-1, "`select` is -1, but there is no device"),
        ("radeon", "`select` is 'radeon', which is part of no device's name. Devices: 0: llvmpipe"),
        ("NVIDIA", "`select` is 'NVIDIA', which fits 2 devices."),
        ("nvidia h200", "Hint: give an index."),
        ("", "is part of no device's name"),
        ("17", "`select` is '17', which is neither the index of a device nor part of a device's name."),
    ],
)
def test_nothing_or_too_much(select: Any, message: str) -> None:
    with pytest.raises(DeviceError) as caught:
        select_device(DEVICES, select)
    assert message in str(caught.value)
    assert "3: NVIDIA H200 (discrete); 4: nvidia h200 (discrete)" in str(caught.value)


@pytest.mark.parametrize("select", [1.0, True, b"llvm", [0], np.float32(0)])
def test_other_kinds_are_refused(select: Any) -> None:
    with pytest.raises(OptionError, match="give an index, part of a device's name, or None"):
        select_device(DEVICES, select)


def test_the_variable_is_used_only_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKATTN_DEVICE", "iris")
    assert select_device(DEVICES).index == 2
    assert select_device(DEVICES, "llvmpipe").index == 0
    monkeypatch.setenv("VKATTN_DEVICE", "1")
    assert select_device(DEVICES).index == 1
    monkeypatch.setenv("VKATTN_DEVICE", "")
    assert select_device(DEVICES).index == 3
    monkeypatch.setenv("VKATTN_DEVICE", "radeon")
    with pytest.raises(DeviceError, match="VKATTN_DEVICE is 'radeon'"):
        select_device(DEVICES)


def test_no_devices() -> None:
    with pytest.raises(DeviceError, match=r"No Vulkan device was found\. Hint: install"):
        select_device([])


def test_a_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    with pytest.raises(DeviceError, match="Python package vulkan is missing"):
        probe.devices()


def test_a_missing_loader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        """What the binding does on import where the library is not there."""

        def find_spec(self, name: str, *_: Any) -> None:
            if name == "vulkan":
                raise OSError("Cannot find Vulkan SDK version")

    monkeypatch.delitem(sys.modules, "vulkan", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(DeviceError, match=r"Vulkan loader library .* cannot be loaded\. Hint: install it"):
        probe.devices()


class FakeVulkan(types.ModuleType):
    """As much of the binding as is used before a device is asked anything."""

    class VkError(Exception):
        pass

    class VkException(Exception):
        pass

    class VkErrorIncompatibleDriver(VkError):
        pass

    class VkErrorInitializationFailed(VkError):
        pass

    class VkErrorOutOfHostMemory(VkError):
        pass

    lib = types.SimpleNamespace(vkEnumerateInstanceVersion=None)

    def __init__(self, create: type[Exception] | None, enumerate_: Any, extensions: tuple[str, ...] = ()) -> None:
        super().__init__("vulkan")
        self.create, self.enumerate, self.extensions = create, enumerate_, extensions
        self.asked: list[dict[str, Any]] = []
        self.alive = 0

    def VkApplicationInfo(self, **fields: Any) -> Any:
        return fields

    def VkInstanceCreateInfo(self, **fields: Any) -> Any:
        self.asked.append(fields)
        return fields

    def vkEnumerateInstanceExtensionProperties(self, layer: None) -> Any:
        return [types.SimpleNamespace(extensionName=name) for name in self.extensions]

    def vkCreateInstance(self, info: Any, allocator: None) -> str:
        if self.create is not None and not info.get("flags"):
            raise self.create
        self.alive += 1
        return "instance"

    def vkDestroyInstance(self, instance: str, allocator: None) -> None:
        self.alive -= 1

    def vkEnumeratePhysicalDevices(self, instance: str) -> Any:
        if isinstance(self.enumerate, type):
            raise self.enumerate
        return self.enumerate if self.asked[-1].get("flags") else []


@pytest.mark.parametrize(
    ("create", "enumerate_", "extensions", "message"),
    [
        (FakeVulkan.VkErrorIncompatibleDriver, [], (), "No Vulkan device was found: no driver (ICD) is installed"),
        (None, [], (), "No Vulkan device was found"),
        (None, FakeVulkan.VkErrorInitializationFailed, (), "No Vulkan device was found"),
        (FakeVulkan.VkErrorOutOfHostMemory, [], (), "A Vulkan instance cannot be made (VkErrorOutOfHostMemory). Hint"),
        (
            FakeVulkan.VkErrorIncompatibleDriver,
            ["mac"],
            ("VK_KHR_portability_enumeration",),
            "The only Vulkan devices here are of portability drivers (Apple M9)",
        ),
    ],
)
def test_a_driver_that_does_not_answer(monkeypatch, create, enumerate_, extensions, message: str) -> None:
    fake = FakeVulkan(create, enumerate_, extensions)
    monkeypatch.setitem(sys.modules, "vulkan", fake)
    monkeypatch.setattr(probe, "_KEPT", [])
    monkeypatch.setattr(probe, "_device_info", lambda vk, instance, index, handle: fake_device_info(name="Apple M9"))
    with pytest.raises(DeviceError) as caught:
        probe.devices()
    assert message in str(caught.value)
    assert fake.alive == len(probe._KEPT) <= 1, "one instance is kept, and no other"
    assert "flags" not in fake.asked[0], "the first question is Kompute's own, without portability drivers"
