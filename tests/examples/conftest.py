"""Makes the modules of examples/ importable here, as they are when an example runs as a script; shared fixtures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture
def weights(rng: np.random.Generator) -> Any:
    """Random weights for the network `mini.MINI`."""
    from tests.examples.mini import mini_weights

    return mini_weights(rng)
