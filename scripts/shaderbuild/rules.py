"""What every compiled variant must keep to (shaders/README.md): checked on each build, whoever compiled it."""

from __future__ import annotations

import math

from .declaration import Declaration
from .reflect import Interface

#: The newest SPIR-V that each target accepts.
NEWEST = {"vulkan1.1": (1, 3), "vulkan1.2": (1, 5), "vulkan1.3": (1, 6)}

#: What Vulkan promises on every device: invocations of a workgroup, its shared memory, push constants.
BASE_INVOCATIONS = 128
BASE_SHARED_BYTES = 16384
PUSH_BYTES = 128


def broken(declaration: Declaration, interface: Interface) -> list[str]:
    """Return one sentence for each rule that a variant breaks."""
    found = []
    numbers = [item["binding"] for item in interface.bindings]
    if numbers != list(range(len(numbers))):
        found.append(f"its bindings are {numbers}; they must count from 0 without a gap")
    names = [item["name"] for item in interface.bindings]
    if len(set(names)) != len(names) or "" in names:
        found.append(f"its buffers are named {names}; each needs a name of its own")
    ids = [item["id"] for item in interface.spec]
    if ids != list(range(len(ids))):
        found.append(f"its spec constants have ids {ids}; Kompute numbers them from 0 without a gap")
    if 4 * len(interface.push) > PUSH_BYTES:
        found.append(f"it has {4 * len(interface.push)} bytes of push constants; Vulkan promises {PUSH_BYTES}")
    extra = sorted(set(interface.capabilities) - declaration.requires)
    if extra:
        found.append(f"it uses {', '.join(extra)}, which `requires` in {declaration.path.name} does not name")
    newest = NEWEST[declaration.target]
    if interface.version > newest:
        have, most = (".".join(map(str, version)) for version in (interface.version, newest))
        found.append(f"it is SPIR-V {have}; {declaration.target} takes {most}")
    if declaration.tier == "base":
        invocations = math.prod(interface.local_size)
        if invocations > BASE_INVOCATIONS:
            found.append(f"its workgroup has {invocations} invocations; the base tier allows {BASE_INVOCATIONS}")
        if interface.shared_bytes > BASE_SHARED_BYTES:
            found.append(f"it shares {interface.shared_bytes} bytes; the base tier allows {BASE_SHARED_BYTES}")
    return found
