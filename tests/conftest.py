"""What every test shares: random numbers with a seed, NumPy errors that raise, the one device, hypothesis profiles.

The suite runs once per Vulkan device. The environment says which one is meant: VKATTN_EXPECT_DEVICE is a part of its
name ("llvmpipe", "SwiftShader"), and every test marked `gpu` fails unless the device that opens is that one, so that a
run cannot pass on the wrong device, or by skipping. VKATTN_ANY_DEVICE=1 takes whatever opens, for a try on real
hardware. VKATTN_LONG=1 runs many more property tests, VKATTN_EXAMPLES of each, and longer forms of some others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

EXPECT = "VKATTN_EXPECT_DEVICE"
ANY = "VKATTN_ANY_DEVICE"
LONG = "VKATTN_LONG"

os.environ["VKATTN_TUNING"] = ""  # what a user has measured is not what is tested

_COMMON: dict[str, Any] = {
    "deadline": None,  # the first example of a shape may compile a pipeline
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=30, database=None, **_COMMON)
settings.register_profile("long", max_examples=int(os.environ.get("VKATTN_EXAMPLES", "3000")), **_COMMON)
settings.load_profile("long" if os.environ.get(LONG) == "1" else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below tests/gpu with `gpu`, and below its kernels with `kernel`: no test there can forget it."""
    gpu_folder = Path(__file__).parent / "gpu"
    for item in items:
        if gpu_folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if gpu_folder / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.kernel)


def pytest_report_header() -> list[str]:
    """Name the device that is meant and those that are there."""
    if not (os.environ.get(EXPECT) or os.environ.get(ANY) == "1"):
        return [f"vkattn device: none expected ({EXPECT} is not set); tests marked gpu will fail"]
    try:
        import vkattn

        found = ", ".join(info.name for info in vkattn.devices()) or "none"
    except Exception as error:  # the header must not stop unit tests; the gpu tests will say it properly
        found = f"none ({type(error).__name__}: {error})"
    return [f"vkattn device: expected {os.environ.get(EXPECT) or 'any'!r}; found: {found}"]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers, the same in every run, and different for each test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _numpy_errors_raise() -> Iterator[None]:
    """Make overflow, division by zero and invalid operations in NumPy raise; underflow to 0 is wanted in a softmax."""
    before = np.seterr(all="raise", under="ignore")
    yield
    np.seterr(**before)


@pytest.fixture(scope="session")
def expected_device() -> str | None:
    """Part of the name of the device under test, or None for any; fails if the environment does not say."""
    if os.environ.get(ANY) == "1":
        return None
    name = os.environ.get(EXPECT)
    if not name:
        pytest.fail(
            f"{EXPECT} is not set, so it is not known which device this run is to test. Use scripts/test, which "
            f"runs the suite on each device; or set {ANY}=1 to take whatever device opens.",
            pytrace=False,
        )
    return name


@pytest.fixture(autouse=True)
def _gpu_needs_an_expected_device(request: pytest.FixtureRequest) -> None:
    """Fail each test marked `gpu` if the environment does not say which device is meant."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("expected_device")


@pytest.fixture(scope="session")
def device(expected_device: str | None) -> Iterator[Any]:
    """Open the device under test once; its name must hold the expected part."""
    import vkattn
    from tests import tolerance

    with vkattn.Device() as opened:
        if expected_device is not None and expected_device not in opened.info.name:
            pytest.fail(
                f"{EXPECT} is {expected_device!r} but the device that opened is {opened.info.name!r}. "
                "Use scripts/test, or point VK_ICD_FILENAMES at the driver that is meant.",
                pytrace=False,
            )
        tolerance.matrix_units = bool(opened.info.matrix_shapes) and opened.info.device_type != "cpu"
        yield opened
