"""The choice of an algorithm: the first that supports the problem, or an error that gives every reason."""

from __future__ import annotations

from types import ModuleType

from .caps.model import DeviceInfo
from .errors import NoKernelError, OptionError
from .kernels import fused, split, three_pass
from .problem import Problem

#: In order of preference; each module has NAME and not_supported_reasons(problem, info).
PRIORITY: tuple[ModuleType, ...] = (
    split,  # few query rows: reads keys and values once, fills the device
    fused,  # any size; scores never leave a workgroup
    three_pass,  # any size; moves the score matrix through memory
)

ALGORITHMS = tuple(module.NAME for module in PRIORITY)


def choose(problem: Problem, info: DeviceInfo, algorithm: str = "auto") -> ModuleType:
    """Return the module of the algorithm to use.

    Raises
    ------
    OptionError
        ``algorithm`` is no algorithm.
    NoKernelError
        The named one, or none, supports the problem on this device; the message lists the reasons.
    """
    if not isinstance(algorithm, str) or algorithm not in ("auto", *ALGORITHMS):
        raise OptionError(f"`algorithm` is {algorithm!r}; supported: 'auto', {', '.join(map(repr, ALGORITHMS))}.")
    failures = []
    for module in PRIORITY:
        if algorithm in ("auto", module.NAME):
            reasons = module.not_supported_reasons(problem, info)
            if not reasons:
                return module
            failures.append(f"  {module.NAME}: {'; '.join(reasons)}")
    raise NoKernelError(f'No kernel supports {problem} on "{info.name}":\n' + "\n".join(failures))


def by_name(name: str) -> ModuleType:
    """Return the module of the algorithm called ``name``."""
    return next(module for module in PRIORITY if name == module.NAME)
