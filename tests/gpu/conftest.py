"""What tests of many shapes share: a device whose plans are roomy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vkattn.ops import plan
from vkattn.runtime.device import Device

#: A plan of these capacities serves nearly every shape in the tests.
ROOMY_WORDS = 1 << 20


@pytest.fixture(scope="session")
def device_of_roomy_plans(device: Device) -> Iterator[Device]:
    """The device of `roomy_device`, of its own so that roomy plans do not drive others out."""
    with Device(device.info.index) as opened:
        yield opened


@pytest.fixture
def roomy_device(device_of_roomy_plans: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device where calls share a plan though their sizes differ much, as each new plan has kernels to compile.

    What runs and how is the same: a plan knows capacities, and a call its sizes.
    """
    monkeypatch.setattr(plan, "MIN_WORDS", ROOMY_WORDS)
    return device_of_roomy_plans
