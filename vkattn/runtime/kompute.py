"""The one place that imports kp, and what a user is told when it is missing."""

from __future__ import annotations

import logging
from types import ModuleType

from ..errors import DeviceError

KP_VERSION = "0.9.0"


def load() -> ModuleType:
    """Import kp without leaving the handler that it puts on the root logger; DeviceError if it is missing."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import kp
    except ImportError as error:
        raise DeviceError(
            f"Kompute (the Python package kp {KP_VERSION}) cannot be imported: {error}. "
            "Hint: run `python -m vkattn setup`, which builds and installs it."
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    if not hasattr(kp, "OpTensorSyncLocal"):
        raise DeviceError(f"The installed kp is not the {KP_VERSION} interface (it has no OpTensorSyncLocal). "
                          "Hint: run `python -m vkattn setup --force`.")
    return kp
