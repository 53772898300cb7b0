"""The open device: choice, close, fork, threads, and how a program that has one ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.dispatches import fill
from vkattn.caps import probe
from vkattn.errors import ClosedError, DeviceError, OptionError
from vkattn.runtime.device import Device

X = np.ones((1, 2, 3, 8), np.float32)


def test_kompute_counts_devices_as_the_probe_does(device: Device) -> None:
    names = [entry["device_name"] for entry in device.manager.list_devices()]
    assert names == [info.name for info in vkattn.devices()]


def test_use_after_close(device: Device) -> None:
    opened = Device(device.info.index)
    buffer = opened.buffer(16, "host", "mine")
    recording = opened.recording([[fill(buffer, 1, 16)]])
    vkattn.attention(X, X, X, device=opened)
    opened.close()
    opened.close()
    for use in (lambda: opened.buffer(4, "host", "x"), recording.run, recording.timings, lambda: buffer.words,
                lambda: vkattn.attention(X, X, X, device=opened), lambda: opened.recording([]),
                lambda: vkattn.scaled_dot_product_attention(X, X, X, device=opened)):
        with pytest.raises(ClosedError, match="close"):
            use()
    with pytest.raises(ClosedError), opened:
        pass
    recording.close()
    buffer.destroy()
    assert "closed" in repr(opened)


def test_results_survive_close(device: Device) -> None:
    with Device(device.info.index) as opened:
        out, lse = vkattn.attention(X, X, X, device=opened, return_lse=True)
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    assert np.isfinite(lse).all()


def in_child(action: Any, seconds: float = 20.0) -> str:
    """Run ``action`` in a forked child; return what it returned, or "hung"."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, str(action()).encode()[:500])
        finally:
            os._exit(0)
    os.close(send)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(receive, 500).decode()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(device: Device) -> None:
    def error_of(action: Any) -> str:
        try:
            return f"no error: {action()}"
        except DeviceError as error:
            return f"{type(error).__name__}: {error}"

    for action in (lambda: vkattn.attention(X, X, X, device=device), lambda: device.buffer(4, "host", "x"),
                   lambda: Device(device.info.index), vkattn.default_device):
        said = in_child(lambda action=action: error_of(action))
        assert said.startswith("DeviceError: "), said
        assert "fork" in said
        assert "spawn" in said
    np.testing.assert_allclose(vkattn.attention(X, X, X, device=device), 1, rtol=1e-6)


def test_a_forked_child_that_exits_normally_does_not_hang(device: Device) -> None:
    """Ours and kp's destructors do nothing there. NVIDIA's own exit handlers crash in such a child, with or without us:
    a child that ends as multiprocessing ends it (os._exit) is all that can be asked for on a real GPU.
    """
    leave = "" if device.info.device_type == "cpu" else "    if not pid: os._exit(0)\n"
    code = ("import os, numpy as np, vkattn\n"
            "x = np.ones((1, 1, 2, 4), np.float32)\n"
            "vkattn.attention(x, x, x)\n"
            "pid = os.fork()\n" + leave.lstrip() +
            "if pid: print(os.waitpid(pid, 0)[1])\n")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60,
                          check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_program_that_never_closes_ends_cleanly(device: Device) -> None:
    code = ("import numpy as np, vkattn\n"
            "x = np.ones((1, 1, 2, 4), np.float32)\n"
            "keep = vkattn.Device()\n"
            "print(vkattn.attention(x, x, x, device=keep).sum(), vkattn.attention(x, x, x).sum())\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "8.0 8.0"), done.stderr


def test_importing_kompute_leaves_the_root_logger_alone(device: Device) -> None:
    code = ("import logging, vkattn\n"
            "vkattn.Device().close()\n"
            "import sys; assert 'kp' in sys.modules\n"
            "print(logging.getLogger().handlers, logging.getLogger().level)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == f"[] {logging.WARNING}", done.stderr


def test_closing_gives_everything_back(device: Device) -> None:
    opened = Device(device.info.index)
    for size in (8, 40, 3000):
        x = np.ones((1, 2, size, 16), np.float32)[:, :, : min(size, 300)]
        vkattn.attention(x, x, x, device=opened)
    assert opened.allocation_count > 0
    opened.close()
    assert (opened.allocated_bytes, opened.allocation_count) == (0, 0)


def test_unknown_boundary_and_budget() -> None:
    with pytest.raises(OptionError, match="`boundary` is 'loose'"):
        Device(boundary="loose")
    for budget in (0, 1.5, "large"):
        with pytest.raises(OptionError, match=f"`score_budget_bytes` is {budget!r}; it must be an integer"):
            Device(score_budget_bytes=budget)


def test_unknown_device_is_named_with_those_there(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"no such GPU(.|\n)*" + device.info.name[:8]):
        Device("no such GPU")


def test_threads_take_turns(device: Device) -> None:
    rng = np.random.default_rng(1)
    problems = [rng.standard_normal((3, 1, 2, 5 + i, 16)).astype(np.float32) for i in range(8)]
    expected = [vkattn.attention(*p, device=device) for p in problems]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            if not np.array_equal(vkattn.attention(*problems[i], device=device), expected[i]):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_instance_outlives_all_devices(device: Device) -> None:
    """Drivers that are unloaded and loaded again a dozen times are not found any more (NVIDIA)."""
    for _ in range(3):
        with Device(device.info.index):
            assert len(probe._KEPT) == 1
    vkattn.devices()
    assert len(probe._KEPT) == 1
