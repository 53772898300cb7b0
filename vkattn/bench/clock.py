"""Warming up by time, and spreads of repeated measurements.

A GPU idles at a fraction of its clock and takes most of a second of work to raise it: the same kernel was read as 800
microseconds cold and 138 warm. So work is repeated for a time, not for a count, and until its pace is steady.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from ..caps.model import DeviceInfo

#: Seconds of work before anything is timed, by device type.
WARM_UP_SECONDS = {"cpu": 0.1, "integrated": 0.7, "virtual": 0.7, "discrete": 0.7, "other": 0.7}

#: The pace is steady if a slice of the warm-up took at most this much more or less for each run than the one before.
STEADY = 0.03

#: Slices of the shortest warm-up; it ends after this many times its length, steady or not.
SLICES = 7
MOST_TIMES = 3

#: Seconds beyond which a slow call is not repeated.
MOST_CALL_SECONDS = 2.0


def warm_up_seconds(info: DeviceInfo) -> float:
    """Return how long to work before timing on a device."""
    return WARM_UP_SECONDS[info.device_type]


def warm_up(run: Callable[[], object], seconds: float, now: Callable[[], float] = time.perf_counter) -> float:
    """Call ``run`` for ``seconds`` and until its pace is steady (at most three times as long); return the last pace.

    The pace is that of the last slice: seconds of a call.
    """
    begin = now()
    before = pace = float("inf")
    while now() < begin + seconds or (abs(pace - before) > STEADY * before and now() < begin + MOST_TIMES * seconds):
        before, start, count = pace, now(), 0
        while count == 0 or now() < start + seconds / SLICES:
            run()
            count += 1
        pace = (now() - start) / count
    return pace


@dataclass(frozen=True)
class Spread:
    """Repeated measurements in nanoseconds: median, lower and upper quartile, the best, and how many there were."""

    median: float
    low: float
    high: float
    best: float
    count: int

    @classmethod
    def of(cls, nanoseconds: Iterable[float]) -> Spread:
        """Return the spread of at least one measurement."""
        values = np.fromiter(nanoseconds, np.float64)
        if not values.size:
            raise ValueError("a spread needs at least one measurement.")
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        return cls(float(middle), float(low), float(high), float(values.min()), int(values.size))

    def as_dict(self) -> dict[str, float]:
        """Return all of it for JSON."""
        return asdict(self)


def host_times(run: Callable[[], object], seconds: float, least: int = 3, most: int = 50) -> Spread:
    """Call ``run`` for about ``seconds``; return the spread of the host's nanoseconds of a call.

    It is called ``least`` times even so, unless that takes too long, and ``most`` times at most.
    """
    end = time.perf_counter() + seconds
    found: list[float] = []
    while not found or (len(found) < most and (
            time.perf_counter() < end or (len(found) < least and sum(found) < 1e9 * MOST_CALL_SECONDS))):
        start = time.perf_counter_ns()
        run()
        found.append(time.perf_counter_ns() - start)
    return Spread.of(found)
