"""The examples as a reader runs them: as commands of their own, on the device under test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.gpu


def run_example(*arguments: str) -> str:
    """Run an example; return what it printed, or fail with that and its exit status."""
    command = [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_first_steps(device: Any) -> None:
    printed = run_example("first_steps.py")
    assert f"float32 (1, 9, 100, 64) from {device.info.name};" in printed
    error = re.search(r"error against the oracle (\S+)$", printed)
    assert error
    assert float(error[1]) < 1e-6


@pytest.mark.parametrize("options, bytes_per_token", [
    ((), 46080), pytest.param(("--cache", "float16"), 23040, marks=pytest.mark.once)], ids=str)
def test_smollm2_is_proven(device: Any, options: tuple[str, ...], bytes_per_token: int) -> None:
    """Two tokens: the prompt of many rows, then a row of its own over the cache, in all 30 layers."""
    printed = run_example("smollm2.py", "--tokens", "2", "--device", device.info.name, *options)
    assert f"Device  {device.info.name}" in printed
    assert f"{bytes_per_token} bytes per token" in printed
    assert "Answer  A GPU ..." in printed
    assert "float64 oracle (60 calls)" in printed
    assert "Right: " in printed
    assert "Exact: the cache holds the keys and values of all 36 tokens" in printed
    assert re.search(r"attend +kv_append_f32_\w+ +[\d.]+\n", printed)
    assert "chose the same tokens, all 2" in printed


@pytest.mark.once
@pytest.mark.slow
def test_smollm2_over_a_quantised_cache(device: Any) -> None:
    printed = run_example("smollm2.py", "--tokens", "2", "--device", device.info.name, "--cache", "q8_0")
    assert re.search(r"Cache   q8_0, 12\d\d\d bytes per token", printed)  # 2 x 30 x 3 rows of 64 codes and 2 halves
    assert "Right: " in printed
    assert "Exact: the cache holds the keys and values of all 36 tokens" in printed
    assert re.search(r"attend +kv_append_quantised +[\d.]+\n", printed)
    assert re.search(r"Tokens  [012] of 2 are those of a run with a float16 cache", printed)


@pytest.mark.once
def test_smollm2_names_the_devices_there_are(device: Any) -> None:
    command = [sys.executable, str(EXAMPLES / "smollm2.py"), "--tokens", "2", "--device", "no such device"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert device.info.name in done.stderr
    assert "Traceback" not in done.stderr
