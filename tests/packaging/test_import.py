"""`import vkattn` is light: no Kompute, no Vulkan, no device; and it says which version it is."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vkattn

HEAVY = ("kp", "vulkan", "torch", "onnx", "ml_dtypes", "argparse")


def python(code: str, **environ: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it prints."""
    env = {**os.environ, **environ}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    assert python(f"import vkattn, sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_oracle_needs_no_kompute() -> None:
    code = "import vkattn, sys; vkattn.oracle.attention; print('kp' in sys.modules, 'vulkan' in sys.modules)"
    assert python(code) == "False False"


def test_import_is_quick() -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        python("import vkattn")
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 2.0  # 0.3 s is the aim (benchmarks measure it); this catches an import gone wrong


def test_import_leaves_the_root_logger_alone() -> None:
    assert python("import logging, vkattn; print(logging.getLogger().handlers)") == "[]"


def test_every_public_name_is_there() -> None:
    for name in vkattn.__all__:
        getattr(vkattn, name)
    assert set(vkattn.__all__) <= set(dir(vkattn))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vkattn.no_such_name


def test_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("vkattn") == vkattn.__version__


def test_without_kp_a_device_names_the_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "kp.py").write_text("raise ModuleNotFoundError(\"No module named 'kp'\", name='kp')\n")
    code = """
import vkattn
try:
    vkattn.Device()
except vkattn.errors.DeviceError as error:
    print(error)
"""
    assert "python -m vkattn setup" in python(code, PYTHONPATH=str(tmp_path))
