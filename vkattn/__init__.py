"""vkattn: attention on any GPU that has a Vulkan driver, from Python.

NumPy arrays in, NumPy arrays out. Importing this package opens no device and does not import Kompute: the names below
are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

#: Public name -> module that defines it.
_HOME = {
    "attention": ".ops.attention",
    "scaled_dot_product_attention": ".ops.attention",
    "merge_states": ".ops.merge",
    "quantized_attention": ".ops.quantized",
    "sdpa_with_kv_cache": ".ops.cached",
    "devices": ".caps.probe",
    "Device": ".runtime.device",
    "default_device": ".runtime.device",
    "DeviceInfo": ".caps.model",
    "Dim": ".graph.values",
    "Graph": ".ops.graph",
    "GraphBuilder": ".ops.builder",
    "KVCache": ".cache.kv_cache",
}
_MODULES = ("errors", "oracle")

__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from . import errors, oracle
    from .cache.kv_cache import KVCache
    from .caps.model import DeviceInfo
    from .caps.probe import devices
    from .graph.values import Dim
    from .ops.attention import attention, scaled_dot_product_attention
    from .ops.builder import GraphBuilder
    from .ops.cached import sdpa_with_kv_cache
    from .ops.graph import Graph
    from .ops.merge import merge_states
    from .ops.quantized import quantized_attention
    from .runtime.device import Device, default_device


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name], __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'vkattn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
