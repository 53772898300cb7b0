"""The choice of an algorithm: the first that supports the problem, or an error that gives every reason."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .caps.model import DeviceInfo
from .errors import NoKernelError, OptionError
from .kernels import coopmat, coopmat2, fused, split, three_pass
from .problem import Problem

#: In order of preference; each module has NAME and not_supported_reasons(problem, info). "auto" passes one over on the
#: device types in its ONLY_BY_NAME_ON, and for problems of which its is_passed_over(problem, info) says so.
PRIORITY: tuple[ModuleType, ...] = (
    split,  # few query rows: reads keys and values once, fills the device
    coopmat2,  # half precision on matrix units, softmax by row reductions
    coopmat,  # half precision on matrix units
    fused,  # any size; scores never leave a workgroup
    three_pass,  # any size; moves the score matrix through memory
)

ALGORITHMS = tuple(module.NAME for module in PRIORITY)
_BY_NAME = {module.NAME: module for module in PRIORITY}

#: Those that take half precision only, and only where a self-test passed.
MATRIX_ALGORITHMS = (coopmat2.NAME, coopmat.NAME)


def choose(problem: Problem, info: DeviceInfo, algorithm: str = "auto") -> ModuleType:
    """Return the module of the algorithm to use.

    Raises
    ------
    OptionError
        ``algorithm`` is no algorithm.
    NoKernelError
        The named one, or none, supports the problem on this device; the message lists the reasons.
    """
    check_algorithm(algorithm)
    failures, spare = [], None
    for module in PRIORITY:
        if algorithm in ("auto", module.NAME):
            reasons = module.not_supported_reasons(problem, info)
            if not reasons and is_for(module, info, algorithm):
                if algorithm != "auto" or not is_passed_over(module, problem, info):
                    return module
                spare = spare or module
            reasons = reasons or [f"on a {info.device_type} device only if asked for by name"]
            failures.append(f"  {module.NAME}: {'; '.join(reasons)}")
    if spare is not None:  # not the fastest, but the only one
        return spare
    raise NoKernelError(f'No kernel supports {problem} on "{info.name}":\n' + "\n".join(failures))


def check_algorithm(algorithm: Any) -> str:
    """Return ``algorithm`` if it is "auto" or an algorithm's name, else raise OptionError."""
    if not isinstance(algorithm, str) or algorithm not in ("auto", *ALGORITHMS):
        raise OptionError(f"`algorithm` is {algorithm!r}; supported: 'auto', {', '.join(map(repr, ALGORITHMS))}.")
    return algorithm


def is_for(module: ModuleType, info: DeviceInfo, algorithm: str) -> bool:
    """Whether ``algorithm`` may mean ``module`` on the device at all."""
    if algorithm != "auto":
        return bool(algorithm == module.NAME)
    return info.device_type not in getattr(module, "ONLY_BY_NAME_ON", ())


def is_passed_over(module: ModuleType, problem: Problem, info: DeviceInfo) -> bool:
    """Whether "auto" prefers what comes after ``module`` for this problem."""
    return hasattr(module, "is_passed_over") and bool(module.is_passed_over(problem, info))


def by_name(name: str) -> ModuleType:
    """Return the module of the algorithm called ``name``."""
    return _BY_NAME[name]
