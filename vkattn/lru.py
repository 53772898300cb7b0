"""A bounded set of plans: the least recently used one is closed to make room. Pure; used by caches and the ops."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MAX_PLANS = 16


class BoundedPlans:
    """Plans by key, at most ``max_plans`` of them. A plan has ``close()``, and ``nbytes`` if bytes are bounded too.

    Parameters
    ----------
    max_plans : int
    max_bytes : int or None
        What all plans together may take; a single plan may be larger. None is no bound.
    """

    def __init__(self, max_plans: int = MAX_PLANS, max_bytes: int | None = None) -> None:
        self.max_plans = max_plans
        self.max_bytes = max_bytes
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def nbytes(self) -> int:
        """Bytes of all living plans."""
        return sum(plan.nbytes for plan in self._plans.values())

    def values(self) -> list[Any]:
        """Return the living plans, the least recently used first."""
        return list(self._plans.values())

    def get(self, key: Hashable, make: Callable[[], Any], nbytes: int = 0) -> Any:
        """Return the plan for ``key``; if there is none, close others until ``nbytes`` more fit, then ``make`` it."""
        plan = self._plans.get(key)
        if plan is None:
            while self._plans and (len(self._plans) >= self.max_plans or self._is_full(nbytes)):
                self._plans.popitem(last=False)[1].close()
            plan = self._plans[key] = make()
        self._plans.move_to_end(key)
        return plan

    def _is_full(self, nbytes: int) -> bool:
        return self.max_bytes is not None and self.nbytes + nbytes > self.max_bytes

    def clear(self) -> None:
        """Close every plan."""
        while self._plans:
            self._plans.popitem(last=False)[1].close()
