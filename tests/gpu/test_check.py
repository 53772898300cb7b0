"""``vkattn check`` on the device under test, whole, and what scripts/validation.py runs of it when time is short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import vkattn
from tests.tolerance import assert_matches_oracle
from vkattn.check import Result, check_caches, check_device, check_quantised_caches, check_words, failed
from vkattn.dispatch import ALGORITHMS, by_name
from vkattn.errors import NoKernelError
from vkattn.kernels.manifest import load_manifest
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

PARTS: dict[str, Callable[[Device, dict[str, Result]], None]] = {
    "words": check_words, "caches": check_caches, "quantised caches": check_quantised_caches}


@pytest.mark.parametrize("part", PARTS)
def test_part(device: Device, part: str) -> None:
    results = {name: Result() for name in load_manifest()}
    PARTS[part](device, results)
    assert any(result.cases for result in results.values())
    assert not {name: result.problem for name, result in results.items() if failed(result)}


def test_whole(roomy_device: Device) -> None:
    """Every variant is reached, and right."""
    assert not {name: result.problem for name, result in check_device(roomy_device).items() if failed(result)}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_small_problem_by_each_algorithm(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    query, key, value = (rng.standard_normal((1, heads, rows, 24), np.float32)
                         for heads, rows in ((4, 3), (2, 130), (2, 130)))
    call = attention_call(query, key, value)
    if by_name(algorithm).not_supported_reasons(call.problem, device.info):
        with pytest.raises(NoKernelError, match=algorithm):
            vkattn.attention(query, key, value, algorithm=algorithm, device=device)
        return
    out, lse = vkattn.attention(query, key, value, causal="bottom_right", algorithm=algorithm, return_lse=True,
                                device=device)
    assert_matches_oracle(out, query, key, value, lse=lse, causal="bottom_right")
