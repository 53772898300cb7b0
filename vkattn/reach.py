"""Which compiled variants a device uses: what it cannot run, and what of the rest some problem gets. Pure.

``vkattn check`` must reach every one of them; ``vkattn info`` says why the others are not used.
"""

from __future__ import annotations

from .caps.model import DeviceInfo
from .dispatch import PRIORITY, is_for
from .dtypes import FLOAT_DTYPES
from .formats import QUANTISED
from .kernels import fused, matrix, split
from .kernels.manifest import Variant
from .kernels.support import device_reasons
from .kernels.verdicts import verdict
from .problem import Problem

#: (query rows, query heads) to one KV head: few and many for each kind of kernel.
ROWS = ((1, 1), (1, 8), (100, 1))

#: Elements of key and value rows: the sizes at which kernels begin or end to fit, and the next longer rows.
DIMS = sorted({size + more for power in range(2, 9) for size in (1 << power, 3 << power - 1) for more in (0, 4)})

#: (key dtype, value dtype) of quantised rows: each format, and one pair for all that are mixed.
QUANTISED_PAIRS = (*((name, name) for name in QUANTISED), ("int8", "float16"))


def unable(kernel: Variant, info: DeviceInfo) -> list[str]:
    """Return why the device cannot run ``kernel``, or may not: it failed its self-test; empty if it can."""
    if kernel.kernel in matrix.FEATURES:
        return matrix.static_reasons(kernel, info) or [found for found in (verdict(kernel, info),) if found]
    if kernel.kernel.startswith("attn_fused"):
        return fused.variant_reasons(kernel, info)
    if kernel.kernel.startswith("attn_split"):
        return split.variant_reasons(kernel, info)
    return device_reasons(kernel, info)


def chosen(info: DeviceInfo) -> frozenset[str]:
    """Return the variants of attention kernels that some problem gets on a device, by "auto" or an algorithm's name.

    It depends on the verdicts of self-tests and on VKATTN_TIERS, and takes a part of a second.
    """
    found: set[str] = set()
    for query, key, value in dtypes():
        for q_len, heads in ROWS:
            for dim in DIMS:
                problem = Problem(1, heads, 1, q_len, 128, dim, dim, query, key, value)
                for module in PRIORITY:
                    if is_for(module, info, "auto") and not module.not_supported_reasons(problem, info):
                        found |= {kernel.name for kernel in module.variants(problem, info)}
    return frozenset(found)


def why_not_run(kernel: Variant, info: DeviceInfo, used: frozenset[str]) -> str:
    """Return why no problem gets ``kernel`` on a device where those `chosen` are ``used``; "" if there is no reason."""
    if reasons := unable(kernel, info):
        return f"cannot run here: {'; '.join(reasons)}"
    if kernel.kernel.startswith("roofline_"):
        return "no attention: vkattn bench measures the device with it"
    if kernel.kernel.startswith("attn_") and kernel.name not in used:
        by_name = kernel.kernel in matrix.FEATURES and info.device_type in matrix.ONLY_BY_NAME_ON
        return "used here only if asked for by name" if by_name else "never used here: other variants do its work"
    return ""


def dtypes() -> list[tuple[str, str, str]]:
    """Return the dtypes of query, key and value that go together; of mixed formats one pair stands for all."""
    floats = [(query, key, key) for query in FLOAT_DTYPES for key in FLOAT_DTYPES if query in ("float32", key)]
    return floats + [(query, *pair) for query in FLOAT_DTYPES for pair in QUANTISED_PAIRS]
