"""How many workgroups a dispatch has, and how much one of them may do.

Kernels loop over whatever is live, so that a recording fits any length. llvmpipe (lavapipe) ends every loop of an
invocation, without an error, once all its loops together have gone round 65535 times (LP_MAX_TGSI_LOOP_ITERATIONS in
Mesa's gallivm; seen with Mesa 22.3: zeros from the 521st item on). The families therefore bound the iterations of their
kernels from above, cut the work finer on such a device, and refuse what a single item cannot do within the limit.
"""

from __future__ import annotations

from ..caps.model import DeviceInfo
from ..problem import Problem

#: Loop iterations of one invocation that are safe on llvmpipe.
LLVMPIPE_ITERATIONS = 60000


def num_groups(info: DeviceInfo) -> int:
    """Return the workgroups of an attention dispatch: enough to fill the device; they loop over what is live."""
    return min(info.tuned.grid_groups, info.max_workgroup_count[0])


def row_tiles(problem: Problem, q_len: int, rows: int) -> int:
    """Return how many tiles of ``rows`` query rows there are, over the KV heads of all batch entries."""
    return problem.batch_size * problem.num_kv_heads * -(-q_len * problem.group_size // rows)


def iteration_limit(info: DeviceInfo) -> int | None:
    """Return the loop iterations that one invocation may make, or None if there is no limit."""
    return LLVMPIPE_ITERATIONS if "llvmpipe" in f"{info.name} {info.driver_name}" else None


def items_that_fit(iterations: int, info: DeviceInfo) -> int | None:
    """Return the most items of a dispatch if each takes ``iterations``: 0 if one is too many, None for no limit."""
    limit = iteration_limit(info)
    return None if limit is None else limit // max(iterations, 1) * num_groups(info)


def too_long(what: str, iterations: int) -> str:
    """Return the reason why an item that takes ``iterations`` cannot be run."""
    return (f"{what} takes {iterations} loop iterations of one invocation; llvmpipe ends loops without an error beyond "
            "65535")
