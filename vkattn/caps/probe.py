"""Asks the Vulkan driver which devices there are and what they can do; the only user of the Vulkan binding.

A short-lived instance of our own is made for the question, so that no Kompute device has to be opened for it (and one
more, once, that stays: `_KEPT`). It is made as Kompute 0.9.0 makes its own (API 1.1, no portability flag), so that both
see the same devices in the same order.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import DeviceError, OptionError
from .matrices import matrix_features, matrix_shapes
from .model import DeviceInfo, Heap

#: Environment variable that chooses a device where the caller does not: an index or part of a name.
DEVICE_VARIABLE = "VKATTN_DEVICE"

#: Best first; the order in which a device is chosen where nobody asks for one.
PREFERENCE = ("discrete", "integrated", "virtual", "other", "cpu")

#: VkPhysicalDeviceType, in the order of its values.
_DEVICE_TYPES = ("other", "integrated", "discrete", "virtual", "cpu")

#: VkSubgroupFeatureFlagBits, from the lowest bit.
_SUBGROUP_BITS = ("basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered", "quad")

#: An instance that lives as long as the process. Without one the last instance to go unloads the driver, and a driver
#: that is loaded a dozen times runs out of thread-local storage (NVIDIA 580: the 16th time no device is found).
_KEPT: list[Any] = []

_API_1_1 = 1 << 22 | 1 << 12
_API_1_2 = 1 << 22 | 2 << 12
_ENUMERATE_PORTABILITY = 1
_NO_DRIVER_HINT = (
    "Hint: install the driver of your GPU, or a software one (Debian: apt-get install mesa-vulkan-drivers); "
    "`vulkaninfo --summary` and the variable VK_ICD_FILENAMES show what the loader uses."
)


def devices() -> list[DeviceInfo]:
    """Return every Vulkan device, in the order of Kompute's device indices. Opens none of them.

    Raises
    ------
    DeviceError
        The Vulkan loader, a driver or a device is missing, or the driver refuses to answer.

    Example
    -------
    >>> [info.name for info in vkattn.devices()]  # doctest: +SKIP
    ['llvmpipe (LLVM 15.0.6, 256 bits)']
    """
    vk = _binding()
    found = _enumerate(vk, portability=False)
    if found:
        return found
    others = _enumerate(vk, portability=True)
    if others:
        raise DeviceError(
            f"The only Vulkan devices here are of portability drivers ({', '.join(info.name for info in others)}), "
            "which Kompute 0.9.0 does not ask the loader for, so it cannot open them. "
            "Hint: macOS is not supported yet; docs/install.md says what is."
        )
    raise DeviceError(f"No Vulkan device was found: no driver (ICD) is installed, or none works. {_NO_DRIVER_HINT}")


def select_device(infos: Sequence[DeviceInfo], select: int | str | None = None) -> DeviceInfo:
    """Return the device that ``select`` means.

    Parameters
    ----------
    infos : what `devices` returned.
    select : int, str or None
        An index; or part of a name, in any case (digits alone are an index if there is one of that number); or None:
        the environment variable VKATTN_DEVICE if it is set, else discrete > integrated > virtual > other > cpu.

    Raises
    ------
    DeviceError
        Nothing matches, or more than one device; the message lists them.
    OptionError
        ``select`` is neither an index, a text nor None.
    """
    source = "`select`"
    if select is None:
        select, source = os.environ.get(DEVICE_VARIABLE) or None, DEVICE_VARIABLE
    if not infos:
        raise DeviceError(f"No Vulkan device was found. {_NO_DRIVER_HINT}")
    if select is None:
        return min(infos, key=lambda info: (info.api_version < (1, 1), PREFERENCE.index(info.device_type), info.index))
    if isinstance(select, str):
        text = select.strip()
        if not (text.isdecimal() and int(text) in {info.index for info in infos}):
            return _by_name(infos, text, source)
        select = text
    index = _as_index(select, source)
    for info in infos:
        if info.index == index:
            return info
    raise DeviceError(f"{source} is {index}, but there is no device of that index. {_listing(infos)}")


def _as_index(select: Any, source: str) -> int:
    """Return an index as int; a bool is no index."""
    try:
        if isinstance(select, bool):
            raise TypeError
        return int(select) if isinstance(select, str) else operator.index(select)
    except TypeError:
        raise OptionError(f"{source} is {select!r}; give an index, part of a device's name, or None.") from None


def _by_name(infos: Sequence[DeviceInfo], text: str, source: str) -> DeviceInfo:
    """Return the one device whose name is ``text``, else the one whose name holds it."""
    wanted = text.casefold()
    equal = [info for info in infos if info.name.casefold() == wanted]
    matches = equal or [info for info in infos if wanted and wanted in info.name.casefold()]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        what = "neither the index of a device nor part of a device's name" if text.isdecimal() else (
            "part of no device's name")
        raise DeviceError(f"{source} is {text!r}, which is {what}. {_listing(infos)}")
    found = f"{source} is {text!r}, which fits {len(matches)} devices."
    raise DeviceError(f"{found} {_listing(infos)} Hint: give an index.")


def _listing(infos: Sequence[DeviceInfo]) -> str:
    """Return a sentence that lists devices."""
    return f"Devices: {'; '.join(f'{info.index}: {info.name} ({info.device_type})' for info in infos)}."


def _binding() -> Any:
    """Import PyPI's ``vulkan``, which loads the Vulkan loader library as it is imported."""
    try:
        import vulkan
    except ImportError as error:
        raise DeviceError(f"The Python package vulkan is missing ({error}). Hint: pip install vulkan") from error
    except OSError as error:
        raise DeviceError(
            "The Vulkan loader library (libvulkan.so.1, vulkan-1.dll or libvulkan.dylib) cannot be loaded. "
            "Hint: install it (Debian: apt-get install libvulkan1 mesa-vulkan-drivers), or a GPU driver that brings it."
        ) from error
    if not hasattr(vulkan.lib, "vkEnumerateInstanceVersion"):
        raise DeviceError("The Vulkan loader library is of Vulkan 1.0; vkattn needs 1.1. Hint: install a newer loader.")
    return vulkan


def _enumerate(vk: Any, portability: bool) -> list[DeviceInfo]:
    """Return the devices that an instance sees; none where no driver answers."""
    with _instance(vk, portability) as instance:
        if instance is None:
            return []
        try:
            handles = list(vk.vkEnumeratePhysicalDevices(instance))
        except vk.VkErrorInitializationFailed:
            return []
        try:
            return [_device_info(vk, instance, index, handle) for index, handle in enumerate(handles)]
        except (vk.VkError, vk.VkException) as error:
            raise DeviceError(f"The Vulkan driver refused to describe a device ({_words(error)}).") from error


@contextmanager
def _instance(vk: Any, portability: bool) -> Iterator[Any]:
    """Give an instance of API 1.1 and destroy it afterwards; None where no driver is compatible."""
    application = vk.VkApplicationInfo(pApplicationName="vkattn", apiVersion=_API_1_1)
    options: dict[str, Any] = {"pApplicationInfo": application}
    try:
        if portability:
            offered = {_text(vk, item.extensionName) for item in vk.vkEnumerateInstanceExtensionProperties(None)}
            if "VK_KHR_portability_enumeration" not in offered:
                yield None
                return
            options["flags"] = _ENUMERATE_PORTABILITY
            options["ppEnabledExtensionNames"] = ["VK_KHR_portability_enumeration"]
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(**options), None)
        if not _KEPT:
            _KEPT.append(vk.vkCreateInstance(vk.VkInstanceCreateInfo(**options), None))
    except vk.VkErrorIncompatibleDriver:
        yield None
        return
    except (vk.VkError, vk.VkException) as error:
        raise DeviceError(
            f"A Vulkan instance cannot be made ({_words(error)}). Hint: look at the variables VK_ICD_FILENAMES, "
            "VK_DRIVER_FILES and VK_INSTANCE_LAYERS, and try `vulkaninfo --summary`."
        ) from error
    try:
        yield instance
    finally:
        vk.vkDestroyInstance(instance, None)


def _device_info(vk: Any, instance: Any, index: int, handle: Any) -> DeviceInfo:
    """Ask one device for all that `DeviceInfo` holds."""
    extensions = frozenset(
        _text(vk, item.extensionName) for item in vk.vkEnumerateDeviceExtensionProperties(handle, None)
    )
    basic = vk.vkGetPhysicalDeviceProperties(handle)
    subgroup = driver = chain = None
    if basic.apiVersion >= _API_1_1:
        chain = subgroup = vk.VkPhysicalDeviceSubgroupProperties()
    if basic.apiVersion >= _API_1_2 or "VK_KHR_driver_properties" in extensions:
        chain = driver = vk.VkPhysicalDeviceDriverProperties(pNext=chain)
    properties = basic
    if chain is not None:
        whole = vk.VkPhysicalDeviceProperties2(pNext=chain)
        vk.vkGetPhysicalDeviceProperties2(handle, whole)
        properties = whole.properties
    limits = properties.limits
    memory = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    in_compute = subgroup is not None and subgroup.supportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT
    kind = properties.deviceType
    return DeviceInfo(
        index=index,
        name=_text(vk, properties.deviceName),
        device_type=_DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else "other",
        vendor_id=properties.vendorID,
        device_id=properties.deviceID,
        driver_name=_text(vk, driver.driverName) if driver is not None else "",
        driver_info=_text(vk, driver.driverInfo) if driver is not None else "",
        driver_version=properties.driverVersion,
        api_version=_version(properties.apiVersion),
        max_storage_buffer_range=limits.maxStorageBufferRange,
        max_memory_allocation_count=limits.maxMemoryAllocationCount,
        max_storage_buffers_per_stage=limits.maxPerStageDescriptorStorageBuffers,
        max_workgroup_count=_three(limits.maxComputeWorkGroupCount),
        max_workgroup_size=_three(limits.maxComputeWorkGroupSize),
        max_workgroup_invocations=limits.maxComputeWorkGroupInvocations,
        max_shared_memory_bytes=limits.maxComputeSharedMemorySize,
        max_push_constants_bytes=limits.maxPushConstantsSize,
        timestamp_period_ns=float(limits.timestampPeriod),
        timestamp_valid_bits=_timestamp_bits(vk, handle),
        subgroup_size=subgroup.subgroupSize if subgroup is not None else 0,
        subgroup_operations=_subgroup_operations(subgroup.supportedOperations if subgroup and in_compute else 0),
        heaps=tuple(
            Heap(memory.memoryHeaps[i].size, bool(memory.memoryHeaps[i].flags & vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT))
            for i in range(memory.memoryHeapCount)
        ),
        extensions=extensions,
        matrix_shapes=matrix_shapes(vk, instance, handle, extensions),
        matrix_features=matrix_features(vk, instance, handle, extensions),
    )


def _timestamp_bits(vk: Any, handle: Any) -> int:
    """Return the valid bits of a timestamp in the queue family that Kompute takes: the first that can compute."""
    for family in vk.vkGetPhysicalDeviceQueueFamilyProperties(handle):
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT:
            return int(family.timestampValidBits)
    return 0


def _subgroup_operations(bits: int) -> frozenset[str]:
    """Return the names of the operations in a set of flags."""
    return frozenset(name for place, name in enumerate(_SUBGROUP_BITS) if bits >> place & 1)


def _version(packed: int) -> tuple[int, int, int]:
    """Unpack a Vulkan version number (the three bits above the major number are the variant's)."""
    return packed >> 22 & 0x7F, packed >> 12 & 0x3FF, packed & 0xFFF


def _three(values: Any) -> tuple[int, int, int]:
    """Return a C array of three numbers as a tuple."""
    return int(values[0]), int(values[1]), int(values[2])


def _text(vk: Any, value: Any) -> str:
    """Return a C string as text, whether or not the binding has decoded it already."""
    return value if isinstance(value, str) else str(vk.ffi.string(value).decode("utf-8", "replace"))


def _words(error: BaseException) -> str:
    """Return the name of a Vulkan error, with what it says if it says anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
