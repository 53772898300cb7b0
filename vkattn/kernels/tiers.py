"""Which kinds of kernels may be used: the environment variable VKATTN_TIERS limits them.

"base" needs nothing beyond Vulkan 1.1; "subgroup" needs subgroup operations; "coopmat" needs matrix units. Without the
variable all are allowed, and each family takes what suits the device. Every call of a function heeds the variable as it
is then; a graph that was built keeps to its kernels.
"""

from __future__ import annotations

import os

from ..errors import OptionError

TIERS = ("base", "subgroup", "coopmat")
VARIABLE = "VKATTN_TIERS"


def allowed_tiers() -> frozenset[str]:
    """Return the tiers that may be used; "base" always."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return frozenset(TIERS)
    names = {name.strip() for name in chosen.split(",")}
    if not names <= set(TIERS):
        raise OptionError(f"{VARIABLE} is {chosen!r}; it takes a list of {', '.join(TIERS)}.")
    return frozenset(names | {"base"})
