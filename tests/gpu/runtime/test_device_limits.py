"""What is beyond a limit of the device or of Kompute is refused before anything is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import vkattn
from vkattn.errors import CapacityError, NoKernelError
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import variant
from vkattn.runtime.device import Device
from vkattn.runtime.pipeline import build

X = np.ones((1, 2, 3, 8), np.float32)


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
        with pytest.raises(CapacityError, match=r"`query` needs 1075200 bytes.*1048576.*Hint: split .* query rows\.$"):
            vkattn.attention(x, x[:, :, :10], x[:, :, :10], device=opened)
        with pytest.raises(CapacityError, match=r"`key` needs 1075200 bytes.*Hint: split .* keys, .*merge_states"):
            vkattn.attention(x[:, :, :10], x, x, device=opened)
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
