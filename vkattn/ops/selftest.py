"""The self-test that lets a kernel on matrix units be used: small problems against the oracle, on the device itself.

It runs at the first use of a kernel on a device, before "auto" may choose it; the verdict is kept by device, driver and
SPIR-V (`vkattn.kernels.verdicts`). A kernel that fails is passed over, with the reason, and is no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

from .. import oracle
from ..dispatch import PRIORITY, check_algorithm, is_for, is_passed_over
from ..dtypes import AXIS, numpy_dtype
from ..errors import VkattnError
from ..kernels import matrix, split_matrix
from ..kernels.manifest import Variant
from ..kernels.verdicts import UNFINISHED, note, verdict, withdraw
from ..problem import Problem
from ..runtime.device import Device
from ..validate import attention_call
from . import selftest_split
from .selftest_case import Sizes, fault

#: How a verdict begins that holds for this process only: there may be more memory the next time.
COULD_NOT_RUN = "its self-test could not be run on this device"

FAILED = "failed its self-test on this device"


def settle(device: Device, problem: Problem, algorithm: str) -> None:
    """Run the self-tests on which the choice of an algorithm for ``problem`` depends, if they have not been run.

    OptionError if ``algorithm`` is no algorithm.
    """
    check_algorithm(algorithm)
    if not device.info.matrix_shapes:
        return
    for module in PRIORITY:
        if algorithm not in ("auto", module.NAME) or not is_for(module, device.info, algorithm):
            continue
        undecided = getattr(module, "untested", None)
        while undecided is not None and (kernel := undecided(problem, device.info)) is not None:
            _test(device, kernel)
        if not module.not_supported_reasons(problem, device.info) and not (
                algorithm == "auto" and is_passed_over(module, problem, device.info)):
            return


def _test(device: Device, kernel: Variant) -> None:
    """Test ``kernel`` and note what was found; other threads wait."""
    with device.lock:
        if verdict(kernel, device.info) is not None:  # by now
            return
        note(kernel, device.info, UNFINISHED)
        try:
            found = judge(device, kernel)
        except BaseException:  # somebody broke it off: that says nothing of the driver, unlike the end of the process
            withdraw(kernel, device.info)
            raise
        note(kernel, device.info, found, is_lasting=not found.startswith(COULD_NOT_RUN))


def judge(device: Device, kernel: Variant) -> str:
    """Run the self-test of ``kernel``; return "" if it is right, else what is wrong."""
    rng = np.random.default_rng(2026)
    try:
        if kernel.kernel == split_matrix.KERNEL:
            wrong = selftest_split.judge(device, kernel, rng)
            return f"{FAILED} ({wrong})" if wrong else ""
        dtype = next(name for name, axis in AXIS.items() if axis == kernel.axes["dtype"])
        for label, (counts, head_dim, value_dim), options in cases(matrix.WIDTHS[kernel.axes["width"]], rng):
            wrong = _judge_one(device, kernel, dtype, counts, head_dim, value_dim, options, rng)
            if wrong:
                return f"{FAILED} ({label}: {wrong})"
    except (VkattnError, RuntimeError) as error:
        return f"{COULD_NOT_RUN} ({type(error).__name__}: {error})"
    return ""


def cases(width: int, rng: np.random.Generator) -> Iterator[tuple[str, Sizes, dict[str, Any]]]:
    """Yield (label, sizes, options): widths with and without a tail, groups, causal both ways, masks, all options."""
    yield "causal", ((1, 6, 2, 70, 97), width, width), {"causal": "bottom_right"}
    yield "odd sizes", ((2, 3, 3, 67, 131), width - 9, width - 23), {"causal": "top_left", "kv_len": [131, 40]}
    mask = rng.random((2, 1, 75, 150)) < 0.6
    mask[:, :, 7], mask[..., 40:44], mask[..., 64:128] = False, False, False
    yield "bool mask", ((2, 4, 2, 75, 150), width // 2 + 1, 7), {"mask": mask, "window": (80, 30), "q_offset": 50}
    added = rng.standard_normal((4, 33, 90)).astype(np.float32)
    added[rng.random(added.shape) < 0.2] = -np.inf
    yield "all options", ((1, 4, 1, 33, 90), width, width - 1), {
        "mask": added, "softcap": 12.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "q_offset": 57,
        "sinks": [1.0, -2.0, 0.0, 4.0], "layout": "bshd", "scale": -0.3}


def _judge_one(device: Device, kernel: Variant, dtype: str, counts: tuple[int, int, int, int, int], head_dim: int,
               value_dim: int, options: dict[str, Any], rng: np.random.Generator) -> str:
    """Return what is wrong with one case, or ""."""
    batch, heads, kv_heads, q_len, kv_len = counts
    arrays = [2 * rng.standard_normal(shape, np.float32) for shape in (
        (batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, value_dim))]
    arrays[1] *= np.linspace(0.2, 1.5, kv_len, dtype=np.float32)[:, None]  # the row maximum moves on and on
    clean = [array.astype(numpy_dtype(dtype)) for array in arrays]
    given = [array.copy() for array in clean]
    mask = options.get("mask")
    if mask is not None and mask.dtype == np.bool_:  # what nobody attends must have no effect
        given[1][:, :, 41], given[2][:, :, 42] = np.nan, np.nan
    if options.get("layout") == "bshd":
        clean, given = ([array.transpose(0, 2, 1, 3) for array in some] for some in (clean, given))
    call = attention_call(*given, return_lse=True, **options)
    return fault(device, call, family(kernel),
                 lambda out, lse: oracle.worst_share(out, *clean, lse=lse, coopmat=True, **options))


def family(kernel: Variant) -> ModuleType:
    """Return an algorithm that is ``kernel`` and nothing else."""
    alone = SimpleNamespace(
        NAME=f"self-test of {kernel.name}",
        passes=lambda problem, info: matrix.one_pass(kernel, problem),
        scratch_words=lambda problem, info, budget_words: {},
        cut=lambda problem, q_len, max_kv_len, scratch, info: matrix.cut_of(kernel, problem, q_len, max_kv_len, info))
    return cast(ModuleType, alone)
