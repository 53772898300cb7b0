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


def build(device: Device, dispatch: Dispatch) -> Any:
    """Return the kp Algorithm of ``dispatch``'s variant, buffers, workgroup count and specialization constants.

    Both arrays are always given, as uint32: without that kp takes specialization constants for float bits.
    """
    variant = dispatch.variant
    reasons = device_reasons(variant, device.info)
    if dispatch.groups > device.info.max_workgroup_count[0]:
        reasons.append(f"{dispatch.groups} workgroups; the device allows {device.info.max_workgroup_count[0]}")
    if reasons:
        raise NoKernelError(f'{variant.name} cannot run on "{device.info.name}": {"; ".join(reasons)}.')
    tensors = [binding.buffer.tensor for binding in dispatch.bindings]
    push = np.zeros(len(variant.push), np.uint32)
    spec = np.array(dispatch.spec, np.uint32)
    code = load(variant) if dispatch.code is None else dispatch.code
    return device.adopt(device.manager.algorithm(tensors, code, (dispatch.groups, 1, 1), spec, push))


class Pipelines:
    """Pipelines by variant, buffers and workgroup count, so that dispatches and recordings share them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Any, Any] = {}

    @property
    def count(self) -> int:
        """Pipelines made."""
        return len(self._made)

    def get(self, dispatch: Dispatch) -> Any:
        """Return the kp Algorithm for ``dispatch``, made now if there is none."""
        buffers = (id(binding.buffer) for binding in dispatch.bindings)
        kernel = dispatch.variant.name if dispatch.code is None else (dispatch.code, len(dispatch.variant.push))
        key = (kernel, dispatch.groups, dispatch.spec, *buffers)
        if key not in self._made:
            self._made[key] = build(self._device, dispatch)
        return self._made[key]

    def close(self) -> None:
        """Free them; recordings that use them must have been closed before."""
        made, self._made = self._made, {}
        for pipeline in made.values():
            self._device.release(pipeline)
