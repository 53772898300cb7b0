"""A device under interrupts, threads, closing while in use, many opens, and thousands of calls."""

from __future__ import annotations

import gc
import random
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkattn
from vkattn.errors import ClosedError
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import variant
from vkattn.runtime import pipeline
from vkattn.runtime.device import Device

X = np.ones((1, 2, 3, 8), np.float32)


def resident_bytes() -> int:
    """Return the resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def problem(rng: np.random.Generator, q_len: int, kv_len: int) -> list[np.ndarray]:
    shapes = ((1, 4, q_len, 16), (1, 2, kv_len, 16), (1, 2, kv_len, 16))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("algorithm", ["three_pass", "split"])
@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupt_while_a_plan_is_built_leaves_nothing_behind(
    device: Device, monkeypatch: pytest.MonkeyPatch, after: int, algorithm: str
) -> None:
    with Device(device.info.index) as own:
        made, build = [], pipeline.build

        def interrupted(*arguments: Any) -> Any:
            made.append(arguments)
            if len(made) == after:
                raise KeyboardInterrupt
            return build(*arguments)

        before = (own.allocated_bytes, own.allocation_count, len(own._handles))
        monkeypatch.setattr(pipeline, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vkattn.attention(X, X, X, device=own, algorithm=algorithm)
        assert len(own.plans) == 0
        boundary = own._boundary
        if boundary is not None:  # the device keeps this one
            before = (before[0] + boundary.allocated_bytes, before[1] + 2, before[2] + 1)
        assert (own.allocated_bytes, own.allocation_count, len(own._handles)) == before
        monkeypatch.setattr(pipeline, "build", build)
        np.testing.assert_allclose(vkattn.attention(X, X, X, device=own), 1, rtol=1e-6)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that an interrupt left open
def test_interrupts_at_any_time_leave_the_device_usable(device: Device, rng: np.random.Generator) -> None:
    draw = random.Random(1)
    inputs = [problem(rng, 3 + 7 * i, 2 ** (i + 5)) for i in range(6)]
    expected = [vkattn.attention(*arrays, device=device) for arrays in inputs]
    hits = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with Device(device.info.index) as own:
            own.plans.max_plans = 2  # so that plans are made and closed all the time
            for _ in range(20):
                i = draw.randrange(len(inputs))
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.03))
                    out = vkattn.attention(*inputs[i], device=own)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    np.testing.assert_array_equal(out, expected[i])
                except KeyboardInterrupt:
                    hits += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            for arrays, out in zip(inputs, expected, strict=True):
                np.testing.assert_array_equal(vkattn.attention(*arrays, device=own), out)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits, "no interrupt came in time"


def test_threads_with_several_devices(device: Device, rng: np.random.Generator) -> None:
    inputs = [problem(rng, 2 + i, 40 * (i + 1)) for i in range(6)]
    expected = [vkattn.attention(*arrays, device=device) for arrays in inputs]
    devices = [device, Device(device.info.index), Device(device.info.index)]
    failures: list[Any] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            for _ in range(15):
                i = draw.randrange(len(inputs))
                if not np.array_equal(vkattn.attention(*inputs[i], device=draw.choice(devices)), expected[i]):
                    failures.append(i)
        except BaseException as error:  # a thread's own error would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in devices[1:]:
        own.close()
    assert not failures


def test_closing_while_threads_use_the_device(device: Device, rng: np.random.Generator) -> None:
    inputs = problem(rng, 5, 100)
    own = Device(device.info.index)
    started, failures = threading.Barrier(4), []

    def work() -> None:
        try:
            vkattn.attention(*inputs, device=own)
            started.wait()
            while True:
                vkattn.attention(*inputs, device=own)
        except ClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    own.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not failures


def test_opening_and_closing_is_flat(device: Device) -> None:
    def once() -> None:
        with Device(device.info.index) as own:
            buffer = own.buffer(64, "storage", "near")
            push = {"offset": 0, "count": 64, "value": 1}
            own.recording([[Dispatch(variant("fill"), (Binding(buffer),), push)]]).run()

    for _ in range(10):
        once()
    gc.collect()
    files, memory = open_files(), resident_bytes()
    for _ in range(40):
        once()
    gc.collect()
    assert open_files() == files
    assert resident_bytes() - memory < 16 << 20


def test_many_calls_are_flat(device: Device, rng: np.random.Generator) -> None:
    inputs = [problem(rng, 1 + i % 9, 1 + 37 * i % 250) for i in range(40)]

    def once() -> None:
        for number, arrays in enumerate(inputs):
            vkattn.attention(*arrays, causal="bottom_right", return_lse=bool(number % 2), device=device)

    for _ in range(2):
        once()
    gc.collect()
    memory, allocated, handles = resident_bytes(), device.allocated_bytes, len(device._handles)
    for _ in range(5):
        once()
    gc.collect()
    assert resident_bytes() - memory < 4 << 20
    assert (device.allocated_bytes, len(device._handles)) == (allocated, handles)
