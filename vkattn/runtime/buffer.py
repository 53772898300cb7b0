"""Device buffers of 32-bit words, and the checks that must come before Kompute allocates one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..caps.model import DeviceInfo
from ..errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from .device import Device

#: "host": one host-visible buffer that shaders read across the bus; "storage": the device's own memory, which the
#: host cannot touch and whose contents are undefined until a kernel writes them; "synced": both, a copy of each.
Kind = Literal["host", "storage", "synced"]

#: Kompute computes a tensor's size in 32 bits.
KOMPUTE_MAX_BYTES = (1 << 32) - 1


def check_allocation(info: DeviceInfo, name: str, size_bytes: int, used_bytes: int, used_count: int) -> None:
    """Raise CapacityError if ``info``'s limits forbid one more buffer of ``size_bytes``; Kompute would not notice."""
    limits = ((info.max_storage_buffer_range, "the device's largest storage buffer"),
              (KOMPUTE_MAX_BYTES, "the largest tensor of Kompute"))
    for limit, what in limits:
        if size_bytes > limit:
            raise CapacityError(f"buffer `{name}` needs {size_bytes} bytes; {what} is {limit} bytes "
                                f'on "{info.name}". Hint: split the problem over heads or batch.')
    heap = info.device_local_bytes
    if heap and used_bytes + size_bytes > heap:
        raise CapacityError(f"buffer `{name}` needs {size_bytes} bytes and {used_bytes} are in use; "
                            f'the largest heap of "{info.name}" holds {heap} bytes. '
                            "Hint: close caches and graphs that are done with, or split the problem.")
    if used_count + 2 > info.max_memory_allocation_count:
        raise CapacityError(f"buffer `{name}` would be allocation {used_count + 1}; "
                            f'"{info.name}" allows {info.max_memory_allocation_count}. '
                            "Hint: close caches and graphs that are done with.")


class Buffer:
    """A kp tensor of ``num_words`` uint32 words. Made by `Device.buffer` only."""

    def __init__(self, device: Device, num_words: int, kind: Kind, name: str) -> None:
        self.device = device
        self.num_words = max(num_words, 4)
        self.kind = kind
        self.name = name
        self._words: np.ndarray | None = None
        copies = 2 if kind == "synced" else 1
        self.size_bytes = 4 * self.num_words
        self.allocated_bytes = copies * self.size_bytes
        check_allocation(device.info, name, self.size_bytes, device.allocated_bytes, device.allocation_count)
        types = device.kp.TensorTypes
        tensor_type = {"host": types.host, "storage": types.storage, "synced": types.device}[kind]
        initial = np.empty(self.num_words, np.uint32) if kind == "storage" else np.zeros(self.num_words, np.uint32)
        self.tensor: Any = device.adopt(device.manager.tensor_t(initial, tensor_type))
        device.track(self, self.allocated_bytes, copies)
        if kind != "storage":
            self._words = self.tensor.data()

    @property
    def words(self) -> np.ndarray:
        """The mapped words, uint32 ``[num_words]``: valid until the buffer is destroyed, so never hand it out."""
        if self.tensor is None:
            raise ClosedError(f"buffer `{self.name}` was used after it was closed.")
        if self._words is None:
            raise TypeError(f"buffer `{self.name}` is in device memory only")
        return self._words

    def destroy(self) -> None:
        """Free the memory. Pipelines and recordings that use the buffer must have been destroyed before."""
        if self.tensor is not None:
            tensor, self.tensor, self._words = self.tensor, None, None
            self.device.untrack(self, self.allocated_bytes, 2 if self.kind == "synced" else 1)
            self.device.release(tensor)
