"""Recordings: what is moved, in which order, what each dispatch is pushed, the canary, timings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.dispatches import copy, fill
from vkattn.errors import DeviceError
from vkattn.graph.hazards import segments
from vkattn.runtime.device import Device


@pytest.fixture(params=["coherent", "full"])
def own_device(request: pytest.FixtureRequest, device: Device) -> Any:
    """A second device, closed by the test, for each way of realising a boundary."""
    with Device(device.info.index, boundary=request.param) as opened:
        yield opened


def test_fill_and_copy_move_exactly_their_words(own_device: Device) -> None:
    near = own_device.buffer(64, "storage", "near")
    far = own_device.buffer(64, "host", "far")
    far.words[...] = 7
    steps = [fill(near, 0xAB, 64), fill(near, 0xFFC00000, 3, offset=5), copy(near, far, 20, src=4, dst=9)]
    recording = own_device.recording(segments(steps))
    recording.run()
    expected = np.full(64, 7, np.uint32)
    expected[9:29] = 0xAB
    expected[10:13] = 0xFFC00000
    np.testing.assert_array_equal(far.words, expected)
    recording.close()


def test_the_number_of_words_to_copy_may_come_from_params(own_device: Device) -> None:
    params, source, target = (own_device.buffer(300, "host", name) for name in ("params", "source", "target"))
    source.words[...] = np.arange(300)
    recording = own_device.recording([[copy(source, target, 0, params=params, index=2)]])
    for live in (300, 1, 0, 257):
        params.words[2] = live
        target.words[...] = 0xFFFFFFFF
        recording.run()
        assert (target.words[:live] == np.arange(live)).all()
        assert (target.words[live:] == 0xFFFFFFFF).all()


def test_a_long_chain_of_dependent_dispatches_keeps_its_order(own_device: Device) -> None:
    a, b = own_device.buffer(4096, "storage", "a"), own_device.buffer(4096, "storage", "b")
    out = own_device.buffer(4096, "host", "out")
    steps = [fill(a, 1, 4096, groups=8)]
    for i in range(10):
        steps += [copy(a, b, 4096 - i, dst=i, groups=8), copy(b, a, 4096, groups=8), fill(a, i, 1)]
    steps.append(copy(a, out, 4096, groups=8))
    recording = own_device.recording(segments(steps))
    for _ in range(20):
        recording.run()
        model_a, model_b = np.ones(4096, np.uint32), None
        for i in range(10):
            model_b = model_a.copy() if model_b is None else model_b
            model_b[i:] = model_a[: 4096 - i]
            model_a = model_b.copy()
            model_a[0] = i
        np.testing.assert_array_equal(out.words, model_a)


def test_push_constants_belong_to_each_recorded_dispatch(device: Device) -> None:
    out = device.buffer(40, "host", "out")
    recording = device.recording([[fill(out, 100 + i, 1, offset=i) for i in range(40)]])
    assert recording.num_pipelines == 1
    recording.run()
    assert out.words.tolist() == list(range(100, 140))
    recording.close()
    out.destroy()


def test_timings_name_each_dispatch(own_device: Device) -> None:
    near, out = own_device.buffer(1 << 16, "storage", "near"), own_device.buffer(1 << 16, "host", "out")
    recording = own_device.recording(segments([fill(near, 5, 1 << 16), copy(near, out, 1 << 16)]))
    spans = recording.timings()
    assert [name for name, _ in spans] == ["fill", "copy"]
    assert all(0 < nanoseconds < 1e9 for _, nanoseconds in spans)
    assert (out.words == 5).all(), "a timed run computes too"


def test_a_device_without_timestamps_is_an_error_and_runs_all_the_same(own_device: Device) -> None:
    out = own_device.buffer(4, "host", "out")
    recording = own_device.recording([[fill(out, 5, 4)]])
    own_device.info = dataclasses.replace(own_device.info, timestamp_valid_bits=0)
    for timed in (recording.timings, recording.elapsed_ns):
        with pytest.raises(DeviceError, match="no timestamps in its compute queue"):
            timed()
    recording.run()
    assert (out.words == 5).all()


def test_a_submission_that_does_not_finish_is_an_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    out = device.buffer(4, "host", "out")
    recording = device.recording([[fill(out, 5, 4)]])

    class Lost:
        def eval(self) -> None:
            """Return as kp does when the device is lost: no error, nothing done."""

        def destroy(self) -> None:
            pass

    sequences = recording._sequences
    recording._sequences = [Lost()]
    with pytest.raises(DeviceError, match="did not finish"):
        recording.run()
    recording._sequences = sequences
    recording.run()
    assert (out.words == 5).all()
    recording.close()
    out.destroy()
