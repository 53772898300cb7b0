"""The arithmetic of timestamps: masked, over a wrap, and refused where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes import fake_device_info
from vkattn.errors import DeviceError
from vkattn.runtime.ticks import check_timestamps, spans_ns


@pytest.mark.parametrize("bits", [36, 40, 48, 63, 64])
def test_a_counter_may_wrap_between_two_timestamps(bits: int) -> None:
    """At the last tick but 4, 3 ticks later, and 10 ticks after that, beyond the end of the counter."""
    last = (1 << bits) - 1
    ticks = np.array([last - 4, last - 1, 8], np.uint64)
    info = fake_device_info(timestamp_valid_bits=bits, timestamp_period_ns=2.5)
    assert spans_ns(ticks, info).tolist() == [7.5, 25.0]


@pytest.mark.parametrize("bits", [36, 48, 63])
def test_bits_that_are_not_valid_have_no_effect(bits: int) -> None:
    noise = np.array([5, 1, 7, 0], np.uint64) << np.uint64(bits)
    ticks = np.array([100, 101, 1 << 30, (1 << 30) + 9], np.uint64)
    spans = spans_ns(ticks | noise, fake_device_info(timestamp_valid_bits=bits))
    assert spans.tolist() == [1.0, (1 << 30) - 101.0, 9.0]


def test_of_one_timestamp_there_is_no_span() -> None:
    assert spans_ns(np.array([3], np.uint64), fake_device_info()).tolist() == []


def test_a_queue_without_timestamps_is_an_error() -> None:
    check_timestamps(fake_device_info(timestamp_valid_bits=36))
    with pytest.raises(DeviceError, match=r'"Fake GPU" has no timestamps .* Hint: time whole calls'):
        check_timestamps(fake_device_info(timestamp_valid_bits=0))
