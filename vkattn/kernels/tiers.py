"""Which kinds of kernels may be used: the environment variable VKATTN_TIERS limits or widens it.

"base" needs nothing beyond Vulkan 1.1; "subgroup" needs subgroup operations; "coopmat" needs matrix units. On a CPU
device subgroups only stand for vector lanes, and shuffles among them cost more than they save: there the default is
"base" alone.
"""

from __future__ import annotations

import os

from ..caps.model import DeviceInfo
from ..errors import OptionError

TIERS = ("base", "subgroup", "coopmat")
VARIABLE = "VKATTN_TIERS"


def allowed_tiers(info: DeviceInfo) -> frozenset[str]:
    """Return the tiers that may be used on the device; "base" always."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return frozenset({"base"} if info.device_type == "cpu" else TIERS)
    names = {name.strip() for name in chosen.split(",")}
    if not names <= set(TIERS):
        raise OptionError(f"{VARIABLE} is {chosen!r}; it takes a list of {', '.join(TIERS)}.")
    return frozenset(names | {"base"})
