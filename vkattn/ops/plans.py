"""The plans of a device that are alive: least recently used out first, bounded in number and in bytes."""

from __future__ import annotations

import weakref
from collections import OrderedDict

from ..runtime.device import Device
from .plan import PlanKey, ThreePassPlan

MAX_PLANS = 16

#: Plans together take at most this part of the device's largest heap (one plan alone may take more).
HEAP_FRACTION = 0.25


class PlanCache:
    """The living plans of one device."""

    def __init__(self, device: Device) -> None:
        self._plans: OrderedDict[PlanKey, ThreePassPlan] = OrderedDict()
        self._max_bytes = int(device.info.device_local_bytes * HEAP_FRACTION)
        device.closers.append(self.clear)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def nbytes(self) -> int:
        """Bytes of all living plans."""
        return sum(plan.nbytes for plan in self._plans.values())

    def get(self, device: Device, key: PlanKey) -> ThreePassPlan:
        """Return the plan for ``key``, made now if there is none; others make room for it."""
        plan = self._plans.get(key)
        if plan is None:
            while self._plans and (len(self._plans) >= MAX_PLANS or self.nbytes + key.nbytes > self._max_bytes):
                self._evict()
            plan = self._plans[key] = ThreePassPlan(device, key)
        self._plans.move_to_end(key)
        return plan

    def _evict(self) -> None:
        _, plan = self._plans.popitem(last=False)
        plan.close()

    def clear(self) -> None:
        """Close every plan."""
        while self._plans:
            self._evict()


_caches: weakref.WeakKeyDictionary[Device, PlanCache] = weakref.WeakKeyDictionary()


def plans_of(device: Device) -> PlanCache:
    """Return the plan cache of ``device``."""
    if device not in _caches:
        _caches[device] = PlanCache(device)
    return _caches[device]
