"""benchmarks/bench_thresholds.py measures what it says, by either clock."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from vkattn.runtime.device import Device

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.once
@pytest.mark.parametrize("clock", ["cpu_seconds", "device_seconds"])
def test_every_algorithm_is_timed(device: Device, monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    thresholds = importlib.import_module("bench_thresholds")
    with Device(device.info.index) as own:
        thresholds.lift_limit(own)
        seconds = getattr(thresholds, clock)(own, thresholds.Case(96, 40), 2, thresholds.ALGORITHMS)
    assert set(seconds) >= {"split", "fused", "three_pass"}
    assert all(0 < value < 60 for value in seconds.values())
