"""The one function that builds a kp Algorithm, with every limit checked before Kompute is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NoKernelError
from ..graph.node import Dispatch
from ..kernels.support import device_reasons
from ..spirv import load

if TYPE_CHECKING:
    from .device import Device

#: An explicit empty uint32 array: without it kp takes specialization constants for float bits.
NO_WORDS = np.array([], np.uint32)


def build(device: Device, dispatch: Dispatch) -> Any:
    """Return the kp Algorithm of ``dispatch``'s variant, buffers and workgroup count."""
    variant = dispatch.variant
    reasons = device_reasons(variant, device.info)
    if dispatch.groups > device.info.max_workgroup_count[0]:
        reasons.append(f"{dispatch.groups} workgroups; the device allows {device.info.max_workgroup_count[0]}")
    if reasons:
        raise NoKernelError(f'{variant.name} cannot run on "{device.info.name}": {"; ".join(reasons)}.')
    tensors = [binding.buffer.tensor for binding in dispatch.bindings]
    push = np.zeros(len(variant.push), np.uint32)
    code = load(variant) if dispatch.code is None else dispatch.code
    return device.adopt(device.manager.algorithm(tensors, code, (dispatch.groups, 1, 1), NO_WORDS, push))
