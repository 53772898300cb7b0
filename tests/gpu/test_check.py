"""``vkattn check`` on the device under test, whole, and its quick parts by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vkattn.check import Result, check_caches, check_device, check_words, failed
from vkattn.kernels.manifest import load_manifest
from vkattn.runtime.device import Device

PARTS: dict[str, Callable[[Device, dict[str, Result]], None]] = {"words": check_words, "caches": check_caches}


@pytest.mark.parametrize("part", PARTS)
def test_part(device: Device, part: str) -> None:
    results = {name: Result() for name in load_manifest()}
    PARTS[part](device, results)
    assert any(result.cases for result in results.values())
    assert not {name: result.problem for name, result in results.items() if failed(result)}


def test_whole(device: Device) -> None:
    """Every variant is reached, and right."""
    assert not {name: result.problem for name, result in check_device(device).items() if failed(result)}
