"""What the self-tests of kernels on matrix units share: one call by one kernel, judged against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..runtime.device import Device
from ..validate import Call
from .plan import AttentionPlan, plan_key

#: (batch, query heads, KV heads, q_len, kv_len), head_dim, value_dim.
Sizes = tuple[tuple[int, int, int, int, int], int, int]


def fault(device: Device, call: Call, algorithm: ModuleType,
          worst_share: Callable[[np.ndarray, np.ndarray | None], float]) -> str:
    """Run ``call`` twice by ``algorithm``; return what is wrong, or "".

    ``worst_share`` compares out and lse with the oracle: the largest error as a share of its bound.
    """
    with device.lock:
        key, cut = plan_key(call, device, algorithm)
        plan = AttentionPlan(device, key)
        try:
            (out, lse), (again, _) = plan.run(call, cut), plan.run(call, cut)
        finally:
            plan.close()
    share = worst_share(out, lse)
    if not share <= 1:
        return f"an error of {share:.3g} of the bound"
    return "" if out.tobytes() == again.tobytes() else "two runs differ"
