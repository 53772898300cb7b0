"""The family attn_coopmat: prefill on matrix units by VK_KHR_cooperative_matrix, in half precision with float32 sums.

Which lane holds which element of a matrix is the driver's secret. The variants "quad" suppose that four lanes hold
whole rows, as on NVIDIA, and keep scores in registers; the variants "shared" suppose nothing. The self-test tells which
is right on a device.
"""

from __future__ import annotations

from ..caps.model import DeviceInfo
from ..problem import Problem
from . import matrix
from .manifest import Variant
from .passes import Cut, Pass

NAME = "coopmat"
ONLY_BY_NAME_ON = matrix.ONLY_BY_NAME_ON

#: The axis `rows`, best first.
ENDINGS = ("_quad", "_shared")


def candidates(problem: Problem, info: DeviceInfo) -> list[Variant]:
    """Return the compiled variants that fit ``problem`` and the device's subgroups, best first."""
    return matrix.candidates("attn_coopmat", ENDINGS, problem, info)


def untested(problem: Problem, info: DeviceInfo) -> Variant | None:
    """Return the variant whose self-test decides next, or None if nothing is left to decide."""
    return None if matrix.problem_reasons(problem) else matrix.untested(candidates(problem, info), info)


def not_supported_reasons(problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why this family cannot compute ``problem`` on the device; empty if it can."""
    return matrix.problem_reasons(problem) or matrix.reasons_of(problem, info, candidates(problem, info))


def variants(problem: Problem, info: DeviceInfo) -> tuple[Variant]:
    """Return the first candidate that may be used, or the last one if none may."""
    fitting = candidates(problem, info)
    return (matrix.able(fitting, info) or fitting[-1],)


def passes(problem: Problem, info: DeviceInfo) -> tuple[Pass, ...]:
    """Return the one pass; its recording is repeated for each chunk of query rows."""
    return matrix.one_pass(variants(problem, info)[0])


def scratch_words(problem: Problem, info: DeviceInfo, budget_words: int) -> dict[str, int]:
    """Return no buffer at all: scores stay in the workgroups."""
    return {}


def cut(problem: Problem, q_len: int, max_kv_len: int, scratch: dict[str, int], info: DeviceInfo) -> Cut:
    """Return how the rows of a run are cut so that no dispatch is long."""
    return matrix.cut_of(variants(problem, info)[0], problem, q_len, max_kv_len, info)
