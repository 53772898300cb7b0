"""The open device: choice, close, fork, the canary, limits, boundaries, timings."""

from __future__ import annotations

import dataclasses
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
from vkattn.caps import probe
from vkattn.errors import CapacityError, ClosedError, DeviceError, NoKernelError, OptionError
from vkattn.graph.hazards import segments
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import variant
from vkattn.runtime.device import Device
from vkattn.runtime.pipeline import build

NO_INDEX = 0xFFFFFFFF
X = np.ones((1, 2, 3, 8), np.float32)


def fill(buffer: Any, value: int, count: int, offset: int = 0, groups: int = 2) -> Dispatch:
    return Dispatch(variant("fill"), (Binding(buffer),), {"offset": offset, "count": count, "value": value}, groups)


def copy(source: Any, target: Any, count: int, src: int = 0, dst: int = 0, params: Any = None, index: int = NO_INDEX,
         groups: int = 2) -> Dispatch:
    bindings = (Binding(params or source), Binding(source), Binding(target))
    push = {"count_index": index, "count": count, "src_offset": src, "dst_offset": dst}
    return Dispatch(variant("copy"), bindings, push, groups)


@pytest.fixture(params=["coherent", "full"])
def own_device(request: pytest.FixtureRequest, device: Device) -> Any:
    """A second device, closed by the test, for each way of realising a boundary."""
    with Device(device.info.index, boundary=request.param) as opened:
        yield opened


def test_kompute_counts_devices_as_the_probe_does(device: Device) -> None:
    names = [entry["device_name"] for entry in device.manager.list_devices()]
    assert names == [info.name for info in vkattn.devices()]


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


@pytest.mark.parametrize(("changes", "words", "match"), [
    ({"max_storage_buffer_range": 1 << 16}, (1 << 14) + 1, "largest storage buffer is 65536 bytes"
     .replace("largest storage buffer is", "the device's largest storage buffer is")),
    ({"max_memory_allocation_count": 1}, 16, "allows 1"),
    ({"heaps": ()}, 1 << 30, "largest tensor of Kompute|largest storage buffer"),
])
def test_allocations_beyond_a_limit_are_refused_before_kompute(
    device: Device, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: int, match: str
) -> None:
    with Device(device.info.index) as opened:
        opened.info = dataclasses.replace(opened.info, **changes)
        monkeypatch.setattr(opened, "manager", None)  # any call would fail
        with pytest.raises(CapacityError, match=match):
            opened.buffer(words, "storage", "big")
        monkeypatch.undo()


def test_a_buffer_beyond_the_heap_is_refused(device: Device) -> None:
    with Device(device.info.index) as opened:
        heap = dataclasses.replace(opened.info.heaps[0], size_bytes=1 << 20, device_local=True)
        opened.info = dataclasses.replace(opened.info, heaps=(heap,))
        opened.buffer(1 << 17, "storage", "half")
        with pytest.raises(CapacityError, match=r"524288 are in use.*holds 1048576"):
            opened.buffer((1 << 17) + 1, "storage", "more")


def test_a_problem_beyond_the_device_is_refused_before_anything_is_made(device: Device) -> None:
    with Device(device.info.index) as opened:
        opened.info = dataclasses.replace(opened.info, max_storage_buffer_range=1 << 20)
        x = np.zeros((1, 1, 4200, 64), np.float32)
        with pytest.raises(CapacityError, match=r"`query` needs 1075200 bytes.*1048576.*Hint: split"):
            vkattn.attention(x, x[:, :, :10], x[:, :, :10], device=opened)
        assert opened.allocation_count == 0


def test_a_kernel_beyond_the_device_is_refused_with_reasons(device: Device) -> None:
    with Device(device.info.index) as opened:
        opened.info = dataclasses.replace(opened.info, max_storage_buffers_per_stage=4, max_shared_memory_bytes=1024)
        with pytest.raises(NoKernelError, match=r"(?s)three_pass: .*buffers.*shared"):
            vkattn.attention(X, X, X, device=opened)
        buffers = [Binding(opened.buffer(4, "host", "b")) for _ in range(5)]
        kernel = variant("attn_weights_f32_f32")
        with pytest.raises(NoKernelError, match="attn_weights_f32_f32 cannot run"):
            build(opened, Dispatch(kernel, tuple(buffers), dict.fromkeys(kernel.push, 0)))


def test_unknown_boundary_and_budget() -> None:
    with pytest.raises(OptionError, match="`boundary` is 'loose'"):
        Device(boundary="loose")
    with pytest.raises(OptionError, match="score_budget_bytes"):
        Device(score_budget_bytes=0)


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
