"""``vkattn check`` on the device under test, whole, and what scripts/validation.py runs of it when time is short."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import vkattn
from tests.tolerance import assert_matches_oracle
from vkattn import check
from vkattn.check import Result, check_caches, check_device, check_quantised_caches, check_words, failed
from vkattn.check_cases import num_steps
from vkattn.dispatch import ALGORITHMS, by_name
from vkattn.errors import NoKernelError
from vkattn.kernels.manifest import load_manifest
from vkattn.problem import Problem
from vkattn.progress import Progress
from vkattn.reach import dtypes
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


#: Kernels of which no device leaves a variant out: nothing else does their work.
EVERYWHERE = {"fill", "copy", "kv_append", "kv_append_quantised", "kv_read", "attn_weights", "attn_softmax",
              "attn_output"}


def test_whole(roomy_device: Device) -> None:
    """Every variant that some problem gets is reached, and right; what is left out is so for a reason."""
    steps: list[str] = []
    results = check_device(roomy_device, steps.append)
    assert len(steps) == num_steps()
    assert not {name: result.problem for name, result in results.items() if failed(result)}
    used = {name for name, result in results.items() if result.cases}
    assert all(bool(result.not_run) == (name not in used) for name, result in results.items())
    assert not {load_manifest()[name].kernel for name in results.keys() - used} & EVERYWHERE
    algorithms = {name: by_name(name) for name in ("split", "fused", "three_pass")}
    for query, key, value in dtypes():
        problem = Problem(1, 4, 2, 3, 130, 24, 24, query, key, value)
        for name, algorithm in algorithms.items():
            assert {kernel.name for kernel in algorithm.variants(problem, roomy_device.info)} <= used, (name, problem)


def test_a_variant_that_no_case_reaches_is_a_failure(
    device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check_attention", "check_quantised"):
        monkeypatch.setattr(check, name, lambda *given: None)
    results = check_device(device)
    assert {load_manifest()[name].kernel for name, result in results.items() if failed(result)} >= {
        "attn_softmax", "attn_weights", "attn_output"}
    assert results["attn_softmax"].problem.startswith("MISSED")
    monkeypatch.setattr(check, "Progress", partial(Progress, every=0))
    assert check.main(Namespace(device=device.info.index)) == 1
    out, err = capsys.readouterr()
    assert "FAILED attn_softmax" in out and "after" not in out
    steps = [line.partition(": ")[2] for line in err.splitlines()]
    assert steps == ["fill and copy", "KV caches", "quantised KV caches"]
    assert "\r" not in err and "\x1b" not in err


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
