"""The rigs of a module, made from its WORDS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.kernels.harness import Rigs
from vkattn.runtime.device import Device


@pytest.fixture(scope="module")
def rigs(request: pytest.FixtureRequest, device: Device) -> Iterator[Rigs]:
    made = Rigs(device, request.module.WORDS)
    yield made
    made.close()
