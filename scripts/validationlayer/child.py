"""What runs inside the layer's process: a pytest plugin that plants a fault first and then says which test is running.

A log without messages means something only if the layer would have spoken. So each run begins with a fault that the
layer must report, in the very process and with the very settings of the tests. Loaded with pytest's
``-p validationlayer.child``; the environment variables below tell it what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from validationlayer.messages import BEFORE, BETWEEN, MARK, PLANTED

#: The named pipe that the layer logs to, the fault to plant, and test names to leave out, one a line.
PIPE, PLANT, LEAVE_OUT = "VKATTN_VALIDATION_PIPE", "VKATTN_VALIDATION_PLANT", "VKATTN_VALIDATION_LEAVE_OUT"

WORDS = 64
NO_INDEX = 0xFFFFFFFF


def mark(place: str) -> None:
    """Write a mark into the log: the messages after it belong to ``place``."""
    pipe = os.open(os.environ[PIPE], os.O_WRONLY)
    os.write(pipe, f"{MARK}{place}\n".encode())
    os.close(pipe)


def plant(fault: str) -> None:
    """Run two dispatches with a fault: "hazard", a read of what the same segment wrote; "overrun", a read too far."""
    from vkattn.graph.node import Binding, Dispatch
    from vkattn.kernels.manifest import variant
    from vkattn.runtime.device import Device

    def copy(source: Any, target: Any, count: int) -> Dispatch:
        push = {"count_index": NO_INDEX, "count": count, "src_offset": 0, "dst_offset": 0}
        return Dispatch(variant("copy"), (Binding(source), Binding(source), Binding(target)), push)

    with Device(boundary="full") as device:
        first, second, third = (device.buffer(words, "storage", "planted") for words in (WORDS, 2 * WORDS, 2 * WORDS))
        if fault == "hazard":
            segments = [[copy(first, second, WORDS), copy(second, third, WORDS)]]
        else:
            segments = [[copy(first, second, WORDS + 1)], [copy(second, third, WORDS)]]
        device.recording(segments).run()


def pytest_sessionstart() -> None:
    """Plant the fault before anything else runs."""
    mark(PLANTED)
    plant(os.environ[PLANT])
    mark(BEFORE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose names hold one of the given parts."""
    parts = os.environ[LEAVE_OUT].splitlines()
    out = [item for item in items if any(part in item.nodeid for part in parts)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Mark where a test begins and ends."""
    mark(item.nodeid)
    result = yield
    mark(BETWEEN)
    return result
