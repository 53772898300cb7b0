"""What a Vulkan device can do, as plain values: read by `probe`, asked by the kernels and the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tuning import Tuning, default_tuning


@dataclass(frozen=True)
class Heap:
    """One memory heap: its size in bytes, and whether it is the device's own memory."""

    size_bytes: int
    device_local: bool


@dataclass(frozen=True)
class MatrixShape:
    """One cooperative multiplication: ``m x k`` times ``k x n`` of ``operand``, summed in ``result``, by a subgroup.

    The types are "float16", "bfloat16", "float32", or "other".
    """

    m: int
    n: int
    k: int
    operand: str
    result: str


@dataclass(frozen=True)
class DeviceInfo:
    """One physical device: identity, limits and abilities.

    ``index`` is its place in the driver's enumeration, which is also Kompute's device index.
    ``device_type`` is "discrete", "integrated", "virtual", "cpu" or "other".
    ``subgroup_operations`` holds names such as "basic", "vote", "arithmetic", "ballot", "shuffle",
    "shuffle_relative", "clustered", "quad"; it is empty when compute shaders have no subgroup operations.
    ``timestamp_valid_bits`` are those of the queue that Kompute takes; 0 is no timestamps.
    ``tuning`` is set when the device is opened; None stands for the defaults of its type.
    ``matrix_shapes`` are those of VK_KHR_cooperative_matrix at subgroup scope; ``matrix_features`` those of
    VK_NV_cooperative_matrix2 that the device reports: "workgroup_scope", "flexible_dimensions", "reductions",
    "conversions", "per_element", "tensor_addressing", "block_loads".
    """

    index: int
    name: str
    device_type: str
    vendor_id: int
    device_id: int
    driver_name: str
    driver_info: str
    driver_version: int
    api_version: tuple[int, int, int]
    max_storage_buffer_range: int
    max_memory_allocation_count: int
    max_storage_buffers_per_stage: int
    max_workgroup_count: tuple[int, int, int]
    max_workgroup_size: tuple[int, int, int]
    max_workgroup_invocations: int
    max_shared_memory_bytes: int
    max_push_constants_bytes: int
    timestamp_period_ns: float
    timestamp_valid_bits: int
    subgroup_size: int
    subgroup_operations: frozenset[str]
    heaps: tuple[Heap, ...]
    extensions: frozenset[str] = field(repr=False)
    matrix_shapes: tuple[MatrixShape, ...] = ()
    matrix_features: frozenset[str] = frozenset()
    tuning: Tuning | None = field(default=None, repr=False)

    @property
    def tuned(self) -> Tuning:
        """The numbers that kernels choose their sizes by: `tuning`, or those of the package for this type."""
        return default_tuning(self.device_type) if self.tuning is None else self.tuning

    @property
    def is_unified(self) -> bool:
        """Whether host-visible memory is as near to the shaders as the device's own."""
        return self.device_type in ("cpu", "integrated")

    @property
    def device_local_bytes(self) -> int:
        """Size of the largest device-local heap, in bytes."""
        return max((heap.size_bytes for heap in self.heaps if heap.device_local), default=0)
