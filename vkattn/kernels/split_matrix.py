"""The kernel of `split` that multiplies quantised rows on matrix units: which variant, and whether a device may use it.

It supposes an order of a matrix's elements that no rule of Vulkan promises (shaders/include/lane_matrices.glsl); the
self-test tells whether a device has it (`vkattn.kernels.matrix`).
"""

from __future__ import annotations

import functools

from ..caps.model import DeviceInfo
from ..formats import QUANTISED
from ..problem import Problem
from . import matrix
from .manifest import Variant, load_manifest
from .verdicts import verdict

KERNEL = "attn_split_quant_coopmat"


def candidate(problem: Problem, info: DeviceInfo) -> Variant | None:
    """Return the variant for the formats and sizes of ``problem`` and the device's subgroups, if one is compiled."""
    if problem.key_dtype not in QUANTISED or problem.key_dtype != problem.value_dtype:
        return None
    widest = max(problem.head_dim, problem.value_dim)
    width = next((name for name, dim in matrix.WIDTHS.items() if widest <= dim), "")
    return load_manifest().get(f"{KERNEL}_{problem.key_dtype}_{width}_l{info.subgroup_size}")


def is_full(kernel: Variant, problem: Problem) -> bool:
    """Return whether rows of ``problem`` are as wide as the variant: it then takes the places in them for constants."""
    return problem.head_dim == problem.value_dim == matrix.WIDTHS[kernel.axes["width"]]


@functools.lru_cache(maxsize=256)  # asked for in every run of a graph
def fitting(problem: Problem, info: DeviceInfo, tiers: frozenset[str]) -> Variant | None:
    """Return the variant that only its self-test may keep from use, or None."""
    kernel = candidate(problem, info) if info.matrix_shapes and "coopmat" in tiers else None
    return None if kernel is None or matrix.static_reasons(kernel, info) else kernel


def usable(problem: Problem, info: DeviceInfo, tiers: frozenset[str]) -> Variant | None:
    """Return the variant to use on the device, or None: another kernel of `split` has to do."""
    kernel = fitting(problem, info, tiers)
    return kernel if kernel is not None and verdict(kernel, info) == "" else None


def untested(problem: Problem, info: DeviceInfo, tiers: frozenset[str]) -> Variant | None:
    """Return the variant if its self-test has not been run."""
    kernel = fitting(problem, info, tiers)
    return kernel if kernel is not None and verdict(kernel, info) is None else None
