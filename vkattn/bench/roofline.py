"""The roofline: what a device moves and computes in a second, measured by plain kernels in the same run.

No kernel can be faster than its bytes at the bandwidth of a copy, or its operations at the rate of the arithmetic it
uses: float32 multiply-adds, or matrix units where the kernel has them and their rate is known.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..graph.node import Binding, Dispatch
from ..kernels.manifest import variant
from ..runtime.buffer import Buffer
from ..runtime.device import Device
from .clock import warm_up, warm_up_seconds
from .problems import BenchProblem

#: Bytes of each of the two buffers of a copy, by device type; the largest storage buffer may be smaller.
COPY_BYTES = {"cpu": 32 << 20, "integrated": 128 << 20, "virtual": 512 << 20, "discrete": 512 << 20, "other": 128 << 20}

#: Workgroups and rounds of the arithmetic, by device type.
FMA_WORK = {"cpu": (64, 64), "integrated": (512, 512), "virtual": (4096, 2048), "discrete": (4096, 2048),
            "other": (512, 512)}  # fmt: skip

FMA_OPERATIONS = 64  # of an invocation in a round: 8 vec4 sums, a multiplication and an addition each
LOCAL_SIZE = 128
REPEAT = 9

#: Seconds of dense work after a pause.
DENSE_SECONDS = 0.4


@dataclass(frozen=True)
class Roofline:
    """Bytes (read and written) in a nanosecond, and operations in a nanosecond; ``matrix`` is None if not known."""

    copy: float
    fma: float
    matrix: float | None = None
    matrix_source: str = ""

    def limit_ns(self, problem: BenchProblem, uses_matrix_units: bool = False) -> float:
        """Return the nanoseconds below which ``problem`` cannot be computed."""
        rate = self.matrix if uses_matrix_units else self.fma
        arithmetic = problem.num_operations / rate if rate else 0.0
        return max(problem.num_bytes / self.copy, arithmetic)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON: gigabytes and gigaflops a second."""
        return asdict(self)


def measure_roofline(device: Device) -> Roofline:
    """Measure the copy and the arithmetic on ``device``, after a warm-up each."""
    return Roofline(_copy_rate(device), _fma_rate(device))


def _median_ns(device: Device, dispatch: Dispatch) -> float:
    """Return the median time of a dispatch that is repeated."""
    recording = device.recording([[dispatch]] * 4)
    warm_up(recording.run, warm_up_seconds(device.info))
    spans = [nanoseconds for _ in range(REPEAT) for _, nanoseconds in recording.timings()]
    recording.close()
    return float(np.median(spans))


def _copy_rate(device: Device) -> float:
    size = min(COPY_BYTES[device.info.device_type], device.info.max_storage_buffer_range // 16 * 16)
    source, target = (device.buffer(size // 4, "storage", name) for name in ("copied", "copy"))
    fill = device.recording([[Dispatch(variant("fill"), (Binding(source),),
                                       {"offset": 0, "count": size // 4, "value": 0x3C003C00}, 64)]])
    fill.run()
    fill.close()
    groups = min(8192, device.info.max_workgroup_count[0])
    took = _median_ns(device, Dispatch(variant("roofline_copy"), (Binding(source), Binding(target)),
                                       {"quads": size // 16}, groups))
    source.destroy()
    target.destroy()
    return 2 * size / took


def _fma(out: Buffer, groups: int, rounds: int) -> Dispatch:
    a, b = (int(word) for word in np.array([0.5, 1.0], np.float32).view(np.uint32))
    return Dispatch(variant("roofline_fma"), (Binding(out),), {"rounds": rounds, "a": a, "b": b}, groups)


def _fma_rate(device: Device) -> float:
    groups, rounds = FMA_WORK[device.info.device_type]
    out = device.buffer(groups * LOCAL_SIZE, "storage", "sums")
    took = _median_ns(device, _fma(out, groups, rounds))
    out.destroy()
    return groups * LOCAL_SIZE * rounds * FMA_OPERATIONS / took


def raise_clock(device: Device) -> None:
    """Keep a GPU busy without a pause for `DENSE_SECONDS`; nothing on a CPU.

    While the host prepares and checks, the clock falls, and work of a millisecond between pauses as long raises it over
    several seconds only: 28 dispatches of decode on an NVIDIA H200 took 1539 us after the oracle had been computed,
    then 1355, 1129, and 540 once it was awake.
    """
    if device.info.device_type == "cpu":
        return
    groups, rounds = FMA_WORK[device.info.device_type]
    out = device.buffer(groups * LOCAL_SIZE, "storage", "sums")
    recording = device.recording([[_fma(out, groups, rounds)]] * 16)
    warm_up(recording.run, DENSE_SECONDS)
    recording.close()
    out.destroy()
