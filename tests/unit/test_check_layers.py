"""The layer check finds planted imports, each with its file and line, and passes this repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import check_layers


def plant(root: Path, module: str, text: str) -> list[str]:
    """Write ``vkattn/<module>`` beside empty modules of every layer and return what is found."""
    for name in ("errors", "dtypes", "mask", "problem", "dispatch", "spirv", "info", "cli", "runtime/device"):
        path = root / "vkattn" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name in ("kernels", "graph", "runtime", "ops", "oracle", "caps", ""):
        path = root / "vkattn" / name / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name in ("caps/probe", "caps/model", "graph/node", "kernels/support", "ops/plan", "oracle/softmax"):
        (root / "vkattn" / f"{name}.py").write_text("")
    (root / "vkattn" / module).write_text(text)
    return check_layers.check(root)


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("graph/node.py", "import kp\n", ":1: imports kp: only runtime may import kp"),
        ("ops/plan.py", "\n\ndef f():\n    import kp.x\n", ":4: imports kp.x: only runtime may import kp"),
        ("info.py", "from kp import Manager\n", ":1: imports kp: only runtime may import kp"),
        ("runtime/device.py", "import vulkan\n", ":1: imports vulkan: only caps.probe may import vulkan"),
        ("ops/plan.py", "import importlib\nimportlib.import_module('kp')\n", ":2: imports kp: only runtime"),
        ("graph/node.py", "from ..ops import plan\n", ":1: imports vkattn.ops.plan: upwards"),
        ("graph/node.py", "from .. import runtime\n", ":1: imports vkattn.runtime: upwards"),
        ("graph/node.py", "import vkattn.runtime.device\n", ":1: imports vkattn.runtime.device: upwards"),
        ("graph/node.py", "from ..dispatch import choose\n", ":1: imports vkattn.dispatch: sideways"),
        ("errors.py", "from .dtypes import FLOAT\n", ":1: imports vkattn.dtypes: upwards"),
        ("graph/node.py", "if not TYPE_CHECKING:\n    from .. import ops\n", ":2: imports vkattn.ops: upwards"),
        (
            "kernels/support.py",
            "from ..caps.probe import devices\n",
            "caps.probe is for __init__, info, run",
        ),
        ("ops/plan.py", "from ..oracle import softmax\n", "oracle is for __init__, bench, check, demo, ops.selftest"),
        ("oracle/softmax.py", "from ..kernels import support\n", "oracle imports dtypes, errors, layout, mask"),
        ("oracle/softmax.py", "from ..problem import Problem\n", "oracle imports dtypes, errors, layout, mask"),
        ("oracle/softmax.py", "import torch\n", "oracle imports numpy and the standard library only"),
        ("caps/probe.py", "from ..runtime import device\n", "caps.probe imports caps.matrices, caps.model, dtypes"),
        ("ops/plan.py", "import vkattn\n", ":1: imports vkattn: only commands import the package itself"),
        ("stray.py", "from . import errors\n", "stray is in no layer; add it to LAYERS"),
    ],
)
def test_planted(tmp_path: Path, module: str, text: str, expected: str) -> None:
    found = plant(tmp_path, module, text)
    assert len(found) == 1
    assert found[0].startswith(f"vkattn/{module}:")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("runtime/device.py", "import kp\nfrom ..caps.probe import devices\nfrom ..graph import node\n"),
        ("caps/probe.py", "import vulkan\nfrom ..errors import DeviceError\nfrom .model import DeviceInfo\n"),
        ("oracle/softmax.py", "import math\nimport numpy as np\nfrom ..mask import Causal\nfrom . import softmax\n"),
        ("ops/plan.py", "from ..kernels.support import f\nfrom ..dispatch import g\nfrom ..problem import Problem\n"),
        ("graph/node.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ops import plan\n"),
        ("info.py", "from . import __version__\nfrom .caps.probe import devices\nfrom .ops import plan\n"),
        ("__init__.py", "from .ops.plan import x\nfrom . import oracle\n"),
        ("dtypes.py", "from .errors import DTypeError\n"),
    ],
)
def test_allowed(tmp_path: Path, module: str, text: str) -> None:
    assert plant(tmp_path, module, text) == []


def test_this_repository() -> None:
    assert check_layers.check(check_layers.ROOT) == []
