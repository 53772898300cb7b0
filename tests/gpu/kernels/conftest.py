"""Fixtures of kernel tests: rigs made from a module's WORDS, and self-tests that nobody has run before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.kernels.harness import Rigs
from vkattn.kernels import verdicts
from vkattn.runtime.device import Device


@pytest.fixture(scope="module")
def rigs(request: pytest.FixtureRequest, device: Device) -> Iterator[Rigs]:
    made = Rigs(device, request.module.WORDS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Begin without verdicts, so that self-tests run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKATTN_CACHE", str(tmp_path_factory.mktemp("verdicts")))
        verdicts.forget()
        yield
    verdicts.forget()
