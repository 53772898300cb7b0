"""From a device's timestamps to nanoseconds. Pure.

A counter of fewer than 64 valid bits starts again at 0 now and then. 36 bits, the fewest that Vulkan allows beside none
at all, last a minute at a tick of a nanosecond: between two timestamps there may be one such wrap, and no more.
"""

from __future__ import annotations

import numpy as np

from ..caps.model import DeviceInfo
from ..errors import DeviceError


def check_timestamps(info: DeviceInfo) -> None:
    """Raise DeviceError if the queue that Kompute takes has no timestamps: what they hold would be nonsense."""
    if info.timestamp_valid_bits == 0:
        raise DeviceError(f'"{info.name}" has no timestamps in its compute queue, so nothing can be timed on the '
                          "device. Hint: time whole calls by the host's clock.")


def spans_ns(ticks: np.ndarray, info: DeviceInfo) -> np.ndarray:
    """Return the nanoseconds between consecutive timestamps.

    Parameters
    ----------
    ticks : uint64 ``[n]``
        As the device wrote them, in their order; bits beyond the valid ones are not looked at.
    info : DeviceInfo
        Says how many bits are valid, and the nanoseconds of a tick.

    Returns
    -------
    float64 ``[n - 1]``
    """
    valid = np.uint64((1 << info.timestamp_valid_bits) - 1)
    result: np.ndarray = (np.diff(ticks) & valid).astype(np.float64) * info.timestamp_period_ns
    return result
